"""Widens a request's row of ``req_to_token`` to hold what decoding reserves.

SGLang: ``get_req_to_token_extra_context_len() -> int`` gives 4 + num_draft_tokens at page size
1, while decoding reserves twice num_draft_tokens beyond the committed length: a request at the
context's end would write past its row (the Triton writer has no bound).
"""

from __future__ import annotations

from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.mem_cache.allocation_sizing"


def _extra(result: int) -> int:
    if not is_faser_process():
        return result
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )

    return max(result, 4 + get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


HOOK = Hook(
    f"{_MODULE}.get_req_to_token_extra_context_len", _MODULE, _extra, HookType.AFTER, ("scheduler",)
)
