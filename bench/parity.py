"""Greedy identity over HTTP: FASER's token ids against those of a server without speculation.

    python bench/parity.py                 the whole matrix on the tiny models, float32
    python bench/parity.py --demo          every drafter on SmolLM2-135M-Instruct
    python bench/parity.py --small         fewer and shorter prompts, as the tests run it

Every variant answers the same prompts: lengths from a few tokens to several prefill chunks,
eight at a time; requests that run into the context's end; every prompt once more (radix hits);
and prompts continued with their own output, whose cached part holds slots that no draft has
written: ids and accept length must equal those of an empty cache. The last line is
``parity: N/N equal``; the exit status is 1 unless all are.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from launch import demo_models, prompts  # noqa: E402
from launch.servers import Server  # noqa: E402

CONTEXT = 512
CHUNK = 64
CONCURRENCY = 8


@dataclass(frozen=True)
class Variant:
    """A target, a draft for it (None: lookup alone) and the flags of FASER's server."""

    target: str
    draft: str | None
    flags: tuple[str, ...] = ("--faser-depth", "random")
    draft_context: int | None = None  # a draft that admits fewer positions
    env: tuple[tuple[str, str], ...] = ()

    @property
    def repeats_itself(self) -> bool:
        """The same request drafts the same again, whatever ran before."""
        return "auto" not in self.flags


RANDOM = ("--faser-depth", "random")
# Chains end, and drafts are withheld from verification, at random too.
ALL_RANDOM = (*RANDOM, "--faser-stop", "on", "--faser-trim", "on")
NO_OVERLAP = (*RANDOM, "--disable-overlap-schedule")
PAGE_16 = (*RANDOM, "--page-size", "16")
NGRAM = (*RANDOM, "--faser-drafter", "ngram")
HYBRID = (*ALL_RANDOM, "--faser-drafter", "hybrid")
# SGLang takes requests out of a running batch every seven passes, and starts them anew.
RETRACT = (("SGLANG_TEST_RETRACT", "1"), ("SGLANG_TEST_RETRACT_INTERVAL", "7"))
# Two ranks, each bound to a core; SGLang takes the cores from this variable.
TP_2 = (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
LM, HEAD = ("tiny", "tiny-drafter"), ("tiny-flat", "tiny-flat-eagle3")
VARIANTS: dict[str, Variant] = {
    "overlap": Variant(*LM),
    "no-overlap": Variant(*LM, NO_OVERLAP),
    "page-16": Variant(*LM, PAGE_16),
    "auto": Variant(*LM, ("--faser-depth", "auto")),
    "stop-and-trim": Variant(*LM, ALL_RANDOM),
    "off": Variant(*LM, ("--faser-mode", "off")),
    "short-draft-context": Variant(*LM, draft_context=128),
    "retraction": Variant(*LM, env=RETRACT),
    "tp-2": Variant(*LM, (*ALL_RANDOM, "--tp-size", "2"), env=TP_2),
    "ngram": Variant("tiny", None, NGRAM),
    "hybrid-lm": Variant(*LM, HYBRID),
    "eagle": Variant("tiny-flat", "tiny-flat-eagle"),
    "eagle3": Variant(*HEAD),
    "eagle3-no-overlap": Variant(*HEAD, NO_OVERLAP),
    "eagle3-page-16": Variant(*HEAD, PAGE_16),
    "eagle3-stop-and-trim": Variant(*HEAD, ALL_RANDOM),
    "eagle3-auto": Variant(*HEAD, ("--faser-depth", "auto")),
    "eagle3-short-draft-context": Variant(*HEAD, draft_context=128),
    "hybrid": Variant(*HEAD, HYBRID),
    "hybrid-tp-2": Variant(*HEAD, (*HYBRID, "--tp-size", "2"), env=TP_2),
    "hybrid-retraction": Variant(*HEAD, HYBRID, env=RETRACT),
}
DEMO_VARIANTS: dict[str, Variant] = {
    "lm": Variant("target", "lm-drafter"),
    "eagle3": Variant("target", "eagle3"),
    "eagle3-no-overlap": Variant("target", "eagle3", NO_OVERLAP),
    "ngram": Variant("target", None, NGRAM),
    "hybrid": Variant("target", "eagle3", HYBRID),
}


@dataclass
class Workload:
    """Prompts as token ids; ``ends`` run into the context's end."""

    plain: list[list[int]]
    ends: list[list[int]]
    new_tokens: int


@dataclass
class Tally:
    equal: int = 0
    total: int = 0
    differences: list[str] = field(default_factory=list)

    def compare(self, what: str, got: Any, expected: Any) -> None:
        self.total += 1
        if got == expected:
            self.equal += 1
        else:
            self.differences.append(what)
            print(f"  differs: {what}\n    expected {expected}\n    got      {got}", flush=True)


def make_workload(model: Path, small: bool) -> Workload:
    """Prompts cut to lengths from 5 tokens to several chunks."""
    from transformers import AutoTokenizer

    count, new_tokens = (8, 48) if small else (32, 96)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = prompts.load("mtbench", count) + prompts.load("gsm8k", count)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    stream = [token for prompt in ids for token in prompt]
    plain = []
    for i in range(count):
        length = 5 + (i * 37) % 300
        plain.append(stream[i * 7 : i * 7 + length])
    lengths = [CONTEXT - 30, CONTEXT - 9] if small else range(CONTEXT - 70, CONTEXT - 6, 9)
    ends = [stream[n : n + length] for n, length in enumerate(lengths)]
    return Workload(plain, ends, new_tokens)


def answer_all(server: Server, requests: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Greedy answers of at most ``new_tokens``, as far as the context goes, in prompt order."""

    def answer(ids: list[int]) -> dict[str, Any]:
        room = min(new_tokens, CONTEXT - len(ids))
        return server.generate(ids, max_new_tokens=room, temperature=0, ignore_eos=True)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(answer, requests))


def accept_length(answer: dict[str, Any]) -> float:
    """Emitted tokens a decode round; the prefill's token is not counted."""
    meta = answer["meta_info"]
    return (meta["completion_tokens"] - 1) / meta["spec_verify_ct"]


def flush(server: Server) -> None:
    """Empty the cache; the overlap scheduler may still be finishing the last round."""
    for _ in range(50):
        answer = server.post("/flush_cache", {})
        if answer.status_code == 200:
            return
        time.sleep(0.1)
    answer.raise_for_status()


def reference(server: Server, work: Workload) -> dict[str, list[list[int]]]:
    """What the target says without speculation."""
    answers = {
        "plain": answer_all(server, work.plain, work.new_tokens),
        "ends": answer_all(server, work.ends, CONTEXT),
    }
    ids = {key: [a["output_ids"] for a in batch] for key, batch in answers.items()}
    continued = answer_all(server, continuations(work, ids["plain"]), work.new_tokens)
    return ids | {"continued": [a["output_ids"] for a in continued]}


def continuations(work: Workload, outputs: list[list[int]]) -> list[list[int]]:
    """Each of the first prompts with its own output behind it, all that is cached or less."""
    pairs = list(zip(work.plain, outputs, strict=True))[: max(4, len(work.plain) // 4)]
    return [prompt + output[: -1 - i % 3] for i, (prompt, output) in enumerate(pairs)]


def check(
    server: Server,
    work: Workload,
    expected: dict[str, list[list[int]]],
    tally: Tally,
    *,
    repeats_itself: bool = True,
) -> dict[str, Any]:
    """All comparisons of one variant; returns the server's counters up to the first flush."""
    name = server.name
    fresh = answer_all(server, work.plain, work.new_tokens)
    again = answer_all(server, work.plain, work.new_tokens)
    ends = answer_all(server, work.ends, CONTEXT)
    for i, ids in enumerate(expected["plain"]):
        tally.compare(f"{name}: prompt {i}", fresh[i]["output_ids"], ids)
        tally.compare(f"{name}: prompt {i} repeated", again[i]["output_ids"], ids)
    for i, ids in enumerate(expected["ends"]):
        tally.compare(f"{name}: prompt {i} to the context's end", ends[i]["output_ids"], ids)
    follow = continuations(work, expected["plain"])
    reused = [answer_all(server, [prompt], work.new_tokens)[0] for prompt in follow]
    counters = server.faser()["counters"]
    for i, prompt in enumerate(follow):
        flush(server)
        if i % 2 == 0:  # a history of which the draft ran nothing but the prompt
            undrafted = {"custom_params": {"faser": {"max_depth": 0}}, "temperature": 0}
            server.generate(
                work.plain[i], max_new_tokens=work.new_tokens, ignore_eos=True, **undrafted
            )
            reused[i] = answer_all(server, [prompt], work.new_tokens)[0]
            flush(server)
        empty = answer_all(server, [prompt], work.new_tokens)[0]
        ids = expected["continued"][i]
        tally.compare(f"{name}: continuation {i}, cached", reused[i]["output_ids"], ids)
        tally.compare(f"{name}: continuation {i}, empty cache", empty["output_ids"], ids)
        if repeats_itself:
            tally.compare(
                f"{name}: continuation {i}, accept length with the cache",
                accept_length(reused[i]),
                accept_length(empty),
            )
        cached = reused[i]["meta_info"]["cached_tokens"]
        tally.compare(f"{name}: continuation {i} hits the cache", cached > len(prompt) // 2, True)
    return counters


def shorten_context(draft: Path, length: int, folder: Path) -> Path:
    """A copy of a draft whose config admits ``length`` positions only."""
    short = folder / f"short-context-{draft.name}"
    shutil.copytree(draft, short, dirs_exist_ok=True)
    config = json.loads((short / "config.json").read_text())
    config["max_position_embeddings"] = length
    (short / "config.json").write_text(json.dumps(config))
    return short


def run(variants: dict[str, Variant], *, small: bool, folder: Path) -> tuple[Tally, dict]:
    """Start one server after the other and compare; also returns each variant's accept length."""
    common = [
        "--dtype", "float32", "--context-length", str(CONTEXT),
        "--chunked-prefill-size", str(CHUNK), "--random-seed", "7",
    ]  # fmt: skip
    tally = Tally()
    lengths = {}
    for target in dict.fromkeys(variant.target for variant in variants.values()):
        model = demo_models.build(target)
        work = make_workload(model, small)
        with Server(model, args=common, name="no speculation") as server:
            expected = reference(server, work)
        for name, variant in variants.items():
            if variant.target != target:
                continue
            before = tally.total, tally.equal
            draft = demo_models.build(variant.draft) if variant.draft else None
            if variant.draft_context:
                draft = shorten_context(draft, variant.draft_context, folder)
            args = [*common, *variant.flags]
            with Server(
                model, draft=draft, is_faser=True, args=args, env=dict(variant.env), name=name
            ) as server:
                counters = check(
                    server, work, expected, tally, repeats_itself=variant.repeats_itself
                )
            lengths[name] = counters["accept_length"]
            print(
                f"{name}: {tally.equal - before[1]}/{tally.total - before[0]} equal, accept length "
                f"{counters['accept_length']}, depths {counters['depth_histogram']}",
                flush=True,
            )
    return tally, lengths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", action="store_true", help="SmolLM2-135M instead of tiny models")
    parser.add_argument("--small", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--variants", nargs="*", help="some of the matrix only")
    parser.add_argument(
        "--save", nargs="?", const="parity", metavar="NAME", help="write bench/results/NAME.json"
    )
    options = parser.parse_args()
    matrix = DEMO_VARIANTS if options.demo else VARIANTS
    chosen = options.variants or list(matrix)
    if unknown := [name for name in chosen if name not in matrix]:
        parser.error(f"there is no variant {unknown[0]!r}: choose of {', '.join(matrix)}")
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tally, lengths = run(
            {name: matrix[name] for name in chosen}, small=options.small, folder=Path(folder)
        )
    if options.save:
        report.save(
            options.save,
            {
                "models": "SmolLM2-135M-Instruct" if options.demo else "tiny",
                "prompts": "8, 48 tokens" if options.small else "32, 96 tokens",
                "accept_length_by_variant": lengths,
                "equal": tally.equal,
                "total": tally.total,
                "differences": tally.differences,
            },
        )
    print(f"parity: {tally.equal}/{tally.total} equal")
    return 0 if tally.equal == tally.total else 1


if __name__ == "__main__":
    sys.exit(main())
