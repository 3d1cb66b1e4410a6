"""Renews the packed copies of the CPU platform's linear layers after a weight update.

SGLang: the methods of ``WeightUpdater`` named below write into the model's parameters, partly
through ``.data``, which leaves no trace on the tensor. Ours run after each.
"""

from __future__ import annotations

from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.model_executor.model_runner_components.weight_updater"
_METHODS = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",
)


def _forget(_result: Any, updater: Any, *_args: Any, **_kwargs: Any) -> None:
    from faser_sglang.cpu.linear import forget_copies

    forget_copies(updater.get_model())


HOOKS = tuple(
    Hook(f"{_MODULE}.WeightUpdater.{method}", _MODULE, _forget, HookType.AFTER, ("scheduler",))
    for method in _METHODS
)
