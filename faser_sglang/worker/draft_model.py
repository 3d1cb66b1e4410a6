"""Draft models as SGLang runs them: loading, pools, attention, and one forward pass."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_model
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import (
    model_draft_parallel_spec,
    resolve_draft_parallel_layout,
)
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context


class DraftModelWorker(EagleDraftWorkerBase):
    """SGLang's handle on a draft that is a language model, in the target's parallel layout."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self.target_worker = target_worker
        self.parallel_layout = resolve_draft_parallel_layout(self._parallel_spec())
        with (
            draft_tp_context(self.parallel_layout),
            draft_pp_context(),
            draft_model_build_scope(),
        ):
            self.draft_worker = TpModelWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                context_length=target_worker.model_runner.model_config.context_len,
            )
        self.draft_runner = self.draft_worker.model_runner
        self._prepared: Any | None = None  # the batch that the runner prepared and ran last

    def _parallel_spec(self) -> DraftParallelSpec:
        return DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)

    def alloc_memory_pool(self, **pools: Any) -> None:
        self.draft_worker.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        with draft_tp_context(self.parallel_layout):
            self.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with draft_tp_context(self.parallel_layout):
            self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    def forward(self, forward_batch: Any) -> Any:
        """One pass of the draft; its logits output.

        A chain hands in the batch of its last step again, moved on: that one needs no second
        preparation, so the model runs at once.
        """
        with draft_tp_context(self.parallel_layout):
            if forward_batch is self._prepared:
                return self._run_prepared(forward_batch)
            output = self.draft_runner.forward(forward_batch)
        self._prepared = None if output.can_run_graph else forward_batch
        return output.logits_output

    def _run_prepared(self, forward_batch: Any) -> Any:
        runner = self.draft_runner
        with (
            get_model().override(shared_experts=runner.model.shared_experts_config),
            forward_context(ForwardContext(runner.attn_backend), forward_batch=forward_batch),
        ):
            if forward_batch.needs_forward_metadata_init():
                runner.attn_backend.init_forward_metadata(forward_batch)
            return runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )

    def draft(self) -> None:
        raise NotImplementedError("FASER's drafters drive the draft runner")

    draft_extend = draft


class HeadWorker(DraftModelWorker):
    """SGLang's handle on an EAGLE or EAGLE3 head.

    The head takes its embedding, and where it has none its lm_head, from the target, by SGLang's
    own rules; ``hot_token_id`` maps a reduced vocabulary's ids to the target's.
    """

    init_token_map = EagleDraftWorker.init_token_map
    init_lm_head = EagleDraftWorker.init_lm_head
    _resolve_shared_embed_and_head = EagleDraftWorker._resolve_shared_embed_and_head

    def _parallel_spec(self) -> DraftParallelSpec:
        runner = self.target_worker.model_runner
        self.speculative_algorithm = runner.spec_algorithm
        return model_draft_parallel_spec(
            runner.spec_aux_config.draft_model_config, spec_algorithm=runner.spec_algorithm
        )

    def alloc_memory_pool(self, **pools: Any) -> None:
        super().alloc_memory_pool(**pools)
        self.init_token_map()
        self.init_lm_head()
