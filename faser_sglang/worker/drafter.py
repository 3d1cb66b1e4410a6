"""What a drafter does for the worker, whatever it is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from faser_sglang.control.types import IntArray

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.kernels.reference import Verdict
    from faser_sglang.worker.packing import PackedRows, Round


class Drafter(ABC):
    """Proposes a chain of tokens behind each request's bonus token.

    A round calls ``settle``, ``draft`` (only if some depth is above 0) and ``commit``; a prefill
    calls ``prefill``. ``context_len`` is the number of positions it can run.
    """

    kind: str
    context_len: int
    draft_worker: Any | None  # SGLang's view of the draft: runners, memory; None without a model

    @abstractmethod
    def attach_pools(self, req_to_token_pool: Any, slots: int) -> None:
        """The pools exist now: size the records by them."""

    @abstractmethod
    def prefill(self, batch: ScheduleBatch, bonus: torch.Tensor, *, is_off: bool) -> None:
        """The target has run ``batch`` and sampled ``bonus`` [n]; ``is_off``: write no KV."""

    @abstractmethod
    def settle(self, rows: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Depths and accepted drafts [n] of each request's last round, off its new length."""

    @abstractmethod
    def draft(self, this_round: Round) -> torch.Tensor:
        """Draft tokens [n, max_depth]; row i holds ``depths[i]`` of them, then anything."""

    @abstractmethod
    def commit(self, this_round: Round, window: PackedRows, verdict: Verdict) -> None:
        """The window was verified; ``this_round.depths`` were its depths."""
