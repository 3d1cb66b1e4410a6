"""The FASER worker: draft, verify, accept, commit, each ragged over the batch's requests."""

from __future__ import annotations

import copy
from collections import deque
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
from faser_sglang.control.policy import DepthPolicy, make_policy
from faser_sglang.control.record import RoundRecord
from faser_sglang.control.types import IntArray
from faser_sglang.request_params import max_depth
from faser_sglang.worker.agreement import Agreement
from faser_sglang.worker.confidence import ConfidenceTally
from faser_sglang.worker.drafter import ARMS, Offer
from faser_sglang.worker.guard import GuardedDrafter
from faser_sglang.worker.make_drafter import make_drafter
from faser_sglang.worker.outputs import OutputRecord
from faser_sglang.worker.packing import Round
from faser_sglang.worker.spec_inputs import FaserDraftState
from faser_sglang.worker.verify import Verifier

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker


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
        self.counters = RoundCounters()
        self.clock = PhaseClock()
        self.confidence = ConfidenceTally(target_worker.model_runner.device)
        self._streams = torch.get_device_module(target_worker.model_runner.device)
        self._stream: Any | None = None  # where the scheduler runs the passes
        self._unread_rounds: deque[tuple[ScheduleBatch, list[Any], IntArray]] = deque()
        self._batch_read: ScheduleBatch | None = None  # the batch of the round that is being read
        self._being_read: dict[str, Any] = {}  # requests of the round that is being read
        self.policy: DepthPolicy | None = None
        self._last_position: IntArray | None = None
        self._max_depth: IntArray | None = None
        self._record: RoundRecord | None = None

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
        self._last_position = np.zeros(pool_rows, np.int64)
        self._max_depth = np.zeros(pool_rows, np.int64)
        self._record = RoundRecord(pool_rows)
        target = self.target_worker.model_runner
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
        self.policy = make_policy(
            self.config.depth,
            cap=self.cap,
            pool_rows=ARMS * pool_rows,  # each arm of a request learns on its own
            seed=get_device().random_seed,
            is_off=self.is_off,
        )

    @property
    def is_off(self) -> bool:
        """Nothing is ever drafted."""
        return self.config.mode == "off" or self.cap == 0

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
        self.outputs.begin(batch)
        self._penalise_prefill(batch)
        result = self.target_worker.forward_batch_generation(
            batch, capture_hidden_mode=self.verifier.capture(batch)
        )
        self.outputs.note_bonus(batch, result.next_token_ids)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        self._begin(batch)
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
        this_round = self._plan(batch)
        self.clock.lap("plan")
        drafts = self.drafter.draft(this_round) if this_round.max_depth else None
        self.clock.lap("draft")
        window = self.verifier.pack(this_round, self.req_to_token_pool.req_to_token)
        verdict, hidden, logits_output, forward_batch = self.verifier.run(
            this_round, window, None if drafts is None else drafts.tokens, grammar_barrier
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

    def _begin(self, batch: ScheduleBatch) -> None:
        """New requests on their rows of the pool."""
        rows = batch.req_pool_indices_cpu.numpy()
        ends = np.asarray(batch.prefix_lens, np.int64) + np.asarray(batch.extend_lens, np.int64)
        self._record.begin(rows, ends)
        for arm in range(ARMS):
            self.policy.reset(self._learner(rows, arm))
        self._last_position[rows] = [
            len(req.origin_input_ids) + req.sampling_params.max_new_tokens - 1 for req in batch.reqs
        ]
        self._max_depth[rows] = [
            max_depth(req.sampling_params.custom_params, self.cap) for req in batch.reqs
        ]

    def _learner(self, rows: IntArray, arms: IntArray | int) -> IntArray:
        """The policy's number for each request and arm."""
        return rows + arms * len(self._last_position)

    def _plan(self, batch: ScheduleBatch) -> Round:
        """Depths of this round. The host knows every length: the scheduler waited for them."""
        rows = batch.req_pool_indices_cpu.numpy()
        lengths = batch.seq_lens_cpu.numpy().astype(np.int64)
        depths, accepted = self._record.settle(rows, lengths)
        learner = self._learner(rows, self._record.arm[rows])
        was_drafted = depths > 0
        self.policy.observe(learner[was_drafted], depths[was_drafted], accepted[was_drafted])
        offer = self._offer(rows, lengths)
        limits = np.minimum(offer.limits, self._limits(rows, lengths))
        depths = self.policy.choose(
            self._learner(rows, offer.arms), lengths, np.clip(limits, 0, self.cap)
        )
        depths, arms = self.agreement.plan(depths, offer.arms)
        self._record.plan(rows, lengths, depths, arms)
        self._unread_rounds.append((batch, list(batch.reqs), depths))
        device = batch.seq_lens.device
        return Round(
            batch=batch,
            rows=batch.req_pool_indices,
            rows_cpu=rows,
            lengths=batch.seq_lens.to(torch.int64),
            lengths_cpu=lengths,
            bonus=batch.spec_info.bonus_tokens,
            depths=torch.from_numpy(depths).to(device),
            depths_cpu=depths,
            arms_cpu=arms,
        )

    def _offer(self, rows: IntArray, lengths: IntArray) -> Offer:
        if self.is_off:
            return Offer(np.zeros_like(lengths), np.zeros_like(rows))
        return self.drafter.offer(rows, lengths)

    def _limits(self, rows: IntArray, lengths: IntArray) -> IntArray:
        """The deepest draft [n] that can be of use, has room and is admitted.

        A window of depth d ends at position length + d. No token is emitted behind a request's
        last one, so drafts for positions beyond it are useless; the target's context ends at
        ``context_len`` - 1.
        """
        useful = self._last_position[rows] - 1 - lengths
        in_context = self.context_len - 1 - lengths
        return np.minimum(np.minimum(useful, in_context), self._max_depth[rows])

    # -- accounting, on the host, when the scheduler reads a round's result -----------------

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        """SGLang's hook: the accepted drafts of the oldest round whose result was not read."""
        self._batch_read, reqs, depths = self._unread_rounds.popleft()
        self._being_read = {req.rid: req for req in reqs}
        self.counters.passes += 1
        for req, depth, accepted in zip(
            reqs, depths.tolist(), num_correct_drafts_per_req, strict=True
        ):
            if req.finished() or req.is_retracted:
                self.counters.add_overshoot(accepted)
            else:
                self.counters.add(depth, accepted)

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's hook: a request of the round being read ended; what lies behind is cut.

        Its slots are about to go to the radix tree.
        """
        req = self._being_read.get(rid)
        if req is None:
            return
        if req.finished_len is not None:
            self.counters.trimmed += len(req.output_ids) - req.finished_len
        if not self.is_off:
            view = copy.copy(self._batch_read)
            view.reqs = [req]
            with self._streams.stream(self._stream):  # behind the target's pass
                self.drafter.finish(view, req.kv.req_pool_idx, req.kv.kv_committed_len)

    def clear_cache_pool(self) -> None:
        """SGLang's hook on a flush, which starts its own metrics anew: so do ours."""
        self.counters = RoundCounters()
        self.clock = PhaseClock()
        self.confidence = ConfidenceTally(self.target_worker.model_runner.device)

    def describe_faser(self) -> dict[str, object]:
        """Resolved values and counters, for ``/server_info``."""
        return {
            **asdict(self.config),
            "mode": "off" if self.is_off else "serial",
            "drafter": self.drafter.kind,
            "depth_cap": self.cap,
            "draft_context": min(self.drafter.context_len, self.context_len),
            "attention_backend": type(self.target_worker.model_runner.attn_backend).__name__,
            "counters": self.counters.snapshot(),
            "draft_faults": self.drafter.faults,
            "drafts_by_confidence": self.confidence.snapshot(),
            "host_ms_per_round": self.clock.snapshot(),
        }
