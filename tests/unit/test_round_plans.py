"""Plans, stop and trim against every choice there is, on batches small enough to try them all."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.depth import BINS, plans, row_price, trim, wants_more

checked = settings(deadline=None, derandomize=True, max_examples=200)
chance = st.floats(0.0, 1.0)
times = st.lists(st.floats(0.0, 5.0), min_size=13, max_size=13)


def survivals(draw, n, depth):
    """[n, depth] of drafts, 0 behind each request's own end."""
    values = np.array(draw(st.lists(chance, min_size=n * depth, max_size=n * depth)))
    survival = np.cumprod(values.reshape(n, depth), axis=1)
    ends = np.array(draw(st.lists(st.integers(0, depth), min_size=n, max_size=n)))
    return survival * (np.arange(depth) < ends[:, None])


@st.composite
def batches(draw):
    n, depth = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    verify_ms = 1.0 + np.cumsum(draw(times))[: n * depth + 1]
    return survivals(draw, n, depth), verify_ms


def expected_tokens(survival, counts):
    return sum(survival[i, :count].sum() for i, count in enumerate(counts))


@given(batches(), st.floats(0.01, 2.0))
@checked
def test_the_trim_is_the_best_of_all_choices(batch, rate):
    survival, verify_ms = batch

    def worth(counts):
        return expected_tokens(survival, counts) - rate * verify_ms[sum(counts)]

    found = trim(survival, rate, verify_ms)
    drafts = [np.count_nonzero(row) for row in survival]
    every = itertools.product(*(range(count + 1) for count in drafts))
    assert worth(found.tolist()) >= max(worth(counts) for counts in every) - 1e-9
    assert all(count <= most for count, most in zip(found, drafts, strict=True))


def test_a_trim_of_nothing_takes_nothing():
    assert trim(np.zeros((3, 2)), 1.0, np.ones(7)).tolist() == [0, 0, 0]


def best_rate(survival, is_free, passes, ms, verify_ms, rest_ms):
    """The most tokens a millisecond with so many passes, over all choices of drafts."""
    n, depth = survival.shape
    most = [
        np.count_nonzero(row[: depth if free else passes])
        for row, free in zip(survival, is_free, strict=True)
    ]
    return max(
        (n + expected_tokens(survival, counts)) / (ms + rest_ms + verify_ms[sum(counts)])
        for counts in itertools.product(*(range(count + 1) for count in most))
    )


@given(
    batches(),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
)
@checked
def test_plans_are_the_best_but_for_the_width_of_a_bin(batch, free, rest_ms, row_ms):
    """Where each row takes the same time; where not, drafts of one bin still go together."""
    survival, _ = batch
    n, depth = survival.shape
    verify_ms = 1.0 + row_ms * np.arange(n * depth + 1)
    is_free = np.array(free[:n])
    draft_ms = np.linspace(0.0, 1.0, depth + 1)
    found = plans(survival[:, :, None], is_free, draft_ms, verify_ms, rest_ms)
    assert [plan.depth for plan in found] == list(range(depth + 1))
    for plan in found:
        right = best_rate(survival, is_free, plan.depth, draft_ms[plan.depth], verify_ms, rest_ms)
        # Drafts of one bin are taken together, so up to a bin's width a draft is lost.
        loss = n * depth / BINS / (verify_ms[0] + rest_ms)
        assert right - loss - 1e-9 <= plan.rate <= right + 1e-9
        assert plan.rate * plan.ms >= n - 1e-9


def test_equally_likely_views_count_as_their_mean():
    verify_ms, draft_ms = np.linspace(1.0, 1.4, 5), np.array([0.0, 0.1])
    two = np.array([[[0.2, 0.8]], [[0.2, 0.8]], [[0.2, 0.8]], [[0.2, 0.8]]])
    one = np.array([[[0.8]], [[0.8]], [[0.2]], [[0.2]]])
    views, drawn = (
        plans(survival, np.zeros(4, bool), draft_ms, verify_ms, 0.0)[1] for survival in (two, one)
    )
    assert views.drafts == drawn.drafts
    assert views.rate == pytest.approx(drawn.rate)


def test_without_drafts_a_plan_is_that_of_no_speculation():
    found = plans(
        np.zeros((3, 2, 1)), np.zeros(3, bool), np.array([0.0, 1.0, 2.0]), np.full(7, 4.0), 2.0
    )
    assert [plan.drafts for plan in found] == [0, 0, 0]
    assert found[0].rate == pytest.approx(3 / 6)


def test_a_row_costs_what_its_time_would_bring_elsewhere():
    verify_ms = np.array([10.0, 12.0, 14.0, 16.0, 18.0])
    assert row_price(0.5, 2, 2, verify_ms) == pytest.approx(0.5 * 2.0)


def test_a_pass_is_asked_for_where_all_together_gain_more_than_its_time():
    def asked(survival, **changes):
        how = {"rate": 0.1, "price": 0.05, "step_ms": np.full(2, 3.0)} | changes
        return wants_more(np.array(survival), **how).tolist()

    assert asked([[0.9, 0.8], [0.02, 0.0]]) == [True, False]  # the other gains nothing
    assert asked([[0.2, 0.1]]) == [False]  # .15 is less than .1 x 3
    assert asked([[0.2, 0.1]] * 3) == [True] * 3  # the pass is shared
    assert asked([[0.2, 0.1]], step_ms=np.full(2, 1.0)) == [True]
    assert asked([[0.3, 0.9]]) == [True]  # it pays two passes ahead
    assert wants_more(np.zeros((2, 0)), 0.1, 0.1, np.zeros(0)).tolist() == [False, False]
