"""From packed rows to what SGLang expects of a verification: everything padded to one width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from faser_sglang.worker.packing import PackedRows


def pad_logprobs(
    logits_output: LogitsProcessorOutput,
    packed: PackedRows,
    offsets: torch.Tensor,
    size: int,
    width: int,
) -> None:
    """Spread the rows' logprobs over [size, width], in place of the packed ones.

    SGLang reads entry (request, place) of the values, and entry request * width + place of the
    lists of top and chosen logprobs; places beyond a window are never read.
    """
    values = logits_output.next_token_logprobs
    padded = values.new_zeros(size, width)
    padded[packed.owners, offsets] = values
    logits_output.next_token_logprobs = padded
    places = (packed.owners * width + offsets).tolist()
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        entries = getattr(logits_output, name)
        if entries:
            setattr(logits_output, name, _spread(entries, places, size * width))


def pad_hidden_states(
    hidden: torch.Tensor, packed: PackedRows, offsets: torch.Tensor, size: int, width: int
) -> torch.Tensor:
    """The rows' hidden states [rows, hidden] as SGLang reads them: [size * width, hidden]."""
    padded = hidden.new_zeros(size * width, hidden.shape[-1])
    padded[packed.owners * width + offsets] = hidden
    return padded


def _spread(entries: list[Any], places: list[int], total: int) -> list[Any]:
    first = entries[0]
    empty = first.new_zeros(0) if torch.is_tensor(first) else []
    spread = [empty] * total
    for place, entry in zip(places, entries, strict=True):
        spread[place] = entry
    return spread
