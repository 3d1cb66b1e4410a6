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


class Calibration:
    """Logistic regression of acceptance on the log odds of confidence and expectation.

    Every arm has its own, learned online by Newton steps on a forgetting sum of curvatures, some
    tens of tests at a time. It also keeps how far the confidence has lately moved the expectation.
    """

    def __init__(self, arms: int) -> None:
        self.weights: FloatArray = np.tile(np.array(START), (arms, 1))
        self._curvature: FloatArray = np.tile(np.eye(3) * PRECISION, (arms, 1, 1))
        self._unlearned: list[list[tuple[FloatArray, FloatArray]]] = [[] for _ in range(arms)]
        self._moves: FloatArray = np.zeros((arms, RECENT))
        self._seen: IntArray = np.zeros(arms, np.int64)
        self._odds: FloatArray = np.ones((arms, VIEWS))  # factors of the odds, in the four views

    def apply(self, chances: FloatArray, expected: FloatArray, arms: IntArray) -> FloatArray:
        """Acceptance [k] of drafts of known confidence [k] and expectation [k]."""
        weights = self.weights[arms]
        logits = weights[:, 0] + weights[:, 1] * _log_odds(chances)
        return _sigmoid(logits + weights[:, 2] * _log_odds(expected))

    def views(self, expected: FloatArray, arm: int) -> FloatArray:
        """[…, VIEWS] what ``expected`` […] may become when the confidence is known.

        Their mean is the expectation again.
        """
        right = expected[..., None] * self._odds[arm]
        moved = right / (right + (1 - expected)[..., None])  # odds times a factor each
        moved *= (expected / np.maximum(moved.mean(axis=-1), 1e-9))[..., None]
        return np.minimum(moved, 1.0)

    def learn(
        self, chances: FloatArray, expected: FloatArray, is_right: FloatArray, arms: IntArray
    ) -> None:
        """``chances`` [k] of tested drafts, which were to be right with ``expected`` [k]."""
        features = _features(chances, expected)
        for arm, waiting in enumerate(self._unlearned):
            own = arms == arm
            if own.any():
                waiting.append((features[own], is_right[own]))
                if sum(len(part) for _, part in waiting) >= AT_ONCE:
                    self._step(
                        arm, *(np.concatenate(parts) for parts in zip(*waiting, strict=True))
                    )
                    waiting.clear()

    def _step(self, arm: int, features: FloatArray, is_right: FloatArray) -> None:
        believed = _sigmoid(features @ self.weights[arm])
        spread = np.maximum(believed * (1 - believed), 0.02)
        memory = MEMORY ** len(is_right)
        floor = np.eye(3) * PRECISION * 0.1
        curvature = self._curvature[arm] * memory + floor * (1 - memory)
        curvature += (features * spread[:, None]).T @ features
        step = np.linalg.solve(curvature, features.T @ (is_right - believed))
        step = np.clip(step, -LONGEST_STEP, LONGEST_STEP)
        self.weights[arm] = np.clip(self.weights[arm] + step, -LARGEST, LARGEST)
        self._curvature[arm] = curvature
        self._keep_moves(arm, _log_odds(believed) - features[:, 2])

    def _keep_moves(self, arm: int, moves: FloatArray) -> None:
        self._moves[arm, (self._seen[arm] + np.arange(len(moves))) % RECENT] = moves
        self._seen[arm] += len(moves)
        known = np.sort(self._moves[arm, : min(self._seen[arm], RECENT)])
        usable = known[: len(known) // VIEWS * VIEWS]
        self._odds[arm] = np.exp(usable.reshape(VIEWS, -1).mean(axis=1))


def _features(chances: FloatArray, expected: FloatArray) -> FloatArray:
    return np.stack([np.ones_like(chances), _log_odds(chances), _log_odds(expected)], axis=-1)


def _log_odds(chances: FloatArray) -> FloatArray:
    chances = np.minimum(np.maximum(chances, 1e-4), 1 - 1e-4)
    return np.log(chances / (1 - chances))


def _sigmoid(values: FloatArray) -> FloatArray:
    return 1 / (1 + np.exp(-np.minimum(np.maximum(values, -30), 30)))
