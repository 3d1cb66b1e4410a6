"""Policies that decide by themselves: the same depth for all, or any depth."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.rounds import FixedPlan, Offer, Outcome, RoundPlan, first_arm, limits_of
from faser_sglang.control.types import BoolArray, FloatArray, IntArray


class Unlearning:
    """A policy without a memory."""

    def reset(self, rows: IntArray) -> None:
        pass

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        pass


class FixedDepth(Unlearning):
    """The same depth for every request."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        arms = first_arm(offer)
        return FixedPlan(np.minimum(limits_of(offer, arms), self.depth), arms)


class RandomDepth(Unlearning):
    """Depths from 0 to the cap, uniform over lengths and fixed by (seed, length), for tests.

    A request that is run again draws the same depths at the same lengths, whatever else is in
    the batch, so that its accept length can be compared exactly. ``stops`` and ``trims`` make
    the further decisions of a round random in the same way.
    """

    def __init__(self, cap: int, seed: int, *, stops: bool = False, trims: bool = False) -> None:
        self.cap = cap
        self.seed = seed
        self.stops = stops
        self.trims = trims

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        arms = first_arm(offer)
        depths = np.minimum(limits_of(offer, arms), _draw(self.seed, lengths, self.cap + 1))
        return RandomPlan(depths, arms, lengths, self)


class RandomPlan(FixedPlan):
    """Chains end, and drafts are withheld, at random."""

    def __init__(
        self, depths: IntArray, arms: IntArray, lengths: IntArray, policy: RandomDepth
    ) -> None:
        super().__init__(depths, arms)
        self.stops = policy.stops
        self.trims = policy.trims
        self._lengths = lengths
        self._seed = policy.seed

    def goes_on(self, members: IntArray, chances: FloatArray) -> BoolArray:
        return _draw(self._seed + 1 + chances.shape[1], self._lengths[members], 4) > 0

    def trim(self, chances: FloatArray, counts: IntArray) -> IntArray:
        return np.minimum(counts, _draw(self._seed - 1, self._lengths, 2 * counts + 1))


def _draw(seed: int, lengths: IntArray, below: IntArray | int) -> IntArray:
    """Whole numbers [n] from 0 up to ``below``, by seed and length."""
    mixed = lengths.astype(np.uint64) + np.uint64(seed & 0xFFFFFFFF) * np.uint64(1 << 20)
    # Finaliser of splitmix64 (Steele, Lea and Flood, 2014).
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed >> np.uint64(33)).astype(np.int64) % below
