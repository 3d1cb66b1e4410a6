"""Out-of-tree CPU platform: SGLang's whole server on a machine without an accelerator."""

from __future__ import annotations

import os

PLATFORM = "faser_sglang.cpu.platform.FaserCpuPlatform"


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform's name, or None to stay out of the way.

    Steps back where an accelerator is present or SGLang's own CPU engine is asked for.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator():
        return None
    return PLATFORM


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()
