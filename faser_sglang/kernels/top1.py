"""The most likely token of each row and its probability, in one sweep over the logits (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def top1_kernel(logits, ids, chances, rows, columns, stride, BLOCK: tl.constexpr):
    """Program p does rows p, p + programs, ...

    Each lane keeps the largest logit that it saw, where that stood, and the sum of exponentials
    relative to it; the lanes are joined once a row. Moves rows * columns logits and 12 bytes a row.
    """
    lanes = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        peak = tl.full([BLOCK], float("-inf"), tl.float32)
        place = tl.zeros([BLOCK], tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        begin = logits + tl.cast(row, tl.int64) * stride
        for start in range(0, columns, BLOCK):
            at = start + lanes
            x = tl.load(begin + at, mask=at < columns, other=float("-inf")).to(tl.float32)
            place = tl.where(x > peak, at, place)
            higher = tl.maximum(peak, x)
            # A lane that saw only -inf has no reference to subtract; any will do.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(peak - base) + tl.exp(x - base)
            peak = higher
        top = tl.max(peak, 0)
        first = tl.min(tl.where(peak == top, place, 2147483647), 0)
        tl.store(ids + row, first.to(tl.int64))
        tl.store(chances + row, 1.0 / tl.sum(total * tl.exp(peak - top), 0))


def top1(logits: torch.Tensor, programs: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``reference.top1``; ``programs`` limits the grid (None: one a row)."""
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, not {logits.stride(1)} apart")
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chances = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        grid = (min(rows, programs or rows),)
        top1_kernel[grid](logits, ids, chances, rows, columns, logits.stride(0), BLOCK=BLOCK)
    return ids, chances
