"""The packed target pass of a round: every window behind the other, no row for padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from faser_sglang.kernels.reference import Verdict, ragged_accept
from faser_sglang.worker.packing import PackedRows, Round, make_forward_batch, pack_rows
from faser_sglang.worker.results import pad_hidden_states, pad_logprobs
from faser_sglang.worker.sampling import RowSampler
from faser_sglang.worker.spec_inputs import FaserVerifyInput, make_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from faser_sglang.worker.agreement import Agreement
    from faser_sglang.worker.outputs import OutputRecord


class Verifier:
    """Runs windows through the target and accepts what the target itself would have said."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        width: int,
        outputs: OutputRecord,
        agreement: Agreement,
        *,
        reads_hidden: bool = False,
    ) -> None:
        self.reads_hidden = reads_hidden
        self.agreement = agreement
        self.sampler = RowSampler(target_worker.model_runner, outputs)
        self.worker = target_worker
        self.runner = target_worker.model_runner
        self.width = width  # columns of the padded result: the depth cap + 1

    def capture(self, batch: ScheduleBatch) -> CaptureHiddenMode:
        """Which hidden states a pass over ``batch`` must return, beyond what the server is for."""
        return CaptureHiddenMode.FULL if self.reads_hidden else batch.return_hidden_states_mode

    def pack(self, this_round: Round, req_to_token: torch.Tensor) -> PackedRows:
        """Rows of all windows: the bonus token and ``depths[i]`` drafts of request i."""
        return pack_rows(
            req_to_token, this_round.rows, this_round.lengths, this_round.depths_cpu + 1
        )

    def run(
        self,
        this_round: Round,
        window: PackedRows,
        drafts: torch.Tensor | None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> tuple[Verdict, torch.Tensor | None, LogitsProcessorOutput, Any]:
        """Verify and accept.

        Args:
            drafts: [n, max_depth], or None if no request drafts.
            grammar_barrier: takes the grammars of the batch to the end of its output.

        Returns:
            the verdict (tokens padded to [n, width]), the target's hidden states of every row if
            the drafter reads them, its output with logprobs and the hidden states that requests
            asked for padded, and the ForwardBatch to keep alive.
        """
        offsets = window.positions - this_round.lengths[window.owners]
        tokens = _window_tokens(this_round, window, offsets, drafts)
        batch = this_round.batch
        wants_hidden = batch.return_hidden_states
        capture = CaptureHiddenMode.FULL if wants_hidden else self.capture(batch)
        forward_batch = make_forward_batch(
            batch,
            self.runner,
            ForwardMode.TARGET_VERIFY,
            members=range(this_round.size),
            rows=this_round.rows,
            input_ids=tokens,
            positions=window.positions,
            slots=window.slots,
            seq_lens=this_round.lengths,
            seq_lens_cpu=this_round.lengths_cpu,
            spec_info=FaserVerifyInput(
                draft_token=tokens,
                positions=window.positions,
                ragged_verify_layout=make_layout(window.lengths_cpu, tokens.device),
                draft_token_num=this_round.max_depth + 1,
                capture_hidden_mode=capture,
            ),
            capture=capture,
        )
        output = self.worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )
        logits_output = output.logits_output
        sampled = self.sampler.sample(
            this_round, window, offsets, drafts, logits_output, grammar_barrier
        )
        sampled = self.agreement.tensor(sampled)
        verdict = self._accept(this_round, window, offsets, sampled, drafts)
        if batch.return_logprob:
            pad_logprobs(logits_output, window, offsets, this_round.size, self.width)
        hidden, logits_output.hidden_states = logits_output.hidden_states, None
        if wants_hidden:
            logits_output.hidden_states = pad_hidden_states(
                hidden, window, offsets, this_round.size, self.width
            )
        logits_output.next_token_logits = None
        return verdict, hidden, logits_output, forward_batch

    def _accept(
        self,
        this_round: Round,
        window: PackedRows,
        offsets: torch.Tensor,
        sampled: torch.Tensor,
        drafts: torch.Tensor | None,
    ) -> Verdict:
        padded = sampled.new_zeros(this_round.size, self.width - 1)
        if drafts is not None:
            padded[:, : drafts.shape[1]] = drafts
        return ragged_accept(sampled, padded, this_round.depths, window.owners, offsets, self.width)


def _window_tokens(
    this_round: Round, window: PackedRows, offsets: torch.Tensor, drafts: torch.Tensor | None
) -> torch.Tensor:
    bonus = this_round.bonus.to(torch.int64)
    if drafts is None:
        return bonus
    chains = torch.cat([bonus[:, None], drafts], dim=1)
    return chains[window.owners, offsets]
