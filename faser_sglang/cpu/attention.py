"""Attention over packed ragged rows with torch SDPA: decode, extend, verify, draft extend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout
from torch.nn.functional import scaled_dot_product_attention

from faser_sglang.cpu.plan import Group, Window, make_groups

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


# The first tokens draw much of a language model's attention (StreamingLLM, arXiv 2309.17453): a
# window without them costs acceptance.
DEFAULT_SINK = 4


class CpuAttentionBackend(AttentionBackend):
    """SDPA a group of similar requests; gathers and masks are planned once a pass.

    Query heads that share a KV head are folded into the query rows, so K and V are never
    repeated. Raises NotImplementedError for what it cannot compute (cross attention, soft caps,
    attention sinks).
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.forward_metadata: list[Group] | None = None
        self.window = _draft_window(model_runner)

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        q_lens, kv_lens = _row_lengths(forward_batch)
        self.forward_metadata = make_groups(
            q_lens,
            kv_lens,
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            self.window,
        )

    def advance_decode(self, forward_batch: ForwardBatch) -> bool:
        """Plan the decode step behind the one planned last, of the same requests in order.

        Returns False where that takes a new plan.
        """
        groups = self.forward_metadata
        is_one = len(groups) == 1 and groups[0].q_rows is None and groups[0].q_len == 1
        if not is_one or self.window is not None:
            return False
        self.forward_metadata = [groups[0].extended(forward_batch.out_cache_loc)]
        return True

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    forward_extend = forward_decode

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        is_plain = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
        if not is_plain or layer.logit_cap > 0 or sinks is not None:
            raise NotImplementedError(
                "the faser_cpu attention backend computes no encoder or cross attention, soft cap "
                "or sink; serve this model on a GPU, or with --attention-backend torch_native"
            )
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        groups = self.forward_metadata
        if len(groups) == 1 and groups[0].q_rows is None:
            return _attend(groups[0], q, keys, values, layer)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for group in groups:
            if group.q_rows is None:
                out.copy_(_attend(group, q, keys, values, layer))
            else:
                part = _attend(group, q.index_select(0, group.q_rows), keys, values, layer)
                out.index_copy_(0, group.out_rows, part.index_select(0, group.out_from))
        return out


def _draft_window(model_runner: Any) -> Window | None:
    """The window of a draft that is a language model; a head's is SGLang's own affair."""
    if not (model_runner.is_draft_worker and model_runner.spec_algorithm.is_standalone()):
        return None
    recent, sink = get_spec().speculative_draft_window_size, get_spec().speculative_draft_sink_size
    return Window(recent, DEFAULT_SINK if sink is None else sink) if recent else None


def _row_lengths(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Query rows and cached tokens (the rows included) of each request, as host lists."""
    mode = forward_batch.forward_mode
    seq_lens = forward_batch.seq_lens.tolist()
    if mode.is_decode():
        return [1] * len(seq_lens), seq_lens
    if mode.is_target_verify():  # seq_lens are those before the window
        layout = resolve_ragged_verify_layout(forward_batch)
        if layout is not None:
            q_lens = layout.verify_lens.tolist()
        else:
            q_lens = [forward_batch.spec_info.draft_token_num] * len(seq_lens)
        return q_lens, [length + rows for length, rows in zip(seq_lens, q_lens, strict=True)]
    return forward_batch.extend_seq_lens.tolist(), seq_lens


def _attend(
    group: Group,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: RadixAttention,
) -> torch.Tensor:
    """One SDPA call. q: [size * q_len, heads, dim] -> [size * q_len, heads * v_dim]."""
    kv_heads, q_heads = layer.tp_k_head_num, layer.tp_q_head_num
    share = q_heads // kv_heads
    size, rows = group.size, group.q_len
    folded = (
        q.view(size, rows, kv_heads, share, layer.qk_head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(size, kv_heads, share * rows, layer.qk_head_dim)
    )
    window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
    attended = scaled_dot_product_attention(
        folded,
        _cached(keys, group, folded.dtype),
        _cached(values, group, folded.dtype),
        attn_mask=group.mask(share, window, folded.dtype),
        scale=layer.scaling,
    )
    return (
        attended.view(size, kv_heads, share, rows, layer.v_head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(size * rows, q_heads * layer.v_head_dim)
    )


def _cached(buffer: torch.Tensor, group: Group, dtype: torch.dtype) -> torch.Tensor:
    """The group's cached rows of one layer: [size, kv heads, kv_len, dim]."""
    slots, heads, dim = buffer.shape
    if group.kv_slots is None:
        rows = buffer.narrow(0, group.kv_start, group.kv_len)
    elif buffer.element_size() == 2 and (heads * dim) % 2 == 0:
        # torch copies 16-bit rows an element at a time, 32-bit ones ten times faster.
        wide = buffer.view(slots, heads * dim).view(torch.float32)
        rows = wide.index_select(0, group.kv_slots).view(buffer.dtype)
    else:
        rows = buffer.index_select(0, group.kv_slots)
    rows = rows.view(group.size, group.kv_len, heads, dim).transpose(1, 2)
    return rows if rows.dtype == dtype else rows.to(dtype)
