"""What the counters of a server have grown by, for metrics and the log.

A flush starts the server's own counters anew, while a metric of Prometheus must never fall: so
differences are passed on, and a new source counts from zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from faser_sglang.control.metrics import RoundCounters

Key = tuple[str, str]  # the name of a sum, and the value of its label ("" where it has none)

# Sums of a server: what they count, and the name of their label.
SUMS: dict[str, tuple[str, str]] = {
    "rounds": ("Decode rounds of requests: one pass of the target, for one request.", ""),
    "passes": ("Decode passes of the target whose results were read, each for a batch.", ""),
    "begun_passes": ("Decode passes of the target that were begun.", ""),
    "drafts": ("Draft tokens made.", ""),
    "trimmed_drafts": ("Draft tokens made, but not verified.", ""),
    "verified_drafts": ("Draft tokens verified.", ""),
    "accepted_drafts": ("Draft tokens that were the target's own.", ""),
    "emitted_tokens": ("Tokens that rounds emitted; those sampled by prefills do not count.", ""),
    "cut_tokens": ("Tokens of rounds behind a stop, which were not emitted.", ""),
    "saved_rounds": ("Emitted tokens less rounds: passes a request would have run besides.", ""),
    "overshoot_rounds": ("Rounds of requests that had ended when the round began.", ""),
    "overshoot_tokens": ("Tokens of such rounds.", ""),
    "rounds_by_depth": ("Decode rounds by the number of drafts verified.", "depth"),
    "position_tested": ("Drafts by position whose predecessors were all accepted.", "position"),
    "position_accepted": ("Accepted drafts by position.", "position"),
    "phase_seconds": ("Host time of the phases of decode passes.", "phase"),
    "draft_faults": ("Requests that lost their drafts because the drafter failed.", ""),
    "timed_rounds": ("Decode passes that the cost model has learned from.", ""),
}


def round_sums(counters: RoundCounters) -> dict[Key, float]:
    """The sums of a server's rounds."""
    plain = {
        "rounds": counters.rounds,
        "passes": counters.passes,
        "drafts": counters.drafted,
        "trimmed_drafts": counters.trimmed,
        "verified_drafts": counters.verified,
        "accepted_drafts": counters.accepted,
        "emitted_tokens": counters.emitted,
        "cut_tokens": counters.cut,
        "saved_rounds": counters.emitted - counters.rounds,
        "overshoot_rounds": counters.overshoot_rounds,
        "overshoot_tokens": counters.overshoot_tokens,
    }
    sums: dict[Key, float] = {(name, ""): value for name, value in plain.items()}
    for depth, count in counters.depth_histogram.items():
        sums["rounds_by_depth", str(depth)] = count
    for name, by_position in (
        ("position_tested", counters.tested_by_position),
        ("position_accepted", counters.accepted_by_position),
    ):
        for position, count in enumerate(by_position, start=1):
            sums[name, str(position)] = count
    return sums


class Growth:
    """By how much sums exceed the most that they ever were.

    Tokens behind a stop are taken off what was emitted when a request ends, so even a sum of one
    source may fall; it grows again when it exceeds its maximum.
    """

    def __init__(self) -> None:
        # By part: its source, held so that a new one is known as new, and the most of each sum.
        self._parts: dict[int, tuple[object, dict[Key, float]]] = {}

    def take(self, parts: Iterable[tuple[object, Mapping[Key, float]]]) -> dict[Key, float]:
        """What the sums of each part grew by since the last call; those that grew only.

        A part whose source is another object than the last time has started at zero, also in the
        sums that the new source does not have yet.
        """
        grown = {}
        for number, (source, sums) in enumerate(parts):
            if number not in self._parts or self._parts[number][0] is not source:
                self._parts[number] = source, {}
            most = self._parts[number][1]
            for key, value in sums.items():
                if value > most.get(key, 0.0):
                    grown[key] = value - most.get(key, 0.0)
                most[key] = max(value, most.get(key, 0.0))
        return grown
