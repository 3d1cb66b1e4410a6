"""How deep to draft and which drafts to verify: expected tokens against milliseconds.

The survival of a draft is the chance that it and all before it are right; it falls along a
request, so any number of the largest ones is a whole number of drafts for every request.
``verify_ms`` [k] is a target pass over the n bonus tokens and 0, 1, 2, … drafts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from faser_sglang.control.types import BoolArray, FloatArray, IntArray

BINS = 256  # of survival, in which plans are compared


class Plan(NamedTuple):
    """A round of a batch, by prediction."""

    depth: int  # passes of the draft model
    drafts: int  # verified, of all requests together
    rate: float  # tokens a millisecond
    ms: float


def plans(
    survival: FloatArray,
    is_free: BoolArray,
    draft_ms: FloatArray,
    verify_ms: FloatArray,
    rest_ms: float,
) -> list[Plan]:
    """The best number of drafts to verify for each number of passes of the draft model.

    Args:
        survival: [n, depth, views] of each draft, 0 where there is none: equally likely views of
            what the drafter will turn out to believe. is_free: [n] drafts that need no pass.
        draft_ms: [depth + 1] time of 0, 1, 2, … passes. rest_ms: of any round, beside.

    Drafts of nearly the same survival are taken together: they are counted in ``BINS``.
    """
    n, deepest, views = survival.shape
    bins = (survival * (BINS - 1e-9)).astype(np.int64)
    column = np.where(is_free[:, None], 0, np.arange(1, deepest + 1))[:, :, None]
    at = (column * BINS + (BINS - 1 - bins)).ravel()
    size = (deepest + 1) * BINS
    values = survival.ravel()
    rows = np.bincount(at, weights=values > 0, minlength=size) / views
    tokens = np.bincount(at, weights=values, minlength=size) / views
    # [passes, bins]: with so many passes, all drafts of at least so much survival
    rows = rows.reshape(deepest + 1, BINS).cumsum(axis=0).cumsum(axis=1)
    tokens = tokens.reshape(deepest + 1, BINS).cumsum(axis=0).cumsum(axis=1)
    # With several views the number of rows is a mean, and its time lies between those of two.
    whole = rows.astype(np.int64)
    more_ms = np.append(np.diff(verify_ms), 0.0)
    times = draft_ms[: deepest + 1, None] + rest_ms + verify_ms[whole]
    times += (rows - whole) * more_ms[whole]
    rates = (n + tokens) / times
    best = rates.argmax(axis=1)
    plain = n / (rest_ms + verify_ms[0])
    found = []
    for depth, where in enumerate(best.tolist()):
        ms, rate = float(times[depth, where]), float(rates[depth, where])
        drafts = math.ceil(rows[depth, where])
        without_drafts = float(draft_ms[depth] + rest_ms + verify_ms[0])
        if n / without_drafts > rate:
            drafts, rate, ms = 0, n / without_drafts, without_drafts
        found.append(Plan(depth, drafts, rate, ms))
    if found[0].drafts == 0:
        found[0] = Plan(0, 0, float(plain), float(rest_ms + verify_ms[0]))
    return found


def row_price(rate: float, drafts: int, n: int, verify_ms: FloatArray) -> float:
    """Tokens that the time of one more row would bring elsewhere."""
    low, high = max(drafts - n, 0), min(drafts + n, len(verify_ms) - 1)
    return rate * float(verify_ms[high] - verify_ms[low]) / max(high - low, 1)


def wants_more(survival: FloatArray, rate: float, price: float, step_ms: FloatArray) -> BoolArray:
    """Which requests are worth a further pass of the drafter.

    Args:
        survival: [k, further] expected of the passes to come. rate: tokens a millisecond of this
            round. price: tokens that a row must bring. step_ms: [further] time of each pass.

    A pass is shared, so its time is set against what all together gain, some passes ahead.
    """
    if survival.size == 0:
        return np.zeros(len(survival), np.bool_)
    gains = np.cumsum(np.maximum(survival - price, 0.0), axis=1)
    worth = gains.sum(axis=0) - rate * np.cumsum(step_ms)
    return (gains[:, -1] > 0) & bool(worth.max() > 0)


def trim(survival: FloatArray, rate: float, verify_ms: FloatArray) -> IntArray:
    """Drafts [n] to verify of each request: those worth more than their rows' time.

    The best of all prefix-closed choices out of ``survival`` [n, depth], 0 where there is none.
    """
    n, deepest = survival.shape
    flat = survival.ravel()
    # Of equal ones any may be taken: only their number in a request counts.
    order = np.argsort(-flat)[: np.count_nonzero(flat)]
    tokens = np.zeros(len(order) + 1)
    np.cumsum(flat[order], out=tokens[1:])
    drafts = int((tokens - rate * verify_ms[: len(tokens)]).argmax())
    return np.bincount(order[:drafts] // deepest, minlength=n)
