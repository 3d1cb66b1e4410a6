"""What reaches Prometheus and the log, and when: beside SGLang's own report, on its rank."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from faser_sglang.control.metrics import PhaseClock, RoundCounters
from faser_sglang.hooks import decode_report
from faser_sglang.worker.exporter import Exporter
from faser_sglang.worker.round_report import RoundReport

LABELS = {"model_name": "m", "tp_rank": 0}
CONTROLLER = {
    "drafter_passes": 2,
    "price_of_a_row": 0.25,
    "rounds_timed": 7,
    "round_time_error": 0.125,
    "time_over_table": {"draft": 1.0, "verify": 1.5, "host": 2.0},
}


class Planner:
    """The planner, as far as reports look at it."""

    def __init__(self):
        self.controller = SimpleNamespace(cost=SimpleNamespace(rounds=7))
        self.values = {"depth": "auto", "stop": "on", "trim": "on", "controller": CONTROLLER}

    def describe(self):
        return self.values


def make_worker():
    return SimpleNamespace(
        ledger=SimpleNamespace(counters=RoundCounters()),
        clock=PhaseClock(),
        drafter=SimpleNamespace(kind="lm", faults=0),
        planner=Planner(),
        cap=3,
        mode="serial",
        report=None,
        describe_faser=dict,
    )


def make_collector():
    registry = CollectorRegistry()
    return SimpleNamespace(
        labels=LABELS,
        registry=registry,
        _counter_cls=partial(Counter, registry=registry),
        _gauge_cls=partial(Gauge, registry=registry),
    )


@pytest.fixture
def setting():
    worker, collector = make_worker(), make_collector()
    report = RoundReport(worker, Exporter(collector, worker.cap))

    def value(name, **labels):
        labels = {**LABELS, **labels}
        return collector.registry.get_sample_value(
            f"sglang:faser_{name}", {key: str(each) for key, each in labels.items()}
        )

    return worker, report, value


def test_every_series_that_is_sure_to_come_begins_at_zero(setting):
    """Else the first rounds would be missing from every rate."""
    _, _, value = setting
    assert value("rounds_total") == value("draft_faults_total") == 0
    assert [value("rounds_by_depth_total", depth=depth) for depth in range(5)] == [0] * 4 + [None]
    assert [value("position_tested_total", position=p) for p in (0, 1, 3, 4)] == [None, 0, 0, None]
    assert value("phase_seconds_total", phase="verify") == 0


def test_counters_follow_every_round(setting):
    worker, report, value = setting
    worker.ledger.counters.add(3, 2, 1)
    worker.clock.start()
    worker.clock.lap("draft")
    worker.drafter.faults = 1
    report.round_read()
    report.round_read()  # nothing new
    names = ("drafts", "trimmed_drafts", "verified_drafts", "accepted_drafts", "emitted_tokens")
    assert [value(f"{name}_total") for name in names] == [3, 1, 2, 1, 2]
    assert [value("position_tested_total", position=p) for p in (1, 2, 3)] == [1, 1, 0]
    assert [value("position_accepted_total", position=p) for p in (1, 2, 3)] == [1, 0, 0]
    assert value("rounds_by_depth_total", depth=2) == 1
    assert value("phase_seconds_total", phase="draft") == worker.clock.seconds["draft"]
    assert value("draft_faults_total") == 1 and value("timed_rounds_total") == 7
    assert value("saved_rounds_total") == 1


def test_a_flush_takes_nothing_back_and_hides_nothing(setting):
    worker, report, value = setting
    for _ in range(2):
        worker.ledger.counters, worker.clock = RoundCounters(), PhaseClock()
        worker.clock.start()
        for _ in range(3):
            worker.ledger.counters.add(2, 2, 2)
        report.round_read()
    assert value("rounds_total") == 6 and value("accepted_drafts_total") == 12
    assert value("begun_passes_total") == 2


def test_gauges_and_the_line_come_at_a_log_interval(setting, caplog):
    worker, report, value = setting
    worker.ledger.counters.add(3, 3, 2)
    report.round_read()
    assert value("accept_length") in (None, 0)
    with caplog.at_level(logging.INFO):
        report.log()
    (line,) = caplog.messages
    assert line.startswith("FASER: accept len: 3.00, depth: 3.00")
    assert value("accept_length") == 3 and value("depth_cap") == 3
    assert value("drafter_passes") == 2 and value("row_price") == 0.25
    assert value("round_time_error") == 0.125 and value("time_over_table", phase="host") == 2


def test_settings_that_were_changed_are_no_longer_in_force(setting):
    worker, report, value = setting
    labels = {"mode": "serial", "drafter": "lm", "stop": "on", "trim": "on"}
    assert value("info", depth="auto", **labels) == 1
    worker.planner.values = {**worker.planner.values, "depth": "2"}
    report.log()
    assert value("info", depth="auto", **labels) == 0
    assert value("info", depth="2", **labels) == 1


def make_reporter(worker, collector, *, is_logging=True, is_enabled=True):
    return SimpleNamespace(
        scheduler=SimpleNamespace(draft_worker=worker),
        is_stats_logging_rank=is_logging,
        current_scheduler_metrics_enabled=is_enabled,
        metrics_collector=collector,
        last_decode_stats_tic=1.0,
    )


def test_the_line_comes_only_when_sglang_really_reported(caplog):
    worker = make_worker()
    reporter = make_reporter(worker, None, is_enabled=False)
    decode_report._begin(None, reporter)
    calls = []

    def quiet(reporter, *args, **kwargs):
        calls.append((args, kwargs))

    def reporting(reporter, *args, **kwargs):
        reporter.last_decode_stats_tic += 1

    with caplog.at_level(logging.INFO):
        decode_report._report(quiet, reporter, True, running_batch=None)
        assert caplog.messages == [] and calls == [((True,), {"running_batch": None})]
        decode_report._report(reporting, reporter, True)
    assert len(caplog.messages) == 1


def test_another_rank_reports_nothing():
    worker = make_worker()
    reporter = make_reporter(worker, make_collector(), is_logging=False)
    decode_report._begin(None, reporter)
    assert worker.report is None
    decode_report._report(lambda *_: None, reporter)


def test_without_enable_metrics_only_the_log_is_told():
    worker = make_worker()
    decode_report._begin(None, make_reporter(worker, None, is_enabled=False))
    assert worker.report is not None and worker.report.exporter is None
    worker.ledger.counters.add(1, 1, 1)
    worker.report.round_read()


def test_a_server_of_another_algorithm_is_left_alone():
    for worker in (None, SimpleNamespace()):
        reporter = make_reporter(worker, make_collector())
        decode_report._begin(None, reporter)
        decode_report._report(lambda *_: None, reporter)
