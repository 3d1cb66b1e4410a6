"""What each request drafted last, until its new length tells how much of it was accepted."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.types import IntArray


class RoundRecord:
    """Length, depth and arm of every request's last round, by its row of the request pool."""

    def __init__(self, pool_rows: int) -> None:
        self.length: IntArray = np.zeros(pool_rows, np.int64)
        self.depth: IntArray = np.zeros(pool_rows, np.int64)
        self.arm: IntArray = np.zeros(pool_rows, np.int64)

    def begin(self, rows: IntArray, lengths: IntArray) -> None:
        """A prefill left ``lengths`` tokens; nothing was drafted."""
        self.plan(rows, lengths, np.zeros_like(rows), np.zeros_like(rows))

    def plan(self, rows: IntArray, lengths: IntArray, depths: IntArray, arms: IntArray) -> None:
        """A round starts: ``depths`` drafts behind ``lengths`` tokens, out of ``arms``."""
        self.length[rows] = lengths
        self.depth[rows] = depths
        self.arm[rows] = arms

    def settle(self, rows: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
        """Depths and accepted drafts [n] of the last round, off the committed lengths.

        Zeros for requests fresh from prefill.
        """
        emitted = lengths - self.length[rows]
        return self.depth[rows], np.where(emitted > 0, emitted - 1, 0)
