"""Does the server draft with the EAGLE3 head as plain PyTorch does?

    python bench/head_check.py             demo models, float32, greedy, depth 5

The target is run by Hugging Face, the head by the plain module that trained it
(``bench/train_head.py``), on the same held-out prompts as a FASER server. For every prompt the
rounds and the drafts accepted at each position must be the same. The last line also gives the
acceptance by position over more prompts, which the plain chain alone measures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.parity import flush  # noqa: E402
from bench.throughput import DEEPEST, chat_prompts  # noqa: E402
from bench.train_head import Head  # noqa: E402
from launch import checkpoint, demo_models  # noqa: E402
from launch.servers import Server  # noqa: E402


class PlainChain:
    """The target by Hugging Face, and the head's chains of ``depth`` behind every position."""

    def __init__(self, target: Path, head: Path, depth: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        config, tensors = checkpoint.read_model(head)
        self.layers = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        offsets = tensors.pop("d2t")
        self.hot = offsets + torch.arange(len(offsets))
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self.lm_head = tensors["lm_head.weight"]
        self.head = Head(config)
        self.head.load(tensors)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.depth = depth

    @torch.inference_mode()
    def answer(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Prompt and greedy answer, past the end token."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # else the end tokens of turns count as padding
            max_new_tokens=new_tokens,
            eos_token_id=-1,
            do_sample=False,
        )
        return out[0].tolist()

    @torch.inference_mode()
    def drafts(self, tokens: list[int]) -> torch.Tensor:
        """[positions, depth]: row p holds the chain drafted behind token p + 1."""
        ids = torch.tensor([tokens])
        states = self.model(ids, output_hidden_states=True).hidden_states
        # Hugging Face's state i + 1 is what layer i puts out.
        joined = torch.cat([states[layer + 1] for layer in self.layers], dim=-1)[:, :-1]
        chain = ids[:, 1:]
        carried: torch.Tensor = joined
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        found = []
        for step in range(self.depth):
            carried, out = self.head(self.embedding[chain], carried, step, cache)
            chain = self.hot[linear(out, self.lm_head).argmax(-1)]
            found.append(chain[0])
        return torch.stack(found, dim=1)

    def rounds(self, tokens: list[int], prompt_len: int) -> list[tuple[int, int]]:
        """(depth, accepted) of every round that a server would run for this answer."""
        drafts = self.drafts(tokens).tolist()
        length, last, seen = prompt_len, len(tokens) - 1, []
        while length < last:
            depth = min(self.depth, last - 1 - length)
            accepted = 0
            while (
                accepted < depth and drafts[length - 1][accepted] == tokens[length + 1 + accepted]
            ):
                accepted += 1
            seen.append((depth, accepted))
            length += accepted + 1
        return seen


def tally(rounds: list[tuple[int, int]], depth: int) -> dict[str, Any]:
    """The same sums as the server's counters."""
    tested = [sum(min(a + 1, d) > j for d, a in rounds) for j in range(depth)]
    right = [sum(a > j for _, a in rounds) for j in range(depth)]
    return {"rounds": len(rounds), "tested": tested, "accepted": right}


def served(server: Server, prompt: list[int], new_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """The server's answer and its counters for this request alone."""
    flush(server)
    answer = server.generate(prompt, max_new_tokens=new_tokens, temperature=0, ignore_eos=True)
    counters = server.faser()["counters"]
    own = {
        "rounds": counters["rounds"],
        "tested": counters["tested_by_position"][:DEEPEST],
        "accepted": counters["accepted_by_position"][:DEEPEST],
    }
    return answer["output_ids"], own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=6, help="compared with the server")
    parser.add_argument("--more", type=int, default=24, help="measured by the plain chain alone")
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    target, head = demo_models.build("target"), demo_models.build("eagle3")
    chain = PlainChain(target, head, DEEPEST)
    prompts = chat_prompts(target, options.prompts + options.more)
    plain = []
    total: list[tuple[int, int]] = []
    for prompt in prompts:
        tokens = chain.answer(prompt, options.new_tokens)
        rounds = chain.rounds(tokens, len(prompt))
        total += rounds
        plain.append((tokens[len(prompt) :], tally(rounds, DEEPEST)))
    sums = tally(total, DEEPEST)
    pairs = zip(sums["accepted"], sums["tested"], strict=True)
    by_position = [round(right / max(tested, 1), 3) for right, tested in pairs]
    print(
        f"  plain chain, {len(prompts)} prompts: acceptance by position {by_position}", flush=True
    )
    equal = 0
    args = ["--dtype", "float32", "--faser-depth", str(DEEPEST), "--max-total-tokens", "8000"]
    if options.prompts:
        with Server(target, draft=head, args=args, name="eagle3") as server:
            for prompt, (text, expected) in zip(prompts[: options.prompts], plain, strict=False):
                ids, own = served(server, prompt, options.new_tokens)
                same = ids == text and own == expected
                equal += same
                print(f"  {'same' if same else 'DIFFERS'}: {own} plain {expected}", flush=True)
        report.save(
            "head_check",
            {"prompts": options.prompts, "equal": equal, "acceptance_by_position": by_position},
        )
    print(
        f"head check: {equal}/{options.prompts} prompts with the same rounds and drafts accepted; "
        f"acceptance by position {by_position}"
    )
    return 0 if equal == options.prompts else 1


if __name__ == "__main__":
    sys.exit(main())
