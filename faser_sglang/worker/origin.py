"""Where a cost table comes from, and whether it fits the server that loads it."""

from __future__ import annotations

import logging
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_parallel

from faser_sglang.control.cost import CostTableError

if TYPE_CHECKING:
    from faser_sglang.worker.faser_worker import FaserWorker

logger = logging.getLogger(__name__)

# Another of these is another cost; another version is a doubt.
DECISIVE = ("device", "threads", "model", "draft_model", "drafter", "dtype", "tp_size")


def origin_of(worker: FaserWorker) -> dict[str, Any]:
    """Device, models and versions of this server."""
    runner = worker.target_worker.model_runner
    device = torch.device(runner.device)
    draft = worker.draft_worker
    return {
        "device": platform.processor() or platform.machine()
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": runner.model_config.model_path,
        "draft_model": draft.draft_runners[0].model_config.model_path if draft else None,
        "drafter": worker.drafter.kind,
        "dtype": str(runner.model_config.dtype),
        "tp_size": get_parallel().tp_size,
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "faser_sglang": version("faser-sglang"),
    }


def check_origin(said: dict[str, Any], here: dict[str, Any], path: str) -> None:
    """Raises CostTableError where the table was measured on something else than ``here``."""
    other = {name: said.get(name) for name in here if said.get(name) != here[name]}
    wrong = [f"{name} {other[name]} (here {here[name]})" for name in DECISIVE if name in other]
    if wrong:
        raise CostTableError(
            f"--faser-cost-table {path} was measured with {', '.join(wrong)}; measure it anew with "
            "python -m faser_sglang.profile, or start without the flag."
        )
    if other:
        logger.warning(
            "FASER: --faser-cost-table %s was measured with other versions (%s); rounds correct "
            "its times as they run.",
            path,
            ", ".join(f"{name} {value}" for name, value in other.items()),
        )
