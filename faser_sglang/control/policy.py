"""How many tokens to draft for each request of a round."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from faser_sglang.control.types import FloatArray, IntArray


class DepthPolicy(Protocol):
    """Chooses draft depths, and learns from verdicts.

    Requests are known by their row of the request pool. ``reset`` starts a new request on a
    row; nothing of the previous one survives.
    """

    def reset(self, rows: IntArray) -> None: ...

    def choose(self, rows: IntArray, lengths: IntArray, limits: IntArray) -> IntArray:
        """Depths [n], each from 0 to its limit, for requests of ``lengths`` [n] tokens."""
        ...

    def observe(self, rows: IntArray, depths: IntArray, accepted: IntArray) -> None:
        """Of ``depths`` [n] drafts of each request, the first ``accepted`` [n] were right."""
        ...


class FixedDepth:
    """The same depth for every request."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def reset(self, rows: IntArray) -> None:
        pass

    def choose(self, rows: IntArray, lengths: IntArray, limits: IntArray) -> IntArray:
        return np.minimum(limits, self.depth)

    def observe(self, rows: IntArray, depths: IntArray, accepted: IntArray) -> None:
        pass


class RandomDepth:
    """Depths from 0 to the cap, uniform over lengths and fixed by (seed, length), for tests.

    A request that is run again draws the same depths at the same lengths, whatever else is in
    the batch, so that its accept length can be compared exactly.
    """

    def __init__(self, cap: int, seed: int) -> None:
        self.cap = cap
        self.seed = seed

    def reset(self, rows: IntArray) -> None:
        pass

    def choose(self, rows: IntArray, lengths: IntArray, limits: IntArray) -> IntArray:
        mixed = lengths.astype(np.uint64) + np.uint64(self.seed & 0xFFFFFFFF) * np.uint64(1 << 20)
        # Finaliser of splitmix64 (Steele, Lea and Flood, 2014).
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        drawn = (mixed >> np.uint64(33)) % np.uint64(self.cap + 1)
        return np.minimum(limits, drawn.astype(np.int64))

    def observe(self, rows: IntArray, depths: IntArray, accepted: IntArray) -> None:
        pass


class AcceptanceAverage:
    """Drafts while the chance that all drafts so far are right stays above ``floor``.

    The chance is rate ** depth, with each request's own forgetting average of tested drafts,
    started at ``prior`` with the weight of ``prior_tests`` tests. A request whose rate is too
    low for one draft still tests one in every ``probe_every`` rounds, else it never recovers.
    """

    def __init__(
        self,
        pool_rows: int,
        *,
        floor: float = 0.4,
        prior: float = 0.6,
        prior_tests: float = 6.0,
        memory: float = 0.96,
        probe_every: int = 16,
    ) -> None:
        self.floor = floor
        self.prior = prior
        self.prior_tests = prior_tests
        self.memory = memory
        self.probe_every = probe_every
        self._accepted: FloatArray = np.zeros(pool_rows)
        self._tested: FloatArray = np.zeros(pool_rows)
        self._idle: IntArray = np.zeros(pool_rows, np.int64)

    def reset(self, rows: IntArray) -> None:
        self._accepted[rows] = 0.0
        self._tested[rows] = 0.0
        self._idle[rows] = 0

    def rates(self, rows: IntArray) -> FloatArray:
        """Estimated acceptance rate [n] of each request's next draft, in (0, 1)."""
        right = self._accepted[rows] + self.prior * self.prior_tests
        return np.clip(right / (self._tested[rows] + self.prior_tests), 0.01, 0.99)

    def choose(self, rows: IntArray, lengths: IntArray, limits: IntArray) -> IntArray:
        depths = np.floor(np.log(self.floor) / np.log(self.rates(rows))).astype(np.int64)
        self._idle[rows] = np.where(depths == 0, self._idle[rows] + 1, 0)
        is_probe = self._idle[rows] >= self.probe_every
        self._idle[rows[is_probe]] = 0
        return np.minimum(limits, np.where(is_probe, 1, depths))

    def observe(self, rows: IntArray, depths: IntArray, accepted: IntArray) -> None:
        # The first wrong draft ends the test; those behind it were never observed.
        tested = np.minimum(accepted + 1, depths)
        fade = self.memory**tested
        self._accepted[rows] = self._accepted[rows] * fade + accepted
        self._tested[rows] = self._tested[rows] * fade + tested


def make_policy(depth: str, *, cap: int, pool_rows: int, seed: int, is_off: bool) -> DepthPolicy:
    """The policy for a value of ``--faser-depth`` (see FaserConfig)."""
    if is_off:
        return FixedDepth(0)
    if depth == "auto":
        return AcceptanceAverage(pool_rows)
    if depth == "random":
        return RandomDepth(cap, seed)
    return FixedDepth(int(depth))
