"""`python -m faser_sglang.doctor`: whether FASER can run here, and what to do where it cannot.

One line a check: ok, warn or fail, the last two with the way out. Exit status 1 if any failed.
SGLang and torch are imported inside the checks: that they cannot be is a finding, too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from faser_sglang import plugin

MIN_PYTHON = (3, 11)
MIN_FREE_GIB = 4.0  # the demo's two models and their KV
ENTRY_POINTS = {"sglang.srt.plugins": "faser", "sglang.srt.platforms": "faser_cpu"}
PLUGIN, PLATFORM = ENTRY_POINTS.values()
REINSTALL = "mend what is named above, else reinstall faser-sglang in this environment"


@dataclass(frozen=True)
class Check:
    """One finding; ``fix`` says what to do where ``level`` is not ok."""

    level: str  # ok, warn, fail
    subject: str
    finding: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5}{self.subject}: {self.finding}"
        return f"{line} -> {self.fix}" if self.fix else line


def check_python(version: Sequence[int] = sys.version_info) -> Iterator[Check]:
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < MIN_PYTHON:
        yield Check("fail", "python", text, "use Python 3.11 or newer")
    else:
        yield Check("ok", "python", text)


def check_sglang(found: str) -> Iterator[Check]:
    """``found`` is the installed version, "none" without one."""
    if found == plugin.REQUIRED_SGLANG:
        yield Check("ok", "sglang", found)
        return
    finding = f"found {found}, FASER needs {plugin.REQUIRED_SGLANG}"
    yield Check("fail", "sglang", finding, f"pip install sglang=={plugin.REQUIRED_SGLANG}")


def check_torch() -> Iterator[Check]:
    import torch

    yield Check("ok", "torch", torch.__version__)


def check_entry_points(find: Callable[..., Any] = entry_points) -> Iterator[Check]:
    for group, name in ENTRY_POINTS.items():
        if name in {point.name for point in find(group=group)}:
            yield Check("ok", "entry point", f"{name} in {group}")
        else:
            yield Check("fail", "entry point", f"{name} is missing in {group}", REINSTALL)


def check_environment(environ: Mapping[str, str], cores: int) -> Iterator[Check]:
    """Variables that take FASER away, or make a server on the CPU slow."""
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    missing = [name for name in (PLUGIN, PLATFORM) if allowed and name not in allowed]
    if missing:
        level = "fail" if PLUGIN in missing else "warn"  # a GPU does without the CPU platform
        finding = f"SGLang skips {' and '.join(missing)}, which it does not list"
        yield Check(level, "SGLANG_PLUGINS", finding, f"add {','.join(missing)}, or unset it")
    if (selected := environ.get("SGLANG_PLATFORM", "")) not in ("", PLATFORM):
        finding = (
            f"with {selected} selected, SGLang skips the plugins of every other distribution that "
            "ships a platform, and faser-sglang ships one"
        )
        yield Check("fail", "SGLANG_PLATFORM", finding, "unset it")
    if environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        finding = "active: waiting threads take the cores from SGLang's other processes"
        yield Check("warn", "OMP_WAIT_POLICY", finding, "unset it")
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        finding = f"{threads} threads on {cores} cores"
        yield Check("warn", "OMP_NUM_THREADS", finding, f"set it to {cores} or less")


def check_plugin() -> Iterator[Check]:
    """Load SGLang's plugins as a server does, and look FASER up."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    load_plugins()
    algorithm = get_spec("FASER")
    if algorithm is None:
        yield Check("fail", "plugin", "SGLang did not load it", REINSTALL)
        return
    if type(algorithm).__name__ != "FaserAlgorithm":
        algorithm.validate_server_args(None)  # a stand-in: raises what went wrong
    yield Check("ok", "plugin", "SGLang knows the algorithm FASER")


def check_device(environ: Mapping[str, str]) -> Iterator[Check]:
    import torch
    from sglang.srt.platforms import current_platform

    if torch.accelerator.is_available():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "not CUDA"
        found = f"{torch.accelerator.current_accelerator().type} ({name})"
        finding = f"{found}: FASER has not been run on a GPU yet, and verifies without CUDA graphs"
        yield Check("warn", "device", finding, "compare greedy output with a run without FASER")
    elif environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        finding = "SGLang's own CPU engine is asked for, so FASER's CPU platform stays out"
        yield Check("warn", "device", finding, "unset SGLANG_USE_CPU_ENGINE")
    elif (found := type(current_platform).__name__) != "FaserCpuPlatform":
        yield Check("fail", "device", f"no accelerator, and SGLang chose {found}", REINSTALL)
    else:
        yield Check("ok", "device", "no accelerator found: FASER's CPU platform is active")
        yield from check_cpu()


def check_cpu() -> Iterator[Check]:
    import psutil

    from faser_sglang.cpu.linear import has_bf16_arithmetic

    kind = (
        "native (oneDNN)"
        if has_bf16_arithmetic()
        else "missing, bf16 linear layers run in fp16 (FBGEMM)"
    )
    yield Check("ok", "cpu", f"bf16 arithmetic: {kind}")
    free = psutil.virtual_memory().available / 2**30
    few = free < MIN_FREE_GIB
    fix = "end other programs, or lower --max-total-tokens" if few else ""
    yield Check("warn" if few else "ok", "memory", f"{free:.1f} GiB available", fix)


def check_pair(model: str, draft: str, fit: Callable[[str, str], None]) -> Iterator[Check]:
    """Whether ``draft`` can draft for ``model``: ``fit`` raises or logs what it finds."""
    for path in (model, draft):
        if path.startswith((".", "/")) and not Path(path).is_dir():
            yield Check("fail", "drafter", f"there is no folder {path}", "correct the path")
            return
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("faser_sglang.validation")
    logger.addHandler(handler)
    try:
        fit(model, draft)
    finally:
        logger.removeHandler(handler)
    for record in records:
        yield Check("warn", "drafter", record.getMessage(), "give another one if that is too short")
    yield Check("ok", "drafter", f"{draft} fits {model}")


def guarded(subject: str, checks: Iterable[Check], fix: str = REINSTALL) -> Iterator[Check]:
    """The checks; one that raises is a failure of ``subject`` with the error as its finding."""
    try:
        yield from checks
    except Exception as error:
        yield Check("fail", subject, " ".join(str(error).split()) or repr(error), fix)


def run_checks(model: str | None, draft: str | None) -> Iterator[Check]:
    yield from check_python()
    yield from check_sglang(plugin.installed_sglang())
    yield from guarded("torch", check_torch())
    yield from check_entry_points()
    yield from check_environment(os.environ, len(os.sched_getaffinity(0)))
    yield from guarded("plugin", check_plugin())
    yield from guarded("device", check_device(os.environ))
    if model and draft:
        yield from guarded("drafter", _check_pair(model, draft), "give a drafter that fits")


def _check_pair(model: str, draft: str) -> Iterator[Check]:
    from faser_sglang.validation import check_fit

    yield from check_pair(model, draft, check_fit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faser_sglang.doctor", description=__doc__)
    parser.add_argument("--model-path", help="a target, to check the drafter against")
    parser.add_argument("--draft", help="a drafter, to check against the target")
    options = parser.parse_args(arguments)
    if bool(options.model_path) != bool(options.draft):
        parser.error("--model-path and --draft go together")
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # what matters is a finding already
    failed = False
    for check in run_checks(options.model_path, options.draft):
        print(check, flush=True)
        failed = failed or check.level == "fail"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
