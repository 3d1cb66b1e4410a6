"""A drafter that is a language model of its own, with the target's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from faser_sglang.control.rounds import MODEL, Offer, offer_of
from faser_sglang.control.types import IntArray
from faser_sglang.kernels.ops import top1
from faser_sglang.worker.chain import ChainDrafter, Step
from faser_sglang.worker.draft_kv import DraftKv
from faser_sglang.worker.history import TokenHistory, request_tokens
from faser_sglang.worker.packing import (
    PackedRows,
    Round,
    make_forward_batch,
    pack_rows,
    pick,
    to_device,
)
from faser_sglang.worker.spec_inputs import FaserExtendInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict
    from faser_sglang.worker.draft_model import DraftModelWorker


class LmDrafter(ChainDrafter):
    """Greedy chains of a plain language model.

    The first step of a round is one packed pass over whatever the draft's KV lacks, up to the
    bonus token; the following steps run one row for each request that still wants a draft.
    """

    kind = "lm"

    def __init__(self, draft_worker: DraftModelWorker, width: int, vocab_size: int) -> None:
        super().__init__(draft_worker)
        self.width = width
        own = self.runner.model_config.vocab_size
        self._last_id = own - 1 if own < vocab_size else None
        self.kv: DraftKv | None = None  # filled by attach_pools, like the next
        self.history: TokenHistory | None = None

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        super().attach_pools(req_to_token_pool, slots)
        pool_rows = self.req_to_token.shape[0]
        self.kv = DraftKv(pool_rows, slots, self.req_to_token.device)
        self.history = TokenHistory(pool_rows, self.width, self.req_to_token.device)
        self.page = self.draft_worker.draft_runner.page_size

    def prefill(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        is_off: bool,
    ) -> None:
        rows, rows_cpu = batch.req_pool_indices, batch.req_pool_indices_cpu.numpy()
        prefix_lens = np.asarray(batch.prefix_lens, np.int64)
        ends = prefix_lens + np.asarray(batch.extend_lens, np.int64)
        starts = self.kv.first_missing(self.req_to_token, rows, prefix_lens)
        if is_off:
            held, begins = starts, prefix_lens
        else:
            held, begins = np.minimum(ends, self.context_len), starts
            has_all = np.array_equal(starts, prefix_lens) and np.array_equal(held, ends)
            self._extend(batch, starts, held, batch.input_ids if has_all else None)
        written = pack_rows(self.req_to_token, rows, to_device(rows, begins), ends - begins)
        self.kv.mark(written, to_device(rows, held))
        # A prefix as long as SGLang matches at most: the tree may hold what lies behind it, too.
        is_whole = (prefix_lens > 0) & (prefix_lens == (ends - 1) // self.page * self.page)
        self.kv.begin(rows_cpu, ends, held, np.where(is_whole, prefix_lens, ends))
        self.history.begin(rows, rows_cpu, to_device(rows, ends), ends, bonus)

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        self.kv.settle(rows, lengths)
        return offer_of(MODEL, self.context_len - lengths, behind=lengths - self.kv.valid_len[rows])

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        self.kv.plan(this_round)
        self.kv.commit(this_round, window, verdict.accept_lens)
        self.history.commit(this_round, verdict.tokens)

    def _first_step(self, this_round: Round, members: IntArray, rows: torch.Tensor) -> Step:
        """Catch up to the bonus token and draft behind it."""
        lengths = this_round.lengths_cpu[members]
        starts = self.kv.valid_len[this_round.rows_cpu[members]]
        packed = pack_rows(self.req_to_token, rows, to_device(rows, starts), lengths + 1 - starts)
        forward_batch = make_forward_batch(
            this_round.batch,
            self.runner,
            ForwardMode.DRAFT_EXTEND_V2,
            members=members,
            rows=rows,
            input_ids=self._known(self.history.gather(this_round, members, packed)),
            positions=packed.positions,
            slots=packed.slots,
            seq_lens=pick(this_round.lengths, members) + 1,
            seq_lens_cpu=lengths + 1,
            spec_info=FaserExtendInput(positions=packed.positions, select_index=packed.last_rows),
            extend_lens=packed.lengths_cpu,
        )
        self.kv.mark(packed, pick(this_round.lengths, members) + 1)
        return self._run(forward_batch)

    def _step(
        self,
        this_round: Round,
        members: IntArray,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        state: torch.Tensor | None,
        step: int,
    ) -> Step:
        return self._run(self._decode_batch(this_round, members, rows, tokens, step))

    def _extend(
        self,
        batch: ScheduleBatch,
        starts: IntArray,
        ends: IntArray,
        input_ids: torch.Tensor | None,
    ) -> None:
        """Run the draft over tokens ``starts`` .. ``ends`` of each request of a prefill.

        ``input_ids``: these tokens, where they are the rows that the target ran.
        """
        lengths = np.maximum(ends - starts, 0)
        members = np.flatnonzero(lengths)
        if members.size == 0:
            return
        rows = pick(batch.req_pool_indices, members)
        packed = pack_rows(
            self.req_to_token, rows, to_device(rows, starts[members]), lengths[members]
        )
        if input_ids is None:
            known = [request_tokens(batch.reqs[i], starts[i], ends[i]) for i in members]
            input_ids = torch.cat(known).to(rows.device)
        forward_batch = make_forward_batch(
            batch,
            self.runner,
            ForwardMode.DRAFT_EXTEND_V2,
            members=members,
            rows=rows,
            input_ids=self._known(input_ids),
            positions=packed.positions,
            slots=packed.slots,
            seq_lens=to_device(rows, ends[members]),
            seq_lens_cpu=ends[members],
            # The logits are not needed; one row keeps the vocabulary's matrix out of the way.
            spec_info=FaserExtendInput(
                positions=packed.positions, select_index=packed.last_rows[:1]
            ),
            extend_lens=packed.lengths_cpu,
        )
        self.draft_worker.forward(forward_batch)

    def _known(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids within the draft's embedding, where its vocabulary has fewer padding rows."""
        return input_ids if self._last_id is None else input_ids.clamp(max=self._last_id)

    def _run(self, forward_batch: Any) -> Step:
        return Step(*top1(self.draft_worker.forward(forward_batch).next_token_logits), None)
