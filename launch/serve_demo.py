"""`make demo`: chat with a FASER server on the CPU, and the same chat without speculation.

Builds the demo models (cached), starts both servers, asks them in turn, streams FASER's answers to
the terminal, and ends with a table. Leaves no process behind, also when interrupted.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from launch import demo_models
from launch.cache import DemoDataError
from launch.servers import Server, ServerError, start_all

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for a good night's sleep.",
    "Write a Python function that returns the factorial of n.",
)
MAX_TOKENS = 128
# A small KV pool: three short answers need no more. The CPU even where there is a GPU, which
# the comparison below is not about.
SERVER_ARGS = ("--dtype", "bfloat16", "--max-total-tokens", "16384", "--log-level", "warning")
DEPTH = ("--faser-depth", "2")
SERVER_ENV = {"CUDA_VISIBLE_DEVICES": ""}
BUSY_PERCENT = 15.0  # of the CPU, used by other programs while both servers are idle

CLOSING = """\
Drafts come from lookup where the text repeats itself, and from an EAGLE3 head elsewhere; the head
was trained for this target on text of its own (bench/train_head.py).
A deeper batch rounds bf16 differently, so bf16 texts may part at a near tie. That FASER's greedy
text is the target's own is checked in float32: make parity"""


@dataclass(frozen=True)
class Answer:
    """One streamed answer; ``seconds`` run from its first piece of text to its last.

    ``rounds`` is the number of decode rounds, None from a server without speculation.
    """

    text: str
    tokens: int
    seconds: float
    rounds: int | None


@dataclass(frozen=True)
class Run:
    """What one server answered to all questions."""

    name: str
    answers: tuple[Answer, ...]

    @property
    def decoded(self) -> int:
        """Tokens that decode rounds emitted: all but the one of each prefill."""
        return sum(answer.tokens - 1 for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.decoded / sum(answer.seconds for answer in self.answers)

    @property
    def accept_length(self) -> float | None:
        """Emitted tokens a decode round; None without speculation."""
        if any(answer.rounds is None for answer in self.answers):
            return None
        return self.decoded / sum(answer.rounds for answer in self.answers)


def chat(server: Server, question: str, max_tokens: int, *, is_shown: bool) -> Answer:
    """Stream one greedy chat completion; ``is_shown`` prints the text as it arrives.

    Raises ServerError for an answer that is no stream, reports an error or is empty.
    """
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_spec_tokens_details": True,
    }
    pieces, times = [], []
    usage, details = None, None
    with requests.post(
        f"{server.base_url}/v1/chat/completions", json=body, stream=True, timeout=300
    ) as response:
        if response.status_code != 200:
            raise ServerError(f"{server.name} answered {response.status_code}: {response.text}")
        for event in _events(response):
            if "error" in event:
                raise ServerError(f"{server.name} ended the stream: {event['error']}")
            usage = event.get("usage") or usage
            details = (event.get("sglext") or {}).get("spec_tokens_details") or details
            for choice in event.get("choices", []):
                if piece := choice["delta"].get("content"):
                    pieces.append(piece)
                    times.append(time.monotonic())
                    if is_shown:
                        print(piece, end="", flush=True)
    if is_shown:
        print(flush=True)
    if not pieces or usage is None:
        raise ServerError(
            f"{server.name} streamed no text; the end of its log:\n{server.log_tail()}"
        )
    rounds = details["spec_verify_ct"] if details else None
    return Answer("".join(pieces), usage["completion_tokens"], times[-1] - times[0], rounds)


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to its ``[DONE]``."""
    for line in response.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


def converse(faser: Server, base: Server) -> tuple[Run, Run]:
    """Ask both servers all questions, in turn: what slows the machine then slows both."""
    for server in (faser, base):
        chat(server, "Hello", 16, is_shown=False)  # what the first request builds is not timed
    busy = psutil.cpu_percent(interval=2.0)
    if busy > BUSY_PERCENT:
        say(f"other programs use {busy:.0f} % of the CPU: the speeds below mean little")
    answers: dict[str, list[Answer]] = {faser.name: [], base.name: []}
    for question in QUESTIONS:
        print(f"\n> {question}", flush=True)
        answers[faser.name].append(chat(faser, question, MAX_TOKENS, is_shown=True))
        say("the same question without speculation")
        answers[base.name].append(chat(base, question, MAX_TOKENS, is_shown=False))
    return Run(faser.name, tuple(answers[faser.name])), Run(base.name, tuple(answers[base.name]))


def describe(counters: dict[str, Any]) -> str:
    return (
        f"FASER's own counters in /server_info, warm-up included: {counters['rounds']} rounds, "
        f"accept length {counters['accept_length']:.2f}, acceptance rate "
        f"{counters['acceptance_rate']:.2f}"
    )


def report(base: Run, faser: Run) -> str:
    """The table, then what to make of it."""
    lines = [f"{'server':<22}{'tokens/s':>10}{'accept length':>16}{'tokens':>9}"]
    for run in (base, faser):
        length = "-" if run.accept_length is None else f"{run.accept_length:.2f}"
        lines.append(f"{run.name:<22}{run.tokens_per_second:>10.1f}{length:>16}{run.decoded:>9}")
    pairs = zip(base.answers, faser.answers, strict=True)
    equal = sum(one.text == other.text for one, other in pairs)
    lines += ["", f"Equal texts (greedy, bf16): {equal} of {len(base.answers)}.", CLOSING]
    return "\n".join(lines)


def _server(name: str, logs: Path, target: Path, drafter: Path | None, *args: str) -> Server:
    log = logs / f"{name.replace(' ', '-')}.log"
    return Server(
        target, draft=drafter, args=(*SERVER_ARGS, *args), env=SERVER_ENV, name=name, log=log
    )


def say(line: str) -> None:
    print(f"demo: {line}", flush=True)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: stops the servers
    logs = Path(tempfile.mkdtemp(prefix="faser-demo-"))
    servers: list[Server] = []
    try:
        say("models (built once, then cached)")
        target = demo_models.build("target", progress=say)
        head = demo_models.build("eagle3", progress=say)
        faser = _server("FASER", logs, target, head, "--faser-drafter", "hybrid", *DEPTH)
        base = _server("no speculation", logs, target, None)
        servers += [faser, base]
        say("starting both servers")
        began = time.monotonic()
        start_all(servers, progress=say)
        say(f"both answer after {time.monotonic() - began:.0f} s")
        faser_run, base_run = converse(faser, base)
        print(flush=True)
        say(describe(faser.faser()["counters"]))
        print(f"\n{report(base_run, faser_run)}", flush=True)
    except (DemoDataError, ServerError, requests.RequestException) as error:
        print(f"demo: failed: {error}\ndemo: server logs are in {logs}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        shutil.rmtree(logs, ignore_errors=True)
        return 130
    finally:
        if servers:
            for server in servers:
                server.stop()
            say("servers stopped")
    shutil.rmtree(logs, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
