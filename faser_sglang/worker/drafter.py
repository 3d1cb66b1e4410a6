"""What a drafter does for the worker, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from faser_sglang.control.rounds import Offer
from faser_sglang.control.types import IntArray

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict
    from faser_sglang.worker.packing import PackedRows, Round


class Drafts(NamedTuple):
    """Row i holds ``counts[i]`` drafts of request i, then anything."""

    tokens: torch.Tensor  # [n, max_depth] int64
    chances: torch.Tensor  # [n, max_depth] the drafter's probability; 0 where it has none
    counts: IntArray  # [n] at most the round's depths: less where the plan stopped a chain


class Drafter(ABC):
    """Proposes a chain of tokens behind each request's bonus token.

    A round calls ``offer``, ``draft`` (only if some depth is above 0) and ``commit``; a prefill
    calls ``prefill``; the end of a request ``finish``. Where ``reads_hidden`` is set, ``commit``
    and ``prefill`` get the target's hidden states of every row of the pass.
    """

    kind: str
    context_len: int  # positions that its model can run
    draft_worker: Any | None  # SGLang's view of the draft: runners, memory; None without a model
    reads_hidden = False

    @abstractmethod
    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        """The pools exist now: size the records by them."""

    @abstractmethod
    def prefill(
        self,
        batch: ScheduleBatch,
        bonus: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        is_off: bool,
    ) -> None:
        """The target has run ``batch`` and sampled ``bonus`` [n]; ``is_off``: write no KV."""

    @abstractmethod
    def offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        """What can be drafted for requests of ``lengths`` committed tokens."""

    @abstractmethod
    def draft(self, this_round: Round) -> Drafts:
        """Drafts of every request: ``this_round.depths`` of each, or as many as its plan wants."""

    @abstractmethod
    def commit(
        self,
        this_round: Round,
        window: PackedRows,
        verdict: Verdict,
        hidden: torch.Tensor | None,
    ) -> None:
        """The window was verified: ``depths`` of ``drafted`` drafts of each request."""

    def finish(self, batch: ScheduleBatch, row: int, end: int) -> None:  # noqa: B027
        """The one request of ``batch`` ended on ``row`` of the pool: its first ``end`` slots may
        go to the radix tree."""
