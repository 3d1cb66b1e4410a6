"""Tokens per second of every drafter at fixed depths against no speculation, in one run.

    python bench/throughput.py             demo models, bf16, concurrency 1, 4, 16

One server without speculation and one a drafter are up at once and take turns on the same prompts
(chat, maths, code), ``--repeats`` times; an idle server sleeps. Depths are set by each request
(``max_depth``). Printed are medians of the ratios to no speculation of the same turn, their
spread, the accept length and where a round's time goes on the host. The last line is the best
drafter's ratio at concurrency 1; the exit status is 1 below the goal of 1.4.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from launch import demo_models, prompts  # noqa: E402
from launch.servers import Server, start_all  # noqa: E402

GOAL = 1.4
DEEPEST = 5
DRAFTERS: dict[str, tuple[str | None, list[str]]] = {
    "lm": ("lm-drafter", []),
    "eagle3": ("eagle3", []),
    "ngram": (None, ["--faser-drafter", "ngram"]),
    "hybrid": ("eagle3", ["--faser-drafter", "hybrid"]),
}
SETS = ("mtbench", "gsm8k", "humaneval")
FEWEST_PROMPTS = 6  # a turn's text, however few requests run at once


def chat_prompts(model: Path, count: int, sets: Sequence[str] = SETS) -> list[list[int]]:
    """Token ids of ``count`` held-out prompts in the chat format, the sets in turn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    each = {name: prompts.load(name, -(-count // len(sets))) for name in sets}
    texts = [each[sets[i % len(sets)]][i // len(sets)] for i in range(count)]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


def start_servers(names: list[str], args: list[str], progress: Any = print) -> dict[str, Server]:
    """No speculation and the named drafters, all up."""
    model = demo_models.build("target")
    servers = {"none": Server(model, args=args, name="none")}
    for name in names:
        draft, flags = DRAFTERS[name]
        servers[name] = Server(
            model,
            draft=demo_models.build(draft) if draft else None,
            args=[*args, "--faser-depth", str(DEEPEST), *flags],
            is_faser=True,
            name=name,
        )
    start_all(list(servers.values()), progress=progress)
    return servers


def turn(
    server: Server, work: list[list[int]], concurrency: int, new_tokens: int, depth: int | None
) -> tuple[float, float | None]:
    """Output tokens a second over ``work``, ``concurrency`` at a time, and the accept length."""
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    if depth is not None:
        sampling["custom_params"] = {"faser": {"max_depth": depth}}

    def ask(ids: list[int]) -> dict[str, Any]:
        return server.generate(ids, **sampling)["meta_info"]

    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        metas = list(pool.map(ask, work))
    seconds = time.perf_counter() - began
    tokens = sum(meta["completion_tokens"] for meta in metas)
    if depth is None:
        return tokens / seconds, None
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    return tokens / seconds, (tokens - len(metas)) / rounds


def measure(
    servers: dict[str, Server],
    concurrency: int,
    depths: list[int],
    *,
    repeats: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Interleaved turns at one concurrency; ratios are taken within a repeat."""
    work = chat_prompts(demo_models.build("target"), max(FEWEST_PROMPTS, concurrency))
    cases = [("none", None)] + [(name, d) for name in servers if name != "none" for d in depths]
    rates: dict[tuple[str, int | None], list[float]] = {case: [] for case in cases}
    lengths: dict[tuple[str, int | None], float | None] = {}
    for server in servers.values():
        turn(server, work[:1], 1, 8, None)
    for _ in range(repeats):
        for case in cases:
            servers[case[0]].post("/flush_cache", {})
            rate, lengths[case] = turn(servers[case[0]], work, concurrency, new_tokens, case[1])
            rates[case].append(rate)
    rows = []
    for case in cases:
        ratios = [own / base for own, base in zip(rates[case], rates["none", None], strict=True)]
        length = lengths[case]
        rows.append(
            {
                "drafter": case[0],
                "depth": case[1],
                "tokens_per_second": round(statistics.median(rates[case]), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_low": round(min(ratios), 3),
                "ratio_high": round(max(ratios), 3),
                "accept_length": None if length is None else round(length, 3),
            }
        )
        print(f"  concurrency {concurrency:2d}  {rows[-1]}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 3, 5])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--save", default="throughput", help="name of the result")
    options = parser.parse_args()
    servers = start_servers(options.drafters, ["--max-total-tokens", "16000"])
    try:
        results = {
            str(n): measure(
                servers, n, options.depths, repeats=options.repeats, new_tokens=options.new_tokens
            )
            for n in options.concurrency
        }
        rounds = {
            name: server.faser()["host_ms_per_round"]
            for name, server in servers.items()
            if name != "none"
        }
    finally:
        for server in servers.values():
            server.stop()
    path = report.save(
        options.save,
        {"models": "SmolLM2-135M-Instruct", "dtype": "bf16", "new_tokens": options.new_tokens,
         "repeats": options.repeats, "results": results, "host_ms_per_round": rounds},
    )  # fmt: skip
    first = [row for row in results[str(options.concurrency[0])] if row["depth"] is not None]
    best = max(first, key=lambda row: row["ratio"])
    print(path.relative_to(report.ROOT))
    print(
        f"throughput: {best['drafter']} at depth {best['depth']}: {best['ratio']} of no "
        f"speculation ({best['ratio_low']} to {best['ratio_high']}), one request at a time; "
        f"goal {GOAL}"
    )
    return 0 if best["ratio"] >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
