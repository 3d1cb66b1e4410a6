"""Lets FASER report beside SGLang's decode report, on the rank that reports.

SGLang: ``SchedulerMetricsReporter.__post_init__(self)`` is called when the worker exists.
``report_decode_stats(self, can_run_cuda_graph, running_batch, num_generated_tokens)`` is called
behind every decode pass whose result was read; once in ``decode_log_interval`` calls it really
reports, and sets ``last_decode_stats_tic`` then and only then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.scheduler_components.metrics_reporter"


def _begin(_result: None, reporter: Any) -> None:
    worker = reporter.scheduler.draft_worker
    if not hasattr(worker, "describe_faser") or not reporter.is_stats_logging_rank:
        return
    from faser_sglang.worker.exporter import Exporter
    from faser_sglang.worker.round_report import RoundReport

    collector = reporter.metrics_collector
    exports = reporter.current_scheduler_metrics_enabled and collector is not None
    worker.report = RoundReport(worker, Exporter(collector, worker.cap) if exports else None)


def _report(original: Callable, reporter: Any, *args: Any, **kwargs: Any) -> None:
    last = reporter.last_decode_stats_tic
    original(reporter, *args, **kwargs)
    report = getattr(reporter.scheduler.draft_worker, "report", None)
    if report is not None:
        report.round_read()
        if reporter.last_decode_stats_tic != last:
            report.log()


HOOKS = tuple(
    Hook(f"{_MODULE}.SchedulerMetricsReporter.{method}", _MODULE, ours, kind, ("scheduler",))
    for method, ours, kind in (
        ("__post_init__", _begin, HookType.AFTER),
        ("report_decode_stats", _report, HookType.AROUND),
    )
)
