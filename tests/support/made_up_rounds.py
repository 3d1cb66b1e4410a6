"""A made-up drafter of known acceptance and confidence, for tests of the controller."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.cost import CostTable
from faser_sglang.control.rounds import ARMS, LOOKUP, MODEL, Offer, Outcome


def roofline(
    *, fixed: float = 20.0, row: float = 0.5, step: float = 0.7, free_rows: int = 8
) -> CostTable:
    """A target pass takes ``fixed`` ms up to ``free_rows`` rows, then ``row`` for each more."""
    sizes, windows = [1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 3, 5, 9]

    def verify(rows):
        return fixed + row * max(rows - free_rows, 0) + 1e-3 * rows

    return CostTable(
        requests=sizes,
        windows=windows,
        verify=[[verify(n * w) for w in windows] for n in sizes],
        first=[step] * len(sizes),
        step=[step] * len(sizes),
        catch_up=0.0,
        host=[1.0] * len(sizes),
    )


def offer_to(n: int, cap: int, *, lookup: np.ndarray | None = None, **parts) -> Offer:
    """The model offers ``cap`` drafts to each; lookup to those where ``lookup`` [n] is a chance."""
    limits, chances = np.zeros((ARMS, n), np.int64), np.zeros((ARMS, n))
    limits[MODEL] = parts.get("limits", cap)
    if lookup is not None:
        limits[LOOKUP] = np.where(lookup > 0, cap, 0)
        chances[LOOKUP] = lookup
    return Offer(limits, chances, parts.get("behind", np.zeros(n, np.int64)))


class MadeUpDrafter:
    """Drafts that are right with a chance of their own, which the drafter knows more or less.

    ``rates`` [n] is the mean acceptance of each request. ``spread`` is how much a draft's chance
    differs from it, in log odds; ``bias`` how much too sure of itself the drafter is.
    """

    def __init__(self, rates, cap, *, seed=0, spread=1.0, bias=0.0):
        self.rates, self.cap = np.asarray(rates, float), cap
        self.spread, self.bias = spread, bias
        self.draw = np.random.default_rng(seed)

    def drafts(self):
        """Confidence and verdicts [n, cap] of a round."""
        shape = len(self.rates), self.cap
        odds = np.log(self.rates / (1 - self.rates))[:, None]
        odds = odds + self.spread * self.draw.standard_normal(shape)
        is_right = self.draw.random(shape) < 1 / (1 + np.exp(-odds))
        return 1 / (1 + np.exp(-(odds + self.bias))), is_right

    def outcome(self, drafted, verified=None, arms=None):
        """A round in which ``drafted`` [n] were drafted and ``verified`` (None: all) verified."""
        n = len(self.rates)
        drafted = np.broadcast_to(np.asarray(drafted, np.int64), n).copy()
        chances, is_right = self.drafts()
        if callable(verified):
            verified = verified(chances, drafted)
        verified = drafted if verified is None else np.minimum(verified, drafted)
        chances = np.where(np.arange(self.cap) < drafted[:, None], chances, 0.0)
        accepted = np.minimum(np.cumprod(is_right, axis=1).sum(axis=1), verified)
        arms = np.zeros(n, np.int64) if arms is None else np.asarray(arms, np.int64)
        return Outcome(arms, drafted, verified, accepted, chances)


def play(controller, drafter, offer, lengths, rounds):
    """Rounds of a controller with a drafter; the depths verified [rounds, n]."""
    n = len(drafter.rates)
    rows = np.arange(n)
    found = []
    for _ in range(rounds):
        plan = controller.plan(rows, lengths, offer)
        chances, is_right = drafter.drafts()
        drafted = plan.depths.copy()
        going = drafted > 0
        for so_far in range(1, drafter.cap):
            going &= plan.depths > so_far
            if plan.stops and going.any():
                members = np.flatnonzero(going)
                going[members] = plan.goes_on(members, chances[members, :so_far])
            drafted[~going & (drafted > so_far)] = so_far
        deepest = int(drafted.max(initial=0))
        verified = drafted
        if plan.trims and deepest:
            verified = plan.trim(chances[:, :deepest], drafted)
        known = np.where(np.arange(drafter.cap) < drafted[:, None], chances, 0.0)
        accepted = np.minimum(np.cumprod(is_right, axis=1).sum(axis=1), verified)
        controller.observe(rows, Outcome(plan.arms, drafted, verified, accepted, known))
        lengths = lengths + accepted + 1
        found.append(verified)
    return np.array(found)
