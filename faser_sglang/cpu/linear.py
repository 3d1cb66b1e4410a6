"""bf16 linear layers on CPUs without bf16 arithmetic.

There torch multiplies bf16 an element at a time: four rows cost three times as much as one, so
verifying drafts could never pay. FBGEMM's half-precision GEMM (part of torch) reads the same
two bytes a weight, computes in float32 and costs nearly the same for one row and for six.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)

logger = logging.getLogger(__name__)

HALF_MAX = 65504.0

_multiply = torch.ops.quantized.linear_dynamic_fp16.default


class HalfCopy:
    """A bf16 weight's fp16 copy, packed for FBGEMM.

    bf16 values between 2**-14 and 65,504 are exact in fp16; smaller ones are off by at most
    2**-25. The copy is renewed when the weight was written or replaced; loaders that write
    through ``.data`` leave no trace, so ``forget`` must follow them
    (``hooks/weight_updates.py``).
    """

    def __init__(self) -> None:
        self._packed: Any = None
        self._packed_of: tuple[int, int] | None = None

    def forget(self) -> None:
        """The weight may have changed: pack it anew before the next use."""
        self._packed_of = None

    def multiply(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] times ``weight`` [out, in], both ends float32."""
        state = (weight.data_ptr(), weight._version)
        if state != self._packed_of:
            self._packed = torch.ops.quantized.linear_prepack_fp16(weight.detach().float(), None)
            self._packed_of = state
        return _multiply(x, self._packed)


class HalfLinearMethod(UnquantizedLinearMethod):
    """Applies a layer's weight from a HalfCopy; all but ``apply`` is the original method's."""

    def __init__(self, original: Any, *, keeps_float32: bool) -> None:
        super().__init__()
        self._original = original
        self._keeps_float32 = keeps_float32  # logits stay as precise as they were computed
        self.copy = HalfCopy()

    def forget(self) -> None:
        self.copy.forget()

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return self._original.embedding(layer, input_)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self.copy.multiply(layer.weight, x.float())
        if bias is not None:
            out = out + bias
        return out if self._keeps_float32 else out.to(x.dtype)


def has_bf16_arithmetic() -> bool:
    """Whether this CPU multiplies bf16 natively."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def use_half_linears(model: torch.nn.Module) -> int:
    """Give every plain bf16 linear layer of ``model`` a HalfLinearMethod; returns how many.

    Layers whose weights exceed fp16's range keep their method.
    """
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            continue
        weight = getattr(module, "weight", None)
        if weight is None or weight.dtype != torch.bfloat16 or weight.dim() != 2:
            continue
        if float(weight.abs().max()) > HALF_MAX:  # as float: in bf16 the bound rounds up
            continue
        is_vocabulary = type(method) is UnquantizedEmbeddingMethod
        module.quant_method = HalfLinearMethod(method, keeps_float32=is_vocabulary)
        count += 1
    return count


def forget_copies(model: torch.nn.Module) -> None:
    """The weights of ``model`` may have changed: every packed copy is renewed on its next use."""
    for module in model.modules():
        for holder in (getattr(module, "quant_method", None), getattr(module, "half_copy", None)):
            if isinstance(holder, HalfLinearMethod | HalfCopy):
                holder.forget()
