"""The only importer of SGLang names that are no public interface.

Written for SGLang 0.5.23 (``plugin.REQUIRED_SGLANG``). When the pin moves, this file and
``hooks/`` are what must be read against the new sources.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

ALGORITHM = "FASER"

__all__ = [
    "ALGORITHM",
    "HookRegistry",
    "HookType",
    "hook_applied",
    "is_faser_process",
    "resolving_view",
]


def hook_applied(target: str) -> bool:
    """Whether the hooks registered on ``target`` were applied (SGLang only logs a failure)."""
    return target in HookRegistry._patched


def is_faser_process() -> bool:
    """Whether the published configuration of this process asks for FASER.

    False before SGLang publishes its configuration, and for every other algorithm: hooks that
    ask leave SGLang's behaviour alone then.
    """
    from sglang.srt.runtime_context import get_spec

    try:
        algorithm: Any = get_spec().speculative_algorithm
    except Exception:  # nothing is published yet in this process
        return False
    return isinstance(algorithm, str) and algorithm.upper() == ALGORITHM
