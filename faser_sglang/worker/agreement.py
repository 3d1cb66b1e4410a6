"""One decision for all tensor-parallel ranks: the first rank's.

Ranks compute the same plan, drafts and verdict from the same numbers; but should one of them round
a near tie the other way, or see its drafter fail, they would run passes of different shapes and
wait for each other for ever. So what shapes a pass is taken from rank 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from faser_sglang.control.types import IntArray
from faser_sglang.worker.drafter import Drafts


class Agreement:
    """Broadcasts within ``group`` (SGLang's GroupCoordinator); nothing where there is one rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_alone = group.world_size == 1

    def plan(self, depths: IntArray, arms: IntArray) -> tuple[IntArray, IntArray]:
        """Depths and arms [n] of the round, on the host."""
        if self.is_alone:
            return depths, arms
        both = torch.from_numpy(np.stack([depths, arms]))
        torch.distributed.broadcast(both, src=self.group.ranks[0], group=self.group.cpu_group)
        return both[0].numpy(), both[1].numpy()

    def drafts(self, drafts: Drafts) -> Drafts:
        """Tokens and probabilities [n, depth] of the drafts."""
        return drafts if self.is_alone else Drafts(*(self.tensor(part) for part in drafts))

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of rank 0, on the device."""
        return values if self.is_alone else self.group.broadcast(values.contiguous(), src=0)
