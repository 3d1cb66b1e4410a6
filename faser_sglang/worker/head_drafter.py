"""EAGLE and EAGLE3 heads: one layer that continues the target's own hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

from faser_sglang.control.types import IntArray
from faser_sglang.kernels.ops import top1
from faser_sglang.worker.chain import ChainDrafter, Step
from faser_sglang.worker.drafter import Offer
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
    from faser_sglang.worker.draft_model import HeadWorker


class HeadDrafter(ChainDrafter):
    """Greedy chains of an EAGLE head.

    The head's slot p holds token p + 1 and the target's hidden states at p (SGLang's layout).
    Every pass of the target, prefill or verification, is followed by one pass of the head over
    the same rows: it writes the slots of what was accepted, overwrites those of the drafts, and
    its last accepted row is the first draft of the next round. So there is never a gap, whatever
    the depths; depth d takes d - 1 further passes.
    """

    reads_hidden = True

    def __init__(self, draft_worker: HeadWorker, kind: str) -> None:
        super().__init__(draft_worker)
        self.kind = kind
        self._first: Step | None = None  # by pool row: the next round's first draft

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        super().attach_pools(req_to_token_pool, slots)
        rows, device = self.req_to_token.shape[0], self.req_to_token.device
        config = self.runner.model_config
        self._first = Step(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(rows, config.hidden_size, dtype=config.dtype, device=device),
        )

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
        starts = np.asarray(batch.prefix_lens, np.int64)
        rows_each = np.asarray(batch.extend_lens, np.int64)
        # Each row's next token: the row behind it, and at a chunk's end the prompt's next token or
        # the sampled one.
        tokens = torch.roll(batch.input_ids, -1).to(torch.int64)
        ends = to_device(tokens, np.cumsum(rows_each) - 1)
        tokens[ends] = _eagle_prefill_tail_tokens(batch, bonus).to(torch.int64)
        self._extend(batch, batch.req_pool_indices, starts, rows_each, tokens, hidden)

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        return Offer(self.context_len - lengths, np.zeros_like(rows))

    def _first_step(self, this_round: Round, members: IntArray, rows: torch.Tensor) -> Step:
        """What the pass behind the last verification left."""
        return Step(*(kept[rows.long()] for kept in self._first))

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        offsets = window.positions - this_round.lengths[window.owners]
        tokens = verdict.tokens[window.owners, offsets].to(torch.int64)
        self._extend(
            this_round.batch,
            this_round.rows,
            this_round.lengths_cpu,
            np.asarray(window.lengths_cpu, np.int64),
            tokens,
            hidden,
            last=verdict.accept_lens.to(torch.int64) - 1,
        )

    def _extend(
        self,
        batch: ScheduleBatch,
        rows: torch.Tensor,
        starts: IntArray,
        rows_each: IntArray,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        last: torch.Tensor | None = None,
    ) -> None:
        """Run the head over the target's packed rows and keep each request's first draft.

        Args:
            starts, rows_each: [n] first position and rows of each request.
            tokens: [rows] the token behind each. hidden: [rows, ·] the target's states.
            last: [n] the row, counted in its request, that the next draft follows; None: the last.
        """
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
        fits = fits[members]
        rows, starts = pick(rows, members), starts[members]
        packed = pack_rows(self.req_to_token, rows, to_device(rows, starts), fits)
        select = packed.last_rows
        if last is not None:
            select = select - torch.clamp(to_device(rows, fits - 1) - pick(last, members), min=0)
        forward_batch = make_forward_batch(
            batch,
            self.runner,
            ForwardMode.DRAFT_EXTEND_V2,
            members=members,
            rows=rows,
            input_ids=tokens,
            positions=packed.positions,
            slots=packed.slots,
            seq_lens=to_device(rows, starts + fits),
            seq_lens_cpu=starts + fits,
            spec_info=FaserExtendInput(
                positions=packed.positions, select_index=select, hidden_states=hidden
            ),
            extend_lens=packed.lengths_cpu,
            capture=CaptureHiddenMode.LAST,
        )
        for kept, new in zip(self._first, self._forward(forward_batch), strict=True):
            kept[rows.long()] = new

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
