"""The policy of ``--faser-depth auto``: what each round drafts, by expected tokens and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from faser_sglang.control.acceptance import Acceptance
from faser_sglang.control.adaptive import AdaptivePlan
from faser_sglang.control.calibration import VIEWS
from faser_sglang.control.cost import CostModel, CostTable
from faser_sglang.control.depth import Plan, plans, row_price
from faser_sglang.control.rounds import (
    LOOKUP,
    MODEL,
    FixedPlan,
    Offer,
    Outcome,
    RoundPlan,
    first_arm,
    limits_of,
)
from faser_sglang.control.types import BoolArray, FloatArray, IntArray

MARGIN, PATIENCE = 1.02, 3  # another depth must be so much better, for so many rounds
CLEAR = 1.15  # … or so much better at once
PROBE_FIRST, PROBE_LAST = 32, 256  # rounds without drafts between two probes
PROBE_REQUESTS = 4
RECENT = 0.05  # weight of a round in what a round emits
USES = 4  # rounds that a search serves
SPARE = 0.7  # of a row's price: drafts of known worth that the trim may still take


@dataclass(frozen=True)
class Settings:
    """What the controller may decide.

    ``depth`` fixes the depth of every request; None lets the controller choose. ``stops`` ends
    chains early, ``trims`` withholds drafts from verification, both by the drafter's confidence.
    ``token_limit_ms`` bounds a round's predicted time, and so what a request waits for a token.
    """

    depth: int | None = None
    stops: bool = True
    trims: bool = True
    token_limit_ms: float = np.inf


@dataclass
class _Search:
    """What was found best for a batch."""

    chosen: Plan
    price: float  # tokens that a row must bring
    verify_ms: FloatArray
    n: int
    asking: int  # requests that the model was to draft for
    settings: Settings
    uses: int = 1

    def serves(self, n: int, asking: int, settings: Settings) -> bool:
        """Whether it holds for such a batch still.

        A batch where few look up changes with every match; one of a few requests is searched anew.
        """
        return (
            self.uses < USES
            and self.n == n
            and self.settings is settings
            and (asking == self.asking == n or 8 * abs(asking - self.asking) < n)
        )


class Controller:
    """Plans rounds of up to ``cap`` drafts a request on ``pool_rows`` rows.

    Each round takes the number of drafter passes with the most expected tokens a millisecond.
    Where nothing is worth drafting, a few requests still draft one token every now and then, less
    and less often, else the estimates could never recover.
    """

    def __init__(
        self, cap: int, pool_rows: int, table: CostTable, settings: Settings | None = None
    ) -> None:
        self.cap = cap
        self.settings = settings or Settings()
        self.acceptance = Acceptance(cap, pool_rows)
        self.cost = CostModel(table, cap)
        self.depth = 0  # passes of the drafter, as of the last round
        self._waiting = 0  # rounds for which another depth has been better
        self._idle = 0  # rounds without drafts
        self._probe_every = PROBE_FIRST
        self._turn = 0  # which requests the next probe takes
        self._search: _Search | None = None
        self._emitted = 2.0  # tokens a request and round with drafts, lately
        self._price = 0.1  # tokens that a row had to bring in the last round
        self._model_price = 0.1  # … and the model's drafts of one request

    def reset(self, rows: IntArray) -> None:
        self.acceptance.reset(rows)

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        if outcome.verified.any():
            self._emitted += RECENT * (float(outcome.accepted.mean()) + 1.0 - self._emitted)
        if outcome.drafted.any():
            self.acceptance.observe(rows, outcome)

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        n = len(rows)
        if not (offer.limits > 0).any():
            return FixedPlan(np.zeros(n, np.int64), np.zeros(n, np.int64))
        arms, expected, survival = self._survival(rows, offer)
        limits = limits_of(offer, arms)
        drafts_itself = (arms == MODEL) & (limits > 0)
        found = self._searched(expected, survival, drafts_itself, lengths, offer.behind)
        depths = self._depths(found, expected, survival, drafts_itself, limits)
        if not depths.any():
            return self._rest_or_probe(offer)
        self._idle = 0
        return AdaptivePlan(
            depths, arms, expected, found.chosen.rate, found.price, found.verify_ms, self
        )

    def describe(self) -> dict[str, Any]:
        """Estimates and predictions in force, for ``/server_info``."""
        names = ("model", "lookup")
        by_position = self.acceptance.by_position()
        return {
            "drafter_passes": self.depth,
            "acceptance_by_position": {
                name: [round(float(rate), 3) for rate in by_position[arm]]
                for arm, name in enumerate(names)
            },
            "price_of_a_row": round(self._price, 4),
            **self.cost.describe(),
        }

    # -- the parts of a plan --------------------------------------------------------------

    def _survival(self, rows: IntArray, offer: Offer) -> tuple[IntArray, FloatArray, FloatArray]:
        """Arms [n]; acceptance of each draft behind right ones, and survival: [n, cap] each.

        Lookup where it is offered, but where the model's drafts are worth their time more.
        """
        looked_up = np.flatnonzero(offer.limits[LOOKUP] > 0)
        arms = np.zeros(len(rows), np.int64)  # MODEL
        expected = self._expected(rows, offer.limits[MODEL], offer.chances[MODEL], MODEL)
        if not looked_up.size:
            return arms, expected, np.cumprod(expected, axis=1)
        limits, chances = offer.limits[LOOKUP, looked_up], offer.chances[LOOKUP, looked_up]
        other = self._expected(rows[looked_up], limits, chances, LOOKUP)
        survival = np.cumprod(expected, axis=1)
        other_survival = np.cumprod(other, axis=1)
        if self.settings.depth is None and (offer.limits[MODEL] > 0).any():
            gains = (
                np.maximum(part - self._price, 0.0).sum(axis=1)
                for part in (other_survival, survival[looked_up])
            )
            is_taken = next(gains) >= next(gains) - self._model_price
            looked_up = looked_up[is_taken]
            other, other_survival = other[is_taken], other_survival[is_taken]
        arms[looked_up] = LOOKUP
        expected[looked_up], survival[looked_up] = other, other_survival
        return arms, expected, survival

    def _expected(
        self, rows: IntArray, limits: IntArray, chances: FloatArray, arm: int
    ) -> FloatArray:
        """[n, cap] acceptance of each draft of an arm behind right ones, 0 beyond ``limits``."""
        expected = self.acceptance.expected(rows, arm)
        if chances.any():
            expected = self.acceptance.given(expected, chances[:, None], arm)
        if (limits < self.cap).any():
            expected *= np.arange(self.cap) < limits[:, None]
        return expected

    def _searched(
        self,
        expected: FloatArray,
        survival: FloatArray,
        drafts_itself: BoolArray,
        lengths: IntArray,
        behind: IntArray,
    ) -> _Search:
        """The best round for the batch; that of a few rounds ago where the batch is much the same.

        What is best changes slowly, and to find out takes longer than all else here.
        """
        n, asking = len(lengths), int(drafts_itself.sum())
        last = self._search
        if last is not None and last.serves(n, asking, self.settings):
            last.uses += 1
            return last
        # What a pause has left behind is not this round's to pay: it is caught up once, whenever
        # the drafter is asked next, and a round like the last ones leaves this much.
        rows_behind = np.minimum(behind[drafts_itself], self._emitted)
        draft_ms = self.cost.draft_ms(asking, asking + float(rows_behind.sum()))
        verify_ms = self.cost.verify_ms(n, float(lengths.mean()))
        views = self._views(expected, survival, drafts_itself)
        chosen = self._choose(
            plans(views, ~drafts_itself, draft_ms, verify_ms, self.cost.host_ms(n))
        )
        price = row_price(chosen.rate, chosen.drafts, n, verify_ms)
        self._price = price
        if asking:
            passes = max(chosen.depth, 1)
            self._model_price = chosen.rate * float(draft_ms[passes]) / asking
        self._search = _Search(chosen, price, verify_ms, n, asking, self.settings)
        return self._search

    def _views(
        self, expected: FloatArray, survival: FloatArray, drafts_itself: BoolArray
    ) -> FloatArray:
        """[n, cap, views] survival as the trim may see it, when the confidence is known."""
        if not self.settings.trims or not drafts_itself.any():
            return survival[:, :, None]
        views = np.repeat(survival[:, :, None], VIEWS, axis=2)
        views[drafts_itself] = _before(survival[drafts_itself])[
            :, :, None
        ] * self.acceptance.calibration.views(expected[drafts_itself], MODEL)
        return views

    def _choose(self, found: list[Plan]) -> Plan:
        """The plan of the best depth; but the depth in force as long as it is nearly as good."""
        if self.settings.depth is not None:
            self.depth = min(self.settings.depth, len(found) - 1)
            return found[self.depth]
        within = [plan for plan in found if plan.ms <= self.settings.token_limit_ms]
        within = within or [min(found, key=lambda plan: plan.ms)]
        best = max(within, key=lambda plan: plan.rate)
        current = found[self.depth]
        ahead = best.rate / current.rate
        self._waiting = self._waiting + 1 if ahead > MARGIN else 0
        if ahead > CLEAR or self._waiting >= PATIENCE or current not in within:
            if best.depth > 0 and self.depth == 0:
                self._probe_every = PROBE_FIRST
            self.depth, self._waiting = best.depth, 0
            return best
        return current

    def _depths(
        self,
        found: _Search,
        expected: FloatArray,
        survival: FloatArray,
        drafts_itself: BoolArray,
        limits: IntArray,
    ) -> IntArray:
        """[n] up to the first draft that cannot turn out to be worth its row."""
        if self.settings.depth is not None:
            return np.minimum(limits, self.settings.depth)
        if found.chosen.drafts == 0:
            return np.zeros(len(limits), np.int64)
        most, least = survival, found.price
        if self.settings.trims:
            best = self.acceptance.calibration.most(expected, MODEL)
            most = np.where(drafts_itself[:, None], _before(survival) * best, survival / SPARE)
        is_worth = np.zeros((len(limits), self.cap + 1), np.bool_)
        np.greater(most, least, out=is_worth[:, :-1])
        depths = is_worth.argmin(axis=1)  # the first that is not
        most_passes = np.where(drafts_itself, found.chosen.depth, self.cap)
        return np.minimum(np.minimum(depths, most_passes), limits)

    def _rest_or_probe(self, offer: Offer) -> RoundPlan:
        """No drafts; every now and then one draft of a few requests."""
        arms = first_arm(offer)
        depths = np.zeros(len(arms), np.int64)
        self._idle += 1
        if self._idle >= self._probe_every and self.settings.depth is None:
            self._idle = 0
            self._probe_every = min(2 * self._probe_every, PROBE_LAST)
            able = np.flatnonzero(limits_of(offer, arms))
            taken = np.roll(able, -self._turn)[:PROBE_REQUESTS]
            self._turn += PROBE_REQUESTS
            depths[taken] = 1
        return FixedPlan(depths, arms)


def _before(survival: FloatArray) -> FloatArray:
    """[n, cap] survival of each draft's predecessor."""
    before = np.ones_like(survival)
    before[:, 1:] = survival[:, :-1]
    return before
