"""Tokens per second of FASER servers against no speculation, in one run.

    python bench/throughput.py             demo models, bf16, concurrency 1, 4, 16

All servers are up at once and take turns, ``--repeats`` times each, on the same prompts; an idle
server sleeps. Printed are medians of the ratios to no speculation of the same turn, their spread,
the accept length and where a round's time goes on the host. The last line is the ratio at
concurrency 1; this benchmark reports, it has no goal to miss: the plain LM drafter of the demo is
nearly as large as its target, so that a ratio below 1 is expected.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from launch import demo_models, prompts  # noqa: E402
from launch.servers import Server, start_all  # noqa: E402

SERVERS: dict[str, list[str] | None] = {
    "none": None,
    "auto": ["--faser-depth", "auto"],
    "depth-3": ["--faser-depth", "3"],
    "off": ["--faser-mode", "off"],
}


def turn(server: Server, texts: list[str], concurrency: int, new_tokens: int) -> float:
    """Output tokens a second over all ``texts``, ``concurrency`` at a time."""

    def ask(text: str) -> int:
        answer = server.generate(text, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
        return answer["meta_info"]["completion_tokens"]

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        total = sum(pool.map(ask, texts))
    return total / (time.perf_counter() - began)


def measure(
    servers: dict[str, Server], concurrency: int, *, repeats: int, new_tokens: int
) -> dict[str, Any]:
    """Interleaved turns at one concurrency; ratios are taken within a turn."""
    texts = prompts.load("mtbench", max(2, concurrency))
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for server in servers.values():
        turn(server, texts[:1], 1, 8)
    for _ in range(repeats):
        for name, server in servers.items():
            server.post("/flush_cache", {})
            rates[name].append(turn(server, texts, concurrency, new_tokens))
    rows = {}
    for name, server in servers.items():
        ratios = [own / base for own, base in zip(rates[name], rates["none"], strict=True)]
        row: dict[str, Any] = {
            "tokens_per_second": round(statistics.median(rates[name]), 2),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
        }
        if name != "none":
            faser = server.faser()
            row["accept_length"] = faser["counters"]["accept_length"]
            row["host_ms_per_round"] = faser["host_ms_per_round"]
        rows[name] = row
        print(f"  concurrency {concurrency:2d}  {name:8s} {row}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--servers", nargs="*", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    model, draft = demo_models.build("target"), demo_models.build("lm-drafter")
    names = dict.fromkeys(["none", *options.servers])
    servers = {
        name: Server(
            model,
            draft=None if SERVERS[name] is None else draft,
            args=["--max-total-tokens", "20000", *(SERVERS[name] or [])],
            name=name,
        )
        for name in names
    }
    start_all(list(servers.values()), progress=print)
    try:
        results = {
            str(n): measure(servers, n, repeats=options.repeats, new_tokens=options.new_tokens)
            for n in options.concurrency
        }
    finally:
        for server in servers.values():
            server.stop()
    path = report.save(
        "throughput",
        {"models": "SmolLM2-135M-Instruct, lm-drafter (27 of its layers)", "dtype": "bf16",
         "new_tokens": options.new_tokens, "repeats": options.repeats, "results": results},
    )  # fmt: skip
    first = results[str(options.concurrency[0])]
    best = max((name for name in first if name != "none"), key=lambda name: first[name]["ratio"])
    print(path.relative_to(report.ROOT))
    print(f"throughput: {best} at {first[best]['ratio']} of no speculation, one request at a time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
