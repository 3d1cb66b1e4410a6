"""What an operator does to a running server leaves its answers the target's."""

from __future__ import annotations

import threading
import time

import pytest
import requests

from bench import parity
from launch import demo_models

pytestmark = [pytest.mark.server, pytest.mark.models]

PARAMS = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
PROMPTS = ["Seven brave sailors", "The longest river", "a b c d a b c d", "Once upon a time"]


def answers(server):
    """Greedy answers to the prompts, at once."""
    body = {"text": PROMPTS, "sampling_params": PARAMS}
    return [answer["output_ids"] for answer in server.post("/generate", body).json()]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("which", ["lm", "hybrid"])
def test_requests_go_on_behind_a_pause_as_if_there_had_been_none(
    tiny_servers, head_servers, which, mode
):
    pairs = {"lm": tiny_servers, "hybrid": (head_servers["none"], head_servers["hybrid"])}
    base, faser = pairs[which]
    expected = answers(base)
    parity.flush(faser)
    got = []
    work = threading.Thread(target=lambda: got.extend(answers(faser)))
    work.start()
    while not faser.faser()["counters"]["rounds"]:  # none since the flush
        time.sleep(0.05)
    faser.post("/pause_generation", {"mode": mode}).raise_for_status()
    time.sleep(1)
    is_paused = not got
    rounds = faser.faser()["counters"]["rounds"]
    time.sleep(1)
    assert faser.faser()["counters"]["rounds"] == rounds
    faser.post("/continue_generation", {}).raise_for_status()
    work.join()
    assert is_paused
    assert got == expected


@pytest.mark.parametrize("which", ["lm", "hybrid"])
def test_a_weight_update_keeps_answers_and_drafts_right(tiny_servers, head_servers, which):
    """The target's weights from disk; the draft, of which there are none, keeps its own."""
    pairs = {"lm": tiny_servers, "hybrid": (head_servers["none"], head_servers["hybrid"])}
    model = demo_models.build({"lm": "tiny", "hybrid": "tiny-flat"}[which])
    base, faser = pairs[which]
    expected = answers(base)
    parity.flush(faser)
    assert answers(faser) == expected
    before = faser.faser()["counters"]
    body = {"model_path": str(model), "flush_cache": True}
    reply = faser.post("/update_weights_from_disk", body)
    assert reply.status_code == 200 and reply.json()["success"], reply.text
    assert answers(faser) == expected
    after = faser.faser()["counters"]
    assert after["accepted"] > 0
    if which == "lm":  # whose server takes no requests out of the batch: the very same rounds
        assert after["accepted_by_position"] == before["accepted_by_position"]
    assert "draft model keeps its weights" in faser.log.read_text()


def test_health_and_information_are_answered_while_requests_run(tiny_servers):
    """/health_generate runs a request of its own beside them."""
    faser = tiny_servers[1]
    work = threading.Thread(target=lambda: answers(faser))
    work.start()
    for route in ("/health", "/health_generate", "/model_info", "/v1/models", "/v1/loads"):
        assert requests.get(faser.base_url + route, timeout=120).status_code == 200, route
    work.join()
