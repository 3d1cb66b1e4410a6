"""Nothing is lost: mixed traffic, aborts and disconnects, then the KV account must balance.

    python bench/soak.py --minutes 10          the tiny models, float32, requests retracted by force
    python bench/soak.py --minutes 10 --seed 7 --drafter hybrid

Requests of every length, greedy and sampled, with grammars, penalties, logprobs and n, are
answered, aborted or abandoned; the cache is flushed in between. SGLang's strict check of its pools
runs at every pass and whenever the server is idle; it ends the server at the first slot that is
neither free, nor cached, nor a request's. Every greedy answer must equal that of a server without
speculation. Afterwards no request may be left, the cache must flush, and no token may be in use.
The last line is ``soak: N requests, E errors, L slots lost``; ``--seed``, which is printed, plays
the same requests again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.parity import RETRACT, flush  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server, ServerError, start_all  # noqa: E402

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
CLIENTS = 12
GREEDY = 40  # different greedy requests, whose answers are known
PAIRS = {
    "lm": ("tiny", "tiny-drafter", []),
    "ngram": ("tiny", None, ["--faser-drafter", "ngram"]),
    "eagle3": ("tiny-flat", "tiny-flat-eagle3", []),
    "hybrid": ("tiny-flat", "tiny-flat-eagle3", ["--faser-drafter", "hybrid"]),
}


@dataclass
class Outcome:
    """What became of the requests; ``most`` tokens were seen in use at once."""

    fates: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    most: int = 0


def make_body(draw: random.Random, temperature: float) -> dict[str, Any]:
    """A request of random length with a random feature."""
    shared = [7] * draw.choice([0, 40, 90])
    sampling = {
        "max_new_tokens": draw.randint(1, 120),
        "temperature": temperature,
        "ignore_eos": draw.random() < 0.7,
    }
    body: dict[str, Any] = {}
    match draw.randrange(8):
        case 0:
            sampling |= {"regex": "(ab|cd)+[0-9]{2,60}", "ignore_eos": False}
        case 1:
            sampling |= {"json_schema": '{"type": "object"}', "ignore_eos": False}
        case 2:
            sampling |= {"frequency_penalty": 0.6, "presence_penalty": 0.3}
        case 3:
            sampling |= {"repetition_penalty": 1.3, "min_new_tokens": draw.randint(1, 20)}
        case 4:
            body |= {"return_logprob": True, "top_logprobs_num": 2}
        case 5:
            sampling |= {"custom_params": {"faser": {"max_depth": draw.randint(0, 3)}}}
        case 6 if temperature:
            sampling |= {"n": 2, "top_p": 0.9}
    prompt = shared + [draw.randrange(10, 2000) for _ in range(draw.randint(1, 120))]
    return {**body, "input_ids": prompt, "sampling_params": sampling}


def greedy_body(number: int) -> dict[str, Any]:
    """One of the ``GREEDY`` requests with a known answer."""
    return make_body(random.Random(f"greedy {number}"), 0.0)


def reference(server: Server) -> list[list[int]]:
    """Answers without speculation to the greedy requests."""

    def answer(number: int) -> list[int]:
        reply = server.post("/generate", greedy_body(number))
        reply.raise_for_status()
        return reply.json()["output_ids"]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(answer, range(GREEDY)))


def one_request(
    server: Server, seed: int, number: int, expected: list[list[int]]
) -> tuple[str, int, str | None]:
    """A request that is answered, aborted or abandoned: which, tokens in use, and what was wrong.

    The tokens in use are those seen while a streamed one ran (else 0).
    """
    draw = random.Random(f"{seed} {number}")
    rid = uuid.uuid4().hex
    known = draw.randrange(GREEDY) if draw.random() < 0.5 else None
    body = greedy_body(known) if known is not None else make_body(draw, 0.8)
    body["rid"] = rid
    fate = draw.choice(["answer", "answer", "abort", "disconnect"])
    if fate == "answer" or "n" in body["sampling_params"]:
        answer = server.post("/generate", body)
        if answer.status_code != 200:
            return "answered", 0, f"request {number}: {answer.status_code} {answer.text}"
        if known is not None and answer.json()["output_ids"] != expected[known]:
            return "answered", 0, f"request {number}: greedy answer {known} differs"
        return "answered", 0, None
    stream = requests.post(
        f"{server.base_url}/generate", json={**body, "stream": True}, stream=True, timeout=300
    )
    with stream:
        for _ in zip(range(draw.randint(1, 6)), stream.iter_lines(), strict=False):
            pass
        used = load(server)["num_used_tokens"]
        if fate == "disconnect":
            return "disconnected", used, None
        server.post("/abort_request", {"rid": rid}).raise_for_status()
        for _ in stream.iter_lines():
            pass
    return "aborted", used, None


def run(server: Server, expected: list[list[int]], *, seconds: float, seed: int) -> Outcome:
    """Send requests from ``CLIENTS`` threads for so long, flushing whenever that is possible."""
    outcome = Outcome()
    began = time.monotonic()
    sent = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        while time.monotonic() - began < seconds:
            batch = range(sent, sent + 4 * CLIENTS)
            sent += len(batch)
            done = pool.map(lambda number: one_request(server, seed, number, expected), batch)
            for fate, used, error in done:
                outcome.fates[fate] += 1
                outcome.most = max(outcome.most, used)
                if error is not None:
                    outcome.errors.append(error)
                    print(f"  {error[:400]}", flush=True)
            flush(server)
            print(f"  {sent} requests, {time.monotonic() - began:.0f} s", flush=True)
    return outcome


def load(server: Server) -> dict[str, int]:
    """The scheduler's own account; SGLang leaves out fields that are zero.

    ``num_used_tokens`` is the pool less what is free and what the radix tree could give back.
    """
    answer = requests.get(f"{server.base_url}/v1/loads", timeout=30).json()["loads"][0]
    if not answer.get("max_total_num_tokens"):
        raise ServerError(f"{server.name}: /v1/loads shows no pool: {answer}")
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {name: answer.get(name, 0) for name in names}


def settle(server: Server) -> int:
    """Wait until no request runs, flush, and return the tokens still in use."""
    for _ in range(100):
        now = load(server)
        if not now["num_running_reqs"] and not now["num_waiting_reqs"]:
            break
        time.sleep(0.2)
    else:
        raise ServerError(f"{server.name}: requests are still there: {now}")
    flush(server)
    time.sleep(2)  # the account is published at intervals
    if server.process.poll() is not None:
        raise ServerError(f"{server.name} ended:\n{server.log_tail()}")
    return load(server)["num_used_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--drafter", choices=list(PAIRS), default="lm")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--save", metavar="NAME", help="write bench/results/NAME.json")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    target, draft, flags = PAIRS[options.drafter]
    model = demo_models.build(target)
    args = [
        "--dtype", "float32", "--max-total-tokens", "6000", "--chunked-prefill-size", "64",
        "--page-size", str(options.page_size), "--context-length", "512", "--random-seed", "7",
    ]  # fmt: skip
    base = Server(model, args=args, name="no speculation")
    server = Server(
        model,
        draft=demo_models.build(draft) if draft else None,
        is_faser=True,
        args=[*args, "--faser-depth", "random", *flags],
        env={**STRICT, **dict(RETRACT)},
        name=options.drafter,
    )
    start_all([base, server])
    try:
        expected = reference(base)
        base.stop()
        outcome = run(server, expected, seconds=60 * options.minutes, seed=options.seed)
        lost = settle(server)
        counters = server.faser()["counters"]
    finally:
        base.stop()
        server.stop()
    count, errors = sum(outcome.fates.values()), len(outcome.errors)
    print(f"most tokens in use: {outcome.most}; {dict(outcome.fates)}")
    if options.save:
        report.save(
            options.save,
            {
                "drafter": options.drafter,
                "minutes": options.minutes,
                "seed": options.seed,
                "fates": outcome.fates,
                "errors": outcome.errors,
                "slots_lost": lost,
                "most_tokens_in_use": outcome.most,
                "counters_since_the_last_flush": counters,
            },
        )
    print(f"soak: {count} requests, {errors} errors, {lost} slots lost")
    return 0 if lost == errors == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
