"""Keeps the target's new weights out of the draft model.

SGLang: ``SchedulerWeightUpdaterManager._select_runners(self, selector="all")`` returns pairs of
role and runner; a weight update loads the same weights into each. Those of a target are not a
draft's: a head of another vocabulary ends the scheduler over them. Ours takes the draft out of
"all", with a warning; "draft" still names it.
"""

from __future__ import annotations

import logging
from typing import Any

from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.scheduler_components.weight_updater"

logger = logging.getLogger(__name__)


def _target_only(runners: list[tuple[str, Any]], _manager: Any, selector: str = "all") -> Any:
    kept = [(role, runner) for role, runner in runners if role != "draft"]
    if selector != "all" or len(kept) == len(runners) or not is_faser_process():
        return runners
    logger.warning(
        "FASER's draft model keeps its weights while the target's change: output stays the "
        'target\'s, but fewer drafts may be accepted; the selector "draft" updates the draft.'
    )
    return kept


HOOK = Hook(
    f"{_MODULE}.SchedulerWeightUpdaterManager._select_runners",
    _MODULE,
    _target_only,
    HookType.AFTER,
    ("scheduler",),
)
