"""The CPU attention backend against attention written out for one row at a time."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from faser_sglang.cpu.attention import CpuAttentionBackend
from faser_sglang.cpu.pool import CpuMHATokenToKVPool
from faser_sglang.worker.spec_inputs import FaserExtendInput, FaserVerifyInput, make_layout

KV_HEADS, DIM, LAYERS = 2, 16, 2
POOL_ROWS, CONTEXT = 9, 1100
SLOTS = POOL_ROWS * CONTEXT

# An output is a mean of values of about 1, weighted by a softmax of scores of about 1. Both sides
# round the scores (16 products each) to a few 1e-7, the weights by as much, and the mean to the
# same again: a few 1e-6 where a value reaches 4. A wrong or missing token moves it by 1e-3 and up.
FLOAT32 = 1e-5
# bf16 rounds an output below 4 by up to 2**-7 (8e-3); the rounded weights add up to the same.
BFLOAT16 = 2e-2

# (query rows, cached tokens before them) of each request
DECODE = [[(1, 0)], [(1, 299)], [(1, 7), (1, 0), (1, 300)], [(1, 1000), (1, 3), (1, 40), (1, 1000)]]
EXTEND = [
    [(1, 0)],
    [(7, 0)],
    [(300, 0)],
    [(1, 5), (7, 33), (300, 20)],
    [(7, 0), (7, 300), (1, 1), (257, 256)],
]
VERIFY = [
    [(1, 1)],
    [(5, 30)],
    [(1, 30), (4, 2), (2, 500), (1, 31)],
    [(3, 40), (3, 40), (3, 40)],
    [(2, 998), (2, 8), (1, 9), (1, 9)],  # two groups, the second padded to the whole's rows
]
DRAFT_EXTEND = [[(1, 9)], [(2, 9), (1, 9)], [(17, 300), (1, 20), (3, 0)]]


class Case:
    """A pool whose prefixes are filled, and one packed pass over it."""

    def __init__(self, pairs, mode, *, dtype=torch.float32, share=3, is_dense=False, **layer):
        self.pairs, self.share = pairs, share
        generator = torch.Generator().manual_seed(len(pairs) + sum(map(sum, pairs)))
        self.pool = CpuMHATokenToKVPool(SLOTS, 1, dtype, KV_HEADS, DIM, LAYERS, "cpu", False)
        order = torch.arange(SLOTS) if is_dense else torch.randperm(SLOTS, generator=generator)
        self.req_to_token = order.view(POOL_ROWS, CONTEXT).to(torch.int32)
        self.rows = torch.randperm(POOL_ROWS, generator=generator)[: len(pairs)]
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))  # stale slots are not zero
        q_heads = KV_HEADS * share
        total = sum(rows for rows, _ in pairs)
        self.q = torch.randn(total, q_heads * DIM, generator=generator).to(dtype)
        self.k = torch.randn(total, KV_HEADS * DIM, generator=generator).to(dtype)
        self.v = torch.randn(total, KV_HEADS * DIM, generator=generator).to(dtype)
        self.layer = RadixAttention(q_heads, DIM, DIM**-0.5, KV_HEADS, LAYERS - 1, **layer)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool,
            is_draft_worker=False,
        )
        self.backend = CpuAttentionBackend(runner)
        self.batch = self._batch(mode)

    def _batch(self, mode):
        q_lens = [rows for rows, _ in self.pairs]
        before = [prefix for _, prefix in self.pairs]
        slots = [
            self.req_to_token[row, prefix : prefix + rows]
            for row, (rows, prefix) in zip(self.rows, self.pairs, strict=True)
        ]
        with_rows = torch.tensor([rows + prefix for rows, prefix in self.pairs])
        batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=with_rows,
            req_pool_indices=self.rows,
            out_cache_loc=torch.cat(slots).long(),
            extend_seq_lens=torch.tensor(q_lens),
            extend_prefix_lens=torch.tensor(before),
            spec_info=None,
        )
        if mode == ForwardMode.TARGET_VERIFY:
            batch.seq_lens = torch.tensor(before)
            batch.extend_seq_lens = batch.extend_prefix_lens = None
            batch.spec_info = FaserVerifyInput(ragged_verify_layout=make_layout(q_lens, "cpu"))
        if mode == ForwardMode.DRAFT_EXTEND_V2:
            batch.spec_info = FaserExtendInput()
        return batch

    def run(self):
        self.backend.init_forward_metadata(self.batch)
        return self.backend.forward(self.q, self.k, self.v, self.layer, self.batch)

    def expected(self, window=None, causal=True):
        """[rows, heads * dim] in float32, one row and head at a time."""
        keys, values = (
            buffer[self.layer.layer_id].float().clone()
            for buffer in (self.pool.k_buffer, self.pool.v_buffer)
        )
        heads = self.layer.tp_q_head_num
        q = self.q.float().view(-1, heads, DIM)
        keys[self.batch.out_cache_loc] = self.k.float().view(-1, KV_HEADS, DIM)
        values[self.batch.out_cache_loc] = self.v.float().view(-1, KV_HEADS, DIM)
        out = []
        for pool_row, (rows, prefix) in zip(self.rows, self.pairs, strict=True):
            for position in range(prefix, prefix + rows):
                first = 0 if window is None else max(position - window, 0)
                end = position + 1 if causal else prefix + rows
                seen = self.req_to_token[pool_row, first:end].long()
                for head in range(heads):
                    kv_head = head // self.share
                    scores = keys[seen, kv_head] @ q[len(out) // heads, head] * DIM**-0.5
                    out.append(scores.softmax(0) @ values[seen, kv_head])
        return torch.stack(out).view(-1, heads * DIM)


def assert_attends(case, tolerance, **how):
    expected = case.expected(**how)
    actual = case.run()
    assert actual.shape == expected.shape and actual.dtype == case.q.dtype
    wrong = ((actual.float() - expected).abs() > tolerance).any(1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong[:8]} of {len(expected)} are off"


def modes():
    for mode, batches in (
        (ForwardMode.DECODE, DECODE),
        (ForwardMode.EXTEND, EXTEND),
        (ForwardMode.TARGET_VERIFY, VERIFY),
        (ForwardMode.DRAFT_EXTEND_V2, DRAFT_EXTEND),
    ):
        for pairs in batches:
            yield pytest.param(pairs, mode, id=f"{mode.name}-{pairs}".replace(" ", ""))


@pytest.mark.parametrize(("pairs", "mode"), modes())
@pytest.mark.parametrize("share", [1, 3])
def test_float32_rows_attend_to_their_own_request_up_to_themselves(pairs, mode, share):
    assert_attends(Case(pairs, mode, share=share), FLOAT32)


@pytest.mark.parametrize(("pairs", "mode"), modes())
def test_bf16_rows_do_too(pairs, mode):
    assert_attends(Case(pairs, mode, dtype=torch.bfloat16), BFLOAT16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", [[(1, 0)], [(1, 299)], [(7, 33)], [(300, 20)]])
def test_slots_in_a_run_are_read_in_place(pairs, dtype):
    case = Case(pairs, ForwardMode.EXTEND, dtype=dtype, is_dense=True)
    assert_attends(case, FLOAT32 if dtype == torch.float32 else BFLOAT16)
    assert all(group.kv_slots is None for group in case.backend.forward_metadata)


@pytest.mark.parametrize("window", [1, 8, 200])
@pytest.mark.parametrize("pairs", [[(1, 300)], [(5, 3), (1, 30), (2, 260)], [(300, 20)]])
def test_a_sliding_window_counts_the_row_itself_and_the_tokens_before(pairs, window):
    case = Case(pairs, ForwardMode.EXTEND, sliding_window_size=window)
    assert_attends(case, FLOAT32, window=window)


def test_an_encoder_layer_is_refused():
    case = Case([(7, 0)], ForwardMode.EXTEND, attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(NotImplementedError, match="torch_native"):
        case.run()


def test_a_verification_without_a_layout_has_windows_of_one_width():
    case = Case([(3, 4), (3, 90)], ForwardMode.TARGET_VERIFY)
    case.batch.spec_info = FaserVerifyInput(draft_token_num=3)
    assert_attends(case, FLOAT32)


def test_the_new_rows_are_stored_in_the_layer_and_nothing_else_is():
    case = Case([(2, 5), (1, 0)], ForwardMode.EXTEND)
    before = [buffer.clone() for buffer in (*case.pool.k_buffer, *case.pool.v_buffer)]
    case.run()
    at = case.batch.out_cache_loc
    for layer in range(LAYERS):
        for buffers, new, old in (
            (case.pool.k_buffer, case.k, before[layer]),
            (case.pool.v_buffer, case.v, before[LAYERS + layer]),
        ):
            expected = old.clone()
            if layer == case.layer.layer_id:
                expected[at] = new.view(-1, KV_HEADS, DIM)
            assert torch.equal(buffers[layer], expected)


def test_rows_already_stored_are_not_stored_again():
    """A layer that shares another's KV gives neither k nor v."""
    case = Case([(2, 5)], ForwardMode.EXTEND)
    expected = case.expected()
    case.run()
    stored = [buffer.clone() for buffer in case.pool.k_buffer]
    for k, v in ((None, None), (torch.zeros_like(case.k), torch.zeros_like(case.v))):
        out = case.backend.forward(case.q, k, v, case.layer, case.batch, save_kv_cache=False)
        assert (out - expected).abs().max() < FLOAT32
    assert all(map(torch.equal, stored, case.pool.k_buffer))


def test_queries_may_be_a_slice_of_a_wider_projection():
    case = Case([(3, 5), (1, 2)], ForwardMode.EXTEND)
    wide = torch.cat([case.q, case.k, case.v], 1)
    widths = [case.q.shape[1], case.k.shape[1], case.v.shape[1]]
    expected = case.expected()
    case.q, case.k, case.v = wide.split(widths, 1)
    assert not case.q.is_contiguous()
    assert (case.run() - expected).abs().max() < FLOAT32


def test_one_plan_serves_every_layer_of_the_pass():
    case = Case([(3, 5), (1, 2)], ForwardMode.EXTEND)
    case.run()
    case.layer.layer_id = 0
    expected = case.expected()
    out = case.backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert (out - expected).abs().max() < FLOAT32


@pytest.mark.parametrize(
    ("layer", "kwargs"),
    [
        ({"logit_cap": 30.0}, {}),
        ({"is_cross_attention": True}, {}),
        ({}, {"sinks": torch.zeros(KV_HEADS * 3)}),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_way_out(layer, kwargs):
    case = Case([(1, 3)], ForwardMode.DECODE, **layer)
    case.backend.init_forward_metadata(case.batch)
    with pytest.raises(NotImplementedError, match="--attention-backend torch_native"):
        case.backend.forward(case.q, case.k, case.v, case.layer, case.batch, **kwargs)


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("pairs", [*DECODE, [(1, 60), (1, 3), (1, 40)]])  # one padded group
def test_a_further_decode_step_is_planned_from_the_one_before(pairs, is_dense):
    case = Case(pairs, ForwardMode.DECODE, is_dense=is_dense)
    case.run()
    for step in (1, 2, 3):
        case.pairs = [(rows, prefix + step) for rows, prefix in pairs]
        case.batch = case._batch(ForwardMode.DECODE)
        case.k, case.v = -case.k.roll(1), case.v.roll(1)  # or a wrong slot could hold the same
        expected = case.expected()
        is_one = len(case.backend.forward_metadata) == 1
        assert case.backend.advance_decode(case.batch) == is_one
        if is_one:
            actual = case.backend.forward(case.q, case.k, case.v, case.layer, case.batch)
            assert (actual - expected).abs().max() < FLOAT32


def test_a_run_that_breaks_off_is_gathered_from_there_on():
    case = Case([(1, 40)], ForwardMode.DECODE, is_dense=True)
    row = case.req_to_token[case.rows[0]]
    row[41:] = row[41:].flip(0)
    case.run()
    assert case.backend.forward_metadata[0].kv_slots is None
    case.pairs = [(1, 41)]
    case.batch = case._batch(ForwardMode.DECODE)
    expected = case.expected()
    assert case.backend.advance_decode(case.batch)
    actual = case.backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert (actual - expected).abs().max() < FLOAT32


def test_other_passes_are_planned_anew():
    case = Case([(2, 9), (1, 9)], ForwardMode.DRAFT_EXTEND_V2)
    case.run()
    assert not case.backend.advance_decode(case.batch)
