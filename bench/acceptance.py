"""Accept length and acceptance by position of every drafter on held-out prompts, by the server.

    python bench/acceptance.py             demo models, bf16, greedy, depth 5

HumanEval, MT-Bench and GSM8K in the chat format; the figures are those of ``/server_info``.
``--drafters lm lm-window --save acceptance-window`` shows what a draft KV window costs.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.parity import flush  # noqa: E402
from bench.throughput import DEEPEST, DRAFTERS, SETS  # noqa: E402
from launch import demo_models, prompts  # noqa: E402
from launch.servers import Server  # noqa: E402

WINDOW = 64
VARIANTS = DRAFTERS | {
    "lm-window": ("lm-drafter", ["--speculative-draft-window-size", str(WINDOW)]),
}


def positions(counters: dict[str, Any]) -> list[float]:
    """Share of drafts accepted at each position, of those that were tested there."""
    pairs = zip(counters["accepted_by_position"], counters["tested_by_position"], strict=True)
    return [round(right / max(tested, 1), 3) for right, tested in pairs][:DEEPEST]


def measure(server: Server, texts: list[str], new_tokens: int) -> dict[str, Any]:
    """Answer ``texts`` as chats, two at a time, and read the counters since the flush."""
    flush(server)

    def ask(text: str) -> None:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": new_tokens,
            "temperature": 0,
        }
        server.post("/v1/chat/completions", body).raise_for_status()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, texts))
    faser = server.faser()
    counters, confidence = faser["counters"], faser["drafts_by_confidence"]
    return {
        "accept_length": round(counters["accept_length"], 3),
        "acceptance_by_position": positions(counters),
        "rounds": counters["rounds"],
        "drafts_by_confidence": confidence,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=VARIANTS)
    parser.add_argument("--prompts", type=int, default=12, help="of each set")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--save", default="acceptance", help="name of the result")
    options = parser.parse_args()
    model = demo_models.build("target")
    results: dict[str, dict[str, Any]] = {}
    for name in options.drafters:
        draft, flags = VARIANTS[name]
        with Server(
            model,
            draft=demo_models.build(draft) if draft else None,
            args=["--faser-depth", str(DEEPEST), "--max-total-tokens", "16000", *flags],
            is_faser=True,
            name=name,
        ) as server:
            results[name] = {
                key: measure(server, prompts.load(key, options.prompts), options.new_tokens)
                for key in SETS
            }
        for key, row in results[name].items():
            print(f"  {name:9s} {key:10s} {row}", flush=True)
    report.save(
        options.save,
        {"depth": DEEPEST, "prompts_of_each": options.prompts, "new_tokens": options.new_tokens,
         "dtype": "bf16", "results": results},
    )  # fmt: skip
    lengths = {
        name: round(sum(row["accept_length"] for row in rows.values()) / len(rows), 3)
        for name, rows in results.items()
    }
    print(f"acceptance: mean accept length {lengths}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
