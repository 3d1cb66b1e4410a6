"""`python -m faser_sglang.doctor`: why FASER would not run here, and what to do about it.

One line a check: ok, warn or fail, the last two with the way out. Exit status 1 if any failed.
SGLang and torch are imported inside the checks, so that their absence is a finding too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from faser_sglang import plugin

MIN_PYTHON = (3, 11)
MIN_FREE_GIB = 4.0  # the demo's target and drafter, and their KV
PLUGIN_NAME, PLATFORM_NAME = "faser", "faser_cpu"
ENTRY_POINTS = {"sglang.srt.plugins": PLUGIN_NAME, "sglang.srt.platforms": PLATFORM_NAME}
REINSTALL = "install faser-sglang into this environment (pip install -e . in its source folder)"


@dataclass(frozen=True)
class Check:
    """One finding; ``fix`` says what to do where ``level`` is not ok."""

    level: str  # ok, warn, fail
    subject: str
    finding: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<5}{self.subject}: {self.finding}"
        return f"{line}\n     fix: {self.fix}" if self.fix else line


def check_python(version: Sequence[int] = sys.version_info) -> Check:
    text = ".".join(map(str, version[:3]))
    if tuple(version[:2]) < MIN_PYTHON:
        return Check("fail", "python", text, "use Python 3.11 or newer")
    return Check("ok", "python", text)


def check_sglang(found: str) -> Check:
    """``found`` is the installed version, "none" without one."""
    if found != plugin.REQUIRED_SGLANG:
        finding = f"{found} is installed, {plugin.REQUIRED_SGLANG} is needed"
        return Check("fail", "sglang", finding, f"pip install sglang=={plugin.REQUIRED_SGLANG}")
    return Check("ok", "sglang", found)


def check_torch() -> Check:
    try:
        import torch
    except Exception as error:  # a broken build raises OSError and others
        return Check("fail", "torch", f"cannot be imported ({error})", "reinstall sglang's own pin")
    return Check("ok", "torch", torch.__version__)


def check_entry_points(find: Callable[..., Any] = entry_points) -> Iterator[Check]:
    for group, name in ENTRY_POINTS.items():
        is_found = name in {point.name for point in find(group=group)}
        if is_found:
            yield Check("ok", "entry point", f"{name} in {group}")
        else:
            yield Check("fail", "entry point", f"{name} is not in {group}", REINSTALL)


def check_environment(environ: Mapping[str, str], cores: int) -> Iterator[Check]:
    """Variables that take FASER away, or make a CPU server slow."""
    allowed = {name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    missing = [name for name in (PLUGIN_NAME, PLATFORM_NAME) if name not in allowed]
    if allowed and missing:
        finding = f"it lists only {', '.join(sorted(allowed))}; SGLang skips {', '.join(missing)}"
        level = "fail" if PLUGIN_NAME in missing else "warn"
        fix = f"add {','.join(missing)} to it, or unset it ({PLATFORM_NAME} serves the CPU)"
        yield Check(level, "SGLANG_PLUGINS", finding, fix)
    platform = environ.get("SGLANG_PLATFORM", "")
    if platform and platform != PLATFORM_NAME:
        finding = (
            f"{platform} is selected, so SGLang skips the plugins of every other distribution "
            "that ships a platform, and FASER's ships one"
        )
        yield Check("fail", "SGLANG_PLATFORM", finding, "unset it")
    if environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        finding = "active: waiting threads take the cores from SGLang's other processes"
        yield Check("warn", "OMP_WAIT_POLICY", finding, "unset it")
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > cores:
        finding = f"{threads} threads on {cores} cores"
        yield Check("warn", "OMP_NUM_THREADS", finding, f"set it to {cores} or less")


def check_plugin() -> Check:
    """Load SGLang's plugins as a server would and look up FASER."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    load_plugins()
    algorithm = get_spec("FASER")
    if algorithm is None:
        return Check("fail", "plugin", "SGLang did not load it", "see the failures above")
    if type(algorithm).__name__ != "FaserAlgorithm":  # the stand-in raises why it is one
        try:
            algorithm.validate_server_args(None)
        except plugin.FaserLoadError as error:
            cause = error.__cause__
            return Check("fail", "plugin", f"{type(cause).__name__}: {cause}", REINSTALL)
    return Check("ok", "plugin", "SGLang knows the algorithm FASER")


def check_device(environ: Mapping[str, str]) -> Iterator[Check]:
    import torch

    if torch.accelerator.is_available():
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        yield Check("ok", "device", f"{torch.accelerator.current_accelerator().type}: {name}")
        fix = "check the output on your models (greedy, float32) before you rely on it"
        yield Check("warn", "device", "FASER has not been run on an accelerator yet", fix)
        return
    if environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        finding = "SGLang's own CPU engine is asked for, so FASER's CPU platform stays out"
        yield Check("warn", "device", finding, "unset SGLANG_USE_CPU_ENGINE")
        return
    from sglang.srt.platforms import current_platform

    found = type(current_platform).__name__
    if found != "FaserCpuPlatform":
        yield Check("fail", "device", f"no accelerator, and SGLang chose {found}", REINSTALL)
        return
    yield Check("ok", "device", "cpu, no accelerator found: FASER's CPU platform is active")
    yield from check_cpu()


def check_cpu() -> Iterator[Check]:
    import psutil

    from faser_sglang.cpu.linear import has_bf16_arithmetic

    kind = "native" if has_bf16_arithmetic() else "missing; bf16 linear layers run in fp16 (FBGEMM)"
    yield Check("ok", "cpu", f"bf16 arithmetic {kind}")
    free = psutil.virtual_memory().available / 2**30
    if free < MIN_FREE_GIB:
        fix = "end other programs, or lower --mem-fraction-static or --max-total-tokens"
        yield Check("warn", "memory", f"{free:.1f} GiB available", fix)
    else:
        yield Check("ok", "memory", f"{free:.1f} GiB available")


def check_pair(model: str, draft: str, fit: Callable[[str, str], None]) -> Check:
    """Whether ``draft`` can draft for ``model``; ``fit`` raises what it finds wrong."""
    try:
        fit(model, draft)
    except Exception as error:  # unreadable checkpoints raise whatever transformers does
        return Check("fail", "drafter", str(error).strip() or repr(error), "give another drafter")
    return Check("ok", "drafter", f"{draft} fits {model}")


def run_checks(model: str | None, draft: str | None) -> Iterator[Check]:
    environ = os.environ
    yield check_python()
    sglang = check_sglang(plugin.installed_sglang())
    yield sglang
    torch = check_torch()
    yield torch
    yield from check_entry_points()
    yield from check_environment(environ, len(os.sched_getaffinity(0)))
    if "fail" in (sglang.level, torch.level):
        return  # the rest would repeat it
    yield check_plugin()
    yield from check_device(environ)
    if model and draft:
        from faser_sglang.validation import check_fit

        yield check_pair(model, draft, check_fit)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faser_sglang.doctor", description=__doc__)
    parser.add_argument("--model-path", help="target, to check the drafter against")
    parser.add_argument("--draft", help="drafter, to check against the target")
    options = parser.parse_args(arguments)
    if bool(options.model_path) != bool(options.draft):
        parser.error("--model-path and --draft go together")
    warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # what is wrong comes as a check
    levels = []
    for check in run_checks(options.model_path, options.draft):
        print(check, flush=True)
        levels.append(check.level)
    return 1 if "fail" in levels else 0


if __name__ == "__main__":
    sys.exit(main())
