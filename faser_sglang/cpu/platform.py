"""The platform object that SGLang asks about its device."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "faser_cpu"


class FaserCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through plain torch; no Triton, no graphs, no libcuda."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # a string: SGLang splits it, whatever its annotation says

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Attention of our own instead of the AMX one, which needs sgl-kernel's CPU build."""
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = 0.5
        # An idle scheduler would spin on a core that the other processes need.
        server_args.sleep_on_idle = True
        # OpenMP's threads spin without end between parallel regions by default, which starves
        # every other process, and waking a sleeping one takes longer than a small layer. So they
        # spin for about half a millisecond: through a pass, not between passes. Read when the
        # library loads, hence set for the processes that are started next.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "200000")

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        if kind != "mha":
            return None
        from faser_sglang.cpu.pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return False  # SGLang's own algorithms need Triton or sgl-kernel; FASER does not ask

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def init_backend(self) -> None:
        """Once in each worker: register attention, skip the copies that only graphs need."""
        os.environ.setdefault("SGLANG_EAGER_INPUT_NO_COPY", "1")
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        @register_attention_backend(ATTENTION_BACKEND)
        def create(runner: Any) -> Any:
            from faser_sglang.cpu.attention import CpuAttentionBackend

            return CpuAttentionBackend(runner)

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Once a model: fewer torch calls a layer, and linear layers from packed weights."""
        from faser_sglang.cpu import linear, llama, norm, rope

        norm.install()
        rope.install()
        copy = linear.copy_for_this_cpu()
        count = 0 if copy is None else linear.use_packed_linears(model, copy)
        if count:
            how = (
                "no bf16 arithmetic here; %d linear layers run in fp16 with float32 sums (FBGEMM)."
                if copy is linear.HalfCopy
                else "%d bf16 linear layers run from packed copies of their weights (oneDNN)."
            )
            logger.info("CPU platform: " + how, count)
        if llama.use_direct_stack(model):
            logger.info("CPU platform: the layers of this model run through a direct stack.")

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU
