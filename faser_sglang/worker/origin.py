"""Where a cost table comes from, and whether it fits the server that loads it."""

from __future__ import annotations

import logging
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
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
        "device": cpu_name()
        if device.type == "cpu"
        else torch.get_device_module(device).get_device_name(),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": model_name(runner.model_config.model_path),
        "draft_model": model_name(draft.draft_runners[0].model_config.model_path)
        if draft
        else None,
        "drafter": worker.drafter.kind,
        "dtype": str(runner.model_config.dtype),
        "tp_size": get_parallel().tp_size,
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "faser_sglang": version("faser-sglang"),
    }


def made() -> dict[str, Any]:
    """When, and by which revision of a checkout; for the reader, and compared with nothing."""
    return {"date": time.strftime("%Y-%m-%d"), "git": _revision()}


def cpu_name() -> str:
    """The processor, as Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def model_name(path: str | None) -> str | None:
    """A folder by one name, however it was given; a name on the hub as it is."""
    return str(Path(path).resolve()) if path and Path(path).is_dir() else path or None


def _revision() -> str | None:
    try:
        git = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:
        return None
    return git.stdout.strip() or None


def launch_origin(args: Any) -> dict[str, Any]:
    """What the launching process knows of ``origin_of`` before any other starts."""
    known = {
        "model": model_name(args.model_path),
        "draft_model": model_name(args.speculative_draft_model_path),
        "tp_size": args.tp_size,
    }
    return known | ({"device": cpu_name()} if str(args.device or "").startswith("cpu") else {})


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
