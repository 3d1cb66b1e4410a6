"""Provenance and storage of benchmark results."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict[str, Any]:
    """Where, when and from what a result came."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "git": _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "-s") else ""),
        "device": device,
        "cores": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sglang": version("sglang"),
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write ``bench/results/<name>.json`` with the provenance."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"provenance": provenance(), **result}, indent=1) + "\n")
    return path


def _git(*command: str) -> str:
    run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "cpu"
