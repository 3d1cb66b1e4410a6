"""Lets ``POST /set_internal_state`` switch FASER while it serves.

SGLang: ``SchedulerInternalStateController._update_handlers(self)`` makes the table of names that
can be set, each with a check and an action; values are numbers. Ours adds ``faser_depth`` (-1:
auto), ``faser_stop`` and ``faser_trim`` (-1: auto, 0: off, 1: on).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.scheduler_components.internal_state"
SWITCH = {-1: "auto", 0: "off", 1: "on"}


def _add(handlers: dict[str, Any], controller: Any) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import _UpdateHandler

    planner = getattr(controller.scheduler.draft_worker, "planner", None)
    if planner is not None:
        handler = _UpdateHandler(partial(_check, planner), partial(_apply, planner))
        handlers |= dict.fromkeys(("faser_depth", "faser_stop", "faser_trim"), handler)


def _value(key: str, value: float) -> str:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    if key == "faser_depth" and value == int(value) >= -1:
        return "auto" if value == -1 else str(int(value))
    if key != "faser_depth" and value in SWITCH:
        return SWITCH[value]
    allowed = "-1 (auto) or a depth" if key == "faser_depth" else "-1 (auto), 0 (off) or 1 (on)"
    raise UpdateRejected(f"{key} is {value}; it takes {allowed}.")


def _check(planner: Any, key: str, value: float) -> None:
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    try:
        planner.check_switch(**{key.removeprefix("faser_"): _value(key, value)})
    except ValueError as error:
        raise UpdateRejected(f"Updating {key} to {value} is rejected: {error}") from error


def _apply(planner: Any, key: str, value: float) -> None:
    planner.switch(**{key.removeprefix("faser_"): _value(key, value)})


HOOK = Hook(
    f"{_MODULE}.SchedulerInternalStateController._update_handlers",
    _MODULE,
    _add,
    HookType.AFTER,
    ("scheduler",),
)
