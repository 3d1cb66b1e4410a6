"""Makes SGLang's accept rate right where requests draft different numbers of tokens.

SGLang: ``SchedulerMetricsReporter.update_spec_metrics(self, bs, num_correct_drafts,
num_accept_tokens, …)`` adds up a log interval, and the report divides the correct drafts by
``spec_num_forward_ct`` * (``speculative_num_draft_tokens`` - 1), as if every round had the largest
depth. Ours runs after it and sets the sum of correct drafts to what makes that quotient accepted
over verified drafts; SGLang uses the sum for nothing else.
"""

from __future__ import annotations

from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.scheduler_components.metrics_reporter"


def _correct(_result: None, reporter: Any, bs: int, num_correct_drafts: int, *_: Any, **__: Any):
    ledger = getattr(reporter.scheduler.draft_worker, "ledger", None)
    if ledger is None:
        return
    is_new = reporter.spec_num_forward_ct == bs  # the interval's first round
    accepted, verified = (0, 0) if is_new else ledger.interval
    ledger.interval = accepted + num_correct_drafts, verified + ledger.last_verified
    if ledger.interval[1]:
        share = ledger.interval[0] / ledger.interval[1]
        most = reporter.spec_num_forward_ct * reporter.scheduler.draft_worker.cap
        reporter.spec_num_correct_drafts = share * most


HOOK = Hook(
    f"{_MODULE}.SchedulerMetricsReporter.update_spec_metrics",
    _MODULE,
    _correct,
    HookType.AFTER,
    ("scheduler",),
)
