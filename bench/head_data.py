"""Text for training the demo head: conversations that the demo target writes all by itself.

    python bench/head_data.py --out FOLDER --minutes 20

The model first writes a user's turn (sampled, behind a short random opening so that chat, maths and
code all come up), then answers it, half of the time greedily and half at temperature 0.8. For every
token the inputs of three of the target's layers and its 16 most likely next tokens are kept:
2.2 MB for a thousand tokens. Turns that share eight words in a row with a prompt of HumanEval,
MT-Bench or GSM8K are dropped: those measure the head.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch import demo_models, prompts  # noqa: E402

AUX_LAYERS = (2, 15, 27)
TOP = 16
USER_TOKENS, ANSWER_TOKENS = 96, 224
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HELD_OUT = {"humaneval": 164, "mtbench": 80, "gsm8k": 100}
SHARED_WORDS = 8

WORDS = json.loads((Path(__file__).parent / "head_openings.json").read_text())


def opening(rng: random.Random) -> str:
    """The first words of a user's turn: a third each of chat, maths and code."""

    def word(kind: str) -> str:
        return rng.choice(WORDS[kind])

    topic, n = rng.random(), rng.randint(2, 200)
    if topic < 0.34:
        return word("asks") if rng.random() < 0.9 else ""
    if topic < 0.67:
        if rng.random() < 0.6:
            return f"{word('names')} {word('starts').format(n=n)}"
        return word("maths_asks").format(n=n)
    if rng.random() < 0.4:
        return word("code_asks")
    head = rng.choice(("", "", "from typing import List\n\n\n", "import math\n\n\n", "\n"))
    return f"{head}def {word('verbs')}_{word('nouns')}("


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}


class Store:
    """Growing arrays on disk, one row a token; ``starts`` are the rows where sequences begin."""

    def __init__(self, folder: Path, hidden: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, 0
        self.starts: list[int] = []
        self.answers: list[int] = []  # where in its sequence the answer begins
        self.files = {
            name: (folder / f"{name}.bin").open("wb") for name in ("ids", "aux", "top_ids", "top_p")
        }
        self.hidden = hidden

    def add(self, answer_at: int, **arrays: np.ndarray) -> None:
        self.starts.append(self.rows)
        self.answers.append(answer_at)
        self.rows += len(arrays["ids"])
        for name, array in arrays.items():
            self.files[name].write(np.ascontiguousarray(array).tobytes())

    def save(self) -> None:
        for file in self.files.values():
            file.flush()
        about = {
            "rows": self.rows, "hidden": self.hidden, "top": TOP,
            "starts": self.starts, "answers": self.answers,
        }  # fmt: skip
        (self.folder / "index.json").write_text(json.dumps(about))


class Slots:
    """``size`` conversations side by side, one token of each a step."""

    def __init__(self, model: Path, size: int, seed: int) -> None:
        from transformers import AutoTokenizer

        from bench.cpu_overhead import LeanLlama

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.rng = random.Random(seed)
        self.generator = torch.manual_seed(seed)
        ids = self.tokenizer.encode
        self.prefix = ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
        self.turn = ids("<|im_end|>\n<|im_start|>assistant\n")
        self.end = self.tokenizer.eos_token_id
        longest = len(self.prefix) + USER_TOKENS + 32 + len(self.turn) + ANSWER_TOKENS + 4
        lean = LeanLlama(model, longest)
        self.lean, self.size = lean, size
        self.layers = [{k: v.float() for k, v in layer.items()} for layer in lean.layers]
        self.embedding, self.norm = lean.embedding.float(), lean.norm.float()
        shape = (len(self.layers), size, lean.kv_heads, longest, lean.dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        hidden = self.embedding.shape[1]
        self.aux = torch.zeros(size, longest, 3 * hidden, dtype=torch.bfloat16)
        self.top_ids = torch.zeros(size, longest, TOP, dtype=torch.int32)
        self.top_p = torch.zeros(size, longest, TOP, dtype=torch.float16)
        self.length = torch.zeros(size, dtype=torch.long)  # tokens run
        self.text: list[list[int]] = [[] for _ in range(size)]
        self.answer_at = [0] * size  # 0: the user is still writing
        self.temperature = torch.ones(size)
        for i in range(size):
            self.begin(i)

    def begin(self, i: int) -> None:
        """A new conversation; the prefix is run like everything else the first time."""
        self.text[i] = self.prefix + self.tokenizer.encode(opening(self.rng))
        self.answer_at[i] = 0
        self.temperature[i] = 1.0
        # The slot's first rows hold the same prefix from the conversation before.
        self.length[i] = len(self.prefix) - 1 if int(self.length[i]) > len(self.prefix) else 0

    def step(self) -> None:
        """Run one token of every conversation and append one where its text is used up."""
        lengths = self.length.tolist()
        tokens = torch.tensor([text[n] for text, n in zip(self.text, lengths, strict=True)])
        logits = self._forward(tokens)
        top = logits.topk(64, dim=-1)
        total = logits.logsumexp(-1, keepdim=True)
        at = (torch.arange(self.size), self.length)
        self.top_ids[at] = top.indices[:, :TOP].int()
        self.top_p[at] = (top.values[:, :TOP] - total).exp().half()
        heat = self.temperature.clamp(min=1e-3)[:, None]
        pick = torch.softmax(top.values / heat, -1).multinomial(1, generator=self.generator)
        sampled = top.indices.gather(1, pick).squeeze(1).tolist()
        self.length += 1
        for i, length in enumerate(self.length.tolist()):
            if length == len(self.text[i]):
                self._append(i, sampled[i])

    def _append(self, i: int, token: int) -> None:
        text = self.text[i]
        if not self.answer_at[i]:
            if token == self.end or len(text) >= len(self.prefix) + USER_TOKENS:
                text.extend(self.turn)
                self.answer_at[i] = len(text)
                self.temperature[i] = self.rng.choice((0.0, 0.8))
            else:
                text.append(token)
        else:
            text.append(token)

    def finished(self, i: int) -> bool:
        text, answer = self.text[i], self.answer_at[i]
        if not answer or len(text) <= answer:
            return False
        return text[-1] == self.end or len(text) >= answer + ANSWER_TOKENS

    def take(self, i: int) -> tuple[int, dict[str, np.ndarray]]:
        """The finished conversation's arrays; its last token has not been run and is left out."""
        n = int(self.length[i])
        return self.answer_at[i], {
            "ids": np.asarray(self.text[i][:n], np.int32),
            "aux": self.aux[i, :n].view(torch.int16).numpy(),
            "top_ids": self.top_ids[i, :n].numpy(),
            "top_p": self.top_p[i, :n].numpy(),
        }

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lean, size = self.lean, self.size
        x = self.embedding[tokens]
        at = self.length
        cos, sin = lean.cos[at][:, None], lean.sin[at][:, None]
        end = int(at.max()) + 1
        mask = (torch.arange(end)[None] <= at[:, None])[:, None, None]
        rows = torch.arange(size)
        for i, w in enumerate(self.layers):
            if i in AUX_LAYERS:
                place = AUX_LAYERS.index(i) * x.shape[1]
                self.aux[rows, at, place : place + x.shape[1]] = x.bfloat16()
            normed = rms_norm(x, x.shape[-1:], w["norm1"], lean.eps)
            qkv = linear(normed, w["qkv"]).view(size, -1, lean.dim)
            q, k, v = qkv.split([lean.heads, lean.kv_heads, lean.kv_heads], dim=1)
            q, k = lean._rotate(q, cos, sin), lean._rotate(k, cos, sin)
            self.keys[i, rows, :, at] = k.bfloat16()
            self.values[i, rows, :, at] = v.bfloat16()
            attended = scaled_dot_product_attention(
                q.bfloat16().view(size, lean.kv_heads, -1, lean.dim),
                self.keys[i, :, :, :end], self.values[i, :, :, :end], attn_mask=mask,
            )  # fmt: skip
            x = x + linear(attended.reshape(size, -1).float(), w["o"])
            normed = rms_norm(x, x.shape[-1:], w["norm2"], lean.eps)
            gate, up = linear(normed, w["gate_up"]).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, w["down"])
        return linear(rms_norm(x, x.shape[-1:], self.norm, lean.eps), self.embedding)


@torch.inference_mode()
def generate(out: Path, minutes: float, size: int, seed: int) -> dict[str, Any]:
    """Write conversations to ``out`` for ``minutes``; returns counts."""
    held_out = set()
    for name, count in HELD_OUT.items():
        for text in prompts.load(name, count):
            held_out |= runs_of_words(text)
    slots = Slots(demo_models.build("target"), size, seed)
    store = Store(out, slots.embedding.shape[1])
    began = told = time.monotonic()
    answered = dropped = 0
    while time.monotonic() - began < 60 * minutes:
        slots.step()
        for i in range(size):
            if not slots.finished(i):
                continue
            answer_at, arrays = slots.take(i)
            turn = slots.tokenizer.decode(slots.text[i][len(slots.prefix) : answer_at])
            if runs_of_words(turn) & held_out:
                dropped += 1
            else:
                store.add(answer_at, **arrays)
                answered += len(arrays["ids"]) - answer_at
            slots.begin(i)
        if time.monotonic() - told > 20:
            told = time.monotonic()
            rate = store.rows / (told - began)
            print(
                f"{(told - began) / 60:5.1f} min: {len(store.starts)} conversations, "
                f"{answered} answer tokens, {rate:.0f} tokens/s, {dropped} dropped",
                flush=True,
            )
            store.save()
    store.save()
    return {"conversations": len(store.starts), "answer_tokens": answered, "dropped": dropped}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = generate(options.out, options.minutes, options.slots, options.seed)
    print(f"head data: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
