"""What SGLang's server costs over a lean loop, on CPU, without speculation, one request.

    python bench/cpu_overhead.py

A token through the whole server is compared with a token through a bare PyTorch loop over the same
weights (bf16, torch's own linear layers, a contiguous cache), in turns in one run. The goal is a
ratio of 1.25; the last line gives it, and the exit status is 1 if it is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server  # noqa: E402

GOAL = 1.25
PROMPT = 120
TOKENS = 48


class LeanLlama:
    """A Llama decode loop with nothing around it."""

    def __init__(self, folder: Path, context: int) -> None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["hidden_size"] // self.heads
        self.eps = config["rms_norm_eps"]
        weights = load_file(folder / "model.safetensors")
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [
            self._layer(weights, f"model.layers.{i}.") for i in range(config["num_hidden_layers"])
        ]
        shape = (len(self.layers), 1, self.kv_heads, context, self.dim)
        self.keys = torch.zeros(shape, dtype=self.embedding.dtype)
        self.values = torch.zeros_like(self.keys)
        base = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.outer(
            torch.arange(context), base ** -(torch.arange(0, self.dim, 2) / self.dim)
        )
        self.cos, self.sin = angles.cos(), angles.sin()

    @staticmethod
    def _layer(weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        attention = [weights[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
        mlp = [weights[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        return {
            "qkv": torch.cat(attention),
            "o": weights[f"{prefix}self_attn.o_proj.weight"],
            "gate_up": torch.cat(mlp),
            "down": weights[f"{prefix}mlp.down_proj.weight"],
            "norm1": weights[f"{prefix}input_layernorm.weight"],
            "norm2": weights[f"{prefix}post_attention_layernorm.weight"],
        }

    def step(self, tokens: torch.Tensor, start: int) -> int:
        """Run ``tokens`` [rows] at positions from ``start``; the greedy next token."""
        x = self.embedding[tokens]
        rows, end = len(tokens), start + len(tokens)
        cos, sin = self.cos[start:end, None], self.sin[start:end, None]
        size = x.shape[-1]
        for i, w in enumerate(self.layers):
            qkv = linear(rms_norm(x, (size,), w["norm1"], self.eps), w["qkv"])
            qkv = qkv.view(rows, -1, self.dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            self.keys[i, 0, :, start:end] = k.transpose(0, 1)
            self.values[i, 0, :, start:end] = v.transpose(0, 1)
            attended = scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                self.keys[i, :, :, :end],
                self.values[i, :, :, :end],
                is_causal=rows > 1,
                enable_gqa=True,
            )
            x = x + linear(attended[0].transpose(0, 1).reshape(rows, -1), w["o"])
            hidden = linear(rms_norm(x, (size,), w["norm2"], self.eps), w["gate_up"])
            gate, up = hidden.chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, w["down"])
        last = rms_norm(x[-1:], (size,), self.norm, self.eps)
        return int(linear(last, self.embedding).argmax())

    @staticmethod
    def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    @torch.inference_mode()
    def milliseconds(self, prompt: list[int]) -> float:
        """A token, over TOKENS greedy ones behind ``prompt``."""
        token = self.step(torch.tensor(prompt), 0)
        began = time.perf_counter()
        for n in range(TOKENS):
            token = self.step(torch.tensor([token]), len(prompt) + n)
        return 1e3 * (time.perf_counter() - began) / TOKENS


def server_milliseconds(server: Server, prompt: list[int]) -> float:
    """A token through the server: the difference of a long answer and its first token."""
    server.post("/flush_cache", {})
    latency = {}
    for tokens in (1, TOKENS + 1):
        began = time.perf_counter()
        server.generate(prompt, max_new_tokens=tokens, temperature=0, ignore_eos=True)
        latency[tokens] = time.perf_counter() - began
        server.post("/flush_cache", {})
    return 1e3 * (latency[TOKENS + 1] - latency[1]) / TOKENS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model = demo_models.build("target")
    lean = LeanLlama(model, PROMPT + TOKENS + 8)
    prompt = torch.randint(100, 40000, (PROMPT,), generator=torch.manual_seed(1)).tolist()
    turns = []
    with Server(model, name="no speculation") as server:
        server_milliseconds(server, prompt)
        lean.milliseconds(prompt)
        for _ in range(options.repeats):
            turns.append((server_milliseconds(server, prompt), lean.milliseconds(prompt)))
            print("  server {:.1f} ms, lean loop {:.1f} ms a token".format(*turns[-1]), flush=True)
    ratios = [server / lean for server, lean in turns]
    ratio = statistics.median(ratios)
    report.save(
        "cpu_overhead",
        {"server_ms": [s for s, _ in turns], "lean_ms": [n for _, n in turns], "ratio": ratio},
    )
    print(
        f"cpu overhead: {ratio:.2f} of a lean loop ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"goal {GOAL}"
    )
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
