"""Times of rounds: each phase its own, and nothing of what lay between two rounds."""

from types import SimpleNamespace

import pytest

from faser_sglang.control.cost import RoundShape
from faser_sglang.control.rounds import LOOKUP, MODEL
from faser_sglang.worker import round_costs
from faser_sglang.worker.round_costs import RoundTimer, shape_of
from tests.support.rounds import make_round


class Watch:
    """A clock that a test sets, in milliseconds."""

    now = 0.0

    def perf_counter(self):
        return self.now / 1e3

    def pass_by(self, ms):
        self.now += ms


class Told:
    """A cost model that keeps what it is told."""

    def __init__(self):
        self.rounds = []

    def observe(self, shape, measured):
        self.rounds.append((shape, measured))


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(round_costs, "time", watch)
    return watch


def a_round(depths=(2, 0, 3), drafted=None, arms=None, lengths=None):
    rows = range(len(depths))
    lengths = [10] * len(depths) if lengths is None else lengths
    drafted = depths if drafted is None else drafted
    return make_round(rows, lengths, [0] * len(depths), depths, drafted=drafted, arms=arms)


def play(timer, watch, draft, verify, rest, depths=(2, 0, 3)):
    timer.start()
    watch.pass_by(draft)
    timer.drafted()
    watch.pass_by(verify)
    timer.verified(a_round(depths), 5)
    watch.pass_by(rest)


def reported(timer):
    told = Told()
    timer.report(told)
    return told.rounds


def test_a_round_is_reported_when_the_next_one_begins_with_a_time_for_each_phase(watch):
    timer = RoundTimer("cpu")
    play(timer, watch, 3, 8, 2)
    assert reported(timer) == []  # its end is not known
    timer.start()
    ((shape, measured),) = reported(timer)
    assert shape == shape_of(a_round(), 5) and measured == pytest.approx((3, 8, 2))
    assert reported(timer) == []  # once


def test_the_phases_of_rounds_in_a_row_add_up_to_the_time_that_passed(watch):
    timer = RoundTimer("cpu")
    for number in range(6):
        play(timer, watch, 1 + number, 7 * number, 0.25)
    timer.start()
    rounds = reported(timer)
    assert len(rounds) == 6
    assert sum(sum(measured) for _, measured in rounds) == pytest.approx(watch.now)


def test_a_round_with_a_prefill_or_an_idle_time_behind_it_is_left_out(watch):
    timer = RoundTimer("cpu")
    play(timer, watch, 1, 1, 1, depths=[1])
    play(timer, watch, 1, 1, 500, depths=[2])
    timer.interrupt()
    play(timer, watch, 1, 1, 1, depths=[3])
    timer.start()
    assert [shape.drafts for shape, _ in reported(timer)] == [1, 3]


def test_an_interruption_within_nothing_does_no_harm(watch):
    timer = RoundTimer("cpu")
    timer.interrupt()
    timer.interrupt()
    play(timer, watch, 1, 2, 3)
    timer.start()
    assert len(reported(timer)) == 1


def test_without_a_cost_model_rounds_are_dropped_and_not_kept(watch):
    timer = RoundTimer("cpu")
    for _ in range(3):
        play(timer, watch, 1, 1, 1)
    timer.start()
    timer.report(None)
    assert reported(timer) == []


class Event:
    """A device's event: done when the test says so."""

    done_before = 0.0
    watch = None

    def record(self):
        self.at = Event.watch.now

    def query(self):
        return self.at < Event.done_before

    def elapsed_time(self, other):
        assert self.query() and other.query(), "the host would wait here"
        return other.at - self.at


def test_on_a_device_nothing_is_read_before_it_has_happened(monkeypatch, watch):
    module = SimpleNamespace(Event=lambda enable_timing: Event())
    monkeypatch.setattr(round_costs.torch, "get_device_module", lambda device: module)
    Event.watch, Event.done_before = watch, 0.0
    timer = RoundTimer("cuda:0")
    for number in range(3):
        play(timer, watch, 1, 2, 3, depths=[number])
    timer.start()
    assert reported(timer) == []
    Event.done_before = 13.0  # two rounds and the start of the third
    rounds = reported(timer)
    assert [shape.drafts for shape, _ in rounds] == [0, 1]
    assert [measured for _, measured in rounds] == [pytest.approx((1, 2, 3))] * 2
    Event.done_before = 100.0
    assert [shape.drafts for shape, _ in reported(timer)] == [2]


# -- shapes -------------------------------------------------------------------------------------


def test_a_shape_counts_the_requests_in_each_pass_of_the_drafter():
    shape = shape_of(a_round(depths=[1, 0, 2, 0], drafted=[3, 0, 2, 1], lengths=[5, 6, 9, 20]), 11)
    assert shape == RoundShape(4, 10.0, drafts=3, drafting=(3, 2, 1), first_rows=11)


def test_lookups_are_verified_but_cost_no_pass():
    arms = [LOOKUP, MODEL, LOOKUP]
    shape = shape_of(a_round(depths=[4, 1, 2], drafted=[4, 2, 2], arms=arms), 3)
    assert (shape.drafts, shape.drafting, shape.first_rows) == (7, (1, 1), 3)


def test_a_round_in_which_no_model_drafts_has_no_pass_and_no_first_rows():
    arms = [LOOKUP, MODEL]
    shape = shape_of(a_round(depths=[4, 0], arms=arms), 9)
    assert (shape.drafts, shape.drafting, shape.first_rows) == (4, (), 0)


def test_a_shape_is_of_plain_numbers():
    """It is kept, and may be written as JSON."""
    shape = shape_of(a_round(), 5)
    assert {type(part) for part in (*shape[:1], *shape[2:3], *shape.drafting)} == {int}
    assert type(shape.context) is float
