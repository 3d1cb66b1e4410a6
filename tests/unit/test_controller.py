"""The controller: as deep as it pays, within every limit, steady, and never lost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.controller import PROBE_FIRST, USES, Controller, Settings
from faser_sglang.control.rounds import ARMS, LOOKUP, MODEL, Offer, Outcome
from tests.support.made_up_rounds import MadeUpDrafter, offer_to, play, roofline

CAP = 8
checked = settings(deadline=None, derandomize=True, max_examples=60)
NO_CONFIDENCE = Settings(stops=False, trims=False)


def controller_of(n, table=None, **changes):
    controller = Controller(CAP, n, table or roofline(), Settings(**changes))
    controller.reset(np.arange(n))
    return controller


def taught(n, rate, table=None, rounds=80, **changes):
    """A controller that has seen requests of acceptance ``rate`` drafted for at full depth."""
    controller = controller_of(n, table, **changes)
    drafter = MadeUpDrafter(np.broadcast_to(rate, n), CAP, spread=0.5)
    for _ in range(rounds):
        controller.observe(np.arange(n), drafter.outcome(CAP))
    return controller


def plan_of(controller, n, offer=None, lengths=None):
    lengths = np.full(n, 200) if lengths is None else lengths
    return controller.plan(np.arange(n), lengths, offer or offer_to(n, CAP))


def steady(controller, n, offer=None):
    """The plan once no hysteresis holds it back."""
    for _ in range(8 * USES):
        plan = plan_of(controller, n, offer)
    return plan


# -- load and acceptance ----------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_more_load_is_never_drafted_for_deeper(rate):
    depths = [
        steady(taught(n, rate, stops=False, trims=False), n).depths.mean()
        for n in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert depths[0] >= 2
    assert all(more <= less + 1e-9 for less, more in zip(depths, depths[1:], strict=False))
    assert depths[-1] < depths[0]


@pytest.mark.parametrize("n", [1, 8, 32])
def test_higher_acceptance_is_never_drafted_for_less_deep(n):
    depths = [
        steady(taught(n, rate, rounds=200, stops=False, trims=False), n).depths.mean()
        for rate in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert all(low <= high + 0.3 for low, high in zip(depths, depths[1:], strict=False))
    assert depths[-1] > depths[0]


@pytest.mark.parametrize("trims", [False, True])
def test_within_a_batch_the_better_requests_are_drafted_for_deeper(trims):
    rates = np.linspace(0.15, 0.9, 16)
    controller = taught(16, rates, rounds=150, stops=False, trims=trims)
    depths = steady(controller, 16).depths
    own = controller.acceptance.expected(np.arange(16), MODEL)[:, 0]
    assert (np.diff(depths[np.argsort(own)]) >= 0).all()
    assert depths.max() >= depths.min() + 2


def test_where_drafts_pay_nothing_there_are_none():
    dear = roofline(row=20.0, free_rows=0)
    controller = taught(16, 0.3, dear)
    steady(controller, 16)
    assert controller.depth == 0
    assert not plan_of(controller, 16).depths.any()


def test_where_the_drafter_is_dear_it_is_not_asked_but_lookup_is():
    controller = taught(4, 0.6, roofline(step=40.0))
    lookup = np.array([0.9, 0.0, 0.9, 0.0])
    plan = steady(controller, 4, offer_to(4, CAP, lookup=lookup))
    assert plan.arms[[0, 2]].tolist() == [LOOKUP, LOOKUP]
    assert (plan.depths[[0, 2]] > 0).all() and not plan.depths[[1, 3]].any()


def test_the_model_is_asked_instead_of_a_lookup_that_has_proved_worth_little():
    n = 4
    controller = taught(n, 0.9)
    bad = MadeUpDrafter([0.05] * n, CAP)
    for _ in range(60):
        outcome = bad.outcome(CAP, arms=np.full(n, LOOKUP))
        controller.observe(np.arange(n), outcome._replace(chances=np.full((n, CAP), 0.75)))
    plan = steady(controller, n, offer_to(n, CAP, lookup=np.full(n, 0.75)))
    assert plan.arms.tolist() == [MODEL] * n


# -- limits -----------------------------------------------------------------------------------

limits = st.lists(st.integers(-3, CAP), min_size=1, max_size=9)


@given(limits, st.data())
@checked
def test_no_limit_is_exceeded_and_nothing_is_asked_of_an_arm_that_offers_nothing(model, data):
    n = len(model)
    lookup = data.draw(st.lists(st.integers(-3, CAP), min_size=n, max_size=n))
    offers = np.array([model, lookup])
    chances = np.where(offers > 0, np.array([[0.0], [0.8]]), 0.0)
    depth = data.draw(st.sampled_from([None, 0, 3]))
    controller = controller_of(n, depth=depth)
    for _ in range(3):
        plan = plan_of(controller, n, Offer(offers, chances, np.zeros(n, np.int64)))
        most = np.maximum(offers[plan.arms, np.arange(n)], 0)
        assert (plan.depths >= 0).all() and (plan.depths <= most).all()
        if depth is not None:
            assert plan.depths.tolist() == np.minimum(most, depth).tolist()


@pytest.mark.parametrize("limit_ms", [20.0, 21.5, 24.0, np.inf])
def test_a_token_limit_bounds_the_predicted_round(limit_ms):
    controller = taught(4, 0.9, token_limit_ms=limit_ms)
    steady(controller, 4)
    found = controller._search.chosen
    assert found.ms <= max(limit_ms, 21.1)  # no speculation takes 21 ms; less cannot be had
    assert (found.depth > 0) == (limit_ms > 21.7)


def test_a_fixed_depth_may_still_be_stopped_and_trimmed():
    controller = taught(32, 0.5, depth=5, trims=True, stops=True)
    found = play(
        controller, MadeUpDrafter([0.5] * 32, CAP), offer_to(32, CAP), np.full(32, 200), 30
    )
    assert found.max() <= 5 and found.mean() < 4


# -- stop and trim ----------------------------------------------------------------------------


def test_drafts_of_low_confidence_are_withheld_and_chains_end_at_them():
    n = 32
    controller = controller_of(n, roofline(row=0.2, step=0.1))
    drafter = MadeUpDrafter([0.6] * n, CAP, spread=2.0)
    play(controller, drafter, offer_to(n, CAP), np.full(n, 200), 100)
    plan = plan_of(controller, n)
    assert plan.stops and plan.trims
    sure, unsure = np.full((n, 2), 0.98), np.full((n, 2), 0.02)
    counts = np.minimum(plan.depths, 2)
    kept, withheld = plan.trim(sure, counts), plan.trim(unsure, counts)
    assert kept.sum() > withheld.sum()
    half = np.where(np.arange(n)[:, None] < n // 2, sure, unsure)
    by_confidence = plan.trim(half, counts)
    assert by_confidence[: n // 2].sum() > by_confidence[n // 2 :].sum()
    members = np.arange(n)
    assert plan.goes_on(members, sure[:, :1]).sum() > plan.goes_on(members, unsure[:, :1]).sum()


def test_trimming_by_confidence_brings_more_tokens_for_a_row():
    n, table = 32, roofline(row=0.3)
    tokens = {}
    for trims in (False, True):
        controller = controller_of(n, table, stops=False, trims=trims)
        drafter = MadeUpDrafter([0.6] * n, CAP, spread=2.0, seed=2)
        lengths = np.full(n, 200)
        play(controller, drafter, offer_to(n, CAP), lengths, 60)
        tokens[trims] = max(plan.rate for plan in [controller._search.chosen])
    assert tokens[True] > 1.02 * tokens[False]


# -- steadiness -------------------------------------------------------------------------------


def changes_of(controller, n, rounds, seed):
    """How often the number of passes changes while drafts are accepted at chance."""
    drafter = MadeUpDrafter([0.62] * n, CAP, spread=0.5, seed=seed)
    offer, seen = offer_to(n, CAP), []
    for _ in range(rounds):
        play(controller, drafter, offer, np.full(n, 200), 1)
        seen.append(controller.depth)
    return sum(now != then for now, then in zip(seen, seen[1:], strict=False))


def test_a_depth_on_the_threshold_does_not_flap(monkeypatch):
    """Two depths are worth the same; noise alone changes the order of the estimates."""
    steady_changes = changes_of(controller_of(4, trims=False, stops=False), 4, 400, seed=3)
    monkeypatch.setattr("faser_sglang.control.controller.MARGIN", 1.0)
    monkeypatch.setattr("faser_sglang.control.controller.PATIENCE", 1)
    loose_changes = changes_of(controller_of(4, trims=False, stops=False), 4, 400, seed=3)
    assert steady_changes <= 12
    assert loose_changes > 2 * steady_changes


def test_a_much_better_depth_is_taken_at_once():
    controller = taught(4, 0.9)
    controller.depth = 0
    plan_of(controller, 4)
    assert controller.depth > 0


def test_a_batch_that_stays_the_same_is_searched_every_few_rounds():
    controller = taught(32, 0.6)
    searches = set()
    for _ in range(3 * USES):
        plan_of(controller, 32)
        searches.add(id(controller._search))
    assert len(searches) <= 4
    search = controller._search
    plan_of(controller, 16)
    assert controller._search is not search  # another batch


def test_other_settings_hold_from_the_next_round_on():
    controller = taught(32, 0.6)
    plan_of(controller, 32)
    controller.settings = Settings(depth=2, stops=False, trims=False)
    plan = plan_of(controller, 32)
    assert plan.depths.tolist() == [2] * 32 and not plan.stops and not plan.trims


# -- recovery ---------------------------------------------------------------------------------


def test_while_nothing_is_drafted_a_few_requests_probe_less_and_less_often():
    controller = taught(16, 0.3, roofline(row=20.0, free_rows=0))
    probes = []
    for number in range(20 * PROBE_FIRST):
        depths = plan_of(controller, 16).depths
        if depths.any():
            assert depths.max() == 1 and depths.sum() == 4
            probes.append((number, np.flatnonzero(depths).tolist()))
    gaps = np.diff([number for number, _ in probes])
    assert (np.diff(gaps) >= 0).all() and gaps[-1] == 256
    assert probes[0][1] != probes[1][1]  # others in their turn


def test_a_drafter_that_becomes_good_again_is_used_again():
    n = 4
    controller = taught(n, 0.02, rounds=300)
    steady(controller, n)
    assert controller.depth == 0
    good = MadeUpDrafter([0.95] * n, CAP)
    found = play(controller, good, offer_to(n, CAP), np.full(n, 200), 1500)
    assert found[-50:].mean() > 2


def test_a_request_that_takes_a_row_over_starts_anew():
    rates = np.array([0.05] + [0.9] * 7)
    controller = taught(8, rates, rounds=150, trims=False, stops=False)
    before = steady(controller, 8).depths
    controller.reset(np.array([0]))
    after = steady(controller, 8).depths
    assert before[0] < before[1:].min()
    assert after[0] >= before[0] + 2


# -- absurd inputs ----------------------------------------------------------------------------

absurd = st.sampled_from([0.0, 1e-300, 0.5, 1.0 - 1e-16, 1.0])


@given(st.integers(1, 6), st.data())
@checked
def test_absurd_inputs_lead_to_plans_within_the_limits(n, data):
    table = dataclasses.replace(
        roofline(),
        first=[data.draw(st.sampled_from([0.0, 1e-9, 1e9]))] * 8,
        host=[data.draw(st.sampled_from([0.0, 1e9]))] * 8,
        catch_up=data.draw(st.sampled_from([0.0, 1e6])),
    )
    controller = controller_of(n, table)
    lengths = np.array(data.draw(st.lists(st.integers(0, 2**40), min_size=n, max_size=n)))
    behind = np.array(data.draw(st.lists(st.integers(0, 2**31), min_size=n, max_size=n)))
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for _ in range(6):
            offer = offer_to(n, CAP, lookup=np.full(n, data.draw(absurd)), behind=behind)
            plan = plan_of(controller, n, offer, lengths)
            assert (plan.depths >= 0).all() and (plan.depths <= CAP).all()
            drafted = plan.depths
            deepest = int(drafted.max(initial=0))
            chances = np.full((n, CAP), data.draw(absurd))
            if plan.stops and deepest > 1:
                plan.goes_on(np.arange(n), chances[:, :1])
            verified = plan.trim(chances[:, :deepest], drafted) if deepest else drafted
            assert (verified <= drafted).all()
            accepted = np.minimum(verified, data.draw(st.integers(0, CAP)))
            controller.observe(
                np.arange(n), Outcome(plan.arms, drafted, verified, accepted, chances)
            )
            shape = controller.cost
            assert np.isfinite(shape.error)


def test_a_round_in_which_nothing_can_be_drafted_costs_no_plan():
    controller = controller_of(3)
    offer = Offer(np.zeros((ARMS, 3), np.int64), np.zeros((ARMS, 3)), np.zeros(3, np.int64))
    plan = plan_of(controller, 3, offer)
    assert plan.depths.tolist() == [0, 0, 0]
    assert controller._search is None


def test_what_it_says_of_itself_is_plain():
    said = taught(4, 0.6).describe()
    assert set(said) >= {"drafter_passes", "acceptance_by_position", "price_of_a_row"}
    assert len(said["acceptance_by_position"]["model"]) == CAP
