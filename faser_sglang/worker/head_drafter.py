"""EAGLE and EAGLE3 heads: one layer that continues the target's own hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

from faser_sglang.control.rounds import MODEL, Offer, offer_of
from faser_sglang.control.types import IntArray
from faser_sglang.kernels.ops import top1
from faser_sglang.worker.chain import ChainDrafter, Step
from faser_sglang.worker.packing import (
    PackedRows,
    Round,
    make_forward_batch,
    pack_rows,
    pick,
    to_device,
)
from faser_sglang.worker.spec_inputs import FaserExtendInput
from faser_sglang.worker.state_ring import StateRing

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict
    from faser_sglang.worker.draft_model import HeadWorker


class HeadDrafter(ChainDrafter):
    """Greedy chains of an EAGLE head.

    The head's slot p holds token p + 1 and the target's hidden states at p (SGLang's layout). It
    runs behind the target only when it is to draft: every pass of the target leaves its states in
    a ring, and the head's first pass of a round takes all that it has not run yet, overwrites
    the slots of its old drafts, and yields the first draft. So depth d takes d passes, whatever
    the depths before, and a round in which something else drafts, or nothing, takes none; only a
    request that would outgrow the ring is caught up at depth 0.

    A request that ends is caught up before its slots go to the radix tree, so whoever inherits
    them finds the head's KV complete.
    """

    reads_hidden = True

    def __init__(self, draft_worker: HeadWorker, kind: str, cap: int) -> None:
        super().__init__(draft_worker)
        self.kind = kind
        self.cap = cap
        self.held_len: IntArray | None = None  # by pool row: positions that the head has run
        self.ring: StateRing | None = None  # made when the width of the states is seen

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        super().attach_pools(req_to_token_pool, slots)
        self.held_len = np.zeros(len(self.req_to_token), np.int64)

    def prefill(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        is_off: bool,
    ) -> None:
        if is_off:
            return
        rows = batch.req_pool_indices
        starts = np.asarray(batch.prefix_lens, np.int64)
        rows_each = np.asarray(batch.extend_lens, np.int64)
        # Each row's next token: the row behind it, and at a chunk's end the prompt's next token or
        # the sampled one.
        tokens = torch.roll(batch.input_ids, -1).to(torch.int64)
        ends = to_device(tokens, np.cumsum(rows_each) - 1)
        tokens[ends] = _eagle_prefill_tail_tokens(batch, bonus).to(torch.int64)
        self._make_ring(hidden)
        # The last row is run once more, in the first round that drafts, to yield the first draft.
        last = starts + rows_each - 1
        self.held_len[batch.req_pool_indices_cpu.numpy()] = last
        self.ring.put(rows, to_device(rows, last), tokens[ends], hidden[ends])
        fits = np.clip(self.context_len - starts, 0, rows_each)
        members = np.flatnonzero(fits)
        if members.size == 0:
            return
        if not np.array_equal(fits, rows_each):  # beyond the head's context nothing is run
            places = np.arange(rows_each.sum()) - np.repeat(
                np.cumsum(rows_each) - rows_each, rows_each
            )
            kept = to_device(tokens, np.flatnonzero(places < np.repeat(fits, rows_each)))
            tokens, hidden = tokens[kept], hidden[kept]
        rows, starts, fits = pick(rows, members), starts[members], fits[members]
        packed = pack_rows(self.req_to_token, rows, to_device(rows, starts), fits)
        self._extend(batch, members, rows, starts + fits, packed, tokens, hidden)

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        return offer_of(MODEL, self.context_len - lengths, behind=lengths - self.held_len[rows] - 1)

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        lengths = this_round.lengths_cpu
        behind = lengths - self.held_len[this_round.rows_cpu]
        is_outgrown = behind + window.lengths_cpu > self.ring.span
        # Beyond the head's context a request is never drafted for again.
        outgrown = np.flatnonzero(is_outgrown & (lengths < self.context_len))
        if outgrown.size:
            self._first_step(this_round, outgrown, pick(this_round.rows, outgrown))
        offsets = window.positions - this_round.lengths[window.owners]
        tokens = verdict.tokens[window.owners, offsets].to(torch.int64)
        self.ring.put(this_round.rows[window.owners], window.positions, tokens, hidden)

    def finish(self, batch: ScheduleBatch, row: int, end: int) -> None:
        end = min(end, self.context_len)
        if self.held_len[row] < end:
            rows = torch.tensor([row], device=self.req_to_token.device)
            self._catch_up(batch, np.zeros(1, np.int64), rows, np.array([row]), np.array([end]))

    def _first_step(self, this_round: Round, members: IntArray, rows: torch.Tensor) -> Step:
        rows_cpu, lengths = this_round.rows_cpu[members], this_round.lengths_cpu[members]
        return self._catch_up(this_round.batch, members, rows, rows_cpu, lengths)

    def _catch_up(
        self,
        batch: ScheduleBatch,
        members: IntArray,
        rows: torch.Tensor,
        rows_cpu: IntArray,
        ends: IntArray,
    ) -> Step:
        """Run the head over what it lacks of requests ``members``: the draft behind each.

        Args:
            rows, rows_cpu: [n] their rows of the pool. ends: [n] the position to stop before.
        """
        starts = self.held_len[rows_cpu]
        self.held_len[rows_cpu] = ends
        packed = pack_rows(self.req_to_token, rows, to_device(rows, starts), ends - starts)
        tokens, hidden = self.ring.get(rows[packed.owners], packed.positions)
        return self._extend(batch, members, rows, ends, packed, tokens, hidden)

    def _extend(
        self,
        batch: ScheduleBatch,
        members: IntArray,
        rows: torch.Tensor,
        ends: IntArray,
        packed: PackedRows,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> Step:
        """Run the head over packed rows of requests ``members``: the draft behind each.

        Args:
            rows: [n] of the pool. ends: [n] the position behind each request's last row.
            tokens: [packed] the token behind each. hidden: [packed, width] the target's states.
        """
        forward_batch = make_forward_batch(
            batch,
            self.runner,
            ForwardMode.DRAFT_EXTEND_V2,
            members=members,
            rows=rows,
            input_ids=tokens,
            positions=packed.positions,
            slots=packed.slots,
            seq_lens=to_device(rows, ends),
            seq_lens_cpu=ends,
            spec_info=FaserExtendInput(
                positions=packed.positions, select_index=packed.last_rows, hidden_states=hidden
            ),
            extend_lens=packed.lengths_cpu,
            capture=CaptureHiddenMode.LAST,
        )
        return self._forward(forward_batch)

    def _step(
        self,
        this_round: Round,
        members: IntArray,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        state: torch.Tensor | None,
        step: int,
    ) -> Step:
        return self._forward(self._decode_batch(this_round, members, rows, tokens, step - 1, state))

    def _forward(self, forward_batch: Any) -> Step:
        output = self.draft_worker.forward(forward_batch)
        tokens, chances = top1(output.next_token_logits)
        hot = self.draft_worker.hot_token_id
        return Step(tokens if hot is None else hot[tokens], chances, output.hidden_states)

    def _make_ring(self, hidden: torch.Tensor) -> None:
        if self.ring is None:
            # The state that yields the next draft, and a window behind it.
            self.ring = StateRing(len(self.held_len), self.cap + 2, hidden.shape[-1], hidden)
