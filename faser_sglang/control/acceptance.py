"""How likely each draft is to be what the target says."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.types import FloatArray, IntArray

LOW, HIGH = 0.02, 0.99
WINDOW = 2000  # tests that the acceptance by position remembers
PRIOR, PRIOR_TESTS = 0.6, 20.0  # before anything was seen
OWN_TESTS = 6.0  # of the mean request, in a request's own ratio
OWN_MEMORY = 0.96  # a test
CALIBRATION_MEMORY = 0.998  # a test
CALIBRATION_START = (0.0, 0.6, 0.6)  # bias, log odds of the confidence, of the expectation
CALIBRATION_PRECISION = 20.0  # how firmly it is believed


class Acceptance:
    """Acceptance by position, by request, and given the drafter's confidence.

    Requests are known by row of the request pool; ``arms`` [n] say where their drafts come from,
    and every arm learns on its own. A request's ratio to the mean starts at one, with the weight
    of ``OWN_TESTS``. Positions that were not verified are not observed; but a draft that was
    withheld from verification counts as much as its confidence promised, else only drafts of high
    confidence would be counted and every estimate would drift upwards.
    """

    def __init__(self, cap: int, pool_rows: int, arms: int) -> None:
        self.cap = cap
        self._right: FloatArray = np.zeros((arms, cap))  # by position
        self._tests: FloatArray = np.zeros((arms, cap))
        self._own_right: FloatArray = np.zeros((arms, pool_rows))
        self._own_expected: FloatArray = np.zeros((arms, pool_rows))
        self.calibration = [Calibration() for _ in range(arms)]

    def reset(self, rows: IntArray) -> None:
        """New requests on these rows."""
        self._own_right[:, rows] = 0.0
        self._own_expected[:, rows] = 0.0

    def by_position(self) -> FloatArray:
        """[arms, cap] of a draft whose predecessors were right; unseen ones like the one before."""
        rates = np.empty_like(self._right)
        before = np.full(len(rates), PRIOR)
        for position in range(self.cap):
            right = self._right[:, position] + PRIOR_TESTS * before
            before = right / (self._tests[:, position] + PRIOR_TESTS)
            rates[:, position] = before
        return rates

    def expected(self, rows: IntArray, arms: IntArray) -> FloatArray:
        """[n, cap] acceptance of each position if its predecessors are right."""
        rates = self.by_position()
        tests = self._tests.sum(axis=1) + PRIOR_TESTS
        mean = (self._right.sum(axis=1) + PRIOR_TESTS * PRIOR) / tests
        weight = OWN_TESTS * mean[arms]
        own = (self._own_right[arms, rows] + weight) / (self._own_expected[arms, rows] + weight)
        return np.clip(rates[arms] * own[:, None], LOW, HIGH)

    def given(self, expected: FloatArray, chances: FloatArray, arms: IntArray) -> FloatArray:
        """Acceptance given the drafter's confidence.

        Args:
            expected: [n, …] as by ``expected``. chances: the same shape, 0 where unknown.
        """
        known = expected.copy()
        for arm, calibration in enumerate(self.calibration):
            is_known = (chances > 0) & (arms == arm).reshape(-1, *[1] * (expected.ndim - 1))
            if is_known.any():
                known[is_known] = calibration.apply(chances[is_known], expected[is_known])
        return np.clip(known, LOW, HIGH)

    def observe(
        self,
        rows: IntArray,
        arms: IntArray,
        chances: FloatArray,
        drafted: IntArray,
        verified: IntArray,
        accepted: IntArray,
    ) -> None:
        """Of ``drafted`` [n] drafts with ``chances`` [n, cap], the first ``verified`` were verified
        and the first ``accepted`` of those right."""
        positions = np.arange(self.cap)
        expected = self.expected(rows, arms)
        believed = self.given(expected, chances, arms)
        is_tested = positions < np.minimum(accepted + 1, verified)[:, None]
        is_right = positions < accepted[:, None]
        # A draft withheld behind accepted ones is as good as it promised; those behind it count by
        # the chance that they would have been reached.
        is_withheld = (positions >= verified[:, None]) & (positions < drafted[:, None])
        is_withheld &= (accepted == verified)[:, None] & (chances > 0)
        reach = np.cumprod(np.where(is_withheld, believed, 1.0), axis=1)
        weight = np.where(is_withheld, reach / believed, is_tested.astype(float))
        right = np.where(is_withheld, reach, (is_tested & is_right).astype(float))
        for arm in np.unique(arms):
            own = arms == arm
            tests = weight[own].sum(axis=0)
            fade = np.exp(-tests / WINDOW)
            self._tests[arm] = self._tests[arm] * fade + tests
            self._right[arm] = self._right[arm] * fade + right[own].sum(axis=0)
            learns = own[:, None] & is_tested & (chances > 0)
            if learns.any():
                self.calibration[arm].learn(chances[learns], expected[learns], is_right[learns])
        fade = OWN_MEMORY ** weight.sum(axis=1)
        rates = self.by_position()[arms]
        self._own_right[arms, rows] = self._own_right[arms, rows] * fade + right.sum(axis=1)
        self._own_expected[arms, rows] = self._own_expected[arms, rows] * fade + (
            weight * rates
        ).sum(axis=1)


class Calibration:
    """Logistic regression of acceptance on the log odds of confidence and expectation.

    Learned online by Newton steps on a forgetting sum of curvatures.
    """

    def __init__(self) -> None:
        self.weights: FloatArray = np.array(CALIBRATION_START)
        self._curvature: FloatArray = np.eye(3) * CALIBRATION_PRECISION

    def apply(self, chances: FloatArray, expected: FloatArray) -> FloatArray:
        """Acceptance [k] of drafts of known confidence [k] and expectation [k]."""
        return _sigmoid(_features(chances, expected) @ self.weights)

    def learn(self, chances: FloatArray, expected: FloatArray, is_right: FloatArray) -> None:
        features = _features(chances, expected)
        believed = _sigmoid(features @ self.weights)
        spread = np.maximum(believed * (1 - believed), 0.02)
        floor = np.eye(3) * CALIBRATION_PRECISION * 0.1
        self._curvature = self._curvature * CALIBRATION_MEMORY ** len(chances) + floor * (
            1 - CALIBRATION_MEMORY ** len(chances)
        )
        self._curvature += (features * spread[:, None]).T @ features
        step = np.linalg.solve(self._curvature, features.T @ (is_right - believed))
        self.weights = np.clip(self.weights + np.clip(step, -0.5, 0.5), -5, 5)


def _features(chances: FloatArray, expected: FloatArray) -> FloatArray:
    return np.stack([np.ones_like(chances), _log_odds(chances), _log_odds(expected)], axis=-1)


def _log_odds(chances: FloatArray) -> FloatArray:
    chances = np.clip(chances, 1e-4, 1 - 1e-4)
    return np.log(chances / (1 - chances))


def _sigmoid(values: FloatArray) -> FloatArray:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))
