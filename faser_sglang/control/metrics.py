"""What the rounds of a server did, counted on the host."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field


@dataclass
class RoundCounters:
    """Sums over the decode rounds of requests that were still running.

    One round of one request verifies its drafts and emits the accepted ones plus one token, so
    ``emitted = accepted + rounds - trimmed`` (``trimmed``: behind a stop). The token that the
    prefill samples is not counted. Under the overlap scheduler a request that has finished is
    still in the round that was already started: ``overshoot_rounds`` of ``overshoot_tokens``,
    which SGLang's own averages count and these sums do not.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    trimmed: int = 0
    passes: int = 0
    overshoot_rounds: int = 0
    overshoot_tokens: int = 0
    depth_histogram: dict[int, int] = field(default_factory=dict)
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, depth: int, accepted: int) -> None:
        """One request's round: ``accepted`` of ``depth`` drafts were right."""
        if not 0 <= accepted <= depth:
            raise ValueError(f"{accepted} of {depth} drafts cannot have been accepted")
        self.rounds += 1
        self.drafted += depth
        self.accepted += accepted
        self.depth_histogram[depth] = self.depth_histogram.get(depth, 0) + 1
        while len(self.tested_by_position) < depth:
            self.tested_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(min(accepted + 1, depth)):
            self.tested_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    def add_overshoot(self, accepted: int) -> None:
        """A round of a request that had finished before it."""
        self.overshoot_rounds += 1
        self.overshoot_tokens += accepted + 1

    @property
    def emitted(self) -> int:
        return self.accepted + self.rounds - self.trimmed

    @property
    def accept_length(self) -> float:
        """Emitted tokens a decode round, 0.0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts whose predecessor was accepted, 0.0 before the first."""
        tested = sum(self.tested_by_position)
        return self.accepted / tested if tested else 0.0

    def snapshot(self) -> dict[str, object]:
        """Everything as plain values, for ``/server_info``."""
        state = asdict(self)
        state["depth_histogram"] = {
            str(depth): count for depth, count in sorted(self.depth_histogram.items())
        }
        return state | {
            "emitted": self.emitted,
            "accept_length": round(self.accept_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
        }


class PhaseClock:
    """Host time of the phases of a round, as means over rounds.

    On a device that runs behind the host this is the time to launch, not to compute.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._rounds = 0
        self._last = 0.0

    def start(self) -> None:
        """A round begins."""
        self._rounds += 1
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """``phase`` ends now; the next one begins."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def snapshot(self) -> dict[str, float]:
        """Milliseconds a round by phase, in the order in which they ran."""
        rounds = max(self._rounds, 1)
        return {phase: round(1e3 * s / rounds, 3) for phase, s in self._seconds.items()}
