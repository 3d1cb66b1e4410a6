"""What a round costs: a table measured once, corrected by the rounds that run."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from faser_sglang.control.types import FloatArray, IntArray

DRAFT, VERIFY, HOST = range(3)  # phases of a round
SIZES = 12  # buckets of batch sizes: powers of two
SHAPES = 4  # buckets of drafts a request: none, up to one, up to three, more
_ENDS = np.array([0, 1, 3])
FAST, SLOW = 0.1, 0.02  # weight of a round in the shared factor, and at least in its own
PRIOR_ROUNDS = 4  # for which the table stands
RETURN = 0.01  # a round, of what was not run, to the mean of the phase
MEMORY = 200  # rounds in the mean error
CONTEXT_STEP = 64  # tokens of context that share a curve
MOST_CURVES = 256


class CostTableError(ValueError):
    """A cost table that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class CostTable:
    """Milliseconds, measured on one device with one pair of models.

    Args:
        requests: [B] ascending batch sizes. windows: [R] ascending rows a request, from 1.
        verify: [B, R] a target pass over ``requests`` x ``windows`` rows.
        first: [B] a drafter's first pass of a round, a row a request. step: [B] a further one.
        catch_up: one more row in a first pass.
        host: [B] what a round takes beside its passes.
        context: tokens of context at which all this was measured.
        context_slope: of a target pass, for each request and further token of context.
        origin: device, models, versions and date of the measurement.

    Raises CostTableError for shapes that do not fit, and for numbers that are no times.
    """

    requests: list[int]
    windows: list[int]
    verify: list[list[float]]
    first: list[float]
    step: list[float]
    catch_up: float
    host: list[float]
    context: float = 0.0
    context_slope: float = 0.0
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes, windows = len(self.requests), len(self.windows)
        fits = (
            sizes > 0
            and self.windows[:1] == [1]
            and all(len(row) == windows for row in self.verify)
            and all(len(part) == sizes for part in (self.verify, self.first, self.step, self.host))
            and all(np.all(np.diff(axis) > 0) for axis in (self.requests, self.windows))
        )
        if not fits:
            raise CostTableError("the cost table's rows do not fit its axes; measure it again.")
        times = [*np.ravel(self.verify), *self.first, *self.step, *self.host]
        times += [self.catch_up, self.context, self.context_slope]
        if not np.all(np.isfinite(times)) or min(times) < 0 or np.min(self.verify) <= 0:
            raise CostTableError("the cost table holds what is no time; measure it again.")

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Raises CostTableError where the file is missing or is no cost table."""
        try:
            table = cls(**json.loads(Path(path).read_text()))
            if not isinstance(table.origin, dict):
                raise CostTableError("its origin is no record.")
            return table
        except (OSError, TypeError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise CostTableError(
                f"--faser-cost-table {path} cannot be used ({str(what).rstrip('.')}); "
                "python -m faser_sglang.profile writes such a file."
            ) from error


class RoundShape(NamedTuple):
    """What a round ran, as far as its time depends on it."""

    requests: int
    context: float  # mean length
    drafts: int  # verified, of all requests together
    drafting: tuple[int, ...] = ()  # requests in each pass of the drafter
    first_rows: int = 0  # rows of the drafter's first pass


class CostModel:
    """Predicted times of rounds, for up to ``cap`` drafts a request.

    The table's times are scaled by how rounds compare with it: by a factor for each phase, batch
    size and shape, an average over its rounds, and by one that all share, which follows within
    some ten rounds. So a machine that slows down as a whole changes no choice between shapes.
    """

    def __init__(self, table: CostTable, cap: int) -> None:
        self.table = table
        self.cap = cap
        self.rounds = 0
        self.error = 0.0  # of predicted round times, as a share: a forgetting mean
        self._common = 0.0  # factors are kept as logarithms
        self._own: dict[tuple[int, int, int], float] = {}  # by phase, size, shape
        self._seen: dict[tuple[int, int, int], int] = defaultdict(int)
        self._mean = [0.0, 0.0, 0.0]  # over the rounds of a phase, for shapes not seen yet
        self._curves: dict[tuple[int, int], tuple[FloatArray, IntArray]] = {}
        self._by_size: dict[int, tuple[float, float, float]] = {}

    def verify_ms(self, n: int, context: float) -> FloatArray:
        """[n * cap + 1] a target pass over n requests' bonus tokens and 0, 1, 2, … drafts."""
        curve, shapes = self._table_curve(n, context)
        factors = np.array([self._factor(VERIFY, n, shape) for shape in range(SHAPES)])
        # More rows are never cheaper, whatever the factors of neighbouring shapes say.
        return np.maximum.accumulate(curve * factors[shapes])

    def _verify_one(self, n: int, context: float, drafts: int) -> float:
        """``verify_ms`` at one number of drafts, which is a shape's end, as the curve rises."""
        curve, shapes = self._table_curve(n, context)
        most = 0.0
        for shape in range(int(shapes[drafts]) + 1):
            last = int(min(_last_of(shape, n), drafts))
            most = max(most, float(curve[last]) * self._factor(VERIFY, n, shape))
        return most

    def _table_curve(self, n: int, context: float) -> tuple[FloatArray, IntArray]:
        """The table's times by number of drafts, and the shape of each."""
        key = n, int(context) // CONTEXT_STEP
        if key not in self._curves:
            if len(self._curves) >= MOST_CURVES:
                self._curves.clear()
            drafts = np.arange(n * self.cap + 1)
            self._curves[key] = self._curve(n, drafts, context), _shape(drafts, n)
        return self._curves[key]

    def draft_ms(self, n: int, first_rows: float) -> FloatArray:
        """[cap + 1] drafting 0, 1, 2, … tokens for n requests; the first pass runs so many rows."""
        if n == 0:
            return np.zeros(self.cap + 1)
        first, step = self._passes(n, first_rows)
        factor = self._factor(DRAFT, n)
        return np.array([0.0] + [(first + step * k) * factor for k in range(self.cap)])

    def step_ms(self, n: int) -> float:
        """A further pass of the drafter, over one row of each of n requests."""
        return self._passes(n, n)[1] * self._factor(DRAFT, n)

    def host_ms(self, n: int) -> float:
        """What a round takes beside its passes."""
        return self._of_size(n)[2] * self._factor(HOST, n)

    def predict(self, what: RoundShape) -> tuple[float, float, float]:
        """Milliseconds to draft, to verify, and beside."""
        n, draft = what.requests, 0.0
        if what.drafting:
            draft = self._passes(what.drafting[0], what.first_rows)[0]
            draft += sum(self._passes(each, each)[1] for each in what.drafting[1:])
            draft *= self._factor(DRAFT, what.drafting[0])
        return draft, self._verify_one(n, what.context, what.drafts), self.host_ms(n)

    def observe(self, what: RoundShape, measured: tuple[float, float, float]) -> None:
        """A round took so many milliseconds to draft, to verify, and beside."""
        predicted = self.predict(what)
        self.rounds += 1
        off = abs(sum(predicted) / max(sum(measured), 1e-6) - 1)
        self.error += (min(off, 1.0) - self.error) / min(self.rounds, MEMORY)
        sizes = [what.drafting[0] if what.drafting else 0, what.requests, what.requests]
        shapes = [0, int(_shape(what.drafts, what.requests)), 0]
        for phase in range(3):
            if predicted[phase] > 0:
                ratio = _log_ratio(measured[phase], predicted[phase])
                self._learn((phase, _size(sizes[phase]), shapes[phase]), ratio)
        self._common += FAST * _log_ratio(sum(measured), sum(self.predict(what)))

    def _learn(self, bucket: tuple[int, int, int], ratio: float) -> None:
        phase, size, shape = bucket
        mean = self._mean[phase]
        own = self._own.get(bucket, mean)
        self._seen[bucket] += 1
        # What lies beside the passes is a guess of the table: the first round replaces it.
        prior = 0 if phase == HOST else PRIOR_ROUNDS
        self._own[bucket] = own + max(1 / (self._seen[bucket] + prior), SLOW) * ratio
        self._mean[phase] += max(1 / self.rounds, SLOW) * (self._own[bucket] - mean)
        for other in range(SHAPES):  # what is not run is believed less and less to be different
            if other != shape and (phase, size, other) in self._own:
                self._own[phase, size, other] += RETURN * (mean - self._own[phase, size, other])

    def describe(self) -> dict[str, Any]:
        """How rounds compare with the table, for ``/server_info``."""
        factors = [math.exp(self._common + mean) for mean in self._mean]
        return {
            "rounds_timed": self.rounds,
            "round_time_error": round(self.error, 4),
            "time_over_table": dict(
                zip(("draft", "verify", "host"), [round(f, 3) for f in factors], strict=True)
            ),
        }

    def _factor(self, phase: int, n: int, shape: int = 0) -> float:
        """What the table's time is multiplied by."""
        bucket = phase, _size(n), shape
        return math.exp(self._common + self._own.get(bucket, self._mean[phase]))

    def _passes(self, n: int, first_rows: float) -> tuple[float, float]:
        """A first and a further pass of the drafter, by the table."""
        first, step, _ = self._of_size(n)
        return first + self.table.catch_up * max(first_rows - n, 0), step

    def _of_size(self, n: int) -> tuple[float, float, float]:
        """First and further pass of the drafter and time beside, by the table."""
        if n not in self._by_size:
            table = self.table
            first, step, host = (
                _at(n, table.requests, column) for column in (table.first, table.step, table.host)
            )
            self._by_size[n] = first, step, host
        return self._by_size[n]

    def _curve(self, n: int, drafts: IntArray, context: float) -> FloatArray:
        table = self.table
        by_window = [_at(n, table.requests, column) for column in zip(*table.verify, strict=True)]
        windows = 1 + drafts / n
        curve = _beyond(windows, table.windows, np.maximum.accumulate(by_window))
        further = (context - table.context) * table.context_slope * n
        return np.maximum(curve + further, 0.2 * curve)


def _at(n: float, axis: list[int], values: Any) -> float:
    return float(_beyond(np.array([n]), axis, np.asarray(values, float))[0])


def _beyond(points: FloatArray, axis: list[int], values: FloatArray) -> FloatArray:
    """Linear between what was measured, and on along the last stretch behind it."""
    inside = np.interp(points, axis, values)
    if len(axis) < 2:
        return inside
    slope = max((values[-1] - values[-2]) / (axis[-1] - axis[-2]), 0.0)
    return inside + slope * np.maximum(points - axis[-1], 0)


def _size(n: int) -> int:
    return min(int(n).bit_length(), SIZES - 1)


def _shape(drafts: IntArray | int, n: int) -> IntArray:
    return np.searchsorted(_ENDS * n, drafts)


def _last_of(shape: int, n: int) -> float:
    """The most drafts of a shape."""
    return float(_ENDS[shape]) * n if shape < len(_ENDS) else math.inf


def _log_ratio(measured: float, predicted: float) -> float:
    """Clipped: a pause of the machine says nothing about a table."""
    return min(max(math.log(max(measured, 1e-6) / max(predicted, 1e-6)), -0.7), 0.7)
