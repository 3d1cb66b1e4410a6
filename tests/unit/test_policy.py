"""Policies without a memory: never beyond a limit, and the same again by seed and length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from faser_sglang.control.policy import FixedDepth, RandomDepth
from faser_sglang.control.rounds import LOOKUP, MODEL, Offer, offer_of

CAP = 8
MANY = 9000  # frequencies over so many lengths; the seeds are fixed, so 1e-3 is no gamble
POLICIES = {
    "0": lambda: FixedDepth(0),
    "3": lambda: FixedDepth(3),
    "random": lambda: RandomDepth(CAP, 3),
    "random, stop and trim": lambda: RandomDepth(CAP, 3, stops=True, trims=True),
}
checked = settings(deadline=None, derandomize=True, max_examples=60)

limit = st.integers(-5, CAP)
requests = st.lists(st.tuples(limit, limit, st.integers(0, 10_000)), min_size=1, max_size=7)


def offer_to(limits):
    """What both arms offer: ``limits`` [ARMS, n]."""
    limits = np.array(limits, np.int64)
    return Offer(limits, np.zeros(limits.shape), np.zeros(limits.shape[1], np.int64))


def plan_of(policy, lengths, offer=None):
    lengths = np.array(lengths, np.int64)
    offer = offer_of(MODEL, np.full(len(lengths), CAP)) if offer is None else offer
    return policy.plan(np.arange(len(lengths)), lengths, offer)


@pytest.mark.parametrize("name", POLICIES)
@given(requests)
@checked
def test_depths_stay_between_zero_and_the_limit_of_the_arm_that_drafts(name, drawn):
    model, lookup, lengths = np.array(drawn).T
    plan = plan_of(POLICIES[name](), lengths, offer_to([model, lookup]))
    assert plan.depths.dtype == plan.arms.dtype == np.int64
    for depth, arm, *limits in zip(plan.depths, plan.arms, model, lookup, strict=True):
        assert 0 <= depth <= max(limits[arm], 0)


@pytest.mark.parametrize("name", POLICIES)
def test_lookup_drafts_where_it_offers_anything_and_the_model_elsewhere(name):
    offer = offer_to([[CAP, CAP, 0, 0, CAP], [CAP, 0, 1, 0, -3]])
    plan = plan_of(POLICIES[name](), range(5), offer)
    assert plan.arms.tolist() == [LOOKUP, MODEL, LOOKUP, MODEL, MODEL]
    assert plan.depths[3] == 0


def test_a_fixed_depth_is_taken_wherever_it_fits():
    offer = offer_of(MODEL, np.array([0, 2, 3, 8, -1]))
    assert plan_of(FixedDepth(3), range(5), offer).depths.tolist() == [0, 2, 3, 3, 0]
    assert plan_of(FixedDepth(0), range(5), offer).depths.tolist() == [0] * 5


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("trims", [False, True])
def test_random_rounds_stop_and_trim_only_where_they_are_to(stops, trims):
    plan = plan_of(RandomDepth(CAP, 3, stops=stops, trims=trims), range(3))
    assert (plan.stops, plan.trims) == (stops, trims)


def test_a_fixed_depth_goes_on_and_withholds_nothing():
    plan = plan_of(FixedDepth(5), range(3))
    assert not plan.stops and not plan.trims
    assert plan.goes_on(np.array([2, 0]), np.zeros((2, 1))).tolist() == [True, True]
    assert plan.trim(np.zeros((3, CAP)), np.array([4, 0, 1])).tolist() == [4, 0, 1]


# -- random depths ------------------------------------------------------------------------------


def random_depths(seed, lengths, cap=CAP):
    return plan_of(RandomDepth(cap, seed), lengths).depths


def assert_uniform(numbers, below):
    """Evenly spread, and independent of the number at the length before."""
    assert chisquare(np.bincount(numbers, minlength=below)).pvalue > 1e-3
    pairs = np.zeros((below, below))
    np.add.at(pairs, (numbers[:-1], numbers[1:]), 1)
    assert chi2_contingency(pairs).pvalue > 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2**31, -1])
def test_random_depths_are_uniform_over_lengths_and_independent_of_the_one_before(seed):
    assert_uniform(random_depths(seed, range(MANY)), CAP + 1)


def test_random_depths_follow_seed_and_length_whatever_else_runs():
    lengths = [17, 4, 900, 4]
    depths = random_depths(5, lengths)
    assert depths[1] == depths[3]
    assert [int(random_depths(5, [length])[0]) for length in lengths] == depths.tolist()
    assert not np.array_equal(random_depths(5, range(50)), random_depths(6, range(50)))


def test_random_depths_without_room_are_zero():
    assert set(random_depths(5, range(20), cap=0).tolist()) == {0}


# -- random stops and trims ---------------------------------------------------------------------


def further(seed, lengths):
    return plan_of(RandomDepth(CAP, seed, stops=True, trims=True), lengths)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, CAP)), min_size=1, max_size=9))
@checked
def test_a_random_trim_stays_within_the_drafts_that_were_made(drawn):
    lengths, counts = np.array(drawn).T
    kept = further(3, lengths).trim(np.zeros((len(counts), CAP)), counts)
    assert kept.dtype == np.int64 and (kept >= 0).all() and (kept <= counts).all()


def test_random_stops_and_trims_follow_seed_and_length_whatever_else_runs():
    lengths, counts = np.array([17, 4, 900, 4]), np.array([5, 8, 3, 8])
    plan = further(5, lengths)
    kept = plan.trim(np.zeros((4, CAP)), counts)
    assert kept[1] == kept[3]
    for i, length in enumerate(lengths):
        alone = further(5, [length])
        assert alone.trim(np.zeros((1, CAP)), counts[i : i + 1])[0] == kept[i]
        for step in range(1, CAP):
            members, seen = np.array([3, i]), np.zeros((2, step))
            on = plan.goes_on(members, seen)
            assert on.dtype == np.bool_
            assert on[1] == alone.goes_on(np.array([0]), seen[:1])[0]


@pytest.mark.parametrize("seed", [0, 7, -1])
def test_one_chain_in_four_stops_at_each_step_whatever_it_did_before(seed):
    """Independently of the depth at that length, too."""
    plan = further(seed, range(MANY))
    members = np.arange(MANY)
    on = [plan.goes_on(members, np.zeros((MANY, step))) for step in (1, 2, 3)]
    for step in on:
        assert chisquare(np.bincount(step, minlength=2), [MANY / 4, 3 * MANY / 4]).pvalue > 1e-3
    for one, other in ((on[0], on[1]), (on[1], on[2]), (on[0], plan.depths)):
        pairs = np.zeros((2, CAP + 1))
        np.add.at(pairs, (one.astype(int), other.astype(int)), 1)
        assert chi2_contingency(pairs[:, pairs.any(axis=0)]).pvalue > 1e-3


def test_any_number_of_drafts_may_be_withheld_and_often_none():
    """More than half are verified whole: of 2 count + 1 draws those from count on."""
    for count in (1, 3, CAP):
        counts = np.full(MANY, count)
        kept = further(11, range(MANY)).trim(np.zeros((MANY, CAP)), counts)
        expected = np.full(count + 1, MANY / (2 * count + 1))
        expected[-1] *= count + 1
        assert chisquare(np.bincount(kept, minlength=count + 1), expected).pvalue > 1e-3
