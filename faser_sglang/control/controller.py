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
    ARMS,
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
        self._price = 0.1  # tokens that a row had to bring in the last round
        self._model_price = 0.1  # … and the model's drafts of one request

    def reset(self, rows: IntArray) -> None:
        self.acceptance.reset(rows)

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        if outcome.drafted.any():
            self.acceptance.observe(rows, outcome)

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        n = len(rows)
        if not (offer.limits > 0).any():
            return FixedPlan(np.zeros(n, np.int64), np.zeros(n, np.int64))
        expected, survival = self._survival(rows, offer)
        arms = self._arms(offer, survival)
        every = np.arange(n)
        expected, survival = expected[arms, every], survival[arms, every]
        limits = limits_of(offer, arms)
        drafts_itself = (arms == MODEL) & (limits > 0)
        draft_ms = self._draft_ms(drafts_itself, offer.behind)
        verify_ms = self.cost.verify_ms(n, float(lengths.mean()))
        views = self._views(expected, survival, drafts_itself)
        found = plans(views, arms == LOOKUP, draft_ms, verify_ms, self.cost.host_ms(n))
        chosen = self._choose(found)
        price = row_price(chosen.rate, chosen.drafts, n, verify_ms)
        self._remember(chosen, price, draft_ms, int(drafts_itself.sum()))
        depths = self._depths(chosen, price, survival, views, drafts_itself, limits)
        if not depths.any():
            return self._rest_or_probe(offer)
        self._idle = 0
        return AdaptivePlan(depths, arms, expected, chosen.rate, price, verify_ms, self)

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

    def _survival(self, rows: IntArray, offer: Offer) -> tuple[FloatArray, FloatArray]:
        """Acceptance of each draft behind right ones, and survival: [ARMS, n, cap] each."""
        places = np.arange(self.cap)
        expected = np.zeros((ARMS, len(rows), self.cap))
        for arm in range(ARMS):
            able = np.flatnonzero(offer.limits[arm] > 0)
            if able.size:
                own = self.acceptance.expected(rows[able], arm)
                chances = offer.chances[arm, able]
                if chances.any():
                    known = np.broadcast_to(chances[:, None], own.shape)
                    own = self.acceptance.given(own, known, arm)
                expected[arm, able] = own
        expected *= places < offer.limits[:, :, None]
        return expected, np.cumprod(expected, axis=2)

    def _arms(self, offer: Offer, survival: FloatArray) -> IntArray:
        """Lookup where it is offered, but where the model's drafts are worth their time more."""
        if self.settings.depth is not None or not (offer.limits > 0).any(axis=1).all():
            return first_arm(offer)
        gains = np.maximum(survival - self._price, 0.0).sum(axis=2)
        return np.where(
            (offer.limits[LOOKUP] > 0) & (gains[LOOKUP] >= gains[MODEL] - self._model_price),
            LOOKUP,
            MODEL,
        )

    def _draft_ms(self, drafts_itself: BoolArray, behind: IntArray) -> FloatArray:
        asking = int(drafts_itself.sum())
        return self.cost.draft_ms(asking, asking + float(behind[drafts_itself].sum()))

    def _views(
        self, expected: FloatArray, survival: FloatArray, drafts_itself: BoolArray
    ) -> FloatArray:
        """[n, cap, views] survival as the trim may see it, when the confidence is known."""
        if not self.settings.trims or not drafts_itself.any():
            return survival[:, :, None]
        before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
        views = np.repeat(survival[:, :, None], VIEWS, axis=2)
        views[drafts_itself] = before[drafts_itself][
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

    def _remember(self, chosen: Plan, price: float, draft_ms: FloatArray, asking: int) -> None:
        self._price = price
        if asking:
            passes = max(chosen.depth, 1)
            self._model_price = chosen.rate * float(draft_ms[passes]) / asking

    def _depths(
        self,
        chosen: Plan,
        price: float,
        survival: FloatArray,
        views: FloatArray,
        drafts_itself: BoolArray,
        limits: IntArray,
    ) -> IntArray:
        if self.settings.depth is not None:
            return np.minimum(limits, self.settings.depth)
        if chosen.drafts == 0:
            return np.zeros(len(limits), np.int64)
        spare = SPARE if self.settings.trims else 1.0
        worth = np.where(
            drafts_itself[:, None], views.max(axis=2) > price, survival > spare * price
        )
        # Up to the first that is not worth it: what a trim takes is closed towards the front.
        depths = np.cumprod(worth, axis=1).sum(axis=1)
        depths = np.where(drafts_itself, np.minimum(depths, chosen.depth), depths)
        return np.minimum(depths, limits)

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
