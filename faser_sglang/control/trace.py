"""Records of rounds for replay: what was drafted, how sure the drafter was, what was accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from faser_sglang.control.rounds import Outcome
from faser_sglang.control.types import IntArray


class TraceWriter:
    """One line of JSON a round, written when its outcome is known: when the next one is planned."""

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO = Path(path).open("w", buffering=1)  # noqa: SIM115

    def write(self, rows: IntArray, lengths: IntArray, outcome: Outcome) -> None:
        """The last round of requests that have ``lengths`` tokens now."""
        deepest = int(outcome.drafted.max(initial=0))
        line = {
            "rows": rows.tolist(),
            "lengths": lengths.tolist(),
            "arms": outcome.arms.tolist(),
            "drafted": outcome.drafted.tolist(),
            "verified": outcome.verified.tolist(),
            "accepted": outcome.accepted.tolist(),
            "chances": np.round(outcome.chances[:, :deepest], 4).tolist(),
        }
        self._file.write(json.dumps(line) + "\n")


def read_trace(path: str | Path, cap: int) -> Iterator[tuple[IntArray, IntArray, Outcome]]:
    """Rows, lengths and outcome of each round of a trace, for up to ``cap`` drafts a request."""
    with Path(path).open() as file:
        for line in file:
            record = json.loads(line)
            chances = np.zeros((len(record["rows"]), cap))
            known = np.array(record["chances"], float).reshape(len(chances), -1)[:, :cap]
            chances[:, : known.shape[1]] = known
            parts = (
                np.array(record[name], np.int64)
                for name in ("arms", "drafted", "verified", "accepted")
            )
            rows, lengths = np.array(record["rows"]), np.array(record["lengths"])
            yield rows, lengths, Outcome(*parts, chances)
