"""What travels through SGLang's batches on FASER's behalf."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class FaserDraftState(SpecInput):
    """Between rounds: the bonus token of each request.

    SGLang filters and merges it with the batch, and relays the tokens through its FutureMap
    under the overlap scheduler (``future_indices`` is set then, by the scheduler).
    """

    bonus_tokens: torch.Tensor | None = None  # [n]
    future_indices: torch.Tensor | None = None  # [n], filled by the scheduler
    # Read by the relay, never set: a language model needs none of them.
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)

    def filter_batch(
        self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None
    ) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: FaserDraftState) -> None:
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


@dataclass
class FaserExtendInput(SpecInput):
    """A ragged draft pass: logits of the rows in ``select_index`` only."""

    positions: torch.Tensor | None = None  # [rows]
    select_index: torch.Tensor | None = None  # [n] last row of each request
    hidden_states: torch.Tensor | None = None  # [rows, ·] what an EAGLE head continues
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT_EXTEND)


@dataclass
class FaserStepInput(SpecInput):
    """One row for each drafting request: a step of an EAGLE head's chain."""

    positions: torch.Tensor | None = None  # [n]
    hidden_states: torch.Tensor | None = None  # [n, hidden] the head's state before the step
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.LAST

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)


@dataclass
class FaserVerifyInput(SpecInput):
    """A packed verification: window i holds ``ragged_verify_layout.verify_lens[i]`` rows."""

    draft_token: torch.Tensor | None = None  # [rows]
    positions: torch.Tensor | None = None  # [rows]
    ragged_verify_layout: RaggedVerifyLayout | None = None
    draft_token_num: int = 0  # the widest window, for readers of uniform shapes
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    # A graph of uniform width must never take a ragged batch.
    cuda_graph_compatible: bool = False

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_VERIFY)


def make_layout(lengths: list[int], device: torch.device | str) -> RaggedVerifyLayout:
    """SGLang's layout of a ragged verification of ``lengths`` rows a request, unpadded."""
    verify_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    indptr = torch.nn.functional.pad(torch.cumsum(verify_lens, 0, dtype=torch.int32), (1, 0))
    total = sum(lengths)
    return RaggedVerifyLayout(
        verify_lens=verify_lens,
        graph_num_tokens=total,
        extend_start_loc=indptr[:-1],
        qo_indptr_device=indptr,
        verify_lens_cpu=lengths,
        total_verify_tokens=total,
    )
