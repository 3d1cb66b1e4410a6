"""Workloads for a server, driven by ``sglang.bench_serving`` and measured by it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.throughput import chat_prompts

if TYPE_CHECKING:
    from launch.servers import Server

LATENCIES = ("ttft", "tpot", "itl", "e2e_latency")
PERCENTILES = ("mean", "median", "p99")


@dataclass(frozen=True)
class Phase:
    """Requests at up to ``concurrency`` at once (closed loop), or ``rate`` a second (Poisson).

    Neither: all at once.
    """

    requests: int
    concurrency: int | None = None
    rate: float = float("inf")


@dataclass(frozen=True)
class Load:
    """Phases, one after the other; ``is_open`` where arrivals do not wait for answers."""

    phases: tuple[Phase, ...]
    is_open: bool = False

    @property
    def requests(self) -> int:
        return sum(phase.requests for phase in self.phases)


def closed(concurrency: int, requests: int) -> Load:
    """``concurrency`` clients that send a request as soon as they have an answer."""
    return Load((Phase(requests, concurrency),))


def poisson(rate: float, requests: int) -> Load:
    """Arrivals at random, ``rate`` a second."""
    return Load((Phase(requests, rate=rate),), is_open=True)


def bursts(size: int, count: int) -> Load:
    """``count`` times ``size`` requests at once, with a single one in between."""
    return Load((Phase(size), Phase(1)) * count, is_open=True)


def ramp(steps: tuple[int, ...]) -> Load:
    """Closed loops of so many clients each, up and down."""
    return Load(tuple(Phase(max(3, 3 * n // 2), n) for n in steps))


class Prompts:
    """Held-out prompts in the target's chat format, as token ids."""

    def __init__(self, model: Path, new_tokens: int, seed: int) -> None:
        from transformers import AutoTokenizer

        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.new_tokens = new_tokens
        self.seed = seed

    def rows(self, sets: tuple[str, ...], count: int) -> list[Any]:
        """``count`` rows for ``sglang.bench_serving``, the sets in turn; always the same ones."""
        from sglang.benchmark.datasets.common import DatasetRow

        ids = chat_prompts(self.model, count, sets)
        return [DatasetRow(prompt, len(prompt), self.new_tokens) for prompt in ids]


def run(server: Server, prompts: Prompts, sets: tuple[str, ...], load: Load) -> dict[str, Any]:
    """One run on an empty cache, and what it took.

    Tokens a second over the phases' own time; latencies in milliseconds over all requests; the
    accept length of the run alone, None without speculation.
    """
    rows = prompts.rows(sets, load.requests)
    server.post("/flush_cache", {}).raise_for_status()
    before = _rounds(server)
    parts, start = [], 0
    for number, phase in enumerate(load.phases):
        some = rows[start : start + phase.requests]
        start += phase.requests
        parts.append(_run_phase(server, prompts, some, phase, prompts.seed + number))
    seconds = sum(part["duration"] for part in parts)
    tokens = sum(part["total_output_tokens"] for part in parts)
    emitted, rounds = (now - then for now, then in zip(_rounds(server), before, strict=True))
    weights = [part["completed"] for part in parts]
    return {
        "tokens_per_second": tokens / seconds,
        "accept_length": emitted / rounds if rounds else None,
        "texts": [text for part in parts for text in part["generated_texts"]],
        **{
            f"{which}_{name}_ms": float(
                np.average([part[f"{which}_{name}_ms"] for part in parts], weights=weights)
            )
            for name in LATENCIES
            for which in PERCENTILES
        },
    }


def _rounds(server: Server) -> tuple[int, int]:
    """Tokens emitted and rounds until now."""
    counters = (server.info().get("faser") or {}).get("counters") or {}
    return counters.get("emitted", 0), counters.get("rounds", 0)


def _run_phase(
    server: Server, prompts: Prompts, rows: list[Any], phase: Phase, seed: int
) -> dict[str, Any]:
    from sglang.benchmark import serving
    from sglang.test.test_utils import get_benchmark_args

    args = get_benchmark_args(
        server.base_url, dataset_name="custom", disable_ignore_eos=True, seed=seed
    )
    args.output_file = os.devnull
    serving.set_global_args(_complete(args))
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - bench_serving draws its arrivals from it
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard):
        result = asyncio.run(
            serving.benchmark(
                backend="sglang",
                api_url=f"{server.base_url}/generate",
                base_url=server.base_url,
                model_id=str(prompts.model),
                tokenizer=prompts.tokenizer,
                input_requests=rows,
                request_rate=phase.rate,
                max_concurrency=phase.concurrency,
                disable_tqdm=True,
                lora_names=None,
                lora_request_distribution=None,
                lora_zipf_alpha=None,
                extra_request_body={},
                profile=False,
                warmup_requests=0,
            )
        )
    if result["completed"] != len(rows):
        errors = [error for error in result["errors"] if error]
        raise RuntimeError(f"{server.name}: {len(errors)} requests failed: {errors[:1]}")
    return result


def _complete(args: Any) -> Any:
    """What ``run_benchmark`` adds to its arguments, for a caller with requests of its own."""
    values = {
        "warmup_requests": 0,
        "output_details": False,
        "tokenize_prompt": True,
        "plot_throughput": False,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "logprob_start_len": -1,
        "return_logprob": False,
        "temperature": 0.0,
        "top_p": 1.0,
        "cache_report": False,
        "goodput": None,
    }
    for name, value in values.items():
        setattr(args, name, value)
    return args
