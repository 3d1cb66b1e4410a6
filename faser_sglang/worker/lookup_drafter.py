"""Drafts without a model: what followed the text's end the last time it stood there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from faser_sglang.control.ngram import continuation, longest_match
from faser_sglang.control.rounds import LOOKUP, Offer, offer_of
from faser_sglang.control.types import FloatArray, IntArray
from faser_sglang.worker.drafter import Drafter, Drafts
from faser_sglang.worker.packing import PackedRows, Round, to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict

# With a model at hand, a match of fewer tokens is the worse guess.
HYBRID_MATCH = 3
NO_LIMIT = np.iinfo(np.int64).max


class LookupDrafter(Drafter):
    """n-gram lookup in each request's own prompt and output, on the host.

    The host waits for a round's tokens when the next one is planned; SGLang's scheduler has just
    waited for the same round's lengths.
    """

    kind = "ngram"
    context_len = NO_LIMIT
    draft_worker = None

    def __init__(self, cap: int, context_len: int, min_match: int = 1) -> None:
        self.cap = cap
        self.min_match = min_match
        self._columns = context_len + cap + 2
        self._text: IntArray | None = None  # [pool rows, tokens], filled by attach_pools
        self._proposed: IntArray | None = None  # [pool rows, cap], like the next
        self._chances: FloatArray | None = None  # [pool rows]
        self._unread: list[tuple[IntArray, IntArray, torch.Tensor]] = []

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        rows = req_to_token_pool.req_to_token.shape[0]
        self._text = np.zeros((rows, self._columns), np.int32)  # pages are taken when written
        self._proposed = np.zeros((rows, self.cap), np.int64)
        self._chances = np.zeros(rows)

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
        self._read()  # a new request may have the row of one that has just finished
        rows = batch.req_pool_indices_cpu.tolist()
        ends = [p + e for p, e in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        sampled = bonus.tolist()  # the host waits here, once a prefill batch
        for row, end, token, req in zip(rows, ends, sampled, batch.reqs, strict=True):
            text = list(req.origin_input_ids) + list(req.output_ids)
            self._text[row, :end] = text[:end]
            self._text[row, end] = token

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        self._read()
        limits = np.zeros_like(lengths)
        chances = np.zeros(len(rows))
        for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            text = self._text[row, : length + 1]
            match = longest_match(text)
            if match.length >= self.min_match:
                limits[i] = self.cap
                # A longer match is a better guess; how much better, the policy learns.
                chances[i] = match.length / (match.length + 1)
                self._proposed[row] = continuation(text, match, self.cap)
        self._chances[rows] = chances
        return offer_of(LOOKUP, limits, chances)

    def draft(self, this_round: Round) -> Drafts:
        rows, depth = this_round.rows_cpu, this_round.max_depth
        tokens = to_device(this_round.rows, self._proposed[rows, :depth])
        chances = np.repeat(self._chances[rows, None], depth, axis=1).astype(np.float32)
        return Drafts(tokens, to_device(tokens, chances), this_round.depths_cpu.copy())

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        self._unread.append((this_round.rows_cpu, this_round.lengths_cpu, verdict.tokens))

    def _read(self) -> None:
        """Take in the tokens of finished rounds; those behind the accepted are overwritten."""
        for rows, lengths, tokens in self._unread:
            emitted = tokens.cpu().numpy()
            columns = lengths[:, None] + 1 + np.arange(emitted.shape[1])
            self._text[rows[:, None], columns] = emitted
        self._unread.clear()


class HybridDrafter(Drafter):
    """Lookup where the text's last three tokens stood before, or the draft model.

    The policy chooses for each request and round. The model's KV follows by its own rules: a
    lookup round is to it a round at depth 0.
    """

    def __init__(self, model: Drafter, lookup: LookupDrafter) -> None:
        self.model = model
        self.lookup = lookup
        self.kind = f"hybrid ({model.kind} and ngram)"
        self.context_len = model.context_len
        self.draft_worker = model.draft_worker
        self.reads_hidden = model.reads_hidden

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        self.model.attach_pools(req_to_token_pool, slots)
        self.lookup.attach_pools(req_to_token_pool, slots)

    def prefill(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        is_off: bool,
    ) -> None:
        self.model.prefill(batch, bonus, hidden, is_off=is_off)
        self.lookup.prefill(batch, bonus, hidden, is_off=is_off)

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        model, lookup = self.model.offer(rows, lengths), self.lookup.offer(rows, lengths)
        return Offer(
            model.limits + lookup.limits, model.chances + lookup.chances, model.behind
        )  # each has nothing in the other's arm

    def draft(self, this_round: Round) -> Drafts:
        drafts = self.lookup.draft(this_round)
        asked = self._model_round(this_round)
        if asked.max_depth:
            own = self.model.draft(asked)
            is_own = (asked.depths > 0)[:, None]
            for all_of, part in ((drafts.tokens, own.tokens), (drafts.chances, own.chances)):
                first = all_of[:, : part.shape[1]]
                first.copy_(torch.where(is_own, part, first))
            counts = np.where(asked.depths_cpu > 0, own.counts, drafts.counts)
            drafts = drafts._replace(counts=counts)
        return drafts

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        self.model.commit(self._model_round(this_round), window, verdict, hidden)
        self.lookup.commit(this_round, window, verdict, hidden)

    def finish(self, batch: ScheduleBatch, row: int, end: int) -> None:
        self.model.finish(batch, row, end)

    def _model_round(self, this_round: Round) -> Round:
        """The round as the model sees it: depth 0 where lookup drafts."""
        looks_up = this_round.arms_cpu == LOOKUP
        return this_round.with_depths(
            np.where(looks_up, 0, this_round.depths_cpu),
            np.where(looks_up, 0, this_round.drafted_cpu),
        )
