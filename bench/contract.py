"""Every per-request feature over HTTP: a FASER server answers as the server without speculation.

    python bench/contract.py               the whole matrix on the tiny models, float32
    python bench/contract.py --variants lm hybrid

Each feature is asked greedily and with a seed, of every variant (drafter, and overlap schedule on
or off), all mixed in the same batches. The reference has no speculation and no overlap schedule,
where penalties and custom logit processors see every token before the next. Ids, texts, finish
reasons, token counts, logprobs and hidden states must agree.

The variant ``forced`` replays the reference's answers as drafts (``bench/shims/forced.py``): all
right, so that long runs are accepted; wrong at every third place; and failing in three ways, which
must cost nothing but speed. Then faults are planted in the server (``bench/shims/planted.py``),
each of which must make some answer differ. The last line is ``contract: N/N``; the exit status is
1 unless all agree and every planted fault was noticed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import parity, report  # noqa: E402
from bench.parity import flush  # noqa: E402
from bench.shims import planted  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server, start_all  # noqa: E402

CONCURRENCY = 8
TOLERANCE = 2e-3  # of logprobs and hidden states: the same sums in another order
SHIMS = Path(__file__).resolve().parent / "shims"
SHIMMED = {"PYTHONPATH": os.pathsep.join([str(SHIMS), os.environ.get("PYTHONPATH", "")])}
COMMON = [
    "--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "12000",
    "--context-length", "512", "--chunked-prefill-size", "64", "--enable-custom-logit-processor",
    "--enable-return-hidden-states", "--reasoning-parser", "qwen3",
]  # fmt: skip
SYNC = ["--disable-overlap-schedule"]
RANDOM = ["--faser-depth", "random"]
STOP_AND_TRIM = ("--faser-stop", "on", "--faser-trim", "on")
PROMPTS = ["Seven brave sailors", "List the primes: 2, 3, 5, 7,", "a b c d a b c d a b c"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
END_OF_THOUGHT = [9617, 17400, 46]  # "</think>" in the demo's vocabulary
GRAMMAR = 'root ::= item ("," item)*\nitem ::= [a-f]+ ":" [0-9]'


@dataclass(frozen=True)
class Variant:
    """A FASER server: target, draft (None: lookup alone) and flags."""

    target: str
    draft: str | None
    flags: tuple[str, ...] = ()


UNWRITTEN = "unwritten slots shared"  # shows in the accept length only
# What a planted fault is looked for in.
PLANTED_IN = ("plain", "frequency_penalty", "regex", "ebnf")
Case = tuple["Feature", bool, int, int]  # feature, whether sampled, number of the prompt, seed

VARIANTS = {
    "lm": Variant("tiny", "tiny-drafter", STOP_AND_TRIM),
    "lm-sync": Variant("tiny", "tiny-drafter", tuple(SYNC)),
    "ngram": Variant("tiny", None, ("--faser-drafter", "ngram")),
    "ngram-sync": Variant("tiny", None, ("--faser-drafter", "ngram", *SYNC)),
    "eagle3": Variant("tiny-flat", "tiny-flat-eagle3"),
    "forced": Variant(
        "tiny",
        None,
        ("--faser-drafter", "ngram", "--faser-depth", "5", "--max-running-requests", "8"),
    ),
    "hybrid-sync": Variant(
        "tiny-flat", "tiny-flat-eagle3", ("--faser-drafter", "hybrid", *STOP_AND_TRIM, *SYNC)
    ),
}


@dataclass(frozen=True)
class Feature:
    """Bodies for one route; what is asked of the sampling parameters goes in by ``sampling``.

    ``unserved``: the drafters that answer with a 400, which must say why.
    """

    name: str
    sampling: dict[str, Any]
    body: dict[str, Any]
    route: str = "/generate"
    unserved: tuple[str, ...] = ()


def processor(name: str) -> str:
    """A custom logit processor as a client sends it."""
    from sglang.srt.sampling import custom_logit_processor as library

    if name == "no-repeat":
        return library.DeepseekOCRNoRepeatNGramLogitProcessor.to_str()

    class EndReasoning(library.CustomLogitProcessor):
        """Forces ``token_ids`` at a place of the output: a random model would never end."""

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, params in zip(logits, custom_param_list, strict=True):
                place = len(params["__req__"].output_ids) - params["place"]
                if 0 <= place < len(params["token_ids"]):
                    row[:] = -float("inf")
                    row[params["token_ids"][place]] = 0.0
            return logits

    class Ban(library.CustomLogitProcessor):
        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, params in zip(logits, custom_param_list, strict=True):
                row[params["token_id"]] = -float("inf")
            return logits

    return {"ban": Ban, "end-reasoning": EndReasoning}[name].to_str()


def features(plain: dict[str, Any]) -> Iterable[Feature]:
    """All features; ``plain`` is an answer without any, whose tokens some of them name."""
    ids, text = plain["output_ids"], plain["text"]
    frequent = max(set(ids), key=ids.count)
    early, late = ids[4], ids[9]
    yield Feature("plain", {}, {})
    yield Feature("max_new_tokens 1", {"max_new_tokens": 1}, {})
    yield Feature("max_new_tokens 2", {"max_new_tokens": 2}, {})
    yield Feature("frequency_penalty", {"frequency_penalty": 1.3}, {})
    yield Feature("presence_penalty", {"presence_penalty": -0.9}, {})
    yield Feature("repetition_penalty", {"repetition_penalty": 1.4}, {})
    # Not with repetition_penalty: without overlap SGLang scales before or after it adds, by chance.
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "min_new_tokens": 9}
    yield Feature("several penalties", penalties, {})
    yield Feature("logit_bias", {"logit_bias": {str(frequent): -100.0, str(early): 3.0}}, {})
    yield Feature("stop_token_ids", {"stop_token_ids": [late]}, {})
    yield Feature("min_new_tokens", {"stop_token_ids": [early, late], "min_new_tokens": 7}, {})
    yield Feature("min_new_tokens reached", {"stop_token_ids": ids[:9], "min_new_tokens": 3}, {})
    yield Feature("stop", {"stop": [text[len(text) // 2 :][:3]]}, {})
    yield Feature("no_stop_trim", {"stop": [text[len(text) // 2 :][:3]], "no_stop_trim": True}, {})
    yield Feature("stop_regex", {"stop_regex": "[aeiou][a-z]{2}"}, {})
    yield Feature("skip_special_tokens", {"skip_special_tokens": False, "ignore_eos": True}, {})
    yield Feature("eos", {"ignore_eos": False, "logit_bias": {"2": 4.0}}, {})
    # SGLang's seeded draw knows no min_p (it ends the server): the distribution test has it.
    yield Feature("top_k top_p", {"top_k": 20, "top_p": 0.8}, {})
    yield Feature("n", {"n": 3}, {})
    top = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [early, late]}
    yield Feature("logprobs", {}, top)
    yield Feature("input logprobs", {}, {**top, "logprob_start_len": 0})
    yield Feature("logprobs behind penalties", penalties, top)
    yield Feature("logprobs to a stop", {"stop_token_ids": [late]}, top)
    yield Feature("json_schema", {"json_schema": SCHEMA}, {})
    yield Feature("regex", {"regex": "(ab|cd)+[0-9]{2,4}x?"}, {})
    yield Feature("ebnf", {"ebnf": GRAMMAR}, {})
    yield Feature("json_schema and penalties", {"json_schema": SCHEMA, **penalties}, top)
    ban = {"custom_logit_processor": processor("ban")}
    yield Feature("custom logit processor", {"custom_params": {"token_id": frequent}}, ban)
    seen = {"custom_logit_processor": processor("no-repeat")}
    windows = {"custom_params": {"ngram_size": 2, "window_size": 90}}
    yield Feature("custom logit processor that reads the output", windows, seen)
    thought = {"custom_logit_processor": processor("end-reasoning")}
    end = {"custom_params": {"token_ids": END_OF_THOUGHT, "place": 7}}
    yield Feature(
        "json_schema behind reasoning",
        {"json_schema": SCHEMA, **end},
        {**thought, "require_reasoning": True},
    )
    hidden = ("eagle3", "hybrid")
    yield Feature("hidden states", {}, {"return_hidden_states": True}, unserved=hidden)
    yield Feature("stream", {}, {"stream": True})
    yield Feature("stream with logprobs", {}, {"stream": True, **top})
    yield from openai_features()


def openai_features() -> Iterable[Feature]:
    """The same server through the OpenAI API; parameters lie in the body itself."""
    chat = {
        "messages": [{"role": "user", "content": "Seven brave sailors"}],
        "model": "m",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    name = {"name": "f", "schema": json.loads(SCHEMA)}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": name["schema"], "description": "w"},
    }
    route = "/v1/chat/completions"
    yield Feature("chat", {}, chat, route)
    yield Feature("chat logprobs", {}, {**chat, "logprobs": True, "top_logprobs": 2}, route)
    yield Feature("chat n", {"n": 2}, chat, route)
    yield Feature(
        "chat penalties", {"frequency_penalty": 1.1, "presence_penalty": 0.3}, chat, route
    )
    formatted = {"response_format": {"type": "json_schema", "json_schema": name}}
    yield Feature("chat json_schema", {}, {**chat, **formatted}, route)
    yield Feature("chat tools", {}, {**chat, "tools": [tool], "tool_choice": "required"}, route)
    thought = {
        "chat_template_kwargs": {"enable_thinking": True},
        "custom_logit_processor": processor("end-reasoning"),
        "custom_params": {"token_ids": END_OF_THOUGHT, "place": 4},
    }
    yield Feature("chat reasoning", {}, {**chat, **thought}, route)
    yield Feature("chat reasoning, json_schema", {}, {**chat, **thought, **formatted}, route)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    yield Feature("chat stream", {}, {**chat, **usage}, route)
    text = {"prompt": "a b c d a b c d", "model": "m"}
    yield Feature("completion", {}, {**text, "logprobs": 2, "echo": True}, "/v1/completions")
    yield Feature("completion stop", {"stop": ["e"]}, text, "/v1/completions")


def ask(
    server: Server, feature: Feature, sampled: bool = False, number: int = 0, seed: int = 0
) -> dict[str, Any]:
    """One request; an error's text under ``error``."""
    is_native = feature.route == "/generate"
    sampling = {"max_new_tokens" if is_native else "max_tokens": 24, **feature.sampling}
    sampling |= {"temperature": 0.9 if sampled else 0.0}
    sampling |= {"sampling_seed" if is_native else "seed": seed}
    if is_native:
        # A grammar ends with EOS: to ignore it there makes SGLang emit one token beyond it, or not.
        has_end = {"json_schema", "regex", "ebnf"} & set(feature.sampling)
        sampling.setdefault("ignore_eos", not has_end)
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {"text": prompt, "sampling_params": sampling, **feature.body}
    else:
        body = {**feature.body, **sampling}
    try:
        return send(server, feature.route, body)
    except requests.RequestException as error:
        return {"error": f"{type(error).__name__}; the log of {server.name}: {server.log}"}


def send(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    if body.get("stream"):
        return streamed(server, route, body)
    answer = server.post(route, body)
    if answer.status_code != 200:
        return {"error": f"{answer.status_code} {answer.text}"}
    return {"answer": answer.json()}


def streamed(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """A streamed answer, its chunks joined; how they were cut is the server's affair."""
    chunks = []
    with requests.post(server.base_url + route, json=body, stream=True, timeout=300) as stream:
        if stream.status_code != 200:
            return {"error": f"{stream.status_code} {stream.text}"}
        for line in stream.iter_lines():
            if line.startswith(b"data: {"):
                chunks.append(json.loads(line[6:]))
    if route == "/generate":
        return {"answer": chunks[-1], "chunks": len(chunks)}
    text = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return {"answer": {"text": text, "finish": ends[-1], "usage": chunks[-1]["usage"]}}


def essence(answer: Any) -> Any:
    """An answer without what may differ: times, ids of requests, cache hits, own counters."""
    dropped = {
        "id", "created", "e2e_latency", "weight_version", "cached_tokens", "cached_tokens_details",
        "prompt_tokens_details", "metadata", "dp_rank", "total_retractions", "num_retractions",
        "queue_time", "decode_throughput", "inference_time", "tool_calls_id", "sglext", "faser",
    }  # fmt: skip
    if isinstance(answer, dict):
        return {
            key: essence(value)
            for key, value in answer.items()
            if key not in dropped and not key.startswith("spec_") and not key.endswith("_time")
        }
    if isinstance(answer, list):
        return [essence(value) for value in answer]
    return answer


def difference(got: Any, expected: Any, path: str = "") -> str | None:
    """The first place where two answers differ, numbers beyond TOLERANCE; None if nowhere."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(set(expected) | set(got)):
            if (found := difference(got.get(key), expected.get(key), f"{path}.{key}")) is not None:
                return found
        return None
    if isinstance(expected, list) and isinstance(got, list) and len(got) == len(expected):
        for i, pair in enumerate(zip(got, expected, strict=True)):
            if (found := difference(*pair, f"{path}[{i}]")) is not None:
                return found
        return None
    if isinstance(expected, float) and isinstance(got, float):
        close = math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if close else f"{path}: {got} instead of {expected}"
    return None if got == expected else f"{path}: {got!r:.300} instead of {expected!r:.300}"


def ask_all(server: Server, cases: list[Case]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda case: ask(server, *case), cases))


def check(
    server: Server,
    cases: list[Case],
    expected: list[dict[str, Any]],
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """How many cases agree with the reference; says what does not."""
    agreed = 0
    for (feature, sampled, number, _), got, wanted in zip(
        cases, ask_all(server, cases), expected, strict=True
    ):
        if any(server.name.startswith(each) for each in feature.unserved):
            found = None if "FASER does not serve" in got.get("error", "") else f"answered {got}"
        elif "answer" not in wanted or "answer" not in got:
            found = f"{got.get('error', 'an answer')}; the reference: {wanted.get('error', 'one')}"
        else:
            found = difference(essence(got["answer"]), essence(wanted["answer"]))
        if found is None:
            agreed += 1
        else:
            kind = "sampled" if sampled else "greedy"
            say(f"  differs: {server.name}: {feature.name}, {kind} {number}: {found[:700]}")
    return agreed


def make_cases(reference: Server, prompts: int = len(PROMPTS)) -> list[Case]:
    """Every feature, greedy and sampled, on the first prompts; a seed of its own for each."""
    plain = ask(reference, Feature("plain", {}, {}))["answer"]
    asked = [
        (feature, sampled, number)
        for number in range(prompts)
        for feature in features(plain)
        for sampled in (False, True)
    ]
    return [(*case, 1000 + i) for i, case in enumerate(asked)]


def recorded(cases: list[Case], expected: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The reference's answers by seed, as far as they name token ids."""
    answers = {}
    for (*_, seed), wanted in zip(cases, expected, strict=True):
        answer = wanted.get("answer")
        answer = answer[0] if isinstance(answer, list) else answer
        if answer and "output_ids" in answer:
            answers[str(seed)] = answer["output_ids"]
    return answers


def check_forced(
    server: Server,
    files: Path,
    cases: list[Case],
    expected: list[dict[str, Any]],
    say: Callable[[str], None],
) -> dict[str, list[int]]:
    """The forced drafter: right, wrong and failing; then the planted faults."""
    answers = recorded(cases, expected)
    totals = {}

    def force(name: str, **how: Any) -> dict[str, Any]:
        (files / "forced.json").write_text(json.dumps({"answers": answers, **how}))
        flush(server)
        agreed = check(server, cases, expected, say)
        state = server.faser()
        totals[f"forced, {name}"] = [agreed, len(cases)]
        say(
            f"forced, {name}: {agreed}/{len(cases)}, accept length "
            f"{state['counters']['accept_length']}, draft faults {state['draft_faults']}"
        )
        return state

    right = force("right")
    wrong = force("wrong at every third", wrong_every=3)
    if not 2.4 < right["counters"]["accept_length"] > wrong["counters"]["accept_length"] > 1:
        raise RuntimeError("the forced drafter's answers were not accepted as they should be")
    kinds = ("raise", "nan", "range")
    faults = {seed: kinds[i % 3] for i, seed in enumerate(list(answers)[::4])}
    if force("failing", faults=faults)["draft_faults"] < len(faults):
        raise RuntimeError("a drafter's failure was not counted")

    (files / "forced.json").write_text(json.dumps({"answers": answers, "wrong_every": 4}))
    few = [i for i, case in enumerate(cases) if case[0].name in PLANTED_IN]
    some, wanted = [cases[i] for i in few], [expected[i] for i in few]
    totals["planted faults"] = [0, 0]
    for fault in [fault for fault in planted.FAULTS if fault != UNWRITTEN]:
        with planted_in(files, fault):
            differing = len(some) - check(server, some, wanted)
        totals["planted faults"][0] += differing > 0
        totals["planted faults"][1] += 1
        say(f"planted: {fault}: {differing} of {len(some)} answers differ")
    flush(server)
    return totals


@contextmanager
def planted_in(files: Path, fault: str) -> Iterator[None]:
    """Switch a planted fault on for a while."""
    (files / "planted").write_text(fault)
    try:
        yield
    finally:
        (files / "planted").write_text("")


def check_unwritten(
    server: Server, files: Path, model: Path, say: Callable[[str], None]
) -> dict[str, list[int]]:
    """Draft slots in the radix tree that no draft wrote: trusting them must show.

    The target's ids cannot differ; the accept length behind a cached prefix must.
    """
    work = parity.make_workload(model, small=True)
    sampling = {"max_new_tokens": work.new_tokens, "temperature": 0, "ignore_eos": True}
    off = {**sampling, "custom_params": {"faser": {"max_depth": 0}}}

    def lengths_differ(prompt: list[int]) -> bool:
        """Whether the draft goes on otherwise behind tokens that it never ran."""
        flush(server)
        text = prompt + server.generate(prompt, **off)["output_ids"][:-1]
        lengths = []
        for _ in range(2):
            lengths.append(parity.accept_length(server.generate(text, **sampling)))
            flush(server)
        return lengths[0] != lengths[1]

    differing = {}
    for fault in ("", UNWRITTEN):
        with planted_in(files, fault):
            differing[fault] = sum(lengths_differ(prompt) for prompt in work.plain)
        say(f"planted: {fault or 'nothing'}: {differing[fault]} of {len(work.plain)} differ")
    return {f"planted: {UNWRITTEN}": [int(differing[UNWRITTEN] > 0 and not differing[""]), 1]}


def run(
    names: list[str], prompts: int = len(PROMPTS), say: Callable[[str], None] = print
) -> dict[str, list[int]]:
    """All variants named, target by target: how many cases agree, of how many."""
    totals: dict[str, list[int]] = {}
    for target in dict.fromkeys(VARIANTS[name].target for name in names):
        own = {name: VARIANTS[name] for name in names if VARIANTS[name].target == target}
        model = demo_models.build(target)
        with serving(model, own) as (files, servers):
            cases = make_cases(servers[0], prompts)
            expected = ask_all(servers[0], cases)
            for server in servers[1:]:
                if server.name == "forced":
                    totals |= check_forced(server, files, cases, expected, say)
                    continue
                totals[server.name] = [check(server, cases, expected, say), len(cases)]
                length = server.faser()["counters"]["accept_length"]
                say(f"{server.name}: {totals[server.name]}, accept length {length}")
                if server.name == "lm":
                    totals |= check_unwritten(server, files, model, say)
    return totals


@contextmanager
def serving(model: Path, variants: dict[str, Variant]) -> Iterator[tuple[Path, list[Server]]]:
    """The reference, then a server for each variant, all up; and the folder of the shims' files."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        (files / "forced.json").write_text(json.dumps({"answers": {}}))
        (files / "planted").write_text("")
        shimmed = {
            "lm": {"FASER_PLANTED": str(files / "planted")},
            "forced": {
                "FASER_PLANTED": str(files / "planted"),
                "FASER_FORCED": str(files / "forced.json"),
            },
        }
        servers = [Server(model, args=[*COMMON, *SYNC], env=SHIMMED, name="no speculation")]
        for name, variant in variants.items():
            servers.append(
                Server(
                    model,
                    draft=demo_models.build(variant.draft) if variant.draft else None,
                    is_faser=True,
                    args=[*COMMON, *RANDOM, *variant.flags],
                    env=SHIMMED | shimmed.get(name, {}),
                    name=name,
                )
            )
        start_all(servers)
        try:
            yield files, servers
        finally:
            for server in servers:
                server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--save", action="store_true", help="write bench/results/contract.json")
    options = parser.parse_args()
    totals = run(options.variants, say=lambda line: print(line, flush=True))
    agreed, total = (sum(column) for column in zip(*totals.values(), strict=True))
    if options.save:
        report.save("contract", {"models": "tiny", "agreed_by_variant": totals})
    print(f"contract: {agreed}/{total}")
    return 0 if agreed == total else 1


if __name__ == "__main__":
    sys.exit(main())
