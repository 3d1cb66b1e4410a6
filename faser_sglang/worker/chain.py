"""Chains of a draft model: one packed first step, then one row for each request and step."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from faser_sglang.control.types import BoolArray, IntArray
from faser_sglang.worker.drafter import Drafter, Drafts
from faser_sglang.worker.packing import Round, deepest_first, make_forward_batch, pick, to_device
from faser_sglang.worker.spec_inputs import FaserStepInput

if TYPE_CHECKING:
    from faser_sglang.worker.draft_model import DraftModelWorker


class Step(NamedTuple):
    """One draft of n requests."""

    tokens: torch.Tensor  # [n]
    chances: torch.Tensor  # [n]
    state: torch.Tensor | None  # [n, hidden] what the next step goes on from

    def of(self, kept: torch.Tensor) -> Step:
        """The step of requests ``kept`` [k] only."""
        state = None if self.state is None else self.state[kept]
        return Step(self.tokens[kept], self.chances[kept], state)


class ChainDrafter(Drafter):
    """A draft model that is asked for one token after the other, greedily."""

    def __init__(self, draft_worker: DraftModelWorker) -> None:
        self.draft_worker = draft_worker
        self.runner = draft_worker.draft_runner
        self.context_len = self.runner.model_config.context_len
        self.req_to_token: torch.Tensor | None = None  # filled by attach_pools
        self._last_step: Any | None = None  # the ForwardBatch of this round's step before

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        self.req_to_token = req_to_token_pool.req_to_token

    def draft(self, this_round: Round) -> Drafts:
        depths = this_round.depths_cpu
        members = deepest_first(depths)
        rows = pick(this_round.rows, members)
        shape = (this_round.size, this_round.max_depth)
        drafts = Drafts(
            this_round.bonus.new_zeros(shape, dtype=torch.int64),
            this_round.bonus.new_zeros(shape, dtype=torch.float32),
            depths.copy(),
        )
        places = to_device(rows, members)
        self._last_step = None
        last = self._first_step(this_round, members, rows)
        drafts.tokens[places, 0], drafts.chances[places, 0] = last.tokens, last.chances
        for step in range(1, this_round.max_depth):
            stay = depths[members] > step
            if this_round.plan.stops and stay.any():
                stay[stay] = self._goes_on(this_round, members[stay], drafts, step)
                drafts.counts[members[~stay]] = np.minimum(drafts.counts[members[~stay]], step)
            if not stay.any():
                break
            if not stay.all():
                kept = to_device(rows, np.flatnonzero(stay))
                members, rows, places, last = members[stay], rows[kept], places[kept], last.of(kept)
            last = self._step(this_round, members, rows, last.tokens, last.state, step)
            drafts.tokens[places, step], drafts.chances[places, step] = last.tokens, last.chances
        return drafts

    def _goes_on(
        self, this_round: Round, members: IntArray, drafts: Drafts, step: int
    ) -> BoolArray:
        """Ask the plan, which wants the probabilities: the host waits for the device here."""
        chances = pick(drafts.chances[:, :step], members).cpu().numpy()
        return this_round.plan.goes_on(members, chances.astype(np.float64))

    @abstractmethod
    def _first_step(self, this_round: Round, members: IntArray, rows: torch.Tensor) -> Step:
        """The first draft of requests ``members``, which have ``rows`` of the pool."""

    @abstractmethod
    def _step(
        self,
        this_round: Round,
        members: IntArray,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        state: torch.Tensor | None,
        step: int,
    ) -> Step:
        """The draft behind draft ``step``, which is ``tokens`` [len(members)]."""

    def _decode_batch(
        self,
        this_round: Round,
        members: IntArray,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        ahead: int,
        state: torch.Tensor | None = None,
    ) -> Any:
        """One row a request, ``ahead`` positions behind its committed tokens.

        With a ``state`` [n, hidden] to go on from, the pass also returns the state behind it.
        """
        if self._may_advance(len(members)):
            return self._advance(rows, tokens, state)
        positions = pick(this_round.lengths, members) + ahead
        self._last_step = make_forward_batch(
            this_round.batch,
            self.runner,
            ForwardMode.DECODE,
            members=members,
            rows=rows,
            input_ids=tokens,
            positions=positions,
            slots=self.req_to_token[rows.long(), positions].long(),
            seq_lens=positions + 1,
            seq_lens_cpu=this_round.lengths_cpu[members] + ahead + 1,
            spec_info=None if state is None else FaserStepInput(positions, state),
            capture=CaptureHiddenMode.NULL if state is None else CaptureHiddenMode.LAST,
        )
        return self._last_step

    def _may_advance(self, size: int) -> bool:
        """The requests are those of the step before, and its batch holds nothing but their rows."""
        last = self._last_step
        return (
            last is not None
            and last.batch_size == size
            and last.out_cache_loc_virtual is None
            and last.mrope_positions is None
            and last.global_num_tokens_cpu is None
        )

    def _advance(self, rows: torch.Tensor, tokens: torch.Tensor, state: torch.Tensor | None) -> Any:
        """The batch of the step before, moved on by one position."""
        step = self._last_step
        positions = step.positions + 1
        step.input_ids, step.positions = tokens, positions
        step.out_cache_loc = self.req_to_token[rows.long(), positions].long()
        step.seq_lens = step.orig_seq_lens = positions + 1
        step.seq_lens_cpu = step.seq_lens_cpu + 1
        step.seq_lens_sum += step.batch_size
        if state is not None:
            step.spec_info = FaserStepInput(positions, state)
        step.forward_metadata_ready = False
        advance = getattr(self.runner.attn_backend, "advance_decode", None)
        if advance is not None and advance(step):
            step.mark_forward_metadata_ready()
        return step
