"""Recorded answers, replayed as drafts: long runs are accepted, right up to a planned wrong one."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import contract, parity
from launch import demo_models

pytestmark = [pytest.mark.server, pytest.mark.models]

LONGEST = 48
DEPTH = 5  # of the server; a request may ask for less
EOS = 2  # of the tiny target


@pytest.fixture(scope="module")
def forced():
    """The shims' files; a server without speculation, and one that replays answers."""
    model = demo_models.build("tiny")
    with contract.serving(model, {"forced": contract.VARIANTS["forced"]}) as (files, servers):
        yield files, *servers


@pytest.fixture(scope="module")
def whole(forced):
    """The target's greedy answer to each prompt, LONGEST tokens of it."""
    params = {"max_new_tokens": LONGEST, "temperature": 0, "ignore_eos": True}
    return [forced[1].generate(prompt, **params)["output_ids"] for prompt in contract.PROMPTS]


def test_every_feature_at_every_row_and_faults_that_must_be_noticed(forced):
    files, base, server = forced
    said = []
    cases = contract.make_cases(base, prompts=1)
    expected = contract.ask_all(base, cases)
    totals = contract.check_forced(server, files, cases, expected, said.append)
    assert set(totals) == {
        "forced, right", "forced, wrong at every third", "forced, failing", "planted faults",
    }  # fmt: skip
    assert all(agreed == total > 5 for agreed, total in totals.values()), "\n".join(said)


@dataclass(frozen=True)
class Asked:
    """A request: number of its prompt, how much of the answer it stops at, and its drafts."""

    prompt: int
    new_tokens: int
    stops: tuple[int, ...]  # places in the answer whose tokens end it
    depth: int
    wrong: frozenset[int]  # places in the answer that are drafted wrong


REQUESTS = st.builds(
    Asked,
    prompt=st.integers(0, len(contract.PROMPTS) - 1),
    new_tokens=st.integers(1, LONGEST),
    stops=st.lists(st.integers(0, LONGEST - 1), max_size=2).map(tuple),
    depth=st.integers(0, DEPTH),
    wrong=st.frozensets(st.integers(0, LONGEST - 1), max_size=12),
)


def stop_ids(answer, asked):
    return {EOS} | {answer[place] for place in asked.stops}


def emitted(answer, asked):
    """What must come out: the ids, and the rounds that it takes, in plain Python."""
    stops = stop_ids(answer, asked)
    out = answer[:1]  # by the prefill
    rounds = 0
    while out[-1] not in stops and len(out) < asked.new_tokens:
        rounds += 1
        start = len(out)
        # A draft for the last token or behind it is of no use: verification gives one anyway.
        depth = min(asked.depth, asked.new_tokens - start - 1)
        accepted = 0
        while accepted < depth and start + accepted not in asked.wrong:
            accepted += 1
        for token in answer[start : start + accepted + 1]:
            out.append(token)
            if token in stops:
                break
    return out, rounds


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=6))
def test_any_depths_stops_and_lengths_emit_what_plain_python_says(forced, whole, requests):
    """Requests of a batch together: ids, reason of the end, and the very number of rounds."""
    files, _, server = forced
    seeds = [str(i) for i in range(len(requests))]
    answers = [whole[asked.prompt] for asked in requests]
    (files / "forced.json").write_text(
        json.dumps(
            {
                "answers": dict(zip(seeds, answers, strict=True)),
                "wrong_at": {s: sorted(r.wrong) for s, r in zip(seeds, requests, strict=True)},
            }
        )
    )
    params = [
        {
            "temperature": 0,
            "sampling_seed": int(seed),
            "max_new_tokens": asked.new_tokens,
            "stop_token_ids": [answer[place] for place in asked.stops],
            "custom_params": {"faser": {"max_depth": asked.depth}},
        }
        for seed, asked, answer in zip(seeds, requests, answers, strict=True)
    ]
    text = [contract.PROMPTS[asked.prompt] for asked in requests]
    reply = server.post("/generate", {"text": text, "sampling_params": params})
    reply.raise_for_status()
    for got, asked, answer in zip(reply.json(), requests, answers, strict=True):
        ids, rounds = emitted(answer, asked)
        assert got["output_ids"] == ids
        meta = got["meta_info"]
        assert meta["completion_tokens"] == len(ids)
        is_stopped = ids[-1] in stop_ids(answer, asked)
        assert meta["finish_reason"]["type"] == ("stop" if is_stopped else "length")
        assert meta.get("spec_verify_ct", 0) == rounds
        said = meta["faser"]  # the request's own account, cut where a stop is inside a run
        assert (said["rounds"], said["emitted"]) == (rounds, len(ids) - 1)


def test_the_account_balances_afterwards(forced):
    _, _, server = forced
    parity.flush(server)
    assert server.faser()["counters"]["rounds"] == 0
