"""The FASER worker: draft, verify, accept, commit, each ragged over the batch's requests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_device, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from faser_sglang import config
from faser_sglang.control.metrics import PhaseClock, RoundCounters
from faser_sglang.worker.agreement import Agreement
from faser_sglang.worker.confidence import ConfidenceTally
from faser_sglang.worker.guard import GuardedDrafter
from faser_sglang.worker.ledger import Ledger
from faser_sglang.worker.make_drafter import make_drafter
from faser_sglang.worker.make_policy import needs_table
from faser_sglang.worker.outputs import OutputRecord
from faser_sglang.worker.planner import Planner
from faser_sglang.worker.spec_inputs import FaserDraftState
from faser_sglang.worker.start_profile import cost_table
from faser_sglang.worker.verify import Verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker

    from faser_sglang.worker.round_report import RoundReport


class FaserWorker(BaseSpecWorker):
    """What SGLang's scheduler drives instead of the target's worker."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self.config = config.load()
        self.cap = get_spec().speculative_num_steps
        self.speculative_num_steps = self.cap
        self.speculative_num_draft_tokens = self.cap + 1
        self._target_worker = target_worker
        target = target_worker.model_runner.model_config
        self.context_len = target.context_len
        self.agreement = Agreement(get_tp_group())
        self.drafter = GuardedDrafter(
            make_drafter(self.config, self.cap, server_args, gpu_id, nccl_port, target_worker),
            target.vocab_size,
            self.agreement,
        )
        self._draft_worker = self.drafter.draft_worker
        self.outputs: OutputRecord | None = None  # filled by alloc_memory_pool, like the next
        self.verifier: Verifier | None = None
        self.planner: Planner | None = None
        self.ledger = Ledger()
        self.clock = PhaseClock()
        self.report: RoundReport | None = None  # filled by hooks/decode_report
        self.confidence = ConfidenceTally(target_worker.model_runner.device)
        self._streams = torch.get_device_module(target_worker.model_runner.device)
        self._stream: Any | None = None  # where the scheduler runs the passes

    # -- start-up -------------------------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        slots = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
        self.drafter.attach_pools(req_to_token_pool, slots)
        pool_rows = req_to_token_pool.req_to_token.shape[0]
        target = self.target_worker.model_runner
        self.planner = Planner(
            self.config,
            self.drafter,
            self.agreement,
            cap=self.cap,
            context_len=self.context_len,
            pool_rows=pool_rows,
            seed=get_device().random_seed,
            device=target.device,
            trace=self.config.trace if get_tp_group().rank_in_group == 0 else None,
        )
        self.outputs = OutputRecord(
            pool_rows,
            self.context_len + self.cap + 2,  # rejected drafts may lie behind the context
            target.model_config.vocab_size,
            target.device,
        )
        self.verifier = Verifier(
            self.target_worker,
            self.cap + 1,
            self.outputs,
            self.agreement,
            reads_hidden=self.drafter.reads_hidden and not self.is_off,
        )

    def init_cuda_graphs(self) -> None:
        """SGLang's last call before it serves: what rounds cost is measured here, if need be."""
        super().init_cuda_graphs()
        asks = needs_table(self.config) and not self.is_off
        self.planner.start(cost_table(self) if asks else None)

    @property
    def is_off(self) -> bool:
        """Nothing is ever drafted."""
        return self.planner.is_off

    @property
    def mode(self) -> str:
        """How rounds run: "off" or "serial"."""
        return "off" if self.is_off else "serial"

    @property
    def spec_v2_attn_backends(self) -> tuple:
        drafts = self.draft_worker.draft_runners if self.draft_worker else ()
        runners = [self.target_worker.model_runner, *drafts]
        return tuple(runner.attn_backend for runner in runners)

    # -- one pass of the scheduler --------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        self._stream = self._streams.current_stream()
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(
        self, batch: ScheduleBatch, on_publish: Callable[[torch.Tensor], None] | None
    ) -> GenerationBatchResult:
        self.planner.timer.interrupt()
        self.outputs.begin(batch)
        self._penalise_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self.verifier.capture(batch)
        )
        self.outputs.note_bonus(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self.planner.begin(batch)
        self.ledger.begin(batch.reqs)
        hidden = result.logits_output.hidden_states
        if not batch.return_hidden_states:
            result.logits_output.hidden_states = None
        self.drafter.prefill(batch, result.next_token_ids, hidden, is_off=self.is_off)
        result.next_draft_input = FaserDraftState(bonus_tokens=result.next_token_ids)
        return result

    def _penalise_prefill(self, batch: ScheduleBatch) -> None:
        """Let penalties count the output that a retracted request brings along.

        SGLang starts them anew there. ``batch`` holds a copy of the parameters for this pass.
        """
        rows = batch.req_pool_indices_cpu.numpy()
        if not self.outputs.has_penalties(rows):
            return
        ends = np.asarray(batch.prefix_lens, np.int64) + np.asarray(batch.extend_lens, np.int64)
        every = torch.arange(len(rows), device=self.outputs.device)
        terms = self.outputs.terms(
            rows, ends, every, torch.zeros_like(every), None, np.ones_like(rows)
        )
        batch.sampling_info = replace(
            batch.sampling_info,
            acc_additive_penalties=terms.additive,
            acc_scaling_penalties=terms.scaling,
        )

    def _decode(
        self,
        batch: ScheduleBatch,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None,
    ) -> GenerationBatchResult:
        self.clock.start()
        this_round, first_rows = self.planner.plan(batch)
        self.clock.lap("plan")
        self.planner.timer.start()
        drafts = self.drafter.draft(this_round) if this_round.max_depth else None
        this_round = self.planner.choose(this_round, drafts)
        self.ledger.note_round(batch, this_round.drafted_cpu, this_round.depths_cpu)
        self.planner.timer.drafted()
        self.clock.lap("draft")
        window = self.verifier.pack(this_round, self.req_to_token_pool.req_to_token)
        tokens = drafts.tokens[:, : this_round.max_depth] if this_round.max_depth else None
        verdict, hidden, logits_output, forward_batch = self.verifier.run(
            this_round, window, tokens, grammar_barrier
        )
        self.clock.lap("verify")
        new_seq_lens = this_round.lengths + verdict.accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self.outputs.commit(this_round, verdict.tokens)
        if not self.is_off:
            self.drafter.commit(this_round, window, verdict, hidden)
        if drafts is not None:
            self.confidence.add(drafts, this_round.depths, verdict.accept_lens)
        self.planner.timer.verified(this_round, first_rows)
        self.clock.lap("commit")
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=verdict.tokens.flatten(),
            accept_lens=verdict.accept_lens,
            new_seq_lens=new_seq_lens,
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            next_draft_input=FaserDraftState(bonus_tokens=verdict.bonus),
            extra_keep_alive_refs=[forward_batch],
        )

    # -- accounting, on the host, when the scheduler reads a round's result -----------------

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """SGLang's hook: the accepted drafts of the oldest round whose result was not read."""
        self.ledger.read(num_correct_drafts_per_req)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's hook: a request of the round being read ended.

        Its slots are about to go to the radix tree.
        """
        ended = self.ledger.finish(rid)
        if ended is None or self.is_off:
            return
        batch, req = ended
        view = copy.copy(batch)
        view.reqs = [req]
        with self._streams.stream(self._stream):  # behind the target's pass
            self.drafter.finish(view, req.kv.req_pool_idx, req.kv.kv_committed_len)

    def clear_cache_pool(self) -> None:
        """SGLang's hook on a flush, which starts its own metrics anew: so do ours."""
        self.ledger.counters = RoundCounters()
        self.clock = PhaseClock()
        self.confidence = ConfidenceTally(self.target_worker.model_runner.device)

    def describe_faser(self) -> dict[str, object]:
        """Resolved values and counters, for ``/server_info``."""
        return {
            **asdict(self.config),
            "mode": self.mode,
            "drafter": self.drafter.kind,
            "depth_cap": self.cap,
            "draft_context": min(self.drafter.context_len, self.context_len),
            "attention_backend": type(self.target_worker.model_runner.attn_backend).__name__,
            "counters": self.ledger.counters.snapshot(),
            "draft_faults": self.drafter.faults,
            "drafts_by_confidence": self.confidence.snapshot(),
            "host_ms_per_round": self.clock.snapshot(),
            **self.planner.describe(),
        }
