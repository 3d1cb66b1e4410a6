"""Rotary embedding of queries and keys together, with half the torch calls."""

from __future__ import annotations

from typing import Any

import torch


def rope_forward(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RotaryEmbedding.forward_native`` with the same arguments, for the plain case.

    query [rows, heads * dim] and key [rows, kv heads * dim], each head's halves rotated by its
    row's angles (the layout of GPT-NeoX).
    """
    is_plain = (
        offsets is None
        and fused_set_kv_buffer_arg is None
        and self.is_neox_style
        and self.rotary_dim == self.head_size
        and not hasattr(self, "sin_cos_cache")
    )
    if not is_plain:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    rows, dim = positions.numel(), self.head_size
    angles = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype)
    cos, sin = angles.view(rows, 1, dim).chunk(2, dim=-1)
    both = torch.cat([query.view(rows, -1, dim), key.view(rows, -1, dim)], dim=1)
    first, second = both.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    heads = query.shape[-1] // dim
    return (
        rotated[:, :heads].reshape(query.shape),
        rotated[:, heads:].reshape(key.shape),
    )


def install() -> None:
    """Register the forward for SGLang's plain RotaryEmbedding on this platform."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    BaseFusedOp.register_oot_forward(RotaryEmbedding, rope_forward, "native")
