"""Train an EAGLE3 head for the demo target on the text of ``bench/head_data.py``.

    python bench/train_head.py --data FOLDER [FOLDER ...] --minutes 20 --out head.safetensors

The head learns the target's own next-token distribution (its 16 most likely tokens), one, two and
three tokens ahead, each step on the states of the one before as when it drafts (training-time
test, EAGLE-3, arXiv 2503.01840). Its lm_head is the target's rows of the 16,384 most frequent
tokens and stays frozen, so it is not part of the weights that are written.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import checkpoint, demo_models  # noqa: E402

HOT_TOKENS = 16_384
STEPS = 3
EPS = 1e-5
LEAST_CHANCE = 0.01  # less likely tokens cost a column of the loss and teach next to nothing
TENSORS = {
    "q": "midlayer.self_attn.q_proj", "k": "midlayer.self_attn.k_proj",
    "v": "midlayer.self_attn.v_proj", "o": "midlayer.self_attn.o_proj",
    "gate": "midlayer.mlp.gate_proj", "up": "midlayer.mlp.up_proj",
    "down": "midlayer.mlp.down_proj", "fc": "fc",
}  # fmt: skip
NORMS = {
    "input": "midlayer.input_layernorm", "hidden": "midlayer.hidden_norm",
    "post": "midlayer.post_attention_layernorm", "final": "norm",
}  # fmt: skip


class Data:
    """Conversations of one or several folders, memory-mapped; ``hold_out`` of them for checks."""

    def __init__(self, folders: list[Path], hold_out: int = 32) -> None:
        self.sequences: list[tuple[int, int, int, int]] = []  # folder, first row, rows, answer
        self.arrays = []
        for number, folder in enumerate(folders):
            index = json.loads((folder / "index.json").read_text())
            rows, hidden, top = index["rows"], index["hidden"], index["top"]
            self.arrays.append(
                {
                    "ids": np.memmap(folder / "ids.bin", np.int32, "r", shape=(rows,)),
                    "aux": np.memmap(folder / "aux.bin", np.int16, "r", shape=(rows, 3 * hidden)),
                    "top_ids": np.memmap(folder / "top_ids.bin", np.int32, "r", shape=(rows, top)),
                    "top_p": np.memmap(folder / "top_p.bin", np.float16, "r", shape=(rows, top)),
                }
            )
            ends = [*index["starts"][1:], rows]
            for start, end, answer in zip(index["starts"], ends, index["answers"], strict=True):
                self.sequences.append((number, start, end - start, answer))
        self.held_out = self.sequences[:: max(1, len(self.sequences) // hold_out)]
        kept_back = set(self.held_out)
        self.training = [s for s in self.sequences if s not in kept_back]

    def counts(self, vocab_size: int) -> np.ndarray:
        """How often each token was written or likely."""
        total = np.zeros(vocab_size)
        for arrays in self.arrays:
            total += np.bincount(arrays["ids"], minlength=vocab_size)
            likely = arrays["top_p"] > 0.05
            total += 0.3 * np.bincount(arrays["top_ids"][likely], minlength=vocab_size)
        return total

    def batch(self, chosen: list[tuple[int, int, int, int]]) -> dict[str, torch.Tensor]:
        """Padded to the longest: ids, aux, top_ids, top_p and where each token counts."""
        length = max(rows for _, _, rows, _ in chosen)
        out: dict[str, list[torch.Tensor]] = {key: [] for key in self.arrays[0]}
        weight = torch.zeros(len(chosen), length)
        for i, (folder, first, rows, answer) in enumerate(chosen):
            weight[i, :rows] = 0.3  # the user's turn is sampled text too
            weight[i, max(answer - 2, 0) : rows] = 1.0
            for key, array in self.arrays[folder].items():
                part = torch.from_numpy(np.array(array[first : first + rows]))
                padding = [0, 0] * (part.dim() - 1) + [0, length - rows]
                out[key].append(nn.functional.pad(part, padding))
        batch = {key: torch.stack(parts) for key, parts in out.items()}
        batch["aux"] = batch["aux"].view(torch.bfloat16).float()
        batch["ids"], batch["top_ids"] = batch["ids"].long(), batch["top_ids"].long()
        batch["top_p"] = batch["top_p"].float()
        batch["weight"] = weight
        return batch


class Head(nn.Module):
    """The layer as SGLang's LlamaForCausalLMEagle3 has it; names are its checkpoint's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = hidden // self.heads
        sizes = {
            "fc": (hidden, 3 * hidden),
            "q": (self.heads * self.dim, 2 * hidden),
            "k": (self.kv_heads * self.dim, 2 * hidden),
            "v": (self.kv_heads * self.dim, 2 * hidden),
            "o": (hidden, self.heads * self.dim),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        self.w = nn.ParameterDict({name: torch.zeros(shape) for name, shape in sizes.items()})
        norms = ("input", "hidden", "post", "final")
        self.norms = nn.ParameterDict({name: torch.ones(hidden) for name in norms})
        self.base = config["rope_theta"]

    def start_from(self, target: dict[str, torch.Tensor], layer: int) -> None:
        """Begin as the target's ``layer`` on the deepest of the three captured states."""
        at = f"model.layers.{layer}."
        part = {key: value.float() for key, value in target.items() if key.startswith(at)}
        hidden = self.w["o"].shape[0]
        with torch.no_grad():
            self.w["fc"][:, 2 * hidden :] = torch.eye(hidden)
            for name in "qkv":
                weight = part[f"{at}self_attn.{name}_proj.weight"]
                self.w[name][:, :hidden] = 0.3 * weight
                self.w[name][:, hidden:] = 0.7 * weight
            self.w["o"].copy_(part[f"{at}self_attn.o_proj.weight"])
            for name in ("gate", "up", "down"):
                self.w[name].copy_(part[f"{at}mlp.{name}_proj.weight"])
            self.norms["input"].fill_(1.0)
            self.norms["hidden"].copy_(part[f"{at}input_layernorm.weight"])
            self.norms["post"].copy_(part[f"{at}post_attention_layernorm.weight"])
            self.norms["final"].copy_(target["model.norm.weight"].float())

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [batch, positions, heads, dim]."""
        powers = torch.arange(0, self.dim, 2) / self.dim
        angles = torch.outer(positions.float(), self.base**-powers)[:, None]
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        step: int,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Step ``step`` of every chain at once.

        Args:
            embeds: [batch, p, hidden] of token p + 1 + step. states: the captured states joined
                (step 0), else what the step before returned.
            cache: keys and values of the steps before; this step's are appended.

        Returns:
            states for the next step and for the lm_head, [batch, p, hidden].
        """
        w, norms = self.w, self.norms
        size = w["o"].shape[0]
        residual = linear(states, w["fc"]) if step == 0 else states
        joined = torch.cat(
            [
                rms_norm(embeds, (size,), norms["input"], EPS),
                rms_norm(residual, (size,), norms["hidden"], EPS),
            ],
            dim=-1,
        )
        batch, length = embeds.shape[:2]
        positions = torch.arange(length) + step
        q = self.rotate(linear(joined, w["q"]).view(batch, length, -1, self.dim), positions)
        k = self.rotate(linear(joined, w["k"]).view(batch, length, -1, self.dim), positions)
        v = linear(joined, w["v"]).view(batch, length, -1, self.dim)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
        cache.append((k, v))
        residual = residual + linear(self._attend(q, cache).flatten(2), w["o"])
        normed = rms_norm(residual, (size,), norms["post"], EPS)
        mlp = linear(silu(linear(normed, w["gate"])) * linear(normed, w["up"]), w["down"])
        states = residual + mlp
        return states, rms_norm(states, (size,), norms["final"], EPS)

    def _attend(
        self, q: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Chain p sees the first step's slots up to p, and its own later ones."""
        (k, v), later = cache[0], cache[1:]
        length = q.shape[1]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
        own = [torch.einsum("bqhd,bqhd->bhq", q, key)[..., None] for key, _ in later]
        chances = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(self.dim), -1)
        out = torch.einsum("bhqk,bkhd->bqhd", chances[..., :length], v)
        for i, (_, value) in enumerate(later):
            out = out + chances[..., length + i].transpose(1, 2)[..., None] * value
        return out

    def named(self) -> dict[str, nn.Parameter]:
        """Everything but lm_head and d2t, under SGLang's names."""
        out = {f"{name}.weight": self.w[key] for key, name in TENSORS.items()}
        return out | {f"{name}.weight": self.norms[key] for key, name in NORMS.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().bfloat16() for name, tensor in self.named().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self.named().items():
            parameter.copy_(tensors[name])


class Trainer:
    """The head, its frozen surroundings, and one step of training or measuring."""

    def __init__(
        self, data: Data, model: Path, seed: int, start: dict[str, torch.Tensor] | None = None
    ) -> None:
        torch.manual_seed(seed)
        self.data = data
        config, target = checkpoint.read_model(model)
        self.embedding = target["model.embed_tokens.weight"].float()
        if start is None:
            frequent = np.argsort(-data.counts(config["vocab_size"]), kind="stable")[:HOT_TOKENS]
            self.hot = torch.from_numpy(np.sort(frequent))
        else:
            self.hot = start["hot"].long()
        self.to_hot = torch.full((config["vocab_size"],), -1)
        self.to_hot[self.hot] = torch.arange(HOT_TOKENS)
        self.lm_head = self.embedding[self.hot]
        self.head = Head(config)
        self.head.start_from(target, config["num_hidden_layers"] - 1)
        if start is not None:
            self.head.load(start)

    def steps(self, batch: dict[str, torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Each step's output states, weights and likely next tokens, flattened over chains."""
        length = batch["ids"].shape[1]
        states = batch["aux"][:, : length - 1]
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for step in range(STEPS):
            # Chains too near the end see padding; their weight is zero.
            ahead = nn.functional.pad(batch["ids"][:, 1 + step :], [0, step])
            states, out = self.head(self.embedding[ahead], states, step, cache)
            shift = [0, 0, 0, step]
            top_ids = nn.functional.pad(batch["top_ids"][:, 1 + step :], shift)
            top_p = nn.functional.pad(batch["top_p"][:, 1 + step :], shift)
            weight = nn.functional.pad(batch["weight"][:, 1 + step :], [0, step])
            counts = weight.flatten() > 0
            found.append(
                (
                    out.flatten(0, 1)[counts],
                    weight.flatten()[counts],
                    top_ids.flatten(0, 1)[counts],
                    top_p.flatten(0, 1)[counts],
                )
            )
        return found

    def loss(self, batch: dict[str, torch.Tensor], sample: int) -> torch.Tensor:
        """Cross entropy to the target's likely tokens, over those of the batch and a sample."""
        found = self.steps(batch)
        likely = torch.cat([self.to_hot[ids[p >= LEAST_CHANCE]] for _, _, ids, p in found])
        drawn = torch.randint(HOT_TOKENS, (sample,))
        columns = torch.unique(torch.cat([likely[likely >= 0], drawn]))
        place = torch.full((HOT_TOKENS + 1,), -1)
        place[columns] = torch.arange(len(columns))
        lm_head = self.lm_head[columns]
        # Columns that were only drawn stand for all that were not.
        is_likely = torch.zeros(HOT_TOKENS, dtype=torch.bool)
        is_likely[likely[likely >= 0]] = True
        absent = HOT_TOKENS - int(is_likely.sum())
        extra = ~is_likely[columns]
        correction = torch.where(extra, math.log(absent / max(1, int(extra.sum()))), 0.0)
        total = torch.zeros(())
        for step, (out, weight, ids, p) in enumerate(found):
            logits = linear(out, lm_head)
            norm = (logits + correction).logsumexp(-1)
            hot = self.to_hot[ids]
            p = torch.where((hot >= 0) & (p >= LEAST_CHANCE), p, 0.0)
            picked = logits.gather(1, place[hot].clamp(min=0))  # what has no column has p = 0
            row = p.sum(-1) * norm - (p * picked).sum(-1)
            total = total + 0.85**step * (row * weight).sum() / weight.sum()
        return total

    @torch.no_grad()
    def acceptance(self) -> list[float]:
        """Share of held-out answers' chains whose guess is right, given all before were."""
        right, tested = [0.0] * STEPS, [0.0] * STEPS
        for i in range(0, len(self.data.held_out), 8):
            batch = self.data.batch(self.data.held_out[i : i + 8])
            length = batch["ids"].shape[1]
            states = batch["aux"][:, : length - 1]
            cache: list[tuple[torch.Tensor, torch.Tensor]] = []
            alive = torch.ones(batch["ids"].shape[0], length - 1, dtype=torch.bool)
            for step in range(STEPS):
                ahead = nn.functional.pad(batch["ids"][:, 1 + step :], [0, step])
                states, out = self.head(self.embedding[ahead], states, step, cache)
                guess = self.hot[linear(out, self.lm_head).argmax(-1)]
                shift = [0, 0, 0, step]
                truth = nn.functional.pad(batch["top_ids"][:, 1 + step :], shift)[..., 0]
                weight = nn.functional.pad(batch["weight"][:, 1 + step :], [0, step]) == 1.0
                tested[step] += float((alive & weight).sum())
                alive &= (guess == truth) & weight
                right[step] += float(alive.sum())
        return [r / max(t, 1) for r, t in zip(right, tested, strict=True)]


def train(trainer: Trainer, minutes: float, batch_size: int, rate: float) -> list[dict[str, Any]]:
    """AdamW with a cosine over ``minutes``; returns the curve of held-out acceptance."""
    head, data = trainer.head, trainer.data
    matrices = [p for p in head.parameters() if p.dim() == 2]
    vectors = [p for p in head.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate,
        betas=(0.9, 0.98),
    )
    rng = np.random.default_rng(0)
    average = {name: p.detach().clone() for name, p in head.named_parameters()}
    curve, seen, update = [], 0, 0
    began = told = time.monotonic()
    order: list[list[tuple[int, int, int, int]]] = []
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        if not order:
            order = _batches(data.training, batch_size, rng)
        batch = data.batch(order.pop())
        for group in optimizer.param_groups:
            warm = min(1.0, (update + 1) / 40)
            group["lr"] = rate * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        loss = trainer.loss(batch, sample=768)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        update += 1
        seen += int((batch["weight"] > 0).sum())
        keep = min(0.98, update / (update + 20))
        for name, p in head.named_parameters():
            average[name].lerp_(p.detach(), 1 - keep)
        if time.monotonic() - told > 150 or update == 20:
            told = time.monotonic()
            curve.append({"tokens": seen, "loss": loss.item(), "accept": trainer.acceptance()})
            rounded = [round(a, 3) for a in curve[-1]["accept"]]
            print(
                f"{(told - began) / 60:5.1f} min, {seen} tokens, loss {loss.item():.3f}, "
                f"held-out acceptance {rounded}",
                flush=True,
            )
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.copy_(average[name])
    curve.append({"tokens": seen, "loss": loss.item(), "accept": trainer.acceptance()})
    return curve


def _batches(
    sequences: list[tuple[int, int, int, int]], size: int, rng: np.random.Generator
) -> list[list[tuple[int, int, int, int]]]:
    """Batches of similar length, in random order."""
    jitter = rng.normal(0, 12, len(sequences))
    by_length = [sequences[i] for i in np.argsort([s[2] for s in sequences] + jitter)]
    batches = [by_length[i : i + size] for i in range(0, len(by_length), size)]
    rng.shuffle(batches)
    return batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--start", type=Path, help="go on from this head, with its vocabulary")
    options = parser.parse_args()
    from safetensors.torch import load_file, save_file

    data = Data(options.data)
    start = load_file(options.start) if options.start else None
    trainer = Trainer(data, demo_models.build("target"), seed=0, start=start)
    print(f"{len(data.training)} conversations, start {trainer.acceptance()}", flush=True)
    curve = train(trainer, options.minutes, options.batch, options.rate)
    tensors = trainer.head.tensors() | {"hot": trainer.hot.to(torch.int32)}
    save_file(tensors, options.out, {"format": "pt"})
    about = {
        "conversations": len(data.training),
        "distinct_tokens": sum(rows for _, _, rows, _ in data.training),
        "curve": curve,
    }
    options.out.with_suffix(".json").write_text(json.dumps(about, indent=1))
    print(f"head: held-out acceptance {[round(a, 3) for a in curve[-1]['accept']]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
