"""Rounds as the worker makes them, out of plain numbers."""

from __future__ import annotations

import numpy as np
import torch

from faser_sglang.control.rounds import MODEL, FixedPlan
from faser_sglang.worker.packing import Round


def make_round(rows, lengths, bonus, depths, *, arms=None, drafted=None, plan=None, batch=None):
    """A round before its drafts are made; with ``drafted``, one of which ``depths`` are verified.

    ``rows``, ``lengths``, ``bonus`` and ``depths`` are numbers [n], on the host; ``arms``: all
    the model's unless given. ``plan`` takes the place of depths and arms that nobody changes.
    """
    rows, lengths = np.array(rows, np.int64), np.array(lengths, np.int64)
    depths = np.array(depths, np.int64)
    arms = np.full_like(rows, MODEL) if arms is None else np.array(arms, np.int64)
    return Round(
        batch=batch,
        rows=torch.from_numpy(rows),
        rows_cpu=rows,
        lengths=torch.from_numpy(lengths),
        lengths_cpu=lengths,
        bonus=torch.as_tensor(bonus),
        depths=torch.from_numpy(depths),
        depths_cpu=depths,
        drafted_cpu=np.zeros_like(rows) if drafted is None else np.array(drafted, np.int64),
        plan=FixedPlan(depths, arms) if plan is None else plan,
    )
