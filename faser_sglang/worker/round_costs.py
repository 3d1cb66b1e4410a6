"""How long the parts of a round take, measured while rounds run."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from faser_sglang.control.cost import RoundShape
from faser_sglang.control.rounds import MODEL

if TYPE_CHECKING:
    from faser_sglang.control.cost import CostModel
    from faser_sglang.worker.packing import Round


class _Timed(NamedTuple):
    shape: RoundShape
    start: Any
    drafted: Any
    verified: Any
    next_start: Any  # of the following round; what lies before it is no pass


class RoundTimer:
    """Tells a cost model how long rounds took, without waiting for the device.

    A round is timed from its first pass to the first pass of the next one, and left out where a
    prefill or an idle server lies between. On the CPU by the clock; elsewhere by events on the
    stream, read when they have happened.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._is_cpu = torch.device(device).type == "cpu"
        self._device = torch.get_device_module(device)
        self._open: list[Any] = []  # marks of the round that runs
        self._last: tuple[RoundShape, list[Any]] | None = None  # done, its successor not begun
        self._finished: deque[_Timed] = deque()

    def interrupt(self) -> None:
        """A pass that belongs to no round begins."""
        self._last = None

    def start(self) -> None:
        """The round's first pass begins: its plan is made."""
        mark = self._mark()
        if self._last is not None:
            shape, marks = self._last
            self._finished.append(_Timed(shape, *marks, mark))
            self._last = None
        self._open = [mark]

    def drafted(self) -> None:
        """The drafts are there, and it is known which are to be verified."""
        self._open.append(self._mark())

    def verified(self, this_round: Round, first_rows: int) -> None:
        """The round is over; ``first_rows`` were in the drafter's first pass."""
        self._last = shape_of(this_round, first_rows), [*self._open, self._mark()]

    def report(self, cost: CostModel | None) -> None:
        """Hand over the rounds whose times are known by now."""
        while self._finished and self._is_over(self._finished[0].next_start):
            timed = self._finished.popleft()
            marks = timed[1:]
            if cost is not None:
                draft, verify, rest = map(self._ms, marks[:-1], marks[1:])
                cost.observe(timed.shape, (draft, verify, rest))

    def _mark(self) -> Any:
        if self._is_cpu:
            return time.perf_counter()
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def _is_over(self, mark: Any) -> bool:
        return self._is_cpu or mark.query()

    def _ms(self, start: Any, end: Any) -> float:
        return 1e3 * (end - start) if self._is_cpu else start.elapsed_time(end)


def shape_of(this_round: Round, first_rows: int) -> RoundShape:
    """What a round ran, when its drafts are made."""
    counts = this_round.drafted_cpu[this_round.arms_cpu == MODEL]
    passes = tuple(int((counts > step).sum()) for step in range(int(counts.max(initial=0))))
    return RoundShape(
        requests=this_round.size,
        context=float(this_round.lengths_cpu.mean()),
        drafts=int(this_round.depths_cpu.sum()),
        drafting=passes,
        first_rows=first_rows if passes else 0,
    )
