"""Lets a draft model have a shorter context than the target.

SGLang: ``ModelConfig._derive_context_length(self, context_length)`` raises when the draft's own
context is shorter than the length asked for. FASER drafts nothing beyond the draft's context
(depth 0 there), so the draft keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.configs.model_config"


def _derive(original: Callable, model_config: Any, context_length: int | None) -> Any:
    if context_length is not None and model_config.is_draft_model and is_faser_process():
        from sglang.srt.configs.model_config import get_context_length
        from sglang.srt.environ import envs

        if envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get():
            return original(model_config, context_length)  # the user wants it stretched
        context_length = min(context_length, get_context_length(model_config.hf_text_config))
    return original(model_config, context_length)


HOOK = Hook(
    f"{_MODULE}.ModelConfig._derive_context_length",
    _MODULE,
    _derive,
    HookType.AROUND,
    ("launcher", "scheduler"),
)
