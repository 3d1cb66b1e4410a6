"""Operations on ragged rows, each by the fastest way that the tensors' device has."""

from __future__ import annotations

import torch

from faser_sglang.kernels import reference


def top1(logits: torch.Tensor, programs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.top1``; ``programs`` limits the kernel's share of a GPU."""
    if logits.is_cuda:
        from faser_sglang.kernels import top1 as kernel  # Triton is for GPUs alone

        return kernel.top1(logits, programs)
    return reference.top1(logits)
