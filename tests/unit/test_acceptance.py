"""Estimates of acceptance: by position and request, without bias, forgotten when they must be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.acceptance import HIGH, LOW, OWN_TESTS, Acceptance
from faser_sglang.control.calibration import RECENT, VIEWS, Calibration
from faser_sglang.control.rounds import ARMS, LOOKUP, MODEL, Outcome
from tests.support.made_up_rounds import MadeUpDrafter

CAP = 6
checked = settings(deadline=None, derandomize=True, max_examples=60)


def taught(acceptance, drafter, rounds, **how):
    rows = np.arange(len(drafter.rates))
    for _ in range(rounds):
        acceptance.observe(rows, drafter.outcome(how.get("drafted", CAP), how.get("verified")))
    acceptance.learn()
    return acceptance


def true_rates(rates, rounds=4000, **how):
    """Acceptance by position behind right drafts, counted."""
    drafter = MadeUpDrafter(rates, CAP, seed=99, **how)
    tests, hits = np.zeros(CAP), np.zeros(CAP)
    for _ in range(rounds):
        accepted = drafter.outcome(CAP).accepted
        tests += (np.arange(CAP) <= accepted[:, None]).sum(axis=0)
        hits += (np.arange(CAP) < accepted[:, None]).sum(axis=0)
    return hits / tests


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_rates_by_position_are_found(rate):
    acceptance = taught(Acceptance(CAP, 8), MadeUpDrafter([rate] * 8, CAP, seed=1), 400)
    assert acceptance.by_position()[MODEL][:3] == pytest.approx(
        true_rates([rate] * 8)[:3], abs=0.05
    )
    assert acceptance.by_position()[LOOKUP] == pytest.approx([0.6] * CAP)  # it was never asked


def test_requests_differ():
    rates = np.array([0.2, 0.5, 0.8, 0.8])
    acceptance = taught(Acceptance(CAP, 4), MadeUpDrafter(rates, CAP, spread=0.3), 300)
    found = acceptance.expected(np.arange(4), MODEL)[:, 0]
    assert found == pytest.approx(rates, abs=0.12)


def test_a_request_that_changes_is_followed_within_200_tests():
    acceptance = taught(Acceptance(CAP, 8), MadeUpDrafter([0.8] * 8, CAP, spread=0.3), 300)
    changed = MadeUpDrafter([0.3] + [0.8] * 7, CAP, spread=0.3, seed=5)
    tests = 0
    while tests < 200:
        outcome = changed.outcome(CAP)
        acceptance.observe(np.arange(8), outcome)
        tests += min(int(outcome.accepted[0]) + 1, CAP)
    acceptance.learn()
    found = acceptance.expected(np.arange(8), MODEL)[:, 0]
    assert found[0] == pytest.approx(0.3, abs=0.12)
    assert found[1:].min() > 0.65


@pytest.mark.parametrize("spread", [1.0, 2.0])
def test_withholding_drafts_of_low_confidence_biases_nothing(spread):
    """Only confident drafts are verified; the estimate is of all that are drafted."""

    def trims(chances, drafted):
        sure = np.cumprod(chances > 0.55, axis=1).sum(axis=1)
        return np.minimum(np.maximum(sure, 0), drafted)

    rates = [0.6] * 16
    acceptance = taught(
        Acceptance(CAP, 16), MadeUpDrafter(rates, CAP, spread=spread), 500, verified=trims
    )
    right = true_rates(rates, spread=spread)
    assert acceptance.by_position()[MODEL][:3] == pytest.approx(right[:3], abs=0.06)


def test_a_request_starts_at_the_mean_of_all():
    acceptance = taught(Acceptance(CAP, 9), MadeUpDrafter([0.8] * 8, CAP), 200)
    assert acceptance.expected(np.array([8]), MODEL)[0] == pytest.approx(
        np.clip(acceptance.by_position()[MODEL], LOW, HIGH)
    )


@pytest.mark.parametrize("heard", [0, 1, 3])
def test_nothing_of_a_request_survives_it(heard):
    """Whatever of it was learned, or heard and not learned yet."""
    acceptance = taught(Acceptance(CAP, 4), MadeUpDrafter([0.1, 0.9, 0.9, 0.9], CAP), 40)
    drafter = MadeUpDrafter([0.1, 0.9, 0.9, 0.9], CAP, seed=7)
    for _ in range(heard):
        acceptance.observe(np.arange(4), drafter.outcome(CAP))
    others = acceptance.expected(np.arange(1, 4), MODEL)
    acceptance.reset(np.array([0]))
    acceptance.learn()
    assert acceptance.expected(np.array([0]), MODEL)[0] == pytest.approx(
        np.clip(acceptance.by_position()[MODEL], LOW, HIGH)
    )
    assert acceptance.expected(np.arange(1, 4), MODEL) == pytest.approx(others, abs=0.2)


def test_what_is_not_tried_is_forgotten_in_time():
    acceptance = taught(Acceptance(CAP, 4), MadeUpDrafter([0.2, 0.9, 0.9, 0.9], CAP), 60)
    low = acceptance.expected(np.array([0]), MODEL)[0, 0]
    rested = MadeUpDrafter([0.2, 0.9, 0.9, 0.9], CAP, seed=3)
    taught(acceptance, rested, 400, drafted=[0, CAP, CAP, CAP])
    assert acceptance.expected(np.array([0]), MODEL)[0, 0] > low + 0.1


observed = st.lists(
    st.tuples(
        st.integers(0, 3),  # row
        st.integers(0, ARMS - 1),
        st.integers(0, CAP),
        st.integers(0, CAP),
        st.integers(0, CAP),
        st.sampled_from([0.0, 1e-12, 0.3, 1.0]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda drawn: drawn[0],
)


@given(st.lists(observed, max_size=20))
@checked
def test_estimates_are_chances_whatever_is_observed(history):
    acceptance = Acceptance(CAP, 4)
    for drawn in history:
        rows, arms, drafted, verified, accepted, chance = (
            np.array(part) for part in zip(*drawn, strict=True)
        )
        verified = np.minimum(verified, drafted)
        accepted = np.minimum(accepted, verified)
        chances = chance[:, None] * (np.arange(CAP) < drafted[:, None])
        acceptance.observe(rows, Outcome(arms, drafted, verified, accepted, chances))
    acceptance.learn()
    for arm in range(ARMS):
        expected = acceptance.expected(np.arange(4), arm)
        known = acceptance.given(expected, np.full((4, CAP), 0.5), arm)
        for values in (expected, known, acceptance.by_position()[arm]):
            assert np.isfinite(values).all()
        assert (expected >= LOW).all() and (expected <= HIGH).all()
        assert (known >= LOW).all() and (known <= HIGH).all()


@given(observed)
@checked
def test_tests_and_hits_are_those_that_plain_counting_finds(drawn):
    """No draft is withheld here, no request is known, and too few are tested for a sum to fade."""
    acceptance = Acceptance(CAP, 4)
    tests, hits = np.zeros((ARMS, CAP)), np.zeros((ARMS, CAP))
    rows, arms, drafted, _, accepted, _ = (np.array(part) for part in zip(*drawn, strict=True))
    accepted = np.minimum(accepted, drafted)
    nothing = np.zeros((len(rows), CAP))
    acceptance.observe(rows, Outcome(arms, drafted, drafted, accepted, nothing))
    for arm, depth, right in zip(arms, drafted, accepted, strict=True):
        for position in range(min(right + 1, depth)):
            tests[arm, position] += 1
            hits[arm, position] += position < right
    acceptance.learn()
    assert acceptance._tests == pytest.approx(tests, rel=0.02)
    assert acceptance._right == pytest.approx(hits, rel=0.02)


def test_positions_that_only_good_requests_reach_look_no_better_than_they_are():
    rates = np.array([0.2] * 8 + [0.9] * 8)
    acceptance = taught(Acceptance(CAP, 16), MadeUpDrafter(rates, CAP, spread=0.3), 300)
    found = acceptance.expected(np.arange(16), MODEL)
    assert found[:8, 0].mean() == pytest.approx(0.2, abs=0.12)  # drawn towards the mean of all
    assert found[8:, :4].mean() == pytest.approx(0.9, abs=0.08)
    assert np.ptp(found[8:].mean(axis=0)) < 0.08


def test_the_prior_of_a_request_weighs_as_many_tests_as_it_says():
    acceptance = Acceptance(CAP, 1)
    one = np.array([0])
    depth = np.array([1])
    for _ in range(4):
        acceptance.observe(one, Outcome(one, depth, depth, one, np.zeros((1, CAP))))
    mean = 0.6 * 20 / 24  # four misses among the prior's twenty tests
    rate, promised = acceptance.by_position()[MODEL, 0], 4 * 0.6  # promised before they were missed
    weight = OWN_TESTS * mean
    own = weight / (promised + weight)
    assert acceptance.expected(one, MODEL)[0, 0] == pytest.approx(rate * own)


# -- confidence ---------------------------------------------------------------------------------


def log_loss(believed, is_right):
    believed = np.clip(believed, 1e-6, 1 - 1e-6)
    return -np.mean(np.where(is_right, np.log(believed), np.log(1 - believed)))


@pytest.mark.parametrize("bias", [-2.0, 0.0, 2.0])
def test_confidence_is_worth_what_it_turned_out_to_be_worth(bias):
    """A drafter that is too sure of itself, or too little, is believed as it deserves."""
    drafter = MadeUpDrafter([0.6] * 8, CAP, spread=1.5, bias=bias)
    acceptance = taught(Acceptance(CAP, 8), drafter, 400)
    chances, is_right = MadeUpDrafter([0.6] * 4000, CAP, seed=8, spread=1.5, bias=bias).drafts()
    first, right = chances[:, :1], is_right[:, :1]
    expected = np.full_like(first, acceptance.by_position()[MODEL, 0])
    learned = log_loss(acceptance.given(expected, first, MODEL), right)
    assert learned < log_loss(expected, right) - 0.05  # better than without the confidence
    assert learned < log_loss(first, right) + 0.02  # and no worse than the confidence itself
    best = 1 / (1 + np.exp(-(np.log(first / (1 - first)) - bias)))
    assert learned < log_loss(best, right) + 0.03


def test_views_are_what_the_expectation_becomes_and_mean_the_expectation():
    calibration = Calibration(ARMS)
    drafter = MadeUpDrafter([0.6] * 400, 1, spread=1.5)
    for _ in range(8):
        chances, is_right = drafter.drafts()
        calibration.learn(
            chances[:, 0], np.full(400, 0.6), is_right[:, 0].astype(float), np.zeros(400, int)
        )
    expected = np.array([0.2, 0.6, 0.9])
    views = calibration.views(expected, MODEL)
    assert views.shape == (3, VIEWS)
    assert (np.diff(views[:2], axis=1) > 0).all()
    assert views.mean(axis=1) == pytest.approx(expected, abs=0.03)
    # the spread of the made-up drafter: quarters of a normal distribution
    assert np.ptp(np.log(views[1] / (1 - views[1]))) == pytest.approx(1.5 * 2.54, rel=0.4)
    assert calibration.most(expected, MODEL) == pytest.approx(views.max(axis=1), abs=0.15)


def test_before_anything_was_learned_all_views_are_the_expectation():
    calibration = Calibration(ARMS)
    expected = np.array([0.3, 0.7])
    assert calibration.views(expected, MODEL) == pytest.approx(
        np.repeat(expected[:, None], VIEWS, 1)
    )
    assert calibration.most(expected, MODEL) == pytest.approx(expected)


def test_arms_are_calibrated_apart():
    calibration = Calibration(ARMS)
    before = calibration.weights.copy()
    chances = np.full(RECENT, 0.9)
    calibration.learn(chances, np.full(RECENT, 0.5), np.zeros(RECENT), np.full(RECENT, LOOKUP))
    assert (calibration.weights[MODEL] == before[MODEL]).all()
    assert (calibration.weights[LOOKUP] != before[LOOKUP]).any()
