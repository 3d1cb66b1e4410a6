"""One decision for all tensor-parallel ranks: the first rank's.

Ranks compute the same drafts and verdict from the same numbers; but should one of them round a
near tie the other way, time its rounds differently, or see its drafter fail, they would run passes
of different shapes and wait for each other for ever. So what shapes a pass is rank 0's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from faser_sglang.control.rounds import RoundPlan
from faser_sglang.control.types import BoolArray, FloatArray, IntArray
from faser_sglang.worker.drafter import Drafts


class Agreement:
    """Broadcasts within ``group`` (SGLang's GroupCoordinator); nothing where there is one rank."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_alone = group.world_size == 1

    @property
    def is_first(self) -> bool:
        """This rank's word is everyone's."""
        return self.is_alone or self.group.rank_in_group == 0

    def plan(self, plan: RoundPlan) -> RoundPlan:
        """The round's plan, whose further decisions are then rank 0's too."""
        return plan if self.is_alone else AgreedPlan(plan, self)

    def drafts(self, drafts: Drafts) -> Drafts:
        """Tokens and probabilities [n, depth] of the drafts, and their counts [n]."""
        if self.is_alone:
            return drafts
        return Drafts(
            self.tensor(drafts.tokens), self.tensor(drafts.chances), self.numbers(drafts.counts)
        )

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of rank 0, on the device."""
        return values if self.is_alone else self.group.broadcast(values.contiguous(), src=0)

    def numbers(self, values: IntArray) -> IntArray:
        """``values`` of rank 0, on the host."""
        if self.is_alone:
            return values
        shared = torch.from_numpy(np.array(values, np.int64))
        torch.distributed.broadcast(shared, src=self.group.ranks[0], group=self.group.cpu_group)
        return shared.numpy()

    def value(self, value: Any) -> Any:
        """Any ``value`` of rank 0 that can be pickled; at start-up."""
        if self.is_alone:
            return value
        shared = [value]
        torch.distributed.broadcast_object_list(
            shared, src=self.group.ranks[0], group=self.group.cpu_group
        )
        return shared[0]


class AgreedPlan:
    """A plan whose every decision is rank 0's."""

    def __init__(self, plan: RoundPlan, agreement: Agreement) -> None:
        self._plan = plan
        self._agreement = agreement
        ways = np.full_like(plan.depths, 2 * plan.stops + plan.trims)
        self.depths, self.arms, ways = agreement.numbers(np.stack([plan.depths, plan.arms, ways]))
        self.stops, self.trims = bool(ways[0] & 2), bool(ways[0] & 1)

    def goes_on(self, members: IntArray, chances: FloatArray) -> BoolArray:
        own = self._plan.goes_on(members, chances)
        return self._agreement.numbers(own.astype(np.int64)) > 0

    def trim(self, chances: FloatArray, counts: IntArray) -> IntArray:
        return self._agreement.numbers(self._plan.trim(chances, counts))
