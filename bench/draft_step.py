"""What a step of the EAGLE3 head costs in the server, by batch size, beside its arithmetic.

    python bench/draft_step.py             demo models, bf16, batches of 1, 4, 8, 16

A step of the server is what a deeper draft adds: the draft phase of rounds at depth 5 less that
at depth 1, over four (host time, which on the CPU is all the time there is). The bound is the
head's matrix products alone, in a bare loop over the same packed weights with the target's weights
read in between, as in a round. The last line gives the ratio at batch 1; this benchmark reports,
it has no goal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.parity import flush  # noqa: E402
from bench.throughput import DEEPEST, chat_prompts  # noqa: E402
from faser_sglang.cpu.linear import HalfCopy  # noqa: E402
from launch import checkpoint, demo_models  # noqa: E402
from launch.servers import Server  # noqa: E402

STEPS = DEEPEST - 1  # the first draft comes out of the pass that catches up


@torch.no_grad()  # inference tensors have no version, by which a copy knows its weight
def bound(head: Path, target: Path, rows: int, repeats: int = 30) -> float:
    """Milliseconds of one step's matrix products for ``rows`` rows: median of a round's steps."""
    _, own = checkpoint.read_model(head)
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    part = {name: own[key] for name in names for key in own if f".{name}." in key}
    qkv = torch.cat([part["q_proj"], part["k_proj"], part["v_proj"]])
    gate_up = torch.cat([part["gate_proj"], part["up_proj"]])
    weights = [qkv, part["o_proj"], gate_up, part["down_proj"], own["lm_head.weight"]]
    copies = [HalfCopy() for _ in weights]
    inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
    _, others = checkpoint.read_model(target)
    between = [weight for weight in others.values() if weight.dim() == 2]
    times = []
    for _ in range(repeats):
        for weight in between:  # a verification pushes the head out of the caches
            weight.view(torch.int16).max()
        began = time.perf_counter()
        for _ in range(STEPS):
            for copy, weight, x in zip(copies, weights, inputs, strict=True):
                copy.multiply(weight, x)
        times.append(1e3 * (time.perf_counter() - began) / STEPS)
    return statistics.median(times[2:])


def served(
    server: Server, prompts: list[list[int]], new_tokens: int, depth: int
) -> dict[str, float]:
    """Host milliseconds of each phase of a round, every request at ``depth``."""
    flush(server)
    params = {
        "max_new_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": {"faser": {"max_depth": depth}},
    }
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda ids: server.generate(ids, **params), prompts))
    return server.faser()["host_ms_per_round"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    target, head = demo_models.build("target"), demo_models.build("eagle3")
    prompts = chat_prompts(target, max(options.batches))
    args = ["--faser-depth", str(DEEPEST), "--max-total-tokens", "16000"]
    rows = []
    with Server(target, draft=head, args=args, name="eagle3") as server:
        served(server, prompts[:1], 16, DEEPEST)
        for batch in options.batches:
            shallow = served(server, prompts[:batch], options.new_tokens, 1)
            phases = served(server, prompts[:batch], options.new_tokens, DEEPEST)
            step = (phases["draft"] - shallow["draft"]) / STEPS
            least = bound(head, target, batch)
            rows.append(
                {
                    "batch": batch,
                    "step_ms": round(step, 3),
                    "bound_ms": round(least, 3),
                    "ratio": round(step / least, 2),
                    "catch_up_ms": shallow["draft"],
                    "round_ms": phases,
                }
            )
            print(f"  {rows[-1]}", flush=True)
    report.save("draft_step", {"dtype": "bf16", "rows": rows})
    first = rows[0]
    print(
        f"draft step: {first['step_ms']} ms at batch {first['batch']}, {first['ratio']} of its "
        f"arithmetic ({first['bound_ms']} ms)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
