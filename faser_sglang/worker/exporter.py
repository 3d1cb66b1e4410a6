"""FASER's metrics for Prometheus, with the names and labels of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from faser_sglang.control.growth import SUMS, Key

PREFIX = "sglang:faser_"
SETTINGS = ("mode", "drafter", "depth", "stop", "trim")
GAUGES: dict[str, tuple[str, str]] = {  # what they say, and the name of their label
    "accept_length": ("Emitted tokens a decode round, in the last log interval.", ""),
    "depth_cap": ("The largest depth.", ""),
    "drafter_passes": ("Passes of the drafter that the controller found best.", ""),
    "row_price": ("Tokens that a verified row must bring to be worth its time.", ""),
    "round_time_error": ("Mean error of predicted round times, as a share.", ""),
    "time_over_table": ("Times of rounds over those of the cost table.", "phase"),
}


class Exporter:
    """Counters and gauges beside SGLang's own.

    Args:
        collector: SGLang's SchedulerMetricsCollector; it has the labels, and may bring classes
            of its own in place of Prometheus'.
        cap: the largest depth, up to which all series exist from the start.
    """

    def __init__(self, collector: Any, cap: int) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it makes processes; the import reads it.
        from prometheus_client import Counter, Gauge

        self._labels = dict(collector.labels)
        make_counter = collector._counter_cls or Counter
        make_gauge = collector._gauge_cls or Gauge
        self._counters = {
            name: make_counter(
                name=f"{PREFIX}{name}_total",
                documentation=text,
                labelnames=self._names(label),
            )
            for name, (text, label) in SUMS.items()
        }
        self._gauges = {
            name: make_gauge(
                name=PREFIX + name,
                documentation=text,
                labelnames=self._names(label),
                multiprocess_mode="mostrecent",
            )
            for name, (text, label) in GAUGES.items()
        }
        self._info = make_gauge(
            name=f"{PREFIX}info",
            documentation="1 for the settings in force, 0 for earlier ones.",
            labelnames=[*self._labels, *SETTINGS],
            multiprocess_mode="mostrecent",
        )
        self._in_force: dict[str, str] | None = None
        self._children: dict[Key, Any] = {}
        for key in _known_keys(cap):
            self._counter(key)

    def count(self, grown: Mapping[Key, float]) -> None:
        """Add what the sums grew by."""
        for key, value in grown.items():
            self._counter(key).inc(value)

    def show(self, values: Mapping[Key, float]) -> None:
        """Set gauges."""
        for (name, label), value in values.items():
            self._child(self._gauges[name], GAUGES[name][1], label).set(value)

    def show_settings(self, settings: Mapping[str, str]) -> None:
        """Of ``SETTINGS``, as they are now."""
        now = {name: str(settings[name]) for name in SETTINGS}
        if self._in_force not in (None, now):
            self._info.labels(**self._labels, **self._in_force).set(0)
        self._in_force = now
        self._info.labels(**self._labels, **now).set(1)

    def _names(self, label: str) -> list[str]:
        return [*self._labels, *([label] if label else [])]

    def _counter(self, key: Key) -> Any:
        if key not in self._children:
            name, label = key
            self._children[key] = self._child(self._counters[name], SUMS[name][1], label)
        return self._children[key]

    def _child(self, metric: Any, label: str, value: str) -> Any:
        return metric.labels(**self._labels, **({label: value} if label else {}))


def _known_keys(cap: int) -> Iterable[Key]:
    """Every key that is sure to come, so that its series starts at zero."""
    values = {
        "": [""],
        "depth": [str(depth) for depth in range(cap + 1)],
        "position": [str(position) for position in range(1, cap + 1)],
        "phase": ["plan", "draft", "verify", "commit"],
    }
    return [(name, value) for name, (_, label) in SUMS.items() for value in values[label]]
