"""1,000 sampled answers over HTTP follow the target's exact distribution."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import demo_models
from launch.servers import Server, start_all
from tests.support.distribution import (
    SETTINGS,
    SIGNIFICANCE,
    Setting,
    p_value,
    target_distribution,
)

pytestmark = [pytest.mark.server, pytest.mark.models]

DRAWS = 1_000
PROMPT = [3, 14, 15, 9, 2, 6]
VOCABULARY = 32


# Drafter: target, draft, flags. A vocabulary of 32 tokens repeats itself, so lookup drafts too.
DRAFTERS = {
    "lm": ("tiny-vocab", "tiny-vocab-drafter", []),
    "eagle3": ("tiny-vocab-flat", "tiny-vocab-eagle3", []),
    "ngram": ("tiny-vocab", None, ["--faser-drafter", "ngram"]),
    "hybrid": ("tiny-vocab-flat", "tiny-vocab-eagle3", ["--faser-drafter", "hybrid"]),
}


@pytest.fixture(scope="module")
def servers():
    args = ["--dtype", "float32", "--faser-depth", "3", "--random-seed", "5"]
    started = {
        name: Server(
            demo_models.build(target),
            draft=demo_models.build(draft) if draft else None,
            is_faser=True,
            args=[*args, "--max-total-tokens", "20000", *flags],
            name=f"tiny-vocab-{name}",
        )
        for name, (target, draft, flags) in DRAFTERS.items()
    }
    start_all(list(started.values()))
    try:
        yield started
    finally:
        for server in started.values():
            server.stop()


def next_token(model, prefixes: list[list[int]], setting: Setting) -> np.ndarray:
    """Exact P(next token) [prefixes, vocabulary], from the model run by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor(prefixes)).logits[:, -1].numpy()
    return target_distribution(logits, setting)


@functools.cache
def exact_pairs(target: str, setting: Setting) -> np.ndarray:
    """P(second, third token) of an answer: both come out of verified windows."""
    model = AutoModelForCausalLM.from_pretrained(demo_models.build(target), dtype=torch.float32)
    first = next_token(model, [PROMPT], setting)[0]
    tokens = range(VOCABULARY)
    second = next_token(model, [[*PROMPT, a] for a in tokens], setting)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    for a in tokens:
        third = next_token(model, [[*PROMPT, a, b] for b in tokens], setting)
        pairs += first[a] * second[a][:, None] * third
    return pairs


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pairs_of_tokens_over_http_follow_the_target(servers, drafter, setting):
    server = servers[drafter]
    body = {
        "input_ids": [PROMPT] * 50,
        "sampling_params": {
            **setting.params,
            "max_new_tokens": 4,
            "ignore_eos": True,
            "n": DRAWS // 50,
        },
    }
    answer = server.post("/generate", body)
    assert answer.status_code == 200, answer.text
    ids = np.array([one["output_ids"][1:3] for one in answer.json()])
    assert len(ids) == DRAWS
    counts = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(counts, (ids[:, 0], ids[:, 1]), 1)
    exact = exact_pairs(DRAFTERS[drafter][0], setting)
    assert p_value(counts.sum(1), exact.sum(1)) > SIGNIFICANCE
    assert p_value(counts, exact) > SIGNIFICANCE
    wrong = np.roll(exact, 1, axis=1)  # the test can tell: neighbours swapped
    assert p_value(counts, wrong) < SIGNIFICANCE


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_were_accepted_and_rejected(servers, drafter):
    """Else the distributions above would say nothing about verification."""
    counters = servers[drafter].faser()["counters"]
    assert 0 < counters["accepted"] < counters["drafted"]
