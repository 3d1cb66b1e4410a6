"""Depth by request, by controller and by switch, and the accounts that say what was done."""

from __future__ import annotations

import json
import time

import pytest
import requests
import torch

from bench.parity import CONTEXT
from faser_sglang.control.cost import CostTable
from faser_sglang.worker.origin import cpu_name
from launch.servers import Server
from tests.conftest import COMMON

pytestmark = [pytest.mark.server, pytest.mark.models]

CAP = 8
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
PROMPTS = [[20 + i] * 8 + list(range(100 + 7 * i, 110 + 7 * i)) for i in range(6)]


@pytest.fixture(scope="module")
def auto(tiny_models, tmp_path_factory):
    """FASER's controller on a cost table that makes drafting worth while, and a trace."""
    target, draft = tiny_models
    folder = tmp_path_factory.mktemp("auto")
    CostTable(
        requests=[1, 8], windows=[1, CAP + 1], verify=[[10.0, 11.0], [12.0, 24.0]],
        first=[1.0, 1.0], step=[0.5, 0.5], catch_up=0.0, host=[0.5, 0.5],
        origin={
            "device": cpu_name(), "threads": 1, "model": target, "draft_model": draft,
            "drafter": "lm", "dtype": str(torch.float32), "tp_size": 1,
        },
    ).save(folder / "cost.json")  # fmt: skip
    args = [
        *COMMON, "--chunked-prefill-size", "64", "--context-length", str(CONTEXT),
        "--faser-cost-table", str(folder / "cost.json"),
        "--faser-trace", str(folder / "trace.jsonl"),
    ]  # fmt: skip
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    with Server(target, draft=draft, args=args, env=env, name="tiny-auto") as server:
        server.trace = folder / "trace.jsonl"
        yield server


def ask(server, **body):
    answer = server.post("/generate", {"sampling_params": GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def limited(depth):
    return GREEDY | {"custom_params": {"faser": {"max_depth": depth}}}


def switch(server, **values):
    asked = {f"faser_{name}": value for name, value in values.items()}
    return server.post("/set_internal_state", {"server_args": asked})


@pytest.fixture
def fixed(auto):
    """The server at the same depth for all, by the switch."""
    assert switch(auto, depth=5).json() == [True]
    yield auto
    assert switch(auto, depth=-1, stop=-1, trim=-1).json() == [True]


def account(answer):
    """A request's account, whose sums agree with each other and with SGLang's."""
    meta = answer["meta_info"]
    said = meta["faser"]
    depths = {int(depth): count for depth, count in said["depth_histogram"].items()}
    assert said["emitted"] == said["accepted"] + said["rounds"] - said["cut"]
    assert said["emitted"] == meta["completion_tokens"] - 1
    assert said["drafted"] == said["verified"] + said["trimmed"]
    assert sum(depths.values()) == said["rounds"]
    assert sum(depth * count for depth, count in depths.items()) == said["verified"]
    assert said["accepted"] <= said["verified"]
    return said, depths


def test_the_controller_emits_the_targets_own_ids(auto, tiny_servers):
    expected = [a["output_ids"] for a in ask(tiny_servers[0], input_ids=PROMPTS)]
    answers = ask(auto, input_ids=PROMPTS)
    assert [a["output_ids"] for a in answers] == expected
    assert sum(account(a)[0]["accepted"] for a in answers) > 0


def test_a_named_cost_table_takes_the_place_of_the_measurement(auto):
    assert "FASER measured" not in auto.log.read_text()
    assert auto.faser()["cost_table"].endswith("cost.json")


def test_the_trace_holds_every_round_of_a_request(auto):
    """Rounds are written when the next one is planned: those of a request but its last ones."""
    before = len(auto.trace.read_text().splitlines())
    rounds = account(ask(auto, input_ids=PROMPTS[0]))[0]["rounds"]
    lines = auto.trace.read_text().splitlines()[before:]
    assert rounds <= len(lines) + 1 and all("accepted" in json.loads(line) for line in lines)


def test_random_depths_with_stop_and_trim_emit_the_targets_own_ids(tiny_servers):
    base, faser = tiny_servers
    expected = [a["output_ids"] for a in ask(base, input_ids=PROMPTS)]
    assert switch(faser, stop=1, trim=1).json() == [True]
    try:
        answers = ask(faser, input_ids=PROMPTS)
    finally:
        assert switch(faser, stop=-1, trim=-1).json() == [True]
    assert [a["output_ids"] for a in answers] == expected
    assert sum(account(a)[0]["trimmed"] for a in answers) > 0


def test_every_request_of_a_batch_has_its_own_largest_depth(fixed, tiny_servers):
    expected = [a["output_ids"] for a in ask(tiny_servers[0], input_ids=PROMPTS)]
    bounds = [0, 1, 3, CAP, 0, 2]
    answers = ask(fixed, input_ids=PROMPTS, sampling_params=[limited(b) for b in bounds])
    assert [a["output_ids"] for a in answers] == expected
    for bound, answer in zip(bounds, answers, strict=True):
        said, depths = account(answer)
        assert max(depths) == min(bound, 5)
        assert bound > 0 or (said["drafted"], said["rounds"]) == (0, said["emitted"])


@pytest.mark.parametrize("wrong", [CAP + 1, -1, 1.5, "3", True, None, [2]])
def test_a_wrong_depth_of_a_request_gets_a_400(auto, wrong):
    answer = auto.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": limited(wrong)})
    assert answer.status_code == 400 and "max_depth" in answer.text
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    chat["custom_params"] = {"faser": {"max_depth": wrong}}
    assert auto.post("/v1/chat/completions", chat).status_code == 400


def test_the_switch_changes_what_rounds_do_and_never_the_ids(auto, tiny_servers):
    expected = ask(tiny_servers[0], input_ids=PROMPTS[1])["output_ids"]
    try:
        for depth in (0, 2, 0, 7):  # what was not drafted for a while is caught up on
            assert switch(auto, depth=depth).json() == [True]
            answer = ask(auto, input_ids=PROMPTS[1])
            assert answer["output_ids"] == expected
            assert max(account(answer)[1]) == depth
            assert auto.faser()["depth"] == str(depth)
        assert switch(auto, depth=7, trim=1, stop=1).json() == [True]
        assert ask(auto, input_ids=PROMPTS[1])["output_ids"] == expected
        state = auto.faser()
        assert [state[name] for name in ("depth", "stop", "trim")] == ["7", "on", "on"]
    finally:
        assert switch(auto, depth=-1, stop=-1, trim=-1).json() == [True]
    assert auto.faser()["depth"] == "auto"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"depth": CAP + 1}, "exceeds --speculative-num-steps 8"),
        ({"depth": -2}, "faser_depth is -2; it takes"),
        ({"depth": 0.5}, "faser_depth is 0.5; it takes"),
        ({"stop": 2}, "faser_stop is 2; it takes"),
        ({"depth": 1, "trim": -3}, "faser_trim is -3; it takes"),
        ({"depths": 1}, "faser_depths cannot be set"),
        ({"depth": "deep"}, ""),
    ],
    ids=str,
)
def test_a_wrong_switch_gets_a_400_and_changes_nothing(auto, values, sentence):
    answer = switch(auto, **values)
    assert answer.status_code == 400 and sentence in answer.text
    state = auto.faser()
    assert [state[name] for name in ("depth", "stop", "trim")] == ["auto", "on", "on"]


def test_a_server_that_measured_nothing_refuses_the_controller(tiny_servers):
    for values in ({"depth": -1}, {"depth": 3, "trim": 1}):
        answer = switch(tiny_servers[1], **values)
        assert answer.status_code == 400 and "has not measured" in answer.text.replace("\\n", " ")
    assert tiny_servers[1].faser()["depth"] == "random"
    assert len(ask(tiny_servers[1], input_ids=PROMPTS[0])["output_ids"]) == 40


def test_the_sums_of_every_kind_of_request_agree(tiny_servers, auto):
    for server in (tiny_servers[1], auto):
        several = GREEDY | {"temperature": 0.8, "n": 3}
        for answer in ask(server, text="Seven sailors", sampling_params=several):
            account(answer)
        ids = ask(server, text="Seven sailors")
        inside = ids["text"][len(ids["text"]) // 2 :][:3]
        stopped = ask(server, text="Seven sailors", sampling_params=GREEDY | {"stop": inside})
        assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
        account(stopped)
        for length in (1, 2, 3):
            answer = ask(server, text="Seven", sampling_params=GREEDY | {"max_new_tokens": length})
            assert answer["meta_info"]["completion_tokens"] == length
            if length > 1:
                account(answer)


def test_the_sums_of_a_stream_agree_in_its_last_chunk(tiny_servers):
    body = {"input_ids": PROMPTS[2], "sampling_params": GREEDY, "stream": True}
    with requests.post(
        f"{tiny_servers[1].base_url}/generate", json=body, stream=True, timeout=60
    ) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith(b"data: {")]
    chunks = [json.loads(line) for line in lines]
    said, _ = account(chunks[-1])
    emitted = [chunk["meta_info"]["faser"]["emitted"] for chunk in chunks[1:]]
    assert emitted == sorted(emitted) and emitted[-1] == said["emitted"]


def test_the_sums_of_an_aborted_request_agree(tiny_servers):
    """Counters of the server, before and after: an abort comes between two rounds."""
    server = tiny_servers[1]
    body = {
        "input_ids": PROMPTS[3],
        "sampling_params": GREEDY | {"max_new_tokens": 300},
        "stream": True,
        "rid": "to-abort",
    }
    with requests.post(f"{server.base_url}/generate", json=body, stream=True, timeout=60) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith(b"data: {"))
        last = json.loads(next(lines))
        server.post("/abort_request", {"rid": "to-abort"})
        for line in lines:
            last = json.loads(line)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    time.sleep(0.5)
    said = server.faser()["counters"]
    assert said["emitted"] == said["accepted"] + said["rounds"] - said["cut"]
    assert said["drafted"] == said["verified"] + said["trimmed"]
    assert sum(said["depth_histogram"].values()) == said["rounds"]
    if "faser" in last["meta_info"]:
        account(last)
