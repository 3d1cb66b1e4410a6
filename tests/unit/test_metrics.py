"""The counters: identities that hold whatever the rounds were."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control import metrics
from faser_sglang.control.metrics import Account, PhaseClock, RoundCounters

checked = settings(deadline=None, derandomize=True, max_examples=40)
rounds = st.lists(
    st.tuples(*[st.integers(0, 9)] * 3).map(lambda three: tuple(sorted(three, reverse=True))),
    max_size=20,
)  # drafted, verified, accepted


def counted(triples, cut=0):
    counters = RoundCounters(cut=cut)
    for drafted, verified, accepted in triples:
        counters.add(drafted, verified, accepted)
    return counters


@given(rounds, st.integers(0, 5))
@checked
def test_emitted_tokens_are_those_of_the_rounds_less_those_behind_a_stop(triples, cut):
    counters = counted(triples, cut)
    emitted = sum(accepted + 1 for _, _, accepted in triples) - cut
    assert counters.emitted == emitted == counters.accepted + counters.rounds - counters.cut
    assert counters.rounds == len(triples)
    assert counters.accept_length == (emitted / len(triples) if triples else 0.0)


@given(rounds)
@checked
def test_every_draft_was_verified_or_trimmed(triples):
    counters = counted(triples)
    assert counters.drafted == sum(drafted for drafted, _, _ in triples)
    assert counters.verified == sum(verified for _, verified, _ in triples)
    assert counters.trimmed == sum(drafted - verified for drafted, verified, _ in triples) >= 0
    assert counters.drafted == counters.verified + counters.trimmed


@given(rounds)
@checked
def test_a_position_is_tested_only_behind_accepted_drafts_and_within_the_depth(triples):
    counters = counted(triples)
    deepest = max((verified for _, verified, _ in triples), default=0)
    reached = [sum(p < v and a >= p for _, v, a in triples) for p in range(deepest)]
    assert counters.tested_by_position == reached
    accepted = [sum(a > p for _, _, a in triples) for p in range(deepest)]
    assert counters.accepted_by_position == accepted
    assert sum(counters.accepted_by_position) == counters.accepted


@given(rounds)
@checked
def test_acceptance_rate_counts_only_tested_drafts(triples):
    counters = counted(triples)
    tested = sum(min(a + 1, v) for _, v, a in triples)
    assert counters.acceptance_rate == (counters.accepted / tested if tested else 0.0)
    assert 0.0 <= counters.acceptance_rate <= 1.0


@given(rounds)
@checked
def test_the_histogram_counts_every_round_once_by_what_was_verified(triples):
    assert counted(triples).depth_histogram == Counter(verified for _, verified, _ in triples)


@given(rounds)
@checked
def test_the_accounts_of_requests_add_up_to_the_servers(triples):
    counters, accounts = RoundCounters(), [Account(), Account()]
    for i, triple in enumerate(triples):
        counters.add(*triple)
        accounts[i % 2].add(*triple)
    for name in ("rounds", "drafted", "trimmed", "verified", "accepted", "cut", "emitted"):
        assert getattr(counters, name) == sum(getattr(account, name) for account in accounts)
    histograms = (Counter(account.depth_histogram) for account in accounts)
    assert sum(histograms, Counter()) == Counter(counters.depth_histogram)


def test_positions_beyond_a_requests_depth_are_not_observed():
    shallow_behind_deep = counted([(3, 3, 3), (4, 1, 1), (0, 0, 0)])
    assert shallow_behind_deep.tested_by_position == [2, 1, 1]
    assert shallow_behind_deep.acceptance_rate == 1.0


@pytest.mark.parametrize(
    ("drafted", "verified", "accepted"), [(0, 0, 1), (3, 3, 4), (2, 2, -1), (2, 3, 1), (5, 2, 3)]
)
def test_more_accepted_than_verified_or_verified_than_drafted_is_refused_and_counts_nothing(
    drafted, verified, accepted
):
    counters = counted([(2, 2, 1)])
    before = counters.snapshot()
    with pytest.raises(ValueError, match=f"{accepted} of {verified} of {drafted}"):
        counters.add(drafted, verified, accepted)
    assert counters.snapshot() == before


@given(rounds)
@checked
def test_a_snapshot_is_plain_json_and_keeps_nothing_alive(triples):
    counters = counted(triples)
    state = counters.snapshot()
    assert json.loads(json.dumps(state)) == state
    assert list(map(int, state["depth_histogram"])) == sorted(counters.depth_histogram)
    assert state["emitted"] == counters.emitted and state["trimmed"] == counters.trimmed
    counters.add(9, 9, 9)
    assert json.loads(json.dumps(state)) == state and state["rounds"] == len(triples)


def test_rounds_behind_a_requests_end_are_counted_apart():
    counters = counted([(2, 2, 1)])
    before = counters.snapshot()
    counters.add_overshoot(0)
    counters.add_overshoot(3)
    after = counters.snapshot()
    assert (after.pop("overshoot_rounds"), after.pop("overshoot_tokens")) == (2, 5)
    assert after == {name: before[name] for name in after}


class Watch:
    """A clock that a test sets."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


def test_a_phase_clock_gives_each_phases_mean_over_the_rounds(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(metrics, "time", watch)
    clock = PhaseClock()
    assert clock.snapshot() == {}
    for draft, verify in ((0.001, 0.004), (0.0, 0.002), (0.002, 0.003)):
        watch.pass_by(7.0)  # between the rounds: nobody's
        clock.start()
        watch.pass_by(draft)
        clock.lap("draft")
        watch.pass_by(verify)
        clock.lap("verify")
    assert clock.snapshot() == pytest.approx({"draft": 1.0, "verify": 3.0})
    assert list(clock.snapshot()) == ["draft", "verify"]
