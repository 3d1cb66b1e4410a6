"""A torch writer for ``req_to_token`` on devices without Triton.

SGLang: ``assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset,
end_offset, out_cache_loc, batch_size)`` is a Triton kernel outside its own CPU engine. Ours has
the same arguments and serves CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook
from faser_sglang.kernels.reference import ragged_positions

_MODULE = "sglang.srt.mem_cache.allocation"


def _assign(
    original: Callable,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    if req_to_token.device.type != "cpu":
        original(
            req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size
        )
        return
    start, end = start_offset.long(), end_offset.long()
    rows, columns = ragged_positions(start, end - start)
    req_to_token[req_pool_indices.long()[rows], columns] = out_cache_loc[: rows.numel()].to(
        req_to_token.dtype
    )


HOOK = Hook(
    f"{_MODULE}.assign_req_to_token_pool_func", _MODULE, _assign, HookType.AROUND, ("scheduler",)
)
