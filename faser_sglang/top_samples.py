"""What ``top`` knows of a server: samples of its counters, and what happened between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RESTARTED = "The server was started anew; its counters began at zero."
FLUSHED = "The cache was flushed, which starts the counters anew."
PLAIN = ("rounds", "passes", "drafted", "trimmed", "verified", "accepted", "cut", "emitted")


@dataclass(frozen=True)
class Sample:
    """A server at one moment.

    ``at``: seconds of a monotonic clock. ``server``: another text behind a restart. ``faser``:
    FASER's block of ``/server_info``. ``running``, ``waiting``: requests, None where unknown.
    """

    at: float
    server: str
    faser: Mapping[str, Any]
    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True)
class Sums:
    """What rounds did, over some time."""

    plain: dict[str, int] = field(default_factory=dict)  # by the names of PLAIN
    depths: dict[int, int] = field(default_factory=dict)
    tested: list[int] = field(default_factory=list)  # by position, from the first
    accepted: list[int] = field(default_factory=list)
    host_ms: dict[str, float] = field(default_factory=dict)  # by phase

    @classmethod
    def of(cls, faser: Mapping[str, Any]) -> Sums:
        """The sums of FASER's block of ``/server_info``."""
        counters = faser["counters"]
        return cls(
            plain={name: counters[name] for name in PLAIN},
            depths={int(depth): n for depth, n in counters["depth_histogram"].items()},
            tested=list(counters["tested_by_position"]),
            accepted=list(counters["accepted_by_position"]),
            host_ms={k: ms * counters["passes"] for k, ms in faser["host_ms_per_round"].items()},
        )

    def since(self, before: Sums) -> Sums:
        """What was added to ``before``."""
        return Sums(
            plain=_less(self.plain, before.plain),
            depths=_less(self.depths, before.depths),
            tested=_less_each(self.tested, before.tested),
            accepted=_less_each(self.accepted, before.accepted),
            host_ms=_less(self.host_ms, before.host_ms),
        )

    def __getitem__(self, name: str) -> int:
        return self.plain[name]


class Watch:
    """Follows the server at ``url``, and notices when its counters start anew."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.note = ""  # what happened, for the reader
        self.last: Sample | None = None  # filled by ``take``, like the next
        self.total = Sums()
        self.recent: Sums | None = None  # since the sample before; None where there is none
        self.seconds = 0.0  # … that ago

    def take(self, sample: Sample) -> None:
        """A new sample."""
        total, before = Sums.of(sample.faser), self.last
        self.recent, self.seconds = None, 0.0
        if before is not None:
            is_new = sample.server != before.server
            fell = any(total[name] < self.total[name] for name in ("rounds", "passes"))
            self.note = RESTARTED if is_new else FLUSHED if fell else ""
            if not self.note:
                self.recent, self.seconds = total.since(self.total), sample.at - before.at
        self.last, self.total = sample, total

    def miss(self, reason: str) -> None:
        """The server did not answer; what is known stays."""
        self.note = f"{reason} What is shown was before."
        self.recent, self.seconds = None, 0.0


def merge(blocks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """One block for the data-parallel ranks: sums added, the rest as the first has it."""
    first, *others = blocks
    if not others:
        return first
    counters = dict(first["counters"])
    for name in PLAIN:
        counters[name] = sum(block["counters"][name] for block in blocks)
    histograms = [block["counters"]["depth_histogram"] for block in blocks]
    depths = sorted({depth for each in histograms for depth in each}, key=int)
    counters["depth_histogram"] = {
        depth: sum(each.get(depth, 0) for each in histograms) for depth in depths
    }
    for name in ("tested_by_position", "accepted_by_position"):
        lists = [block["counters"][name] for block in blocks]
        longest = max(map(len, lists))
        counters[name] = [
            sum(each[place] for each in lists if place < len(each)) for place in range(longest)
        ]
    faults = sum(block["draft_faults"] for block in blocks)
    return {**first, "counters": counters, "draft_faults": faults}


def _less(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: max(value - before.get(key, 0), 0) for key, value in now.items()}


def _less_each(now: list[int], before: list[int]) -> list[int]:
    padded = before + [0] * (len(now) - len(before))
    return [max(new - old, 0) for new, old in zip(now, padded, strict=False)]
