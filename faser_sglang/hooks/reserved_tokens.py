"""Lets requests use the whole context with an EAGLE head.

SGLang: ``compute_num_reserved_tokens()`` takes one window off every request's context for EAGLE,
whose drafts lie in output slots. FASER's windows end at the context's end by themselves, so a
request gets what it would get without speculation.
"""

from __future__ import annotations

from collections.abc import Callable

from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.managers.tokenizer_manager"


def _reserved(original: Callable[[], int]) -> int:
    return 0 if is_faser_process() else original()


HOOK = Hook(
    f"{_MODULE}.compute_num_reserved_tokens", _MODULE, _reserved, HookType.AROUND, ("launcher",)
)
