"""Where FASER touches SGLang's own functions: one thin file a touch point.

Each file names its target, gives SGLang's signature and ours, and is inert unless FASER is the
algorithm; those that stand in for Triton, or look after the CPU platform's linear layers, act on
CPU tensors whatever the algorithm. Hooks on modules that a process has not imported yet wait
until FASER is really asked for (``install``), so that a process without FASER pays for no import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from faser_sglang.compat import HookRegistry, HookType, hook_applied


@dataclass(frozen=True)
class Hook:
    """``function`` on the dotted ``target``; ``module`` is the one that defines it.

    ``processes`` are those that call the target: "launcher" (which is also the tokenizer's),
    "scheduler".
    """

    target: str
    module: str
    function: Callable
    kind: HookType
    processes: tuple[str, ...]


_registered: set[str] = set()


def register_flags() -> None:
    """Register the command-line hooks; SGLang applies them after the plugins have run."""
    from faser_sglang.hooks import flags

    for hook in flags.HOOKS:
        _register(hook)


def register_all() -> None:
    """Register the flags and every hook whose module this process has imported already."""
    register_flags()
    for hook in _runtime_hooks():
        if hook.module in sys.modules:
            _register(hook)


def install(process: str) -> None:
    """Apply every hook of ``process`` now; raises RuntimeError naming those that SGLang refused."""
    for hook in _runtime_hooks():
        if process in hook.processes:
            _register(hook)
    HookRegistry.apply_hooks()
    missing = [
        hook.target
        for hook in _runtime_hooks()
        if process in hook.processes and not hook_applied(hook.target)
    ]
    if missing:
        raise RuntimeError(
            f"FASER could not hook {', '.join(missing)}; the log above has SGLang's reason "
            "(is sglang 0.5.23 unmodified?)."
        )


def _runtime_hooks() -> list[Hook]:
    from faser_sglang.hooks import (
        accept_rate,
        decode_report,
        draft_context,
        draft_weights,
        last_loc,
        req_to_token_rows,
        req_to_token_writer,
        request_account,
        request_checks,
        reserved_tokens,
        run_time_switch,
        server_info,
        weight_updates,
    )

    return [
        accept_rate.HOOK,
        *decode_report.HOOKS,
        draft_context.HOOK,
        draft_weights.HOOK,
        last_loc.HOOK,
        req_to_token_rows.HOOK,
        req_to_token_writer.HOOK,
        *request_account.HOOKS,
        request_checks.HOOK,
        reserved_tokens.HOOK,
        *run_time_switch.HOOKS,
        server_info.HOOK,
        *weight_updates.HOOKS,
    ]


def _register(hook: Hook) -> None:
    if hook.target not in _registered:
        _registered.add(hook.target)
        HookRegistry.register(hook.target, hook.function, hook.kind)
