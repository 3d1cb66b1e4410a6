"""Adds FASER's resolved values and counters to ``/server_info``.

SGLang: ``SchedulerInternalStateController._add_speculative(self, state)`` fills the dictionary
that the scheduler sends for ``internal_states``. Ours adds the key ``faser``.
"""

from __future__ import annotations

from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.scheduler_components.internal_state"


def _add(_result: None, manager: Any, state: dict[str, Any]) -> None:
    describe = getattr(manager.scheduler.draft_worker, "describe_faser", None)
    if describe is not None:
        state["faser"] = describe()


HOOK = Hook(
    f"{_MODULE}.SchedulerInternalStateController._add_speculative",
    _MODULE,
    _add,
    HookType.AFTER,
    ("scheduler",),
)
