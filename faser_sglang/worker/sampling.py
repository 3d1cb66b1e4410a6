"""The target's own sampler, run over packed rows instead of one row a request."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from faser_sglang.worker.packing import to_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

    from faser_sglang.worker.outputs import OutputRecord
    from faser_sglang.worker.packing import PackedRows, Round

# Fields of SamplingBatchInfo with one entry a request that a row needs.
PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")


class RequestAt:
    """A request as a custom logit processor sees it at one row: with the output before the row."""

    def __init__(self, req: Any, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids[:0]  # of SGLang's own type
        self.output_ids.extend(output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class RowSampler:
    """Draws the target's token at every row of a window, each from the target's distribution.

    SGLang's sampler does it, so temperature, top-k, top-p, min-p, logit bias and seeds mean what
    they mean without speculation; the row's position is what a seeded draw hashes. What depends
    on the output before a row (penalties, minimum length, grammar, custom logit processors) is
    worked out for each row here.
    """

    def __init__(self, runner: Any, outputs: OutputRecord) -> None:
        self.runner = runner
        self.outputs = outputs

    def sample(
        self,
        this_round: Round,
        window: PackedRows,
        offsets: torch.Tensor,
        drafts: torch.Tensor | None,
        logits_output: LogitsProcessorOutput,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """The target's token [rows] at every row; logprobs go to ``logits_output`` if asked for.

        Args:
            offsets: [rows] the drafts before each row. drafts: [n, depth], or None.
            grammar_barrier: takes the grammars to the end of the output.
        """
        batch = this_round.batch
        info = self._expand(this_round, window, offsets, drafts, grammar_barrier)
        info.apply_logits_bias(logits_output.next_token_logits)
        top_logprobs_nums = token_ids_logprobs = None
        if batch.return_logprob:
            owners = window.owners.tolist()  # a host wait, only for requests that ask for logprobs
            top_logprobs_nums = [batch.top_logprobs_nums[i] for i in owners]
            token_ids_logprobs = [batch.token_ids_logprobs[i] for i in owners]
        return self.runner.sampler(
            logits_output,
            info,
            batch.return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            window.positions,
        )

    def _expand(
        self,
        this_round: Round,
        window: PackedRows,
        offsets: torch.Tensor,
        drafts: torch.Tensor | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> SamplingBatchInfo:
        """Sampling parameters [rows] out of those [n] of the requests that own the rows."""
        info = this_round.batch.sampling_info
        expanded: dict[str, Any] = {"acc_additive_penalties": None, "acc_scaling_penalties": None}
        for name in PER_REQUEST:
            value = getattr(info, name)
            if value is not None:
                expanded[name] = value[window.owners]
        if self.outputs.has_penalties(this_round.rows_cpu):
            terms = self.outputs.terms(
                this_round.rows_cpu,
                this_round.lengths_cpu + 1,
                window.owners,
                offsets,
                drafts,
                np.asarray(window.lengths_cpu, np.int64),
            )
            expanded["acc_additive_penalties"] = terms.additive
            expanded["acc_scaling_penalties"] = terms.scaling
        if info.has_custom_logit_processor:
            expanded |= self._processors(this_round, window, drafts, info)
        expanded["grammars"] = None
        expanded["grammar_mask"] = self._grammar_mask(
            this_round, window, offsets, drafts, grammar_barrier
        )
        return dataclasses.replace(info, **expanded)

    def _processors(
        self,
        this_round: Round,
        window: PackedRows,
        drafts: torch.Tensor | None,
        info: SamplingBatchInfo,
    ) -> dict[str, Any]:
        """Custom logit processors and their parameters, row by row.

        The host waits for the drafts here, for batches with such processors only.
        """
        ends = np.cumsum(window.lengths_cpu)
        starts = ends - window.lengths_cpu
        drafted = [[] for _ in starts] if drafts is None else drafts.tolist()
        entries: dict[int, ProcessorEntry] = {}
        params: list[dict[str, Any] | None] = [None] * int(ends[-1])
        for key, entry in info.custom_logit_processor.items():
            rows = [row for i in entry.rows for row in range(starts[i], ends[i])]
            indices = to_device(window.owners, np.array(rows, np.int64))
            entries[key] = dataclasses.replace(entry, rows=rows, indices=indices)
            for i in entry.rows:
                own = info.custom_params[i]
                for place, row in enumerate(range(starts[i], ends[i])):
                    params[row] = own
                    if own is not None and "__req__" in own:
                        output = self._output(this_round, i) + drafted[i][:place]
                        req = RequestAt(this_round.batch.reqs[i], output)
                        params[row] = own | {"__req__": req}
        return {"custom_logit_processor": entries, "custom_params": params}

    def _output(self, this_round: Round, i: int) -> list[int]:
        """The output of request ``i`` of the round, with its bonus token."""
        row, end = int(this_round.rows_cpu[i]), int(this_round.lengths_cpu[i]) + 1
        return self.outputs.known_output(row, end)

    def _grammar_mask(
        self,
        this_round: Round,
        window: PackedRows,
        offsets: torch.Tensor,
        drafts: torch.Tensor | None,
        barrier: Callable[[], None] | None,
    ) -> GrammarMask | None:
        """What the grammars of the batch allow at each row.

        SGLang walks each grammar along the drafts and back; the host waits for them here.
        """
        batch = this_round.batch
        if not batch.has_grammar:
            return None
        chains = this_round.bonus.to(torch.int64)[:, None]
        if drafts is not None:
            chains = torch.cat([chains, drafts], dim=1)
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=GrammarTree.from_linear_chain(chains),
            sampling_info=batch.sampling_info,
            device=window.owners.device,
            barrier=barrier,
        )
        if mask is None:
            return None
        rows = window.owners * chains.shape[1] + offsets
        return mask._replace(vocab_mask=mask.vocab_mask[rows])
