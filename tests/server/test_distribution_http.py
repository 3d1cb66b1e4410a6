"""1,000 sampled answers over HTTP follow the target's exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch import demo_models
from launch.servers import Server
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


@pytest.fixture(scope="module")
def server():
    target, draft = demo_models.build("tiny-vocab"), demo_models.build("tiny-vocab-drafter")
    args = ["--dtype", "float32", "--faser-depth", "3", "--random-seed", "5"]
    with Server(target, draft=draft, args=args, name="tiny-vocab-faser") as started:
        yield started


def next_token(model, prefixes: list[list[int]], setting: Setting) -> np.ndarray:
    """Exact P(next token) [prefixes, vocabulary], from the model run by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor(prefixes)).logits[:, -1].numpy()
    return target_distribution(logits, setting)


def exact_pairs(setting: Setting) -> np.ndarray:
    """P(second, third token) of an answer: both come out of verified windows."""
    model = AutoModelForCausalLM.from_pretrained(
        demo_models.build("tiny-vocab"), dtype=torch.float32
    )
    first = next_token(model, [PROMPT], setting)[0]
    tokens = range(VOCABULARY)
    second = next_token(model, [[*PROMPT, a] for a in tokens], setting)
    pairs = np.zeros((VOCABULARY, VOCABULARY))
    for a in tokens:
        third = next_token(model, [[*PROMPT, a, b] for b in tokens], setting)
        pairs += first[a] * second[a][:, None] * third
    return pairs


@pytest.mark.parametrize("setting", SETTINGS)
def test_pairs_of_tokens_over_http_follow_the_target(server, setting):
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
    exact = exact_pairs(setting)
    assert p_value(counts.sum(1), exact.sum(1)) > SIGNIFICANCE
    assert p_value(counts, exact) > SIGNIFICANCE
    wrong = np.roll(exact, 1, axis=1)  # the test can tell: neighbours swapped
    assert p_value(counts, wrong) < SIGNIFICANCE
