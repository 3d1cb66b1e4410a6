"""Exact sampling distributions and the test that draws follow them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import chisquare

SIGNIFICANCE = 0.001
MIN_EXPECTED = 5.0  # the usual rule for the approximation by chi-square


@dataclass(frozen=True)
class Setting:
    """Sampling parameters of one request."""

    temperature: float
    top_k: int = 1 << 30
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def params(self) -> dict[str, float]:
        top_k = -1 if self.top_k >= 1 << 30 else self.top_k
        return {
            "temperature": self.temperature,
            "top_k": top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }


SETTINGS = (
    Setting(1.0),
    Setting(0.7, top_k=8, top_p=0.9),
    Setting(1.3, top_p=0.95, min_p=0.05),
)


def target_distribution(logits: np.ndarray, setting: Setting) -> np.ndarray:
    """Probabilities [..., vocabulary] that the parameters leave of ``logits``.

    Softmax at the temperature; of the tokens in falling order keep the first ``top_k``, those
    before which less than ``top_p`` of the mass lies, and those of at least ``min_p`` times the
    first one's mass; renormalise.
    """
    scaled = logits.astype(np.float64) / setting.temperature
    p = np.exp(scaled - scaled.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1, kind="stable")
    falling = np.take_along_axis(p, order, -1)
    before = np.cumsum(falling, -1) - falling
    rank = np.arange(p.shape[-1])
    keep = (rank < setting.top_k) & (before <= setting.top_p)
    keep &= falling >= setting.min_p * falling[..., :1]
    kept = np.zeros_like(p)
    np.put_along_axis(kept, order, falling * keep, -1)
    return kept / kept.sum(-1, keepdims=True)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Chi-square test of ``counts`` against ``probabilities`` (both flat), rare cells pooled.

    A count where the probability is zero is impossible, and gives 0.0.
    """
    counts, probabilities = counts.ravel(), probabilities.ravel()
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < MIN_EXPECTED
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < MIN_EXPECTED:  # too little left to be a cell of its own
        observed[-2] += observed[-1]
        expected[-2] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    return float(chisquare(observed, expected).pvalue)
