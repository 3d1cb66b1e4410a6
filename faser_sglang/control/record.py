"""What each request drafted last, until its new length tells how much of it was accepted."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.rounds import Outcome
from faser_sglang.control.types import FloatArray, IntArray


class RoundRecord:
    """Length and depth of every request's last round, by its row of the request pool."""

    def __init__(self, pool_rows: int) -> None:
        self.length: IntArray = np.zeros(pool_rows, np.int64)
        self.depth: IntArray = np.zeros(pool_rows, np.int64)

    def begin(self, rows: IntArray, lengths: IntArray) -> None:
        """A prefill left ``lengths`` tokens; nothing was drafted."""
        self.plan(rows, lengths, np.zeros_like(rows))

    def plan(self, rows: IntArray, lengths: IntArray, depths: IntArray) -> None:
        """A round starts: ``depths`` drafts behind ``lengths`` tokens."""
        self.length[rows] = lengths
        self.depth[rows] = depths

    def settle(self, rows: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Depths and accepted drafts [n] of the last round, off the committed lengths.

        Zeros for requests fresh from prefill.
        """
        emitted = lengths - self.length[rows]
        return self.depth[rows], np.where(emitted > 0, emitted - 1, 0)


class OutcomeRecord:
    """All that a policy learns from, of every request's last round."""

    def __init__(self, pool_rows: int, cap: int) -> None:
        self._verified = RoundRecord(pool_rows)
        self._drafted: IntArray = np.zeros(pool_rows, np.int64)
        self._arm: IntArray = np.zeros(pool_rows, np.int64)
        self._chances: FloatArray = np.zeros((pool_rows, cap))

    def begin(self, rows: IntArray, lengths: IntArray) -> None:
        """A prefill left ``lengths`` tokens; nothing was drafted."""
        zeros = np.zeros_like(rows)
        self.note(rows, lengths, zeros, zeros, zeros, None)

    def note(
        self,
        rows: IntArray,
        lengths: IntArray,
        arms: IntArray,
        drafted: IntArray,
        verified: IntArray,
        chances: FloatArray | None,
    ) -> None:
        """A round's drafts: [n], but for ``chances`` [n, depth]."""
        self._verified.plan(rows, lengths, verified)
        self._drafted[rows] = drafted
        self._arm[rows] = arms
        self._chances[rows] = 0.0
        if chances is not None:
            self._chances[rows, : chances.shape[1]] = chances

    def settle(self, rows: IntArray, lengths: IntArray) -> Outcome:
        """What became of it, now that ``lengths`` [n] are committed."""
        verified, accepted = self._verified.settle(rows, lengths)
        return Outcome(
            self._arm[rows], self._drafted[rows], verified, accepted, self._chances[rows]
        )
