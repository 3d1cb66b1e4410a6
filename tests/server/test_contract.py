"""A FASER server answers as the same server without speculation, and says what it cannot do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest
import requests
import sglang as sgl
import torch
from transformers import AutoModelForCausalLM

from bench import parity
from launch import demo_models

pytestmark = [pytest.mark.server, pytest.mark.models]

GREEDY = {"temperature": 0, "ignore_eos": True}


def both(servers, body):
    """The same native request to the server without speculation and to FASER's."""
    answers = [server.post("/generate", body) for server in servers]
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


def test_greedy_ids_equal_in_every_situation(tiny_servers, tiny_models):
    """The reduced parity matrix: lengths, repeats, the context's end, reuse of cached slots."""
    base, faser = tiny_servers
    work = parity.make_workload(tiny_models[0], small=True)
    tally = parity.Tally()
    parity.check(faser, work, parity.reference(base, work), tally)
    assert tally.differences == []
    assert tally.total >= 30


@pytest.mark.parametrize("drafter", ["hybrid", "eagle"])
def test_greedy_ids_equal_with_a_head(head_servers, drafter):
    base, faser = head_servers["none"], head_servers[drafter]
    work = parity.make_workload(demo_models.build("tiny-flat"), small=True)
    # Texts that repeat themselves, for lookup: a tiny random model's own words never do.
    work.plain.extend([row * 4 for row in work.plain[:3]])
    tally = parity.Tally()
    counters = parity.check(faser, work, parity.reference(base, work), tally)
    assert tally.differences == []
    assert tally.total >= 30
    assert counters["accepted"] > 0


def test_a_request_bounds_its_own_depth(tiny_servers):
    base, faser = tiny_servers
    for depth in (0, 2):
        parity.flush(faser)
        sampling = {
            **GREEDY,
            "max_new_tokens": 24,
            "custom_params": {"faser": {"max_depth": depth}},
        }
        answers = both(tiny_servers, {"text": "Seven brave", "sampling_params": sampling})
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
        depths = faser.faser()["counters"]["depth_histogram"]
        assert max(int(d) for d, count in depths.items() if count) == depth


@pytest.mark.parametrize(
    "asked", [{"max_depth": -1}, {"max_depth": 9}, {"max_depth": "3"}, {"depth": 3}, 3]
)
def test_a_wrong_depth_is_a_400(tiny_servers, asked):
    sampling = {"max_new_tokens": 4, "custom_params": {"faser": asked}}
    answer = tiny_servers[1].post("/generate", {"text": "Hi", "sampling_params": sampling})
    assert answer.status_code == 400
    assert "max_depth" in answer.text


def test_logprobs_of_every_emitted_token_equal(tiny_servers):
    body = {
        "text": "Seven brave",
        "sampling_params": {**GREEDY, "max_new_tokens": 24},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [11, 12],
    }
    base, faser = (answer["meta_info"] for answer in both(tiny_servers, body))
    for key in ("output_token_logprobs", "input_token_logprobs"):
        assert [t[1] for t in faser[key]] == [t[1] for t in base[key]]
        for ours, theirs in zip(faser[key], base[key], strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-4) or ours[0] is theirs[0] is None
    assert len(faser["output_token_logprobs"]) == 24
    for ours, theirs in zip(faser["output_top_logprobs"], base["output_top_logprobs"], strict=True):
        assert [t[1] for t in ours] == [t[1] for t in theirs]
    for ours, theirs in zip(
        faser["output_token_ids_logprobs"], base["output_token_ids_logprobs"], strict=True
    ):
        assert [t[0] for t in ours] == pytest.approx([t[0] for t in theirs], abs=1e-4)


def test_logit_bias_holds_at_every_position(tiny_servers):
    params = {**GREEDY, "max_new_tokens": 24}
    free, _ = both(tiny_servers, {"text": "Seven brave", "sampling_params": params})
    banned = free["output_ids"][9]
    params["logit_bias"] = {str(banned): -100.0}
    base, faser = both(tiny_servers, {"text": "Seven brave", "sampling_params": params})
    assert faser["output_ids"] == base["output_ids"]
    assert banned not in faser["output_ids"]


def test_stop_inside_an_accepted_run_ends_ids_text_and_usage_together(tiny_servers):
    params = {**GREEDY, "max_new_tokens": 40}
    free, _ = both(tiny_servers, {"text": "Seven brave", "sampling_params": params})
    for place in range(5, 30, 3):
        stop = {**params, "stop_token_ids": [free["output_ids"][place]]}
        base, faser = both(tiny_servers, {"text": "Seven brave", "sampling_params": stop})
        assert faser["output_ids"] == base["output_ids"]
        assert faser["text"] == base["text"]
        assert faser["meta_info"]["completion_tokens"] == base["meta_info"]["completion_tokens"]


def test_streamed_chunks_concatenate_to_the_text(tiny_servers):
    faser = tiny_servers[1]
    body = {
        "model": "default",
        "prompt": "Seven brave",
        "temperature": 0,
        "max_tokens": 30,
        "stream": True,
        "ignore_eos": True,
    }
    whole = faser.post("/v1/completions", {**body, "stream": False}).json()
    chunks = []
    with requests.post(f"{faser.base_url}/v1/completions", json=body, stream=True) as lines:
        for line in lines.iter_lines(decode_unicode=True):
            if line.startswith("data: {"):
                chunks.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(chunks) == whole["choices"][0]["text"]
    assert len(chunks) > 3


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("beam search", {"sampling_params": {"beam_width": 2}}),
        ("return_sampling_mask", {"return_sampling_mask": True}),
    ],
)
def test_what_is_not_served_is_a_clear_400(tiny_servers, name, body):
    answer = tiny_servers[1].post("/generate", {"text": "Seven", **body})
    assert answer.status_code == 400
    assert name in answer.text and "FASER" in answer.text


def test_server_info_shows_resolved_values_and_sums_that_agree(tiny_servers):
    faser = tiny_servers[1].faser()
    assert faser["mode"] == "serial"
    assert faser["drafter"] == "lm"
    assert faser["depth"] == "random"
    assert faser["depth_cap"] == 8
    counters = faser["counters"]
    assert counters["emitted"] == (counters["accepted"] + counters["rounds"] - counters["cut"])
    histogram = {int(depth): count for depth, count in counters["depth_histogram"].items()}
    assert sum(histogram.values()) == counters["rounds"]
    assert sum(depth * count for depth, count in histogram.items()) == counters["verified"]
    assert counters["drafted"] == counters["verified"] + counters["trimmed"]


def bench_serving(server, folder, *arguments):
    """Run SGLang's benchmark against a server; what it printed."""
    command = [
        sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--host",
        "127.0.0.1", "--port", str(server.port), "--seed", "1", *arguments,
    ]  # fmt: skip
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


def test_bench_serving_runs_and_its_accept_length_has_the_documented_relation(
    tiny_servers, tiny_models, tmp_path
):
    faser = tiny_servers[1]
    parity.flush(faser)
    printed = bench_serving(
        faser, tmp_path, "--dataset-name", "random-ids", "--num-prompts", "12",
        "--random-input-len", "40", "--random-output-len", "24", "--random-range-ratio", "0.5",
        "--tokenizer", tiny_models[0], "--max-concurrency", "6",
    )  # fmt: skip
    shown = float(re.search(r"Accept length:\s+([\d.]+)", printed).group(1))
    counters = wait_for_idle(faser)["counters"]
    tokens = counters["emitted"] + counters["cut"] + counters["overshoot_tokens"]
    rounds = counters["rounds"] + counters["overshoot_rounds"]
    # Both are per flush; the server logs every pass, so SGLang's average holds all rounds but
    # those that were under way when the benchmark asked.
    assert shown == pytest.approx(tokens / rounds, abs=0.06)
    assert counters["accept_length"] > 1.2

    dataset = tmp_path / "prompts.jsonl"
    turns = [
        {"conversations": [{"content": f"Number {n}?"}, {"content": "Yes."}]} for n in range(6)
    ]
    dataset.write_text("\n".join(json.dumps(turn) for turn in turns))
    printed = bench_serving(
        faser, tmp_path, "--dataset-name", "custom", "--dataset-path", str(dataset),
        "--num-prompts", "6", "--sharegpt-output-len", "12", "--tokenizer", tiny_models[0],
    )  # fmt: skip
    assert re.search(r"Successful requests:\s+6", printed)


def wait_for_idle(server):
    """FASER's block once its counters stand still."""
    last = server.faser()
    for _ in range(20):
        time.sleep(0.3)
        now = server.faser()
        if now["counters"] == last["counters"]:
            return now
        last = now
    return last


@sgl.function
def tale(s, start):
    s += "Story: " + start
    s += sgl.gen("first", max_tokens=12, temperature=0, ignore_eos=True)
    branches = s.fork(2)
    for number, branch in enumerate(branches):
        branch += f" Branch {number}:" + sgl.gen(
            "end", max_tokens=8, temperature=0, ignore_eos=True
        )
    s += branches[0]["end"] + branches[1]["end"]
    s += " Is it " + sgl.select("mood", choices=["sad", "merry", "long winded"])


def test_frontend_program_gives_what_it_gives_without_speculation(tiny_servers):
    results = []
    for server in tiny_servers:
        state = tale.run(start="Seven brave", backend=sgl.RuntimeEndpoint(server.base_url))
        results.append((state["first"], state["mood"], state.text()))
    assert results[1] == results[0]


def test_greedy_ids_equal_those_of_transformers(tiny_servers, tiny_models):
    """An independent reference: the CPU platform's layers and attention are our own."""
    prompt, new_tokens = list(range(100, 190)), 32  # two chunks of prefill
    model = AutoModelForCausalLM.from_pretrained(tiny_models[0], dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=-1,
        )
        expected = out[0, len(prompt) :].tolist()
    for server in tiny_servers:
        body = {"input_ids": prompt, "sampling_params": {**GREEDY, "max_new_tokens": new_tokens}}
        assert server.post("/generate", body).json()["output_ids"] == expected, server.name
