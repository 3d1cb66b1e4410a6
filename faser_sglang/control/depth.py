"""How deep to draft and which drafts to verify: expected tokens against milliseconds.

``survival`` [n, depth] is the chance that a draft and all before it are right, 0 where there is
none; it falls along each row, so any number of the largest ones is a whole number of drafts for
every request. ``verify_ms`` [k] is a target pass over the n bonus tokens and 0, 1, 2, … drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_sglang.control.types import FloatArray, IntArray

CUTS = 16  # candidates a depth, where a limit on the time per token binds


class Plan(NamedTuple):
    """The best round of a batch, by prediction."""

    depth: int  # passes of the drafter; 0: no speculation
    drafts: int  # verified, of all requests together
    rate: float  # tokens a millisecond
    price: float  # tokens that a verified row must bring
    plain_rate: float  # of a round without speculation


def best_plan(
    survival: FloatArray,
    draft_ms: FloatArray,
    verify_ms: FloatArray,
    rest_ms: float,
    *,
    entry_ms: float = 0.0,
    token_limit_ms: float = np.inf,
) -> Plan:
    """The depth and number of drafts that bring the most tokens a millisecond.

    Args:
        draft_ms: [depth + 1] time to draft 0, 1, 2, … tokens. rest_ms: of any round, beside.
        entry_ms: more for a round that speculates. token_limit_ms: of the plans in which no
            request waits longer for a token, on average, the best one; without such a plan, the
            one with the shortest wait.
    """
    n, deepest = survival.shape
    plain_rate = n / (verify_ms[0] + rest_ms)
    order = np.argsort(-survival.ravel(), kind="stable")
    values, columns = survival.ravel()[order], order % deepest
    plans = [(0, 0, plain_rate)]
    for depth in range(1, deepest + 1):
        tokens = n + np.concatenate([[0.0], np.cumsum(values[columns < depth])])
        times = draft_ms[depth] + entry_ms + rest_ms + verify_ms[: len(tokens)]
        rates = tokens / times
        drafts = int(rates.argmax())
        plans.append((depth, drafts, float(rates[drafts])))
    if np.isfinite(token_limit_ms):
        rest = rest_ms + entry_ms
        plans = _within(token_limit_ms, survival, draft_ms, verify_ms, rest, plans[0])
    depth, drafts, rate = max(plans, key=lambda plan: plan[2])
    return Plan(depth, drafts, rate, row_price(rate, drafts, n, verify_ms), plain_rate)


def row_price(rate: float, drafts: int, n: int, verify_ms: FloatArray) -> float:
    """Tokens that the time of one more row would bring elsewhere."""
    low, high = max(drafts - n, 0), min(drafts + n, len(verify_ms) - 1)
    return rate * float(verify_ms[high] - verify_ms[low]) / max(high - low, 1)


def _within(
    limit_ms: float,
    survival: FloatArray,
    draft_ms: FloatArray,
    verify_ms: FloatArray,
    rest_ms: float,
    plain: tuple[int, int, float],
) -> list[tuple[int, int, float]]:
    """Plans whose slowest request keeps to ``limit_ms`` a token, else the one that comes nearest.

    The candidates of a depth are ``CUTS`` numbers of drafts, evenly spread.
    """
    n, deepest = survival.shape
    ranks = np.empty(survival.size, np.int64)
    ranks[np.argsort(-survival.ravel(), kind="stable")] = np.arange(survival.size)
    found = [(*plain, 1 / plain[2] * n)]
    for depth in range(1, deepest + 1):
        shallow = survival[:, :depth]
        own = np.argsort(np.argsort(ranks.reshape(n, -1)[:, :depth].ravel())).reshape(n, depth)
        for drafts in np.unique(np.linspace(1, n * depth, CUTS).astype(np.int64)):
            tokens = 1 + (shallow * (own < drafts)).sum(axis=1)
            time = draft_ms[depth] + rest_ms + verify_ms[drafts]
            found.append((depth, int(drafts), tokens.sum() / time, time / tokens.min()))
    within = [plan[:3] for plan in found if plan[3] <= limit_ms]
    return within or [min(found, key=lambda plan: plan[3])[:3]]


def goes_on(survival: FloatArray, rate: float, price: float, step_ms: float) -> bool:
    """Whether more passes of the drafter are worth their time.

    Args:
        survival: [n, further] expected of the passes to come, for the requests that draft on.
        rate: tokens a millisecond of this round. price: tokens that a row must bring.
    """
    if survival.size == 0:
        return False
    gains = np.maximum(survival - price, 0.0).sum(axis=0) - rate * step_ms
    return bool(np.cumsum(gains).max() > 0)


def trim(survival: FloatArray, rate: float, verify_ms: FloatArray) -> IntArray:
    """Drafts [n] to verify of each request: those worth more than their rows' time."""
    n, deepest = survival.shape
    order = np.argsort(-survival.ravel(), kind="stable")
    tokens = np.concatenate([[0.0], np.cumsum(survival.ravel()[order])])
    drafts = int((tokens - rate * verify_ms[: len(tokens)]).argmax())
    return np.bincount(order[:drafts] // deepest, minlength=n)
