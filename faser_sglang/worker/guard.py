"""Keeps a server running when its drafter fails: drafts decide its speed, not its output."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from faser_sglang.control.rounds import Offer, no_offer
from faser_sglang.control.types import IntArray
from faser_sglang.worker.drafter import Drafter, Drafts
from faser_sglang.worker.packing import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict
    from faser_sglang.worker.agreement import Agreement
    from faser_sglang.worker.packing import PackedRows, Round

logger = logging.getLogger(__name__)


class GuardedDrafter(Drafter):
    """A drafter whose failures cost the requests concerned their drafts, and nothing else.

    A call that raises bars every request of its batch from drafting; a draft outside the target's
    vocabulary, or with a probability that is no number, bars its own request. A barred request
    runs at depth 0 until it ends. ``faults`` counts the bars; each kind of fault is logged once.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, agreement: Agreement) -> None:
        self.drafter = drafter
        self.kind = drafter.kind
        self.context_len = drafter.context_len
        self.draft_worker = drafter.draft_worker
        self.reads_hidden = drafter.reads_hidden
        self.vocab_size = vocab_size
        self.agreement = agreement  # what is checked must be the same on every rank
        self.faults = 0
        self._is_barred = np.zeros(0, np.bool_)  # by row of the pool, sized by attach_pools
        self._reports: list[tuple[IntArray, torch.Tensor, Any]] = []
        self._said: set[str] = set()

    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        self._is_barred = np.zeros(req_to_token_pool.req_to_token.shape[0], np.bool_)
        self.drafter.attach_pools(req_to_token_pool, slots)

    def prefill(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        is_off: bool,
    ) -> None:
        rows = batch.req_pool_indices_cpu.numpy()
        self._read_reports()  # they are of the requests that had the rows before
        self._is_barred[rows] = False
        self._try(rows, lambda: self.drafter.prefill(batch, bonus, hidden, is_off=is_off))

    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        self._read_reports()
        offer = self._try(rows, lambda: self.drafter.offer(rows, lengths))
        if offer is None:
            return no_offer(len(rows))
        return offer._replace(limits=np.where(self._is_barred[rows], 0, offer.limits))

    def draft(self, this_round: Round) -> Drafts:
        drafts = self._try(this_round.rows_cpu, lambda: self.drafter.draft(this_round))
        if drafts is None:  # any tokens will do: the target rejects what it does not say
            tokens = this_round.bonus.new_zeros(
                (this_round.size, this_round.max_depth), dtype=torch.int64
            )
            chances = torch.zeros_like(tokens, dtype=torch.float32)
            drafts = Drafts(tokens, chances, this_round.depths_cpu.copy())
        return self._checked(this_round, self.agreement.drafts(drafts))

    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        self._try(
            this_round.rows_cpu,
            lambda: self.drafter.commit(this_round, window, verdict, hidden),
        )

    def finish(self, batch: ScheduleBatch, row: int, end: int) -> None:
        if not self._is_barred[row]:
            self._try(np.array([row]), lambda: self.drafter.finish(batch, row, end))

    def _try(self, rows: IntArray, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            self._bar(rows, f"{type(error).__name__}: {error}", error)
            return None

    def _checked(self, this_round: Round, drafts: Drafts) -> Drafts:
        """``drafts`` with token 0 for what is no token; who is concerned is read a round later."""
        columns = torch.arange(drafts.tokens.shape[1], device=drafts.tokens.device)
        is_wrong = (drafts.tokens < 0) | (drafts.tokens >= self.vocab_size)
        is_wrong |= drafts.chances.isnan()
        counts = to_device(columns, drafts.counts)
        wrong = (is_wrong & (columns < counts[:, None])).any(dim=1)
        host, done = wrong, None
        if wrong.device.type != "cpu":
            host = torch.empty(wrong.shape, dtype=torch.bool, pin_memory=True)
            host.copy_(wrong, non_blocking=True)
            done = torch.get_device_module(wrong.device).Event()
            done.record()
        self._reports.append((this_round.rows_cpu, host, done))
        return Drafts(
            drafts.tokens.masked_fill(is_wrong, 0),
            drafts.chances.masked_fill(is_wrong, 0),
            drafts.counts,
        )

    def _read_reports(self) -> None:
        while self._reports and (self._reports[0][2] is None or self._reports[0][2].query()):
            rows, wrong, _ = self._reports.pop(0)
            if wrong.any():
                self._bar(rows[wrong.numpy()], "it drafted no token of the target's vocabulary")

    def _bar(self, rows: IntArray, reason: str, error: Exception | None = None) -> None:
        new = rows[~self._is_barred[rows]]
        self._is_barred[new] = True
        self.faults += len(new)
        kind = reason if error is None else type(error).__name__
        if kind not in self._said:
            self._said.add(kind)
            logger.warning(
                "FASER: the %s drafter failed (%s); the requests concerned run without drafts, "
                "their output is not changed. draft_faults in /server_info counts them.",
                self.kind,
                reason,
                exc_info=error,
            )
