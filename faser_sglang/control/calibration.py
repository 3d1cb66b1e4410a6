"""What a drafter's confidence is worth: acceptance given its probability, learned as it runs."""

from __future__ import annotations

import numpy as np

from faser_sglang.control.types import FloatArray, IntArray

MEMORY = 0.998  # a test
START = (0.0, 0.6, 0.6)  # bias, log odds of the confidence, of the expectation
PRECISION = 20.0  # how firmly that is believed
VIEWS = 4  # equally likely sizes of what confidence adds, for plans made before it is known
RECENT = 512  # tests that the views are taken from
AT_ONCE = 32  # tests learned together, at least
LONGEST_STEP, LARGEST = 0.5, 5.0  # of a weight
SMALLEST = 1e-4  # a chance, and its distance from 1


class Calibration:
    """Logistic regression of acceptance on the log odds of confidence and expectation.

    Every arm has its own, learned online by Newton steps on a forgetting sum of curvatures, some
    tens of tests at a time. It also keeps how far the confidence has lately moved the expectation.
    """

    def __init__(self, arms: int) -> None:
        self.weights: FloatArray = np.tile(np.array(START), (arms, 1))
        self._curvature: FloatArray = np.tile(np.eye(3) * PRECISION, (arms, 1, 1))
        self._unlearned: list[list[FloatArray]] = [[] for _ in range(arms)]
        self._waiting = [0] * arms  # tests that are not learned yet
        self._moves: FloatArray = np.zeros((arms, RECENT))
        self._seen = [0] * arms
        self._odds: FloatArray = np.ones((arms, VIEWS))  # factors of the odds, in the four views

    def apply(self, chances: FloatArray, expected: FloatArray, arms: IntArray | int) -> FloatArray:
        """Acceptance [n, k] of drafts of known confidence and expectation [n, k]."""
        bias, confidence, expectation = self.weights[arms].T[..., None]
        return _sigmoid(bias + confidence * _log_odds(chances) + expectation * _log_odds(expected))

    def views(self, expected: FloatArray, arm: int) -> FloatArray:
        """[…, VIEWS] what ``expected`` […] may become when the confidence is known.

        Their mean is the expectation again.
        """
        right = expected[..., None] * self._odds[arm]
        moved = right / (right + (1 - expected)[..., None])  # odds times a factor each
        moved *= (expected / np.maximum(moved.mean(axis=-1), 1e-9))[..., None]
        return np.minimum(moved, 1.0)

    def most(self, expected: FloatArray, arm: int) -> FloatArray:
        """[…] what ``expected`` […] becomes where the confidence is as good as it gets."""
        right = expected * self._odds[arm].max()
        return right / (right + (1 - expected))

    def learn(
        self, chances: FloatArray, expected: FloatArray, is_right: FloatArray, arms: IntArray
    ) -> None:
        """``chances`` [k] of tested drafts, which were to be right with ``expected`` [k]."""
        tests = np.stack([chances, expected, is_right])
        for arm, waiting in enumerate(self._unlearned):
            own = tests if (arms == arm).all() else tests[:, arms == arm]
            if own.size:
                waiting.append(own)
                self._waiting[arm] += own.shape[1]
                if self._waiting[arm] >= AT_ONCE:
                    self._step(arm, *np.concatenate(waiting, axis=1))
                    waiting.clear()
                    self._waiting[arm] = 0

    def _step(
        self, arm: int, chances: FloatArray, expected: FloatArray, is_right: FloatArray
    ) -> None:
        prior_odds = _log_odds(expected)
        features = np.stack([np.ones_like(chances), _log_odds(chances), prior_odds], axis=1)
        believed = _sigmoid(features @ self.weights[arm])
        spread = np.maximum(believed * (1 - believed), 0.02)
        memory = MEMORY ** len(is_right)
        floor = np.eye(3) * PRECISION * 0.1
        curvature = self._curvature[arm] * memory + floor * (1 - memory)
        curvature += (features * spread[:, None]).T @ features
        step = np.linalg.solve(curvature, features.T @ (is_right - believed))
        step = np.minimum(np.maximum(step, -LONGEST_STEP), LONGEST_STEP)
        self.weights[arm] = np.minimum(np.maximum(self.weights[arm] + step, -LARGEST), LARGEST)
        self._curvature[arm] = curvature
        self._keep_moves(arm, _log_odds(believed) - prior_odds)

    def _keep_moves(self, arm: int, moves: FloatArray) -> None:
        self._moves[arm, (self._seen[arm] + np.arange(len(moves))) % RECENT] = moves
        self._seen[arm] += len(moves)
        known = np.sort(self._moves[arm, : min(self._seen[arm], RECENT)])
        usable = known[: len(known) // VIEWS * VIEWS]
        self._odds[arm] = np.exp(usable.reshape(VIEWS, -1).mean(axis=1))


def _log_odds(chances: FloatArray) -> FloatArray:
    chances = np.minimum(np.maximum(chances, SMALLEST), 1 - SMALLEST)
    return np.log(chances / (1 - chances))


def _sigmoid(values: FloatArray) -> FloatArray:
    """Of values that cannot overflow: log odds of chances, times weights up to ``LARGEST``."""
    return 1 / (1 + np.exp(-values))
