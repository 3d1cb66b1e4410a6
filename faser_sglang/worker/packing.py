"""ForwardBatch for any packed rows of a schedule batch: draft steps, catch-up and windows."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from faser_sglang.control.rounds import RoundPlan
from faser_sglang.control.types import IntArray
from faser_sglang.kernels.reference import ragged_positions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpecInput


@dataclass(frozen=True)
class Round:
    """One decode round of a batch of n requests.

    ``rows`` are their rows of the request pool; ``lengths`` their committed lengths L, whose KV
    is final; ``bonus`` the token at position L, sampled and not yet run; ``depths`` the drafts
    to make, and when they are made those to verify, the first of ``drafted`` ones; ``arms`` where
    they come from. ``*_cpu`` are on the host.
    """

    batch: ScheduleBatch
    rows: torch.Tensor  # [n]
    rows_cpu: IntArray  # [n]
    lengths: torch.Tensor  # [n]
    lengths_cpu: IntArray  # [n]
    bonus: torch.Tensor  # [n]
    depths: torch.Tensor  # [n]
    depths_cpu: IntArray  # [n]
    drafted_cpu: IntArray  # [n] zeros until the drafts are made
    plan: RoundPlan

    @property
    def arms_cpu(self) -> IntArray:
        return self.plan.arms

    @property
    def size(self) -> int:
        return len(self.rows_cpu)

    @property
    def max_depth(self) -> int:
        return int(self.depths_cpu.max(initial=0))

    def with_depths(self, depths_cpu: IntArray, drafted_cpu: IntArray) -> Round:
        """The same round with ``depths_cpu`` of ``drafted_cpu`` drafts to verify."""
        return replace(
            self,
            depths=to_device(self.depths, depths_cpu),
            depths_cpu=depths_cpu,
            drafted_cpu=drafted_cpu,
        )


@dataclass(frozen=True)
class PackedRows:
    """Rows of several requests behind each other: request, position and KV slot of each."""

    owners: torch.Tensor  # [rows] number of the request in its round
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]
    lengths_cpu: list[int]  # rows of each request

    @property
    def last_rows(self) -> torch.Tensor:
        """[n] the last row of each request."""
        ends = np.cumsum(self.lengths_cpu) - 1
        return torch.from_numpy(ends).to(self.owners.device)


def pack_rows(
    req_to_token: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, lengths: IntArray
) -> PackedRows:
    """Rows ``starts[i]`` .. ``starts[i] + lengths[i]`` of each request.

    Args:
        req_to_token: [pool rows, tokens]. rows, starts: [n]. lengths: [n] on the host.
    """
    counts = torch.from_numpy(lengths).to(rows.device)
    owners, positions = ragged_positions(starts, counts, total=int(lengths.sum()))
    slots = req_to_token[rows[owners].long(), positions].long()
    return PackedRows(owners, positions, slots, lengths.tolist())


def deepest_first(depths: IntArray) -> IntArray:
    """Requests that draft at all; those of every further step are then a prefix."""
    return np.argsort(-depths, kind="stable")[: np.count_nonzero(depths)]


def pick(values: torch.Tensor, members: IntArray) -> torch.Tensor:
    """``values[members]`` for numbers on the host."""
    return values[to_device(values, members)]


def to_device(like: torch.Tensor, values: IntArray) -> torch.Tensor:
    """``values`` on the device of ``like``."""
    return torch.from_numpy(values).to(like.device)


def make_forward_batch(
    batch: ScheduleBatch,
    runner: ModelRunner,
    mode: ForwardMode,
    *,
    members: Sequence[int],
    rows: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: IntArray,
    spec_info: SpecInput | None = None,
    extend_lens: list[int] | None = None,
    capture: CaptureHiddenMode = CaptureHiddenMode.NULL,
) -> ForwardBatch:
    """A pass over packed rows of the requests ``members`` of ``batch``.

    ``seq_lens`` follow SGLang's habit for ``mode``: with the new rows for DECODE and
    DRAFT_EXTEND_V2, without them for TARGET_VERIFY. The batch itself is not changed.
    """
    view = copy.copy(batch)
    view.reqs = [batch.reqs[i] for i in members]
    view.forward_mode = mode
    view.input_ids = input_ids
    view.req_pool_indices = rows
    view.seq_lens = seq_lens
    view.seq_lens_cpu = torch.from_numpy(seq_lens_cpu)
    view.seq_lens_sum = int(seq_lens_cpu.sum())
    view.orig_seq_lens = seq_lens
    view.out_cache_loc = slots
    view.spec_info = spec_info
    view.sampling_info = None
    view.return_logprob = False
    view.return_hidden_states = False
    view.top_logprobs_nums = None
    view.token_ids_logprobs = None
    view.extend_logprob_start_lens = None
    view.extend_input_logprob_token_ids = None
    view.multimodal_inputs = None
    view.input_embeds = None
    view.replace_embeds = None
    view.replace_positions = None
    view.is_prefill_only = False
    view.is_extend_in_batch = False
    position_info = None
    if extend_lens is not None:
        view.extend_lens = extend_lens
        view.prefix_lens = (seq_lens_cpu - np.asarray(extend_lens)).tolist()
        view.extend_num_tokens = sum(extend_lens)
        starts = np.cumsum(extend_lens) - np.asarray(extend_lens)
        position_info = (positions, torch.from_numpy(starts).to(rows.device), None)
    forward_batch = ForwardBatch.init_new(
        view,
        runner,
        capture_hidden_mode=capture,
        return_hidden_states_before_norm=False,
        extend_position_info=position_info,
    )
    forward_batch.positions = positions
    return forward_batch
