"""One account of the rounds, wherever it is read: answers, /server_info, /metrics, log and top."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from launch.servers import Server
from tests.conftest import COMMON

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPTS = ["Seven brave sailors", "The longest river", "a b c d a b c d", "Once upon a time"]
# What /server_info and the answers call the sums of /metrics.
NAMES = {
    "rounds": "rounds",
    "drafted": "drafts",
    "trimmed": "trimmed_drafts",
    "verified": "verified_drafts",
    "accepted": "accepted_drafts",
    "cut": "cut_tokens",
    "emitted": "emitted_tokens",
}


@pytest.fixture(scope="module")
def server(tiny_models: tuple[str, str]) -> Iterator[Server]:
    """A server with metrics, whose chains end and whose drafts are withheld at random."""
    flags = ["--enable-metrics", "--decode-log-interval", "4", "--faser-depth", "random"]
    args = [*COMMON, *flags, "--faser-stop", "on", "--faser-trim", "on"]
    target, draft = tiny_models
    with Server(target, draft=draft, args=args, name="metrics") as started:
        yield started


def exported(server: Server) -> dict[tuple[str, str], float]:
    """FASER's sums in /metrics by name and label."""
    text = requests.get(f"{server.base_url}/metrics", timeout=60).text
    sums = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("sglang:faser_")
            if name != sample.name and name.endswith("_total"):
                assert sample.labels["tp_rank"] == "0" and sample.labels["model_name"]
                own = {"depth", "position", "phase"} & set(sample.labels)
                label = sample.labels[own.pop()] if own else ""
                sums[name.removesuffix("_total"), label] = sample.value
    return sums


def settled(server: Server) -> dict[tuple[str, str], float]:
    """The sums when the scheduler has nothing left to do: an answer leaves before they are told."""
    before, now = {}, exported(server)
    while now != before:
        time.sleep(0.3)
        before, now = now, exported(server)
    return now


def answers(server: Server) -> list[dict]:
    """Of requests that end by length, by a stop and without drafts."""
    ways = [{}, {"stop_token_ids": list(range(0, 40000, 7))}, {}, {}]
    ways[2]["custom_params"] = {"faser": {"max_depth": 0}}
    params = [{"max_new_tokens": 40, "temperature": 0, "ignore_eos": False, **way} for way in ways]
    reply = server.post("/generate", {"text": PROMPTS, "sampling_params": params})
    reply.raise_for_status()
    return [answer["meta_info"]["faser"] for answer in reply.json()]


def test_metrics_are_the_sums_of_the_answers_and_those_of_server_info(server):
    before = settled(server)
    accounts = answers(server)
    after = settled(server)
    counters = server.faser()["counters"]
    assert sum(account["accepted"] for account in accounts) > 0
    assert sum(account["trimmed"] for account in accounts) > 0
    for name, metric in NAMES.items():
        grown = after[metric, ""] - before[metric, ""]
        assert grown == sum(account[name] for account in accounts), name
        assert after[metric, ""] == counters[name], name
    depths = sum((Counter(account["depth_histogram"]) for account in accounts), Counter())
    for depth in range(9):
        key = "rounds_by_depth", str(depth)
        assert after[key] - before[key] == depths[str(depth)]
        assert after[key] == counters["depth_histogram"].get(str(depth), 0)
    for position, tested in enumerate(counters["tested_by_position"], start=1):
        assert after["position_tested", str(position)] == tested
        accepted = counters["accepted_by_position"][position - 1]
        assert after["position_accepted", str(position)] == accepted
    assert after["passes", ""] == counters["passes"]
    assert after["saved_rounds", ""] == counters["emitted"] - counters["rounds"]
    seconds = sum(value for (name, _), value in after.items() if name == "phase_seconds")
    assert seconds > sum(value for (name, _), value in before.items() if name == "phase_seconds")


def test_the_log_has_a_line_behind_each_of_sglangs_decode_reports(server):
    answers(server)
    settled(server)
    kinds = [
        "sglang" if "Decode batch" in line else "faser"
        for line in server.log.read_text(errors="replace").splitlines()
        if any(mark in line for mark in ("Decode batch", "FASER: accept len:", "FASER: no round"))
    ]
    assert len(kinds) > 4 and kinds == ["sglang", "faser"] * (len(kinds) // 2)


def test_top_shows_what_server_info_says(server):
    answers(server)
    settled(server)
    command = [sys.executable, "-m", "faser_sglang.top", "--once", "--interval", "0.2"]
    shown = subprocess.run(
        [*command, "--url", server.base_url], capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown.stderr
    counters = server.faser()["counters"]
    assert "requests: 0 running, 0 waiting" in shown.stdout
    assert f"{counters['accept_length']:.2f}" in shown.stdout
    assert f"{counters['accepted']} of {counters['verified']}" in shown.stdout


def test_metrics_go_on_behind_a_flush(server):
    answers(server)
    before = settled(server)
    requests.post(f"{server.base_url}/flush_cache", timeout=60).raise_for_status()
    assert server.faser()["counters"]["rounds"] == 0
    accounts = answers(server)
    after = settled(server)
    for name, metric in NAMES.items():
        grown = after[metric, ""] - before[metric, ""]
        assert grown == sum(account[name] for account in accounts), name
        assert grown == server.faser()["counters"][name], name
