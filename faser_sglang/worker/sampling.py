"""The target's own sampler, run over packed rows instead of one row a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from faser_sglang.worker.packing import PackedRows

# Fields of SamplingBatchInfo with one entry a request that a row needs.
PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")


def expand_to_rows(info: SamplingBatchInfo, owners: torch.Tensor) -> SamplingBatchInfo:
    """Sampling parameters [rows] out of those [n] of the requests that own the rows."""
    expanded = {}
    for name in PER_REQUEST:
        value = getattr(info, name)
        if value is not None:
            expanded[name] = value[owners]
    return dataclasses.replace(info, **expanded)


def sample_rows(
    runner: Any,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    packed: PackedRows,
) -> torch.Tensor:
    """Draw the target's token [rows] at every row, each from the target's own distribution.

    SGLang's sampler does it, so temperature, top-k, top-p, min-p, logit bias and seeds mean
    what they mean without speculation; the row's position is what a seeded draw hashes. Fills
    ``logits_output`` with the rows' logprobs where the batch asks for them.
    """
    info = expand_to_rows(batch.sampling_info, packed.owners)
    runner._preprocess_logits(logits_output, info)
    top_logprobs_nums = token_ids_logprobs = None
    if batch.return_logprob:
        owners = packed.owners.tolist()  # a host wait, only for requests that ask for logprobs
        top_logprobs_nums = [batch.top_logprobs_nums[i] for i in owners]
        token_ids_logprobs = [batch.token_ids_logprobs[i] for i in owners]
    return runner.sampler(
        logits_output,
        info,
        batch.return_logprob,
        top_logprobs_nums,
        token_ids_logprobs,
        packed.positions,
    )
