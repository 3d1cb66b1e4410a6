"""What rounds cost on this machine with these models, measured through the worker itself."""

from __future__ import annotations

import logging
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from faser_sglang.control.cost import CostTable, RoundShape
from faser_sglang.control.policy import Unlearning
from faser_sglang.control.rounds import LOOKUP, MODEL, FixedPlan, Offer, RoundPlan
from faser_sglang.control.types import IntArray
from faser_sglang.worker.ledger import Ledger
from faser_sglang.worker.made_up import MadeUpRequests
from faser_sglang.worker.origin import check_origin, made, origin_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from faser_sglang.worker.faser_worker import FaserWorker

logger = logging.getLogger(__name__)

PROMPT, LONG_PROMPT = 48, 320  # tokens
GROWTH = 96  # tokens that a request may grow by before a new one takes its place
LONG_REQUESTS = 2
GAP = 8  # rounds without drafts, for what catching up costs


@dataclass(frozen=True)
class Effort:
    """How much is measured: in brief at start-up, else as ``faser_sglang.profile`` asks.

    ``repeats`` rounds of each shape, on batches of up to ``max_batch`` requests; after
    ``budget_s`` only what a table needs. ``output`` is where the table is to be written.
    """

    repeats: int = 3
    max_batch: int | None = None
    budget_s: float = 10.0
    output: str | None = None


def cost_table(worker: FaserWorker) -> CostTable:
    """The table that ``--faser-cost-table`` names, or a measurement; rank 0's for all."""
    origin = origin_of(worker)
    if worker.config.cost_table is not None:
        table = CostTable.load(worker.config.cost_table)
        check_origin(table.origin, origin, worker.config.cost_table)
        return table
    effort = Effort(**(worker.config.profile or {}))
    start = time.perf_counter()
    table = replace(Profile(worker, effort).measure(), origin=origin | made())
    table = worker.agreement.value(table)
    if effort.output is not None:
        if worker.agreement.is_first:
            table.save(effort.output)
        return table
    logger.info(
        "FASER measured what rounds cost, in %.1f s (batches of %s); for --faser-cost-table, "
        "python -m faser_sglang.profile does it at leisure.",
        time.perf_counter() - start,
        ", ".join(map(str, table.requests)),
    )
    return table


class Scripted(Unlearning):
    """A policy that is told the depth of the next round."""

    def __init__(self, arm: int) -> None:
        self.arm = arm
        self.depth = 0
        self.cost = self  # the timer reports to it
        self.rounds: list[tuple[RoundShape, tuple[float, float, float]]] = []

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        return FixedPlan(np.full_like(rows, self.depth), np.full_like(rows, self.arm))

    def observe(self, *timed: Any) -> None:
        """A round's outcome, which says nothing here; or what the timer measured."""
        if isinstance(timed[0], RoundShape):
            self.rounds.append(timed)


class Profile:
    """Runs rounds of made-up requests, of growing batch size, and times them.

    The requests grow up to ``longest`` tokens, then new ones take their place.
    """

    def __init__(self, worker: FaserWorker, effort: Effort | None = None) -> None:
        self.worker = worker
        self.effort = effort or Effort()
        self.policy = Scripted(MODEL if worker.config.has_model else LOOKUP)
        cap = worker.cap
        at_leisure = self.effort.output is not None
        self.depths = list(range(cap + 1)) if at_leisure else sorted({*range(4), 5, cap})
        self.depths = [depth for depth in self.depths if depth <= cap]
        self.allocator = worker.token_to_kv_pool_allocator
        self.window = 4 * (cap + 1) + self.allocator.page_size  # what a round reserves, at most
        in_pool = self.allocator.available_size() - self.window
        context = min(worker.context_len, worker.drafter.context_len)
        room = min(context - (cap + 2), in_pool)
        self.gap_growth = GAP + 2 + cap + 1  # of a request while catching up is measured
        if room <= self.gap_growth:
            raise ValueError(
                f"a context of {context} tokens in a KV pool of "
                f"{self.allocator.available_size()} is too short to measure what rounds cost; give "
                "a number to --faser-depth."
            )
        self.prompt = min(PROMPT, max(room // 2, 1), room - self.gap_growth)
        self.longest = min(self.prompt + GROWTH, room)
        self.requests = MadeUpRequests(worker)
        self.bar = tqdm(
            total=len(self._sizes()) * (self.effort.repeats + 1) + 1,
            desc="FASER measures rounds",
            disable=not (at_leisure and worker.agreement.is_first),
        )

    def measure(self) -> CostTable:
        worker, free = self.worker, self.allocator.available_size()
        planner = worker.planner
        usual, planner.policy = planner.policy, self.policy
        try:
            short = self._sweep()
            slope = self._context_slope(short)
        finally:
            planner.policy = usual
            worker.ledger = Ledger()
            worker.clear_cache_pool()
            planner.timer.interrupt()
            self.bar.close()
        if self.allocator.available_size() != free:
            raise RuntimeError(
                f"the profile kept {free - self.allocator.available_size()} slots of the KV pool; "
                "this is a defect of FASER, please report it"
            )
        return make_table(short, self.depths, slope)

    def _sweep(self) -> list[tuple[RoundShape, tuple[float, float, float]]]:
        over = time.perf_counter() + self.effort.budget_s
        batch, lasts = None, 0.0  # lasts: seconds of a batch's rounds of each depth

        def has_time(seconds: float) -> bool:
            return bool(self.worker.agreement.value(time.perf_counter() + seconds < over))

        for size in self._sizes():
            if batch is not None:
                if not has_time(3 * lasts):  # larger by half or more, and it catches up too
                    break
                self.requests.release(batch)
            batch = self.requests.begin(size, self.prompt)
            for repeat in range(self.effort.repeats):
                if repeat and not has_time(lasts):
                    break
                start = time.perf_counter()
                for depth in self.depths:
                    batch = self._round(batch, depth)
                lasts = time.perf_counter() - start
                self.bar.update()
            batch = self._catch_up(batch)
            self.bar.update()
        self.requests.release(batch)
        return self.policy.rounds

    def _catch_up(self, batch: ScheduleBatch) -> ScheduleBatch:
        """A drafting round behind ``GAP`` rounds without."""
        batch = self._renew(batch, self.gap_growth)
        # The rounds before it grow requests by a token each, so none of them is replaced here.
        for depth in [0] * GAP + [1, 0]:  # the last, so that the one before is reported
            batch = self._round(batch, depth)
        return batch

    def _sizes(self) -> list[int]:
        """1, 2, 4, … requests, as many as the server runs and the pool holds."""
        most = min(
            self.worker.req_to_token_pool.available_size(),
            self.allocator.available_size() // (self.longest + self.window),
            self.effort.max_batch or sys.maxsize,
        )
        powers = [1 << power for power in range(most.bit_length())]
        return sorted({*powers, max(most, 1)})

    def _context_slope(self, short: list[tuple[RoundShape, tuple[float, float, float]]]) -> float:
        """Milliseconds of a pass for each request and further token of context."""
        context = min(self.worker.context_len, self.worker.drafter.context_len)
        room = min(self.allocator.available_size() // LONG_REQUESTS, context)
        rounds = 2 * self.effort.repeats + 1
        tokens = min(LONG_PROMPT, room - self.window - rounds)
        usual = [r for r in short if r[0].requests == LONG_REQUESTS and r[0].drafts == 0]
        if tokens < 2 * self.longest or not usual:
            return 0.0
        self.policy.rounds = []
        batch = self.requests.begin(LONG_REQUESTS, tokens)
        self.longest = tokens + rounds + self.worker.cap + 1
        for _ in range(rounds):
            batch = self._round(batch, 0)
        self.requests.release(batch)
        self.bar.update()
        long = self.policy.rounds[1:]
        further = np.median([r[0].context for r in long]) - np.median([r[0].context for r in usual])
        slower = np.median([r[1][1] for r in long]) - np.median([r[1][1] for r in usual])
        return max(float(slower / further / LONG_REQUESTS), 0.0)

    def _renew(self, batch: ScheduleBatch, growth: int) -> ScheduleBatch:
        """``batch``, or new requests in its place where it has no room to grow by so much."""
        if int(batch.seq_lens_cpu.max()) + growth <= self.longest:
            return batch
        size = batch.batch_size()
        self.policy.depth = 0
        self.requests.run(batch)  # so that the round before is timed
        self.requests.release(batch)
        return self.requests.begin(size, self.prompt)

    def _round(self, batch: ScheduleBatch, depth: int) -> ScheduleBatch:
        """One decode round of ``depth`` drafts for every request."""
        batch = self._renew(batch, self.worker.cap + 1)
        self.policy.depth = depth
        self.requests.run(batch)
        return batch


def make_table(
    rounds: list[tuple[RoundShape, tuple[float, float, float]]], depths: list[int], slope: float
) -> CostTable:
    """Medians of the rounds that were timed; of ``depths``, those that every batch reached.

    What a drafter's first pass caught up on is taken off its time, by what a row costs there.
    """
    by_shape: dict[tuple[int, int], list[tuple[RoundShape, tuple[float, float, float]]]]
    by_shape, caught_up = defaultdict(list), []
    for shape, times in rounds:
        if shape.first_rows > GAP * shape.requests:
            caught_up.append((shape, times))
        else:
            by_shape[shape.requests, shape.drafts // shape.requests].append((shape, times))
    sizes = sorted({size for size, _ in by_shape})
    depths = [depth for depth in depths if all((size, depth) in by_shape for size in sizes)]
    rows = {key: np.median([s.first_rows for s, _ in timed]) for key, timed in by_shape.items()}
    draft, verify, rest = (
        {key: float(np.median([t[phase] for _, t in timed])) for key, timed in by_shape.items()}
        for phase in range(3)
    )
    slopes = [
        (times[0] - draft[shape.requests, 1]) / (shape.first_rows - rows[shape.requests, 1])
        for shape, times in caught_up
        if (shape.requests, 1) in by_shape
    ]
    catch_up = max(float(np.median(slopes or [0.0])), 0.0)
    for size, depth in draft:
        draft[size, depth] -= catch_up * max(rows[size, depth] - size, 0)
    deeper = [depth for depth in depths if depth > 1]
    step = {
        size: np.median([(draft[size, d] - draft[size, 1]) / (d - 1) for d in deeper] or [0.0])
        for size in sizes
    }
    return CostTable(
        requests=sizes,
        windows=[depth + 1 for depth in depths],
        verify=[[verify[size, depth] for depth in depths] for size in sizes],
        first=[max(draft.get((size, 1), 0.0), 0.0) for size in sizes],
        step=[max(float(step[size]), 0.0) for size in sizes],
        catch_up=catch_up,
        host=[float(np.median([rest[size, depth] for depth in depths])) for size in sizes],
        context=float(np.median([shape.context for shape, _ in rounds])),
        context_slope=slope,
    )
