"""What the log and Prometheus are told: growth of counters, over flushes and cuts."""

from __future__ import annotations

from faser_sglang.control.growth import Growth, round_sums
from faser_sglang.control.log_line import log_line
from faser_sglang.control.metrics import RoundCounters

STATE = {"mode": "serial", "depth": "auto", "drafter": "lm", "controller": None}


def take(growth, counters):
    return growth.take([(counters, round_sums(counters))])


def test_growth_is_what_was_added_since_the_last_time():
    growth, counters = Growth(), RoundCounters()
    counters.add(3, 2, 1)
    first = take(growth, counters)
    assert first["rounds", ""] == 1 and first["drafts", ""] == 3
    assert first["rounds_by_depth", "2"] == 1
    assert first["position_tested", "2"] == 1 and ("position_accepted", "2") not in first
    assert take(growth, counters) == {}
    counters.add(3, 2, 2)
    assert take(growth, counters)["accepted_drafts", ""] == 2


def test_a_flush_starts_every_sum_anew_also_those_that_come_later():
    """A depth that the new counters see only at the second look is counted whole."""
    growth, old, new = Growth(), RoundCounters(), RoundCounters()
    for _ in range(5):
        old.add(4, 4, 0)
    take(growth, old)
    new.add(1, 1, 0)
    assert take(growth, new)["rounds_by_depth", "1"] == 1
    new.add(4, 4, 0)
    grown = take(growth, new)
    assert grown["rounds_by_depth", "4"] == 1
    assert "depth: 4.00 (4:100% top 4)" in log_line(grown, STATE)


def test_a_cut_never_lets_an_exported_sum_fall_and_is_made_up_for():
    growth, counters = Growth(), RoundCounters()
    counters.add(2, 2, 2)
    take(growth, counters)  # 3 emitted
    counters.cut += 2  # 1 emitted
    assert ("emitted_tokens", "") not in take(growth, counters)
    counters.add(2, 2, 2)  # 4 emitted
    assert take(growth, counters)["emitted_tokens", ""] == 1


def test_the_log_line_of_an_interval_without_rounds_says_so():
    assert log_line({}, STATE).startswith("FASER: no round of a running request")
