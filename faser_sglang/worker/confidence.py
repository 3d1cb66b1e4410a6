"""How far a draft's probability can be trusted: acceptance by the drafter's own confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from faser_sglang.worker.drafter import Drafts

BINS = 10


class ConfidenceTally:
    """Tested and accepted drafts in ten bins of probability, kept on the device.

    Drafts of unknown probability (0) are left out. It counts every verified round, those of
    requests that ended meanwhile included.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._sums = torch.zeros(2, BINS, dtype=torch.int64, device=device)

    def add(self, drafts: Drafts, depths: torch.Tensor, accept_lens: torch.Tensor) -> None:
        """``depths`` [n] were drafted, ``accept_lens`` [n] - 1 of them accepted."""
        columns = torch.arange(drafts.chances.shape[1], device=depths.device)
        lasts = torch.minimum(depths, accept_lens)[:, None]  # the first rejected one was tested
        tested = (columns < lasts) & (drafts.chances > 0)
        accepted = tested & (columns < accept_lens[:, None] - 1)
        bins = (drafts.chances * BINS).long().clamp_(max=BINS - 1).flatten()
        self._sums[0].index_add_(0, bins, tested.flatten().long())
        self._sums[1].index_add_(0, bins, accepted.flatten().long())

    def snapshot(self) -> dict[str, list[int]]:
        """Of each bin from 0-0.1 to 0.9-1; waits for the device."""
        tested, accepted = self._sums.tolist()
        return {"tested": tested, "accepted": accepted}
