"""What a step of the EAGLE3 head costs in the server, by batch size, beside its arithmetic.

    python bench/draft_step.py             demo models, bf16, batches of 1, 4, 8, 16

A step of the server is what a deeper draft adds: the draft phase of rounds at depth 5 less that
at depth 1, over four (host time, which on the CPU is all the time there is). It is compared with
two bare loops over the same packed weights, with the target's weights read in between, as in a
round: the head's matrix products alone, and everything that a step computes (embedding, norms,
rotation, attention over as many positions, activation, the most likely token and its probability)
in plain torch. The last line gives the ratios at batch 1; this benchmark reports, it has no goal.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.parity import flush  # noqa: E402
from bench.throughput import DEEPEST, chat_prompts  # noqa: E402
from faser_sglang.cpu.linear import copy_for_this_cpu  # noqa: E402
from faser_sglang.kernels.ops import top1  # noqa: E402
from launch import checkpoint, demo_models  # noqa: E402
from launch.servers import Server  # noqa: E402

POSITIONS = 200  # about as many as a request has in the middle of the run
STEPS = DEEPEST - 1  # the first draft comes out of the pass that catches up


@torch.no_grad()  # inference tensors have no version, by which a copy knows its weight
def bare(head: Path, target: Path, rows: int, repeats: int = 30) -> tuple[float, float]:
    """Milliseconds of a step for ``rows`` requests: its matrix products, and all it computes."""
    step = BareStep(head, target, rows)
    _, others = checkpoint.read_model(target)
    between = [weight for weight in others.values() if weight.dim() == 2]
    times: dict[Callable[[], None], list[float]] = {step.products: [], step.everything: []}
    for _ in range(repeats):
        for run, taken in times.items():
            for weight in between:  # a verification pushes the head out of the caches
                weight.view(torch.int16).max()
            began = time.perf_counter()
            for _ in range(STEPS):
                run()
            taken.append(1e3 * (time.perf_counter() - began) / STEPS)
    products, everything = (statistics.median(taken[2:]) for taken in times.values())
    return products, everything


class BareStep:
    """One step of the head for ``rows`` requests of ``POSITIONS`` tokens, without a server."""

    def __init__(self, head: Path, target: Path, rows: int) -> None:
        self.config, own = checkpoint.read_model(head)
        _, others = checkpoint.read_model(target)
        names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        part = {name: own[key] for name in names for key in own if f".{name}." in key}
        qkv = torch.cat([part["q_proj"], part["k_proj"], part["v_proj"]])
        gate_up = torch.cat([part["gate_proj"], part["up_proj"]])
        weights = [qkv, part["o_proj"], gate_up, part["down_proj"], own["lm_head.weight"]]
        self.linears = [(copy_for_this_cpu()(), weight) for weight in weights]
        self.inputs = [torch.randn(rows, weight.shape[1]) for weight in weights]
        self.norms = [own[key].float() for key in own if "norm" in key]
        self.embedding = others["model.embed_tokens.weight"]
        self.offsets = own["d2t"]
        self.rows, self.width = rows, own["norm.weight"].numel()
        self.ids = torch.arange(rows)
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.heads, self.kv_heads, self.dim = heads, kv_heads, self.config["head_dim"]
        cached = (rows, kv_heads, POSITIONS, self.dim)
        self.keys, self.values = (torch.randn(cached).bfloat16() for _ in range(2))
        self.cos, self.sin = torch.randn(2, rows, 1, self.dim)

    def products(self) -> None:
        for (copy, weight), x in zip(self.linears, self.inputs, strict=True):
            copy.multiply(weight, x)

    def everything(self) -> None:
        qkv, o, gate_up, down, lm_head = (
            functools.partial(copy.multiply, weight) for copy, weight in self.linears
        )
        stream = self.inputs[1]
        embedded = self._norm(self.embedding[self.ids].float(), 0)
        turning = self.heads + self.kv_heads
        rows = qkv(torch.cat([embedded, self._norm(stream, 1)], -1))
        rows = rows.view(self.rows, turning + self.kv_heads, self.dim)
        first, second = rows[:, :turning].chunk(2, dim=-1)
        turned = rows[:, :turning] * self.cos + torch.cat([second, first], -1) * self.sin
        turned = turned.bfloat16()
        self.keys[:, :, -1] = turned[:, self.heads :]
        self.values[:, :, -1] = rows[:, turning:].bfloat16()
        query = turned[:, : self.heads].view(self.rows, self.kv_heads, -1, self.dim)
        attended = scaled_dot_product_attention(query, self.keys, self.values)
        stream = stream + o(attended.reshape(self.rows, -1).float())
        gate, up = gate_up(self._norm(stream, 2)).chunk(2, dim=-1)
        stream = stream + down(silu(gate).mul_(up))
        tokens, _ = top1(lm_head(self._norm(stream, 3)))
        self.ids = tokens + self.offsets[tokens]

    def _norm(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return rms_norm(x, (self.width,), self.norms[number], self.config["rms_norm_eps"])


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
            products, everything = bare(head, target, batch)
            rows.append(
                {
                    "batch": batch,
                    "step_ms": round(step, 3),
                    "products_ms": round(products, 3),
                    "everything_ms": round(everything, 3),
                    "over_products": round(step / products, 2),
                    "over_everything": round(step / everything, 2),
                    "catch_up_ms": shallow["draft"],
                    "round_ms": phases,
                }
            )
            print(f"  {rows[-1]}", flush=True)
    report.save("draft_step", {"dtype": "bf16", "rows": rows})
    first = rows[0]
    print(
        f"draft step: {first['step_ms']} ms at batch {first['batch']}, {first['over_everything']} "
        f"of a bare loop ({first['everything_ms']} ms), {first['over_products']} of its matrix "
        f"products alone ({first['products_ms']} ms)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
