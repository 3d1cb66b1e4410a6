"""Host time of the controller per round, at cap 8 and 1, 32 and 256 requests.

    python bench/host_overhead.py --save

Everything that ``control/`` does for a round is timed on one core: settle the last round and learn
from it, plan, ask between the drafter's passes whether to go on, trim, and note the round. The
rounds come from a made-up drafter of known confidence; no model runs. The last line is the median
at 256 requests; the exit status is 1 where it exceeds the goal of 300 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from faser_sglang.control.controller import Controller  # noqa: E402
from faser_sglang.control.cost import CostTable, RoundShape  # noqa: E402
from faser_sglang.control.record import OutcomeRecord  # noqa: E402
from faser_sglang.control.rounds import LOOKUP, MODEL, Offer  # noqa: E402

GOAL_US = 300.0  # at 256 requests
CAP = 8
SIZES = (1, 32, 256)
WARM_UP = 200  # rounds until estimates and caches have settled

# Such a target as makes about three drafts a request worth it at every size.
TABLE = CostTable(
    requests=[1, 16, 256],
    windows=[1, 2, 9],
    verify=[[20.0, 20.2, 21.5], [21.0, 22.0, 29.0], [40.0, 52.0, 140.0]],
    first=[0.5, 0.6, 1.5],
    step=[0.5, 0.6, 1.5],
    catch_up=0.002,
    host=[1.0, 1.2, 3.0],
)


class Rounds:
    """A server's decode rounds without a server: every request drafts, some look up instead."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)
        self.n = n
        self.rows = np.arange(n)
        self.lengths = np.full(n, 200)
        self.record = OutcomeRecord(n, CAP)
        self.record.begin(self.rows, self.lengths)
        self.controller = Controller(CAP, n, TABLE)
        self.controller.reset(self.rows)
        self.laps: dict[str, list[float]] = defaultdict(list)

    def play(self) -> None:
        """One round; every part's time goes to ``laps``, in microseconds."""
        n, controller, parts = self.n, self.controller, defaultdict(float)
        is_found = self.draw.random(n) < 0.3
        offer = Offer(
            np.array([np.full(n, CAP), is_found * CAP]),
            np.array([np.zeros(n), is_found * 0.75]),
            np.zeros(n, np.int64),
        )
        chances = self.draw.beta(2.0, 1.0, (n, CAP))
        is_right = self.draw.random((n, CAP)) < chances

        def timed(name: str, call: Any, *args: Any) -> Any:
            began = time.perf_counter()
            answer = call(*args)
            parts[name] += 1e6 * (time.perf_counter() - began)
            return answer

        outcome = timed("settle", self.record.settle, self.rows, self.lengths)
        timed("observe", controller.observe, self.rows, outcome)
        plan = timed("plan", controller.plan, self.rows, self.lengths, offer)
        counts = np.where(plan.arms == LOOKUP, plan.depths, 0)
        members = np.flatnonzero((plan.arms == MODEL) & (plan.depths > 0))
        passes = []
        for so_far in range(1, CAP + 1):
            if not members.size:
                break
            passes.append(len(members))
            counts[members] = so_far
            members = members[plan.depths[members] > so_far]
            if plan.stops and members.size:
                goes_on = timed("goes on", plan.goes_on, members, chances[members, :so_far])
                members = members[goes_on]
        deepest = int(counts.max(initial=0))
        known = np.where(plan.arms[:, None] == LOOKUP, offer.chances[LOOKUP][:, None], chances)
        verified = counts
        if plan.trims and deepest:
            verified = timed("trim", plan.trim, known[:, :deepest], counts)
        timed(
            "note",
            self.record.note,
            self.rows,
            self.lengths,
            plan.arms,
            counts,
            verified,
            known[:, :deepest],
        )
        drafts = int(verified.sum())
        shape = RoundShape(n, 200.0, drafts, tuple(passes), passes[0] if passes else 0)
        measured = controller.cost.predict(shape)
        timed("times", controller.cost.observe, shape, measured)
        accepted = np.minimum(np.cumprod(is_right, axis=1).sum(axis=1), verified)
        self.lengths = self.lengths + accepted + 1
        for name, microseconds in parts.items():
            self.laps[name].append(microseconds)
        self.laps["round"].append(sum(parts.values()))
        self.laps["depth"].append(drafts / n)


def measure(n: int, rounds: int) -> dict[str, float]:
    """Medians in microseconds by part; ``depth`` is verified drafts a request."""
    world = Rounds(n)
    for _ in range(WARM_UP):
        world.play()
    world.laps.clear()
    for _ in range(rounds):
        world.play()
    return {
        name: round(statistics.median(values) if name == "depth" else _middle(values, rounds), 1)
        for name, values in world.laps.items()
    }


def _middle(values: list[float], rounds: int) -> float:
    """Median over all rounds, of parts that not every round has too."""
    return statistics.median(values + [0.0] * (rounds - len(values)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument(
        "--save", action="store_true", help="write bench/results/host_overhead.json"
    )
    options = parser.parse_args()
    results = {str(n): measure(n, options.rounds) for n in SIZES}
    for n, parts in results.items():
        print(f"  {n:>3s} requests  {parts}", flush=True)
    if options.save:
        path = report.save("host_overhead", {"cap": CAP, "microseconds": results})
        print(path.relative_to(report.ROOT))
    last = results[str(SIZES[-1])]["round"]
    print(
        f"host overhead: {last:.0f} microseconds a round at {SIZES[-1]} requests, "
        f"goal {GOAL_US:.0f}"
    )
    return 0 if last <= GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())
