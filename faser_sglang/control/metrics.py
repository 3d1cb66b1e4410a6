"""What the rounds of a server did, counted on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Account:
    """Sums over decode rounds.

    One round of one request makes ``drafted`` drafts, has the first ``verified`` of them verified
    (``trimmed``: the others) and emits the ``accepted`` ones and one token more, so ``emitted =
    accepted + rounds - cut`` (``cut``: behind a stop). The token that the prefill samples is not
    counted.
    """

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    cut: int = 0
    depth_histogram: dict[int, int] = field(default_factory=dict)  # of verified drafts

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        """One request's round: ``accepted`` of ``verified`` of ``drafted`` drafts were right."""
        if not 0 <= accepted <= verified <= drafted:
            raise ValueError(
                f"{accepted} of {verified} of {drafted} drafts cannot have been accepted"
            )
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.depth_histogram[verified] = self.depth_histogram.get(verified, 0) + 1

    @property
    def trimmed(self) -> int:
        return self.drafted - self.verified

    @property
    def emitted(self) -> int:
        return self.accepted + self.rounds - self.cut

    @property
    def accept_length(self) -> float:
        """Emitted tokens a decode round, 0.0 before the first."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, for answers and ``/server_info``."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "trimmed": self.trimmed,
            "verified": self.verified,
            "accepted": self.accepted,
            "cut": self.cut,
            "emitted": self.emitted,
            "accept_length": round(self.accept_length, 4),
            "depth_histogram": {
                str(depth): count for depth, count in sorted(self.depth_histogram.items())
            },
        }


@dataclass
class RoundCounters(Account):
    """Sums over the decode rounds of all requests that were still running.

    Under the overlap scheduler a request that has finished is still in the round that was already
    started: ``overshoot_rounds`` of ``overshoot_tokens``, which SGLang's own averages count and
    these sums do not.
    """

    passes: int = 0
    overshoot_rounds: int = 0
    overshoot_tokens: int = 0
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def add(self, drafted: int, verified: int, accepted: int) -> None:
        super().add(drafted, verified, accepted)
        while len(self.tested_by_position) < verified:
            self.tested_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(min(accepted + 1, verified)):
            self.tested_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    def add_overshoot(self, accepted: int) -> None:
        """A round of a request that had finished before it."""
        self.overshoot_rounds += 1
        self.overshoot_tokens += accepted + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts whose predecessor was accepted, 0.0 before the first."""
        tested = sum(self.tested_by_position)
        return self.accepted / tested if tested else 0.0

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {
            "acceptance_rate": round(self.acceptance_rate, 4),
            "passes": self.passes,
            "overshoot_rounds": self.overshoot_rounds,
            "overshoot_tokens": self.overshoot_tokens,
            "tested_by_position": list(self.tested_by_position),
            "accepted_by_position": list(self.accepted_by_position),
        }


class PhaseClock:
    """Host time of the phases of a round, as means over rounds.

    On a device that runs behind the host this is the time to launch, not to compute.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by phase, in the order in which they ran
        self.rounds = 0  # begun
        self._last = 0.0

    def start(self) -> None:
        """A round begins."""
        self.rounds += 1
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """``phase`` ends now; the next one begins."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def snapshot(self) -> dict[str, float]:
        """Milliseconds a round by phase."""
        rounds = max(self.rounds, 1)
        return {phase: round(1e3 * s / rounds, 3) for phase, s in self.seconds.items()}
