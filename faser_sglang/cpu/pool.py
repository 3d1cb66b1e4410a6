"""KV pool of the CPU platform."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's MHA pool for host memory.

    Pages are zero and only take memory once written (SGLang fills the whole pool at start);
    a write is one index copy a tensor; the Triton copy kernel stays out.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["enable_kv_cache_copy"] = False
        super().__init__(*args, **kwargs)

    def _create_buffers_normal(self) -> None:
        shape = (self.size + self.page_size, self.head_num)
        self.k_buffer = [self._zero_pages(*shape, self.head_dim) for _ in range(self.layer_num)]
        self.v_buffer = [self._zero_pages(*shape, self.v_head_dim) for _ in range(self.layer_num)]

    def _zero_pages(self, slots: int, heads: int, dim: int) -> torch.Tensor:
        size = slots * heads * dim * self.store_dtype.itemsize
        return (
            torch.from_numpy(np.zeros(size, np.uint8))
            .view(self.store_dtype)
            .view(slots, heads, dim)
        )

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if args or kwargs or cache_k.dtype != self.store_dtype:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, *args, **kwargs)
            return
        loc, _, _ = unwrap_write_loc(loc_info)
        index = layer.layer_id - self.start_layer
        keys, values = self.k_buffer[index], self.v_buffer[index]
        keys.index_copy_(0, loc, cache_k.view(-1, *keys.shape[1:]))
        values.index_copy_(0, loc, cache_v.view(-1, *values.shape[1:]))
