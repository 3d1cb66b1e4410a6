"""A plan that goes on deciding while its round runs, by the drafter's confidence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from faser_sglang.control.depth import trim, wants_more
from faser_sglang.control.types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from faser_sglang.control.controller import Controller


class AdaptivePlan:
    """The controller's plan of one round: bounds first, then stop and trim.

    Args:
        depths, arms: [n] the bounds. expected: [n, cap] acceptance of each draft behind right
            ones, before the confidence is known. rate: tokens a millisecond of the round.
            price: tokens that a row must bring. verify_ms: as in ``depth``.
    """

    def __init__(
        self,
        depths: IntArray,
        arms: IntArray,
        expected: FloatArray,
        rate: float,
        price: float,
        verify_ms: FloatArray,
        controller: Controller,
    ) -> None:
        self.depths = depths
        self.arms = arms
        self.stops = controller.settings.stops
        self.trims = controller.settings.trims
        self._expected = expected
        self._rate = rate
        self._price = price
        self._verify_ms = verify_ms
        self._acceptance = controller.acceptance
        self._cost = controller.cost

    def goes_on(self, members: IntArray, chances: FloatArray) -> BoolArray:
        drafted, deepest = chances.shape[1], int(self.depths[members].max(initial=0))
        expected, arms = self._expected[members], self.arms[members]
        so_far = self._acceptance.given(expected[:, :drafted], chances, arms).prod(axis=1)
        further = so_far[:, None] * np.cumprod(expected[:, drafted:deepest], axis=1)
        further *= np.arange(drafted, deepest) < self.depths[members][:, None]
        step_ms = np.full(further.shape[1], self._cost.step_ms(len(members)))
        return wants_more(further, self._rate, self._price, step_ms)

    def trim(self, chances: FloatArray, counts: IntArray) -> IntArray:
        depth = chances.shape[1]
        believed = self._acceptance.given(self._expected[:, :depth], chances, self.arms)
        believed *= np.arange(depth) < counts[:, None]
        return trim(np.cumprod(believed, axis=1), self._rate, self._verify_ms)
