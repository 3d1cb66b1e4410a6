"""Lets ``POST /set_internal_state`` switch FASER while it serves; wrong values get a 400.

SGLang: ``SchedulerInternalStateController.set_internal_state(self, recv_req)`` sets numbers by
name, one after the other, and answers whether it did; ``TokenizerControlMixin.set_internal_state(
self, obj) -> list[bool]`` passes that on, as a 200 either way. Ours take out ``faser_depth`` (-1:
auto), ``faser_stop`` and ``faser_trim`` (-1: auto, 0: off, 1: on): they are set together or not at
all, and what cannot be set is a 400 with a sentence.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.config import FaserConfig, FaserConfigError
from faser_sglang.hooks import Hook

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler_components.internal_state"
_LAUNCHER = "sglang.srt.managers.tokenizer_control_mixin"
PREFIX = "faser_"
SWITCH = {-1: "auto", 0: "off", 1: "on"}
NAMES = ("depth", "stop", "trim")


def changes(requested: Mapping[str, float]) -> dict[str, str]:
    """Values of ``NAMES`` that are asked for; raises FaserConfigError for others."""
    found = {}
    for key, value in requested.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name not in NAMES:
            allowed = ", ".join(PREFIX + each for each in NAMES)
            raise FaserConfigError(f"{key} cannot be set; {allowed} can.")
        found[name] = _depth(value) if name == "depth" else SWITCH.get(value, "")
        if not found[name]:
            allowed = "-1 (auto) or a depth" if name == "depth" else "-1 (auto), 0 (off) or 1 (on)"
            raise FaserConfigError(f"{key} is {value}; it takes {allowed}.")
    return found


def _depth(value: float) -> str:
    if not math.isfinite(value) or value != int(value) or value < -1:
        return ""
    return "auto" if value == -1 else str(int(value))


def _switch(original: Callable, controller: Any, recv_req: Any) -> Any:
    """In the scheduler: all of it is possible, or nothing is changed."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    planner = getattr(controller.scheduler.draft_worker, "planner", None)
    requested = recv_req.server_args
    try:
        ours = {} if planner is None else changes(requested)
        if ours:
            planner.check_switch(**ours)
    except FaserConfigError as error:
        logger.warning("FASER switches nothing: %s", error)
        return SetInternalStateReqOutput(updated=False)
    if not ours:
        return original(controller, recv_req)
    recv_req.server_args = {k: v for k, v in requested.items() if not k.startswith(PREFIX)}
    answer = original(controller, recv_req)
    if answer.updated:
        planner.switch(**ours)
    return answer


async def _answer(original: Callable, manager: Any, obj: Any) -> list[bool]:
    """In the launcher: what is refused gets a 400."""
    if not is_faser_process() or not any(key.startswith(PREFIX) for key in obj.server_args):
        return await original(manager, obj)
    from fastapi import HTTPException
    from sglang.srt.runtime_context import get_spec

    try:
        FaserConfig(**changes(obj.server_args)).check_cap(get_spec().speculative_num_steps)
    except FaserConfigError as error:
        raise HTTPException(400, str(error)) from error
    updated: list[bool] = await original(manager, obj)
    if not all(updated):
        raise HTTPException(
            400,
            "the server cannot switch to that: it was started so that it never drafts, or has not "
            "measured what rounds cost (--faser-depth auto does), or another value is wrong; its "
            "log says which.",
        )
    return updated


HOOKS = (
    Hook(
        f"{_SCHEDULER}.SchedulerInternalStateController.set_internal_state",
        _SCHEDULER,
        _switch,
        HookType.AROUND,
        ("scheduler",),
    ),
    Hook(
        f"{_LAUNCHER}.TokenizerControlMixin.set_internal_state",
        _LAUNCHER,
        _answer,
        HookType.AROUND,
        ("launcher",),
    ),
)
