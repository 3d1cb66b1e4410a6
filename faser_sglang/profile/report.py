"""What a cost table says, in words and as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from faser_sglang.control.cost import CostModel, CostTable

ACCEPTANCES = (0.5, 0.7, 0.9)


def best_depth(table: CostTable, n: int, acceptance: float) -> tuple[int, float]:
    """The depth with the most tokens a millisecond, and its gain over no speculation.

    Every one of ``n`` requests drafts as many tokens, of which each is right with the same
    ``acceptance`` behind right ones: 1 + a + a² + … tokens a round.
    """
    cap = table.windows[-1] - 1
    cost = CostModel(table, cap)
    verify = cost.verify_ms(n, table.context)[:: max(n, 1)][: cap + 1]
    times = cost.draft_ms(n, n) + verify + cost.host_ms(n)
    rates = np.cumsum(acceptance ** np.arange(cap + 1)) / times
    best = int(rates.argmax())
    return best, float(rates[best] / rates[0])


def summary(table: CostTable) -> str:
    """A line for each batch size: the target's pass, and all else relative to it."""
    deepest = table.windows[-1]
    head = ["requests", "target pass", "draft step", "first draft", "host", f"{deepest} rows each"]
    head += [f"depth at {a:.1f}" for a in ACCEPTANCES]
    lines = [head]
    for i, n in enumerate(table.requests):
        one = table.verify[i][0]
        shares = (table.step[i], table.first[i], table.host[i], table.verify[i][-1])
        depths = (best_depth(table, n, a) for a in ACCEPTANCES)
        lines.append(
            [str(n), f"{one:.2f} ms"]
            + [f"{share / one:.2f}" for share in shares]
            + [f"{depth} ({gain:.2f}x)" for depth, gain in depths]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(map(str.rjust, line, widths)) for line in lines]
    return "\n".join(
        [
            *rows,
            "Draft step, first draft, host and the widest pass are relative to the target pass "
            "with a row a request.",
            f"Depth at an acceptance: the best one for all requests alike, and its tokens a second "
            f"over no speculation; {table.windows[-1] - 1} is the largest.",
            f"A row more to catch up on costs {table.catch_up:.3f} ms; 1,000 tokens more of "
            f"context cost {1e3 * table.context_slope:.3f} ms a request.",
        ]
    )


def plot(table: CostTable, path: str | Path) -> None:
    """Passes of the target over rows a request, and of the drafter over requests."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    target, drafter = figure.subplots(1, 2)
    for n, times in zip(table.requests, table.verify, strict=True):
        target.plot(table.windows, times, marker="o", markersize=3, label=f"{n}")
    _name(target, "A pass of the target", "rows a request")
    target.legend(title="requests", fontsize="small")
    lines: dict[str, Any] = {
        "further step": table.step, "first pass": table.first, "host": table.host,
        "target, a row each": [times[0] for times in table.verify],
    }  # fmt: skip
    for name, times in lines.items():
        drafter.plot(table.requests, times, marker="o", markersize=3, label=name)
    drafter.set_xscale("log", base=2)
    drafter.set_xticks(table.requests, labels=list(map(str, table.requests)))
    drafter.legend(fontsize="small")
    _name(drafter, f"Drafting: {table.origin.get('drafter', '')}", "requests")
    figure.suptitle(f"{table.origin.get('device', '')}, {table.origin.get('date', '')}")
    figure.savefig(path)


def _name(axes: Any, title: str, across: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
