"""How likely each draft is to be what the target says."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.calibration import Calibration
from faser_sglang.control.rounds import ARMS, Outcome
from faser_sglang.control.types import FloatArray, IntArray

LOW, HIGH = 0.02, 0.99
WINDOW = 2000  # tests that the acceptance by position remembers
PRIOR, PRIOR_TESTS = 0.6, 20.0  # before anything was seen
OWN_TESTS = 6.0  # of the mean request, in a request's own ratio
OWN_MEMORY = 0.96  # a test
UNTESTED = 0.99  # a round without a test: what is not tried is forgotten in time


class Acceptance:
    """Acceptance by position, by request, and given the drafter's confidence, for each arm.

    Requests are known by row of the request pool. A request's ratio to the mean starts at one,
    with the weight of ``OWN_TESTS``. Positions that were not verified are not observed; but a
    draft that was withheld from verification counts as much as its confidence promised, else only
    drafts of high confidence would be counted and every estimate would drift upwards.
    """

    def __init__(self, cap: int, pool_rows: int) -> None:
        self.cap = cap
        self._right: FloatArray = np.zeros((ARMS, cap))  # by position
        self._tests: FloatArray = np.zeros((ARMS, cap))
        self._rates: FloatArray | None = None  # by position, until something is observed
        self._own_right: FloatArray = np.zeros((ARMS, pool_rows))
        self._own_expected: FloatArray = np.zeros((ARMS, pool_rows))
        self.calibration = Calibration(ARMS)

    def reset(self, rows: IntArray) -> None:
        """New requests on these rows."""
        self._own_right[:, rows] = 0.0
        self._own_expected[:, rows] = 0.0

    def by_position(self) -> FloatArray:
        """[ARMS, cap] of a draft whose predecessors were right; unseen: like the one before."""
        if self._rates is None:
            self._rates = np.empty_like(self._right)
            before = np.full(ARMS, PRIOR)
            for position in range(self.cap):
                right = self._right[:, position] + PRIOR_TESTS * before
                before = right / (self._tests[:, position] + PRIOR_TESTS)
                self._rates[:, position] = before
        return self._rates

    def expected(self, rows: IntArray, arms: IntArray | int) -> FloatArray:
        """[n, cap] acceptance of each position if its predecessors are right."""
        tests = self._tests.sum(axis=1) + PRIOR_TESTS
        mean = (self._right.sum(axis=1) + PRIOR_TESTS * PRIOR) / tests
        weight = OWN_TESTS * mean[arms]
        own = (self._own_right[arms, rows] + weight) / (self._own_expected[arms, rows] + weight)
        acceptance = self.by_position()[arms] * own[:, None]
        return np.minimum(np.maximum(acceptance, LOW), HIGH)

    def given(self, expected: FloatArray, chances: FloatArray, arms: IntArray | int) -> FloatArray:
        """Acceptance given the drafter's confidence.

        Args:
            expected: [n, k] as by ``expected``. chances: the same shape, 0 where unknown.
            arms: [n], or one for all.
        """
        believed = expected.copy()
        owners, places = np.nonzero(chances > 0)
        if owners.size:
            which = np.broadcast_to(arms, len(expected))[owners]
            believed[owners, places] = self.calibration.apply(
                chances[owners, places], expected[owners, places], which
            )
        return np.minimum(np.maximum(believed, LOW), HIGH)

    def observe(self, rows: IntArray, outcome: Outcome) -> None:
        """Learn from the last round of these requests."""
        arms, drafted, verified, accepted, chances = outcome
        expected = self.expected(rows, arms)
        positions = np.arange(self.cap)
        is_tested = positions < np.minimum(accepted + 1, verified)[:, None]
        right = (positions < accepted[:, None]).astype(float)
        weight = is_tested.astype(float)
        if (drafted > verified).any():
            self._count_withheld(outcome, expected, weight, right)
        owners, places = np.nonzero(weight)
        bins = arms[owners] * self.cap + places
        size, shape = ARMS * self.cap, self._tests.shape
        values = weight[owners, places]
        tests = np.bincount(bins, values, size).reshape(shape)
        fade = np.exp(-tests / WINDOW)
        self._tests = self._tests * fade + tests
        hits = np.bincount(bins, right[owners, places], size).reshape(shape)
        self._right = self._right * fade + hits
        self._rates = None
        owners, places = np.nonzero(is_tested & (chances > 0))
        if owners.size:
            self.calibration.learn(
                chances[owners, places],
                expected[owners, places],
                right[owners, places],
                arms[owners],
            )
        self._learn_own(rows, arms, weight, right)

    def _count_withheld(
        self, outcome: Outcome, expected: FloatArray, weight: FloatArray, right: FloatArray
    ) -> None:
        """Add drafts that were withheld to ``weight`` and ``right`` [n, cap].

        One behind accepted drafts is as good as it promised; those behind it count by the chance
        that they would have been reached.
        """
        arms, drafted, verified, accepted, chances = outcome
        positions = np.arange(self.cap)
        is_withheld = (positions >= verified[:, None]) & (positions < drafted[:, None])
        is_withheld &= (accepted == verified)[:, None] & (chances > 0)
        believed = self.given(expected, np.where(is_withheld, chances, 0.0), arms)
        reach = np.cumprod(np.where(is_withheld, believed, 1.0), axis=1)
        weight += np.where(is_withheld, reach / believed, 0.0)
        right += np.where(is_withheld, reach, 0.0)

    def _learn_own(
        self, rows: IntArray, arms: IntArray, weight: FloatArray, right: FloatArray
    ) -> None:
        tests = weight.sum(axis=1)
        promised = (weight * self.by_position()[arms]).sum(axis=1)
        fade = np.where(tests > 0, OWN_MEMORY**tests, UNTESTED)
        for arm in range(ARMS):
            own = np.where(arms == arm, fade, UNTESTED)
            mine = arms == arm
            self._own_right[arm, rows] = self._own_right[arm, rows] * own + mine * right.sum(axis=1)
            self._own_expected[arm, rows] = self._own_expected[arm, rows] * own + mine * promised
