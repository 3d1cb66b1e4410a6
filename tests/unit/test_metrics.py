"""The counters: identities that hold whatever the rounds were."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control import metrics
from faser_sglang.control.metrics import PhaseClock, RoundCounters

checked = settings(deadline=None, derandomize=True, max_examples=40)
rounds = st.lists(
    st.integers(0, 9).flatmap(lambda depth: st.tuples(st.just(depth), st.integers(0, depth))),
    max_size=20,
)


def counted(pairs, trimmed=0):
    counters = RoundCounters(trimmed=trimmed)
    for depth, accepted in pairs:
        counters.add(depth, accepted)
    return counters


@given(rounds, st.integers(0, 5))
@checked
def test_emitted_tokens_are_those_of_the_rounds_less_those_behind_a_stop(pairs, trimmed):
    counters = counted(pairs, trimmed)
    emitted = sum(accepted + 1 for _, accepted in pairs) - trimmed
    assert counters.emitted == emitted == counters.accepted + counters.rounds - counters.trimmed
    assert counters.rounds == len(pairs)
    assert counters.drafted == sum(depth for depth, _ in pairs)
    assert counters.accept_length == (emitted / len(pairs) if pairs else 0.0)


@given(rounds)
@checked
def test_a_position_is_tested_only_behind_accepted_drafts_and_within_the_depth(pairs):
    counters = counted(pairs)
    deepest = max((depth for depth, _ in pairs), default=0)
    reached = [sum(p < d and a >= p for d, a in pairs) for p in range(deepest)]
    assert counters.tested_by_position == reached
    assert counters.accepted_by_position == [sum(a > p for _, a in pairs) for p in range(deepest)]
    assert sum(counters.accepted_by_position) == counters.accepted


@given(rounds)
@checked
def test_acceptance_rate_counts_only_tested_drafts(pairs):
    counters = counted(pairs)
    tested = sum(min(a + 1, d) for d, a in pairs)
    assert counters.acceptance_rate == (counters.accepted / tested if tested else 0.0)
    assert 0.0 <= counters.acceptance_rate <= 1.0


@given(rounds)
@checked
def test_the_histogram_counts_every_round_once(pairs):
    assert counted(pairs).depth_histogram == Counter(depth for depth, _ in pairs)


def test_positions_beyond_a_requests_depth_are_not_observed():
    shallow_behind_deep = counted([(3, 3), (1, 1), (0, 0)])
    assert shallow_behind_deep.tested_by_position == [2, 1, 1]
    assert shallow_behind_deep.acceptance_rate == 1.0


@pytest.mark.parametrize(("depth", "accepted"), [(0, 1), (3, 4), (2, -1)])
def test_more_accepted_than_drafted_is_refused_and_counts_nothing(depth, accepted):
    counters = counted([(2, 1)])
    before = counters.snapshot()
    with pytest.raises(ValueError, match=f"{accepted} of {depth}"):
        counters.add(depth, accepted)
    assert counters.snapshot() == before


@given(rounds)
@checked
def test_a_snapshot_is_plain_json_and_keeps_nothing_alive(pairs):
    counters = counted(pairs)
    state = counters.snapshot()
    assert json.loads(json.dumps(state)) == state
    assert list(map(int, state["depth_histogram"])) == sorted(counters.depth_histogram)
    assert state["emitted"] == counters.emitted
    counters.add(9, 9)
    assert json.loads(json.dumps(state)) == state and state["rounds"] == len(pairs)


def test_rounds_behind_a_requests_end_are_counted_apart():
    counters = counted([(2, 1)])
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
