"""Nothing is lost: random requests, aborts and disconnects, then the KV account must balance.

    python bench/soak.py                   200 requests against the demo target
    python bench/soak.py --tiny --seconds 90

SGLang's strict check of its pools runs at every pass and whenever the server is idle; it ends the
server at the first slot that is neither free, nor cached, nor a request's. Afterwards no request
may be left, the cache must flush, and no token may be in use. The last line is
``soak: N requests, 0 slots lost``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.parity import flush  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server, ServerError  # noqa: E402

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
CLIENTS = 12


def one_request(server: Server, seed: int) -> tuple[str, int]:
    """A random request that is answered, aborted or abandoned; says which.

    Second, for the streamed ones, the tokens in use while it ran (else 0).
    """
    draw = random.Random(seed)
    rid = uuid.uuid4().hex
    shared = [7] * draw.choice([0, 40, 90])
    prompt = shared + [draw.randrange(10, 2000) for _ in range(draw.randint(1, 120))]
    body = {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": draw.randint(1, 200),
            "temperature": draw.choice([0, 0, 0.8]),
            "top_p": draw.choice([1.0, 0.9]),
            "ignore_eos": draw.random() < 0.7,
        },
    }
    fate = draw.choice(["answer", "answer", "abort", "disconnect"])
    if fate == "answer":
        server.post("/generate", body).raise_for_status()
        return "answered", 0
    stream = requests.post(
        f"{server.base_url}/generate", json={**body, "stream": True}, stream=True, timeout=300
    )
    with stream:
        for _ in zip(range(draw.randint(1, 6)), stream.iter_lines(), strict=False):
            pass
        used = load(server)["num_used_tokens"]
        if fate == "disconnect":
            return "disconnected", used
        server.post("/abort_request", {"rid": rid}).raise_for_status()
        for _ in stream.iter_lines():
            pass
    return "aborted", used


def run(server: Server, *, count: int | None, seconds: float | None) -> tuple[Counter, int]:
    """Send requests from ``CLIENTS`` threads until the count or the time is reached.

    Returns how many ended how, and the most tokens that were seen in use.
    """
    fates: Counter = Counter()
    most = 0
    began = time.monotonic()
    sent = 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        while (sent < count) if seconds is None else (time.monotonic() - began < seconds):
            batch = range(sent, sent + 2 * CLIENTS)
            sent += len(batch)
            for fate, used in pool.map(lambda seed: one_request(server, seed), batch):
                fates[fate] += 1
                most = max(most, used)
            print(f"  {sent} requests, {time.monotonic() - began:.0f} s", flush=True)
    return fates, most


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
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, help="for this long, instead of a count")
    parser.add_argument("--tiny", action="store_true", help="the tiny random models")
    parser.add_argument("--page-size", type=int, default=1)
    options = parser.parse_args()
    names = ("tiny", "tiny-drafter") if options.tiny else ("target", "lm-drafter")
    model, draft = (demo_models.build(name) for name in names)
    args = [
        "--faser-depth", "random", "--max-total-tokens", "6000", "--chunked-prefill-size", "64",
        "--page-size", str(options.page_size), "--context-length", "512",
    ]  # fmt: skip
    with Server(model, draft=draft, args=args, env=STRICT, name="soak") as server:
        fates, most = run(server, count=options.requests, seconds=options.seconds)
        lost = settle(server)
    print(f"most tokens in use: {most}")
    print(dict(fates))
    print(f"soak: {sum(fates.values())} requests, {lost} slots lost")
    return 0 if lost == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
