"""The latest tokens of each running request, on the device.

Under the overlap scheduler the host learns a round's tokens after the next round has started;
drafting needs them before. A ring a request holds the newest, the request itself the older ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from faser_sglang.control.types import IntArray

if TYPE_CHECKING:
    from faser_sglang.worker.packing import PackedRows, Round


class TokenHistory:
    """Rings of ``capacity`` tokens; position p of a request lies at p modulo ``capacity``."""

    def __init__(self, pool_rows: int, width: int, device: torch.device | str) -> None:
        # Twice the round in flight and one more, so that the host has what the ring forgets.
        self.width = width
        self.capacity = 4 * width
        self._ring = torch.zeros(pool_rows, self.capacity, dtype=torch.int64, device=device)
        self._first: IntArray = np.zeros(pool_rows, np.int64)

    def begin(
        self,
        rows: torch.Tensor,
        rows_cpu: IntArray,
        lengths: torch.Tensor,
        lengths_cpu: IntArray,
        bonus: torch.Tensor,
    ) -> None:
        """A prefill sampled ``bonus`` [n] at position ``lengths`` [n]."""
        self._first[rows_cpu] = lengths_cpu
        self._ring[rows.long(), lengths % self.capacity] = bonus.to(torch.int64)

    def commit(self, this_round: Round, tokens: torch.Tensor) -> None:
        """Record the tokens [n, width] of a round's verdict.

        Tokens behind the accepted ones are recorded too; later rounds overwrite them.
        """
        offsets = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        columns = (this_round.lengths[:, None] + offsets) % self.capacity
        self._ring[this_round.rows.long()[:, None], columns] = tokens.to(torch.int64)

    def gather(self, this_round: Round, members: IntArray, packed: PackedRows) -> torch.Tensor:
        """Tokens [rows] of ``packed``, whose request i is request ``members[i]`` of the round.

        Positions run from anywhere up to the bonus token's.
        """
        rows = this_round.rows[torch.from_numpy(members).to(this_round.rows.device)].long()
        tokens = self._ring[rows[packed.owners], packed.positions % self.capacity]
        lengths = this_round.lengths_cpu[members]
        # The last commit wrote ``width`` tokens, of which perhaps only one was emitted: the others
        # took the places of the oldest.
        kept = lengths - self.capacity + self.width
        known = np.maximum(self._first[this_round.rows_cpu[members]], kept)
        starts = lengths + 1 - np.asarray(packed.lengths_cpu)
        for i in np.flatnonzero(starts < known):  # a long time at depth 0: rare, on the host
            row = int(np.sum(packed.lengths_cpu[:i]))
            older = request_tokens(this_round.batch.reqs[members[i]], int(starts[i]), int(known[i]))
            tokens[row : row + len(older)] = older.to(tokens.device)
        return tokens


def request_tokens(req: object, start: int, end: int) -> torch.Tensor:
    """Tokens ``start`` .. ``end`` of a request's prompt and output, as the host knows them."""
    prompt, output = req.origin_input_ids, req.output_ids
    size = len(prompt)
    part = list(prompt[start:end]) + list(output[max(start - size, 0) : max(end - size, 0)])
    if len(part) != end - start:
        raise RuntimeError(
            f"tokens {start} to {end} of a request are unknown to the host, which holds "
            f"{size + len(output)}; this is a defect of FASER, please report it"
        )
    return torch.tensor(part, dtype=torch.int64)
