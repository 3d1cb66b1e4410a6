"""The target's hidden states of each request's last positions, for a head that runs later."""

from __future__ import annotations

import torch

MOST_POSITIONS = 32
MOST_BYTES = 256 << 20


class StateRing:
    """Keeps, by row of the request pool, the last ``span`` positions of each request.

    An entry is the token behind a position and the target's hidden states there; position p lies
    at p modulo ``span``. Drafts that were rejected leave entries too, which the next round
    overwrites before anybody may read them.
    """

    def __init__(self, pool_rows: int, at_least: int, width: int, like: torch.Tensor) -> None:
        """
        Args:
            at_least: entries a request cannot do without. width: of the hidden states, of the
            type and on the device of ``like``.
        """
        affordable = MOST_BYTES // (pool_rows * width * like.element_size())
        self.span = max(at_least, min(MOST_POSITIONS, affordable))
        self._tokens = like.new_zeros(pool_rows * self.span, dtype=torch.int64)
        self._hidden = like.new_zeros(pool_rows * self.span, width)

    def put(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
    ) -> None:
        """Keep ``tokens`` [n] and ``hidden`` [n, width] of ``positions`` [n] of ``rows`` [n]."""
        places = self._places(rows, positions)
        self._tokens.index_copy_(0, places, tokens)
        self._hidden.index_copy_(0, places, hidden)

    def get(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] and hidden states [n, width] of ``positions`` [n] of ``rows`` [n]."""
        places = self._places(rows, positions)
        return self._tokens.index_select(0, places), self._hidden.index_select(0, places)

    def _places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.int64) * self.span + positions % self.span
