"""Plain-torch reference of every operation on ragged rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


def ragged_positions(
    starts: torch.Tensor, lengths: torch.Tensor, total: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Owner and position of each packed row.

    Args:
        starts: [n] first position of each request. lengths: [n] its rows, zero allowed.
        total: sum of ``lengths`` where the host knows it (else the device is asked).

    Returns:
        owners, positions: [total] each; rows of request i count up from ``starts[i]``.
    """
    owners = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total
    )
    first_row = torch.cumsum(lengths, 0) - lengths
    rows = torch.arange(owners.numel(), device=lengths.device)
    return owners, starts[owners] + rows - first_row[owners]


class Verdict(NamedTuple):
    """What a verification decided.

    tokens: [n, width] target's own token after each row, zero beyond a request's window;
    accept_lens: [n] int32, accepted drafts + 1; bonus: [n] the last emitted token.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus: torch.Tensor


def ragged_accept(
    sampled: torch.Tensor,
    drafts: torch.Tensor,
    depths: torch.Tensor,
    owners: torch.Tensor,
    offsets: torch.Tensor,
    width: int,
) -> Verdict:
    """Accept the leading drafts that equal the target's own tokens.

    Each row drew its token y from the target's distribution whatever the draft was; draft j of a
    request is accepted while y of row j - 1 equals it. So every emitted token is the target's
    draw, and the drafts only decide how many of the draws are used (target-only acceptance with
    deterministic drafts; no residual distribution is needed).

    Args:
        sampled: [rows] the target's token at each packed row.
        drafts: [n, width - 1] draft tokens, anything beyond ``depths``.
        depths: [n] drafts of each request. owners, offsets: [rows] request and place of a row.
        width: columns of the result, larger than every depth.
    """
    n = depths.numel()
    tokens = sampled.new_zeros(n, width)
    tokens[owners, offsets] = sampled
    is_draft = torch.arange(width - 1, device=depths.device) < depths[:, None]
    matches = (tokens[:, : width - 1] == drafts) & is_draft
    accepted = matches.to(torch.int32).cumprod(dim=1).sum(dim=1)
    bonus = tokens.gather(1, accepted[:, None].long()).squeeze(1)
    return Verdict(tokens, (accepted + 1).to(torch.int32), bonus)


def top1(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row and its probability.

    Args:
        logits: [rows, vocabulary], any float type; a row of nothing but -inf has no answer.

    Returns:
        ids [rows] int64, the lowest of equals, and probabilities [rows] float32.
    """
    top = logits.max(dim=-1)
    return top.indices, (logits.float() - top.values[:, None].float()).exp_().sum(-1).reciprocal()
