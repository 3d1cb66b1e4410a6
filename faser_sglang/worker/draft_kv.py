"""Which tokens the draft's KV cache really holds.

A drafter that is a language model keeps token p of a request in the same slot as the target.
Rounds without drafts, and the last draft of a window that was accepted whole, leave slots that
only the target has written. Two records keep them from being read:

* ``valid_len`` of a running request: its first token whose draft KV is missing. Drafting starts
  with one packed pass from there, so a gap costs no pass of its own.
* ``written``, one bit a slot of the pool. The radix tree hands slots from one request to the
  next; at prefill the first unwritten slot of the shared prefix is where the draft's pass
  begins. So nothing has to be caught up when a request finishes, is retracted or aborted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from faser_sglang.control.record import RoundRecord
from faser_sglang.control.types import IntArray
from faser_sglang.kernels.reference import ragged_positions

if TYPE_CHECKING:
    from faser_sglang.worker.packing import PackedRows, Round


# The overlap scheduler starts the first decode round before it reads the prefill's result.
EXCHANGE_ROUNDS = 2


class DraftKv:
    """Validity of draft KV over a pool of ``slots`` slots and ``pool_rows`` requests."""

    def __init__(self, pool_rows: int, slots: int, device: torch.device | str) -> None:
        self.written = torch.zeros(slots, dtype=torch.bool, device=device)
        self.valid_len: IntArray = np.zeros(pool_rows, np.int64)
        self._record = RoundRecord(pool_rows)
        # Positions whose slots the radix tree may still exchange, and for how many rounds.
        self._unsure_from: IntArray = np.zeros(pool_rows, np.int64)
        self._unsure: IntArray = np.zeros(pool_rows, np.int64)

    def first_missing(
        self, req_to_token: torch.Tensor, rows: torch.Tensor, prefix_lens: IntArray
    ) -> IntArray:
        """First position [n] below ``prefix_lens`` without draft KV, else the prefix's length.

        The host waits for the device here, once a prefill batch with a cached prefix.
        """
        total = int(prefix_lens.sum())
        if total == 0:
            return prefix_lens
        lengths = torch.from_numpy(prefix_lens).to(rows.device)
        owners, positions = ragged_positions(torch.zeros_like(lengths), lengths, total=total)
        slots = req_to_token[rows[owners].long(), positions].long()
        is_missing = ~self.written[slots]
        first = lengths.scatter_reduce(
            0, owners[is_missing], positions[is_missing], "amin", include_self=True
        )
        return first.cpu().numpy()

    def begin(
        self,
        rows: IntArray,
        lengths: IntArray,
        valid: IntArray,
        unsure_from: IntArray | None = None,
    ) -> None:
        """A prefill left ``lengths`` tokens, and draft KV for the first ``valid`` of them.

        When the scheduler reads a prefill's result, the radix tree puts slots of its own, perhaps
        without draft KV, in the place of those that hold the same tokens: of rows from
        ``unsure_from`` on. The drafts of the rounds before and after run these rows again.
        """
        self.valid_len[rows] = valid
        unsure_from = lengths if unsure_from is None else unsure_from
        self._unsure_from[rows] = unsure_from
        self._unsure[rows] = np.where(unsure_from < lengths, EXCHANGE_ROUNDS, 0)
        self._record.begin(rows, lengths)

    def settle(self, rows: IntArray, lengths: IntArray) -> None:
        """Take in the verdicts of the last round, read off the committed lengths."""
        depths, accepted = self._record.settle(rows, lengths)
        was_drafted = depths > 0
        held = self._record.length[rows] + np.minimum(accepted + 1, depths)
        self.valid_len[rows[was_drafted]] = held[was_drafted]
        unsure = rows[self._unsure[rows] > 0]
        self._unsure[unsure] -= 1
        self.valid_len[unsure] = np.minimum(self.valid_len[unsure], self._unsure_from[unsure])

    def plan(self, this_round: Round) -> None:
        """Remember the round, for ``settle`` of the next one."""
        self._record.plan(
            this_round.rows_cpu,
            this_round.lengths_cpu,
            this_round.drafted_cpu,
        )

    def commit(self, this_round: Round, window: PackedRows, accept_lens: torch.Tensor) -> None:
        """Mark the window's slots: draft KV is there for accepted tokens that were drafted from.

        A chain of d drafts writes d positions: the bonus token and the drafts but the last.
        """
        drafted = torch.from_numpy(this_round.drafted_cpu).to(accept_lens.device)
        held = this_round.lengths + torch.minimum(accept_lens.to(torch.int64), drafted)
        self.mark(window, held)

    def mark(self, packed: PackedRows, held: torch.Tensor) -> None:
        """The target wrote ``packed``; the draft's KV is there for positions below ``held`` [n]."""
        self.written[packed.slots] = packed.positions < held[packed.owners]
