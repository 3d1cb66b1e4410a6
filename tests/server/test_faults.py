"""A full pool, senseless requests and a killed scheduler: nothing hangs, nothing is lost."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import requests

from bench import parity, soak
from launch.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.models]

POOL = 1000


@pytest.fixture(scope="module")
def small(tiny_models):
    """FASER with pages of 16, a pool that a few requests fill, and the strict check."""
    target, draft = tiny_models
    args = [
        "--dtype", "float32", "--random-seed", "7", "--context-length", str(parity.CONTEXT),
        "--chunked-prefill-size", "64", "--max-total-tokens", str(POOL), "--page-size", "16",
        "--faser-depth", "random", "--schedule-conservativeness", "0.1",
    ]  # fmt: skip
    with Server(target, draft=draft, args=args, env=soak.STRICT, name="small-pool") as server:
        yield server


def test_a_full_pool_retracts_and_goes_on(small, tiny_servers):
    """Requests that need three times the pool: SGLang takes some out, and none is lost.

    It takes them out when a round's windows may not fit, so what it leaves free is less than the
    windows of a batch.
    """
    prompts = [[20 + i] * 40 + list(range(100, 140)) for i in range(12)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": 180, "temperature": 0},  # ignore_eos reserves all
    }
    expected = [answer["output_ids"] for answer in tiny_servers[0].post("/generate", body).json()]
    got = []
    work = threading.Thread(target=lambda: got.extend(small.post("/generate", body).json()))
    work.start()
    most = 0
    while work.is_alive():
        most = max(most, soak.load(small)["num_used_tokens"])
        time.sleep(0.02)
    work.join()
    assert [answer["output_ids"] for answer in got] == expected
    assert max(answer["meta_info"]["num_retractions"] for answer in got) > 0
    assert most > 0.9 * small.info()["memory_usage"]["token_capacity"]
    assert soak.settle(small) == 0


SENSELESS = [
    {"sampling_params": {"temperature": -1}},
    {"sampling_params": {"max_new_tokens": -3}},
    {"sampling_params": {"regex": "(["}},
    {"sampling_params": {"json_schema": "{not json"}},
    {"sampling_params": {"ebnf": "root ::= missing"}},
    {"sampling_params": {"min_new_tokens": 30, "max_new_tokens": 4}},
    {"sampling_params": {"custom_params": {"faser": {"max_depth": "deep"}}}},
    {"sampling_params": {"logit_bias": {"a": 1}}},
    {"sampling_params": {"stop_token_ids": ["a"]}},
    {"input_ids": [5] * 2000},
    {"input_ids": []},
    {"input_ids": [10**9]},
    {"input_ids": [5, -7]},
    {"return_logprob": True, "token_ids_logprob": [10**9]},
    {"return_logprob": True, "token_ids_logprob": [-1]},
    {"return_logprob": True, "top_logprobs_num": 10**6},
    {"custom_logit_processor": "{}"},
    {"sampling_params": {"beam_width": 3}},
    {"lora_path": "nobody"},
]


def test_senseless_requests_are_refused_and_their_neighbours_do_not_notice(tiny_servers):
    base, faser = tiny_servers
    params = {"max_new_tokens": 150, "temperature": 0, "ignore_eos": True}
    body = {"text": ["Seven brave sailors", "a b c a b c"], "sampling_params": params}
    expected = [answer["output_ids"] for answer in base.post("/generate", body).json()]
    got = []
    work = threading.Thread(target=lambda: got.extend(faser.post("/generate", body).json()))
    work.start()
    accepted = []
    for senseless in SENSELESS:
        request = senseless if "input_ids" in senseless else {"text": "Seven", **senseless}
        answer = faser.post("/generate", request)
        if answer.status_code < 400:
            accepted.append((senseless, answer.text))
    assert faser.post("/generate", {}).status_code >= 400
    raw = requests.post(f"{faser.base_url}/generate", data="{", timeout=60)
    assert raw.status_code >= 400
    work.join()
    assert accepted == []
    assert [answer["output_ids"] for answer in got] == expected


def test_a_killed_scheduler_ends_the_server_and_leaves_nothing_behind(small):
    """The last test of this server."""
    group = psutil.Process(small.process.pid).children(recursive=True)
    schedulers = [p for p in group if "scheduler" in " ".join(p.cmdline())]
    assert len(schedulers) == 1, [p.cmdline() for p in group]
    schedulers[0].kill()
    assert small.process.wait(timeout=120) != 0
    _, alive = psutil.wait_procs(group, timeout=60)
    assert alive == []
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{small.base_url}/health", timeout=5)
