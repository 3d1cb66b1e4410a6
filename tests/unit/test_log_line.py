"""FASER's line in the log says what the interval did."""

from __future__ import annotations

from faser_sglang.control.growth import round_sums
from faser_sglang.control.log_line import log_line
from faser_sglang.control.metrics import RoundCounters

CONTROLLER = {"rounds_timed": 90, "round_time_error": 0.07}
STATE = {"mode": "serial", "depth": "auto", "drafter": "hybrid", "controller": CONTROLLER}


def interval():
    counters = RoundCounters(passes=2)
    counters.add(4, 3, 1)
    counters.add(0, 0, 0)
    counters.add(3, 3, 3)
    counters.add(6, 6, 2)
    return round_sums(counters)


def test_lengths_depths_and_drafts_are_those_of_the_interval():
    line = log_line(interval(), STATE)
    assert line.startswith("FASER: accept len: 2.50, depth: 3.00 (0:25% 3:50% 6:25% top 6), ")
    assert "accepted: 6 of 12 verified, trimmed: 1 of 13 drafted" in line
    assert line.endswith("prediction off by: 7%, mode: serial, depth auto, drafter hybrid")
    assert "\n" not in line


def test_host_time_is_that_of_a_pass_with_each_phases_share():
    times = {("begun_passes", ""): 2, ("phase_seconds", "draft"): 0.006}
    line = log_line({**interval(), **times, ("phase_seconds", "verify"): 0.014}, STATE)
    assert "pass: 10.0 ms (draft 30% verify 70%)" in line


def test_predictions_are_not_spoken_of_without_a_controller_or_before_a_round_was_timed():
    for controller in (None, {**CONTROLLER, "rounds_timed": 0}):
        assert "prediction" not in log_line(interval(), {**STATE, "controller": controller})


def test_draft_faults_are_named_when_there_are_new_ones():
    assert "draft faults" not in log_line(interval(), STATE)
    assert "draft faults: 2" in log_line({**interval(), ("draft_faults", ""): 2}, STATE)


def test_of_many_depths_the_most_frequent_are_shown_and_the_deepest():
    counters = RoundCounters()
    for depth, times in enumerate((5, 1, 4, 3, 2, 1)):
        for _ in range(times):
            counters.add(depth, depth, 0)
    assert "(0:31% 2:25% 3:19% 4:12% top 5)" in log_line(round_sums(counters), STATE)
