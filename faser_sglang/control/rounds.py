"""What a policy and the worker tell each other about a round of n requests."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from faser_sglang.control.types import BoolArray, FloatArray, IntArray

MODEL, LOOKUP = 0, 1  # arms: where a request's drafts of a round come from
ARMS = 2


class Offer(NamedTuple):
    """What each request can get out of each arm."""

    limits: IntArray  # [ARMS, n] the deepest draft; 0 or less: none
    chances: FloatArray  # [ARMS, n] of every draft, as far as it is known before; 0: unknown
    behind: IntArray  # [n] rows that the model would catch up on first


def offer_of(
    arm: int,
    limits: IntArray,
    chances: FloatArray | None = None,
    behind: IntArray | None = None,
) -> Offer:
    """The offer of a drafter that has only the one arm; arguments are [n]."""
    n = len(limits)
    all_limits, all_chances = np.zeros((ARMS, n), np.int64), np.zeros((ARMS, n))
    all_limits[arm] = limits
    if chances is not None:
        all_chances[arm] = chances
    return Offer(all_limits, all_chances, np.zeros(n, np.int64) if behind is None else behind)


def no_offer(n: int) -> Offer:
    """Nothing drafts."""
    return offer_of(MODEL, np.zeros(n, np.int64))


class RoundPlan(Protocol):
    """What is to be drafted, and how it is decided what else.

    ``depths`` and ``arms`` [n] bound the drafts of each request. Where ``stops`` is set,
    ``goes_on`` is asked between the model's drafts, and where ``trims`` is set, ``trim`` before
    verification; both read the drafter's probabilities on the host.
    """

    depths: IntArray
    arms: IntArray
    stops: bool
    trims: bool

    def goes_on(self, members: IntArray, chances: FloatArray) -> BoolArray:
        """Which [k] of requests ``members``, with ``chances`` [k, so far], draft once more."""
        ...

    def trim(self, chances: FloatArray, counts: IntArray) -> IntArray:
        """Drafts [n] to verify of ``counts`` [n] drafted ones with ``chances`` [n, depth]."""
        ...


class FixedPlan:
    """All is decided beforehand."""

    stops = trims = False

    def __init__(self, depths: IntArray, arms: IntArray) -> None:
        self.depths = depths
        self.arms = arms

    def goes_on(self, members: IntArray, chances: FloatArray) -> BoolArray:
        return np.ones(len(members), np.bool_)

    def trim(self, chances: FloatArray, counts: IntArray) -> IntArray:
        return counts


class Outcome(NamedTuple):
    """What became of each request's last round; zeros where there was none."""

    arms: IntArray  # [n]
    drafted: IntArray  # [n]
    verified: IntArray  # [n] the first ones of the drafted
    accepted: IntArray  # [n] the first ones of the verified
    chances: FloatArray  # [n, cap] the drafter's probabilities; 0 where unknown


class Policy(Protocol):
    """Plans rounds, and learns from what became of them.

    Requests are known by their row of the request pool. ``reset`` starts a new request on a
    row; nothing of the previous one survives.
    """

    def reset(self, rows: IntArray) -> None: ...

    def plan(self, rows: IntArray, lengths: IntArray, offer: Offer) -> RoundPlan:
        """For requests of ``lengths`` [n] tokens; the offer's limits are met."""
        ...

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        """The last round of each of these requests."""
        ...


def first_arm(offer: Offer) -> IntArray:
    """[n] lookup where it offers anything, which costs nothing, else the model."""
    return np.where(offer.limits[LOOKUP] > 0, LOOKUP, MODEL)


def limits_of(offer: Offer, arms: IntArray) -> IntArray:
    """[n] the deepest draft of each request's arm."""
    limits: IntArray = np.maximum(offer.limits[arms, np.arange(len(arms))], 0)
    return limits
