"""bf16 linear layers from copies of their weights, packed once for the library that multiplies.

torch's own bf16 layer brings the weight into the order that oneDNN multiplies in at every call,
which takes longer than the product of a few rows. On CPUs without bf16 arithmetic it multiplies an
element at a time instead: four rows cost three times as much as one, so verifying drafts could
never pay. There FBGEMM's half-precision GEMM (part of torch) reads the same two bytes a weight,
computes in float32 and costs nearly the same for one row and for six.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)


class PackedCopy(ABC):
    """A bf16 weight's packed copy.

    The copy is renewed when the weight was written or replaced; loaders that write through
    ``.data`` leave no trace, so ``forget`` must follow them (``hooks/weight_updates.py``).
    """

    largest = math.inf  # weight that the copy can hold

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
            self._packed = self._pack(weight.detach())
            self._packed_of = state
        return self._multiply(x)

    @abstractmethod
    def _pack(self, weight: torch.Tensor) -> Any: ...

    @abstractmethod
    def _multiply(self, x: torch.Tensor) -> torch.Tensor: ...


class HalfCopy(PackedCopy):
    """fp16 for FBGEMM.

    bf16 values between 2**-14 and 65,504 are exact in fp16; smaller ones are off by at most
    2**-25.
    """

    largest = 65504.0

    def _pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.quantized.linear_prepack_fp16(weight.float(), None)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self._packed)


class NativeCopy(PackedCopy):
    """bf16 in the order of oneDNN: products as torch's own layer computes them."""

    rows = 16  # a pass that the order is chosen for; any number of rows can be multiplied

    def _pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight, self.rows)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.bfloat16)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "").float()


class PackedLinearMethod(UnquantizedLinearMethod):
    """Applies a layer's weight from a PackedCopy; all but ``apply`` is the original method's."""

    def __init__(self, original: Any, copy: PackedCopy, *, keeps_float32: bool) -> None:
        super().__init__()
        self._original = original
        self._keeps_float32 = keeps_float32  # logits stay as precise as they were computed
        self.copy = copy

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


def copy_for_this_cpu() -> type[PackedCopy] | None:
    """What bf16 layers are to be copied to; None where torch lacks the library for it."""
    if not has_bf16_arithmetic():
        return HalfCopy
    return NativeCopy if hasattr(torch.ops.mkldnn, "_reorder_linear_weight") else None


def use_packed_linears(model: torch.nn.Module, copy: type[PackedCopy]) -> int:
    """Give every plain bf16 linear layer of ``model`` a PackedLinearMethod; returns how many.

    Layers whose weights exceed what the copy can hold keep their method.
    """
    count = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            continue
        weight = getattr(module, "weight", None)
        if weight is None or weight.dtype != torch.bfloat16 or weight.dim() != 2:
            continue
        if float(weight.abs().max()) > copy.largest:  # as float: in bf16 the bound rounds up
            continue
        is_vocabulary = type(method) is UnquantizedEmbeddingMethod
        module.quant_method = PackedLinearMethod(method, copy(), keeps_float32=is_vocabulary)
        count += 1
    return count


def forget_copies(model: torch.nn.Module) -> None:
    """The weights of ``model`` may have changed: every packed copy is renewed on its next use."""
    for module in model.modules():
        for holder in (getattr(module, "quant_method", None), getattr(module, "packed_copy", None)):
            if isinstance(holder, PackedLinearMethod | PackedCopy):
                holder.forget()
