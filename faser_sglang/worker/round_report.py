"""Tells Prometheus and the log what the rounds did, off counters that lie on the host."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from faser_sglang.control.growth import Growth, Key, round_sums
from faser_sglang.control.log_line import log_line
from faser_sglang.worker.exporter import Exporter

if TYPE_CHECKING:
    from faser_sglang.worker.faser_worker import FaserWorker

logger = logging.getLogger(__name__)


class RoundReport:
    """Reports the rounds of ``worker``; without an ``exporter`` to the log alone.

    Nothing here waits for the device.
    """

    def __init__(self, worker: FaserWorker, exporter: Exporter | None) -> None:
        self.worker = worker
        self.exporter = exporter
        self._exported, self._logged = Growth(), Growth()
        self._show(self._state(), {})

    def round_read(self) -> None:
        """The result of a decode pass was read, and requests that ended are accounted for."""
        if self.exporter is not None:
            self.exporter.count(self._exported.take(self._sums()))

    def log(self) -> None:
        """A log interval is over."""
        state, grown = self._state(), self._logged.take(self._sums())
        logger.info(log_line(grown, state))
        self._show(state, grown)

    def _sums(self) -> Iterator[tuple[object, Mapping[Key, float]]]:
        worker = self.worker
        counters, clock, drafter = worker.ledger.counters, worker.clock, worker.drafter
        yield counters, round_sums(counters)
        seconds = {("phase_seconds", phase): s for phase, s in clock.seconds.items()}
        yield clock, {("begun_passes", ""): clock.rounds, **seconds}
        yield drafter, {("draft_faults", ""): drafter.faults}
        if worker.planner is not None and worker.planner.controller is not None:
            cost = worker.planner.controller.cost
            yield cost, {("timed_rounds", ""): cost.rounds}

    def _state(self) -> dict[str, Any]:
        worker = self.worker
        return {
            "mode": worker.mode,
            "drafter": worker.drafter.kind,
            "depth_cap": worker.cap,
            **worker.planner.describe(),
        }

    def _show(self, state: Mapping[str, Any], grown: Mapping[Key, float]) -> None:
        if self.exporter is None:
            return
        gauges: dict[Key, float] = {("depth_cap", ""): state["depth_cap"]}
        rounds = grown.get(("rounds", ""), 0)
        if rounds:
            gauges["accept_length", ""] = grown.get(("emitted_tokens", ""), 0) / rounds
        controller = state["controller"]
        if controller is not None:
            gauges["drafter_passes", ""] = controller["drafter_passes"]
            gauges["row_price", ""] = controller["price_of_a_row"]
            gauges["round_time_error", ""] = controller["round_time_error"]
            for phase, factor in controller["time_over_table"].items():
                gauges["time_over_table", phase] = factor
        self.exporter.show(gauges)
        self.exporter.show_settings(state)
