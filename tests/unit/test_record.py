"""The record of last rounds: depths and accepted drafts follow from the committed lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.record import RoundRecord

POOL_ROWS = 6


def ints(*values):
    return np.array(values, np.int64)


def settled(record, rows, lengths):
    depths, accepted = record.settle(ints(*rows), ints(*lengths))
    return list(zip(depths.tolist(), accepted.tolist(), strict=True))


@pytest.mark.parametrize(
    ("depth", "accepted"), [(0, 0), (1, 0), (1, 1), (4, 0), (4, 2), (4, 4), (8, 7)]
)
def test_a_round_emits_its_accepted_drafts_and_one_token_more(depth, accepted):
    record = RoundRecord(POOL_ROWS)
    record.begin(ints(0), ints(10))
    record.plan(ints(0), ints(10), ints(depth), ints(0))
    assert settled(record, [0], [10 + accepted + 1]) == [(depth, accepted)]


def test_a_request_fresh_from_prefill_has_no_round_to_report():
    record = RoundRecord(POOL_ROWS)
    record.plan(ints(0), ints(10), ints(3), ints(1))
    record.begin(ints(0), ints(7))  # a new request on the row, with a shorter prompt
    assert settled(record, [0], [7]) == [(0, 0)]
    assert record.arm[0] == 0


def test_a_row_that_was_never_used_has_no_round_to_report():
    assert settled(RoundRecord(POOL_ROWS), [2], [0]) == [(0, 0)]


def test_settling_forgets_nothing():
    """The worker and the draft KV each settle the same round."""
    record = RoundRecord(POOL_ROWS)
    record.plan(ints(1), ints(5), ints(2), ints(1))
    assert settled(record, [1], [7]) == settled(record, [1], [7]) == [(2, 1)]


def test_rounds_of_other_rows_do_not_matter():
    record = RoundRecord(POOL_ROWS)
    record.begin(ints(4, 1, 3), ints(9, 2, 5))
    record.plan(ints(3, 4), ints(5, 9), ints(2, 6), ints(1, 0))
    record.plan(ints(1), ints(2), ints(1), ints(1))
    assert settled(record, [4, 3, 1], [13, 6, 4]) == [(6, 3), (2, 0), (1, 1)]
    assert record.arm[ints(1, 3, 4)].tolist() == [1, 1, 0]


def test_the_numbers_of_a_plan_are_copied():
    """The depths of a round are an array that its maker may write again."""
    record, depths = RoundRecord(POOL_ROWS), ints(3)
    record.plan(ints(0), ints(4), depths, ints(1))
    depths[:] = 0
    assert settled(record, [0], [5]) == [(3, 0)]


steps = st.lists(
    st.tuples(
        st.permutations(range(POOL_ROWS)),
        st.lists(st.integers(0, 8), min_size=POOL_ROWS, max_size=POOL_ROWS),
        st.lists(st.integers(0, 8), min_size=POOL_ROWS, max_size=POOL_ROWS),
        st.lists(st.booleans(), min_size=POOL_ROWS, max_size=POOL_ROWS),
        st.integers(1, POOL_ROWS),
    ),
    min_size=1,
    max_size=12,
)


@given(steps)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_whatever_rows_run_a_round_each_reports_its_own_last_one(rounds):
    """Against a dictionary; in each round some rows get a new request instead."""
    record = RoundRecord(POOL_ROWS)
    lengths = np.zeros(POOL_ROWS, np.int64)
    last = {row: (0, 0, 0) for row in range(POOL_ROWS)}
    for order, depths, accepts, is_new, size in rounds:
        rows = np.array(order[:size], np.int64)
        found = zip(*record.settle(rows, lengths[rows]), record.arm[rows], strict=True)
        assert [tuple(map(int, each)) for each in found] == [last[row] for row in rows.tolist()]
        fresh, old = (
            [r for r in order[:size] if is_new[r]],
            [r for r in order[:size] if not is_new[r]],
        )
        lengths[fresh] = [depths[row] for row in fresh]
        record.begin(ints(*fresh), lengths[fresh])
        last |= {row: (0, 0, 0) for row in fresh}
        arms = [row % 2 for row in old]
        record.plan(ints(*old), lengths[old], ints(*(depths[row] for row in old)), ints(*arms))
        for row, arm in zip(old, arms, strict=True):
            right = min(accepts[row], depths[row])
            last[row] = (depths[row], right, arm)
            lengths[row] += right + 1
