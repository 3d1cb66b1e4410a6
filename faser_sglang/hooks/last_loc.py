"""The torch form of ``get_last_loc`` on devices without Triton (page sizes above 1).

SGLang: ``get_last_loc(req_to_token, req_pool_indices, prefix_lens)`` picks its Triton kernel by
the attention backend's name, which it cannot know for ours. Same arguments here; CPU tensors
take SGLang's own torch form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.mem_cache.allocation"


def _last_loc(
    original: Callable,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
) -> torch.Tensor:
    if req_to_token.device.type != "cpu":
        return original(req_to_token, req_pool_indices, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


HOOK = Hook(f"{_MODULE}.get_last_loc", _MODULE, _last_loc, HookType.AROUND, ("scheduler",))
