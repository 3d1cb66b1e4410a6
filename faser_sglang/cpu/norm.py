"""RMSNorm in one torch call; SGLang's native form is a dozen, which a small model feels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import rms_norm


def rms_norm_forward(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``RMSNorm.forward_native`` with the same arguments, for the plain case."""
    is_plain = (
        self.variance_size_override is None
        and not self.fp32_residual
        and not self.cast_x_before_out_mul
        and self.override_orig_dtype is None
        and post_residual_addition is None
        and self.weight.dtype == x.dtype
    )
    if not is_plain:
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    shape = (self.hidden_size,)
    if residual is None:
        return rms_norm(x, shape, self.weight, self.variance_epsilon)
    total = x + residual
    return rms_norm(total, shape, self.weight, self.variance_epsilon), total


def install() -> None:
    """Register the forward for SGLang's RMSNorm on this platform."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm

    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm_forward, "native")
