"""The drafter that the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faser_sglang.worker.head_drafter import HeadDrafter
from faser_sglang.worker.lm_drafter import LmDrafter
from faser_sglang.worker.lookup_drafter import HYBRID_MATCH, HybridDrafter, LookupDrafter

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker

    from faser_sglang.config import FaserConfig
    from faser_sglang.worker.drafter import Drafter


def make_drafter(
    settings: FaserConfig,
    cap: int,
    server_args: Any,
    gpu_id: int,
    nccl_port: int,
    target_worker: TpModelWorker,
) -> Drafter:
    """Load the draft model, if any, and wrap it; ``cap`` is the largest depth."""
    target = target_worker.model_runner.model_config
    if not settings.has_model:
        return LookupDrafter(cap, target.context_len)
    from faser_sglang.worker.draft_model import DraftModelWorker, HeadWorker

    model: Drafter
    if settings.is_head:
        head = HeadWorker(server_args, gpu_id, nccl_port, target_worker)
        model = HeadDrafter(head, settings.model_kind, cap)
    else:
        draft = DraftModelWorker(server_args, gpu_id, nccl_port, target_worker)
        model = LmDrafter(draft, width=cap + 1, vocab_size=target.vocab_size)
    if not settings.looks_up:
        return model
    return HybridDrafter(model, LookupDrafter(cap, target.context_len, HYBRID_MATCH))
