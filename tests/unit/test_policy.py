"""Depth policies: never beyond a limit, no memory of a row's former request, and able to learn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from faser_sglang.control.policy import AcceptanceAverage, FixedDepth, RandomDepth, make_policy

POOL_ROWS = 6
CAP = 8
SETTINGS = ("auto", "random", "0", "1", "5")
checked = settings(deadline=None, derandomize=True, max_examples=40)

# A round: which rows run, how deep each may go, and how good its drafts are (of 0 to CAP).
rounds = st.lists(
    st.lists(
        st.tuples(st.integers(0, POOL_ROWS - 1), st.integers(0, CAP), st.integers(0, CAP)),
        min_size=1,
        max_size=POOL_ROWS,
        unique_by=lambda request: request[0],
    ),
    max_size=12,
)


def policy_of(setting):
    return make_policy(setting, cap=CAP, pool_rows=POOL_ROWS, seed=3, is_off=False)


def run(policy, sequence):
    """Depths of every round, with min(depth, quality) drafts accepted each time."""
    history = []
    for number, requests in enumerate(sequence):
        rows, limits, quality = np.array(requests).T
        depths = policy.choose(rows, 100 * rows + number, limits)
        policy.observe(rows, depths, np.minimum(depths, quality))
        history.append(depths.tolist())
    return history


def steps(policy, count, *, accepts, row=0, limit=CAP):
    """Depths of ``count`` rounds of one request whose drafts are all right or all wrong."""
    rows, chosen = np.array([row]), []
    for number in range(count):
        depths = policy.choose(rows, np.array([number]), np.array([limit]))
        policy.observe(rows, depths, depths if accepts else np.zeros_like(depths))
        chosen.append(int(depths[0]))
    return chosen


@pytest.mark.parametrize("setting", SETTINGS)
@given(sequence=rounds)
@checked
def test_depths_stay_between_zero_and_each_limit(setting, sequence):
    for requests, depths in zip(sequence, run(policy_of(setting), sequence), strict=True):
        for (_, limit, _), depth in zip(requests, depths, strict=True):
            assert 0 <= depth <= limit


@pytest.mark.parametrize("setting", SETTINGS)
def test_depths_are_whole_numbers_one_a_request(setting):
    for rows in ([2], [5, 0, 3], list(range(POOL_ROWS))):
        depths = policy_of(setting).choose(
            np.array(rows), np.arange(len(rows)), np.full(len(rows), CAP)
        )
        assert depths.shape == (len(rows),) and depths.dtype == np.int64


@given(before=rounds, after=rounds)
@checked
def test_reset_forgets_the_former_request(before, after):
    used = AcceptanceAverage(POOL_ROWS)
    run(used, before)
    used.reset(np.arange(POOL_ROWS))
    assert run(used, after) == run(AcceptanceAverage(POOL_ROWS), after)


@pytest.mark.parametrize("rounds_before", [1, 5, 15])
def test_reset_forgets_how_long_ago_the_last_probe_was(rounds_before):
    """With a prior under the floor a new request starts at depth 0, so only probes draft."""
    used, fresh = (AcceptanceAverage(POOL_ROWS, prior=0.2) for _ in range(2))
    steps(used, rounds_before, accepts=False)
    used.reset(np.array([0]))
    assert steps(used, 50, accepts=False) == steps(fresh, 50, accepts=False)


def test_reset_of_one_row_leaves_the_others_alone():
    policy = AcceptanceAverage(POOL_ROWS)
    for row in (0, 1):
        steps(policy, 100, accepts=False, row=row)
    policy.reset(np.array([1]))
    fresh = AcceptanceAverage(POOL_ROWS)
    assert policy.rates(np.array([0, 1])).tolist() == [
        policy.rates(np.array([0]))[0],
        fresh.rates(np.array([1]))[0],
    ]
    assert policy.rates(np.array([0]))[0] < fresh.rates(np.array([0]))[0]


@given(sequence=rounds, data=st.data())
@checked
def test_the_order_of_the_batch_does_not_matter(sequence, data):
    straight = run(AcceptanceAverage(POOL_ROWS), sequence)
    orders = [data.draw(st.permutations(range(len(requests)))) for requests in sequence]
    shuffled = run(
        AcceptanceAverage(POOL_ROWS),
        [[r[i] for i in o] for r, o in zip(sequence, orders, strict=True)],
    )
    for depths, others, order in zip(straight, shuffled, orders, strict=True):
        assert others == [depths[i] for i in order]


def test_a_request_whose_drafts_are_always_right_goes_as_deep_as_it_may():
    policy = AcceptanceAverage(POOL_ROWS)
    first = steps(policy, 1, accepts=True)[0]
    later = steps(policy, 100, accepts=True)
    assert 1 <= first < CAP
    assert later == sorted(later) and later[-1] == CAP


def test_a_request_whose_drafts_are_always_wrong_stops_drafting_but_for_probes():
    policy = AcceptanceAverage(POOL_ROWS)
    steps(policy, 100, accepts=False)
    later = steps(policy, 10 * policy.probe_every, accepts=False)
    assert sorted(set(later)) == [0, 1]
    probes = np.flatnonzero(later)
    assert len(probes) == 10 and set(np.diff(probes)) == {policy.probe_every}


def test_probes_bring_a_request_back_when_its_drafts_become_right():
    policy = AcceptanceAverage(POOL_ROWS)
    steps(policy, 200, accepts=False)
    # At worst the average holds 1 / (1 - memory) = 25 tests, all wrong: a dozen right probes
    # lift it over the floor, one every 16 rounds.
    back = steps(policy, 20 * policy.probe_every, accepts=True)
    assert back[0] == 0 and back[-1] == CAP


def test_drafts_behind_the_first_wrong_one_are_not_observed():
    rows = np.arange(4)
    policy = AcceptanceAverage(POOL_ROWS)
    policy.observe(rows, np.array([3, 8, 2, 0]), np.array([2, 2, 2, 0]))
    tested_to_the_same_place, deeper, all_right, untested = policy.rates(rows)
    assert tested_to_the_same_place == deeper < all_right
    assert untested == AcceptanceAverage(POOL_ROWS).rates(np.array([3]))[0]


@given(sequence=rounds)
@checked
def test_rates_are_probabilities_strictly_inside(sequence):
    policy = AcceptanceAverage(POOL_ROWS)
    run(policy, sequence)
    rates = policy.rates(np.arange(POOL_ROWS))
    assert (rates > 0).all() and (rates < 1).all()


def test_the_average_approaches_the_true_acceptance_rate():
    policy, rows, random = AcceptanceAverage(1), np.array([0]), np.random.default_rng(0)
    estimates = []
    for _ in range(4000):
        policy.observe(rows, np.array([1]), (random.random(1) < 0.8).astype(np.int64))
        estimates.append(policy.rates(rows)[0])
    # Weight 25 of data at 0.8 and 6 of the prior at 0.6 give 0.761 on average; the mean over the
    # 4,000 correlated rounds strays by sqrt(.8 * .2 / 4000) = .006, take four of those.
    assert np.mean(estimates[100:]) == pytest.approx((25 * 0.8 + 6 * 0.6) / 31, abs=0.025)


def random_depths(seed, lengths, rows=None, cap=CAP):
    rows = np.zeros_like(lengths) if rows is None else rows
    return RandomDepth(cap, seed).choose(rows, lengths, np.full(len(lengths), cap))


@pytest.mark.parametrize("seed", [0, 1, 2**31, -1])
def test_random_depths_are_uniform_over_lengths_and_independent_of_the_one_before(seed):
    """Frequencies over 9,000 lengths; the seeds are fixed, so 1e-3 is no gamble."""
    depths = random_depths(seed, np.arange(9000))
    counts = np.bincount(depths, minlength=CAP + 1)
    assert chisquare(counts).pvalue > 1e-3
    pairs = np.zeros((CAP + 1, CAP + 1))
    np.add.at(pairs, (depths[:-1], depths[1:]), 1)
    assert chi2_contingency(pairs).pvalue > 1e-3


def test_random_depths_follow_seed_and_length_whatever_else_runs():
    lengths = np.array([17, 4, 900, 4])
    depths = random_depths(5, lengths)
    assert depths[1] == depths[3]
    assert np.array_equal(depths, random_depths(5, lengths, rows=np.array([3, 1, 0, 2])))
    assert [int(random_depths(5, np.array([n]))[0]) for n in lengths] == depths.tolist()
    many = np.arange(50)
    assert not np.array_equal(random_depths(5, many), random_depths(6, many))


def test_random_depths_without_room_are_zero():
    assert set(random_depths(5, np.arange(20), cap=0).tolist()) == {0}


def test_a_fixed_depth_is_taken_wherever_it_fits():
    rows = lengths = np.arange(4)
    limits = np.array([0, 2, 3, 8])
    assert FixedDepth(3).choose(rows, lengths, limits).tolist() == [0, 2, 3, 3]
    assert policy_of("2").choose(rows, lengths, limits).tolist() == [0, 2, 2, 2]


@pytest.mark.parametrize("setting", SETTINGS)
def test_off_never_drafts_whatever_the_depth_says(setting):
    policy = make_policy(setting, cap=CAP, pool_rows=POOL_ROWS, seed=3, is_off=True)
    assert set(steps(policy, 50, accepts=True)) == {0}
