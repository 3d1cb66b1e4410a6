"""Sampled tokens have the target's distribution, whatever the drafts and depths.

The worker's own verification runs on a target whose next-token logits depend on the last token:
a vocabulary of 32, so every probability is known exactly. 20,000 requests decode four tokens in
one batch at random depths, with a drafter that agrees with the target's argmax most of the time.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from faser_sglang.kernels.reference import ragged_accept
from faser_sglang.worker import verify
from faser_sglang.worker.agreement import Agreement
from faser_sglang.worker.outputs import OutputRecord
from tests.support.distribution import (
    SETTINGS,
    SIGNIFICANCE,
    Setting,
    p_value,
    target_distribution,
)
from tests.support.rounds import make_round

DRAWS = 20_000
VOCABULARY = 32
CAP = 3
TOKENS = 4
START = 5


def make_logits(seed: int) -> torch.Tensor:
    """[last token, next token] of the target: entropies about 2.3 nats."""
    return 2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


class TableTarget:
    """A target worker and its runner: logits by table, SGLang's own sampler."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.model_runner = self
        self.sampler = sglang_sampler.Sampler.__new__(sglang_sampler.Sampler)
        torch.nn.Module.__init__(self.sampler)
        for name, value in {
            "tp_sync_group": None,
            "cp_sync_group": None,
            "rl_on_policy_target": None,
            "enable_deterministic": False,
            "use_log_softmax_logprob": False,
            "use_ascend_backend": False,
        }.items():
            setattr(self.sampler, name, value)

    def forward_batch_generation(self, batch, forward_batch, is_verify) -> SimpleNamespace:
        rows = self.logits[forward_batch.input_ids].clone()
        return SimpleNamespace(logits_output=LogitsProcessorOutput(next_token_logits=rows))


@pytest.fixture
def stub_sglang(monkeypatch):
    """No server around: the forward batch is the token ids, the backend is plain torch."""
    monkeypatch.setattr(verify, "make_forward_batch", lambda *_a, **kw: SimpleNamespace(**kw))
    settings = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sglang_sampler, "get_exec", lambda: settings)


def make_sampling_info(setting: Setting, size: int) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        temperatures=torch.full((size, 1), setting.temperature),
        top_ps=torch.full((size,), setting.top_p),
        top_ks=torch.full((size,), setting.top_k, dtype=torch.int64),
        min_ps=torch.full((size,), setting.min_p),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=setting.top_p < 1,
        need_top_k_sampling=setting.top_k < VOCABULARY,
        need_min_p_sampling=setting.min_p > 0,
        vocab_size=VOCABULARY,
        device="cpu",
    )


def decode(target: TableTarget, setting: Setting, seed: int) -> np.ndarray:
    """Tokens [DRAWS, TOKENS] that follow START, drawn by verification rounds."""
    torch.manual_seed(seed)
    depths_of = np.random.default_rng(seed)
    outputs = OutputRecord(1, 64, VOCABULARY, "cpu")
    verifier = verify.Verifier(target, CAP + 1, outputs, Agreement(SimpleNamespace(world_size=1)))
    batch = SimpleNamespace(
        sampling_info=make_sampling_info(setting, DRAWS),
        return_logprob=False,
        return_hidden_states=False,
        return_hidden_states_mode=CaptureHiddenMode.NULL,
        has_grammar=False,
    )
    favourite = target.logits.argmax(-1)
    req_to_token = torch.zeros(1, 64, dtype=torch.int64)
    out = np.full((DRAWS, TOKENS + CAP + 1), -1)
    done = np.zeros(DRAWS, np.int64)
    bonus = torch.full((DRAWS,), START)
    while done.min() < TOKENS:
        depths = depths_of.integers(0, CAP + 1, DRAWS)
        drafts = torch.zeros(DRAWS, CAP, dtype=torch.int64)
        last = bonus
        for step in range(CAP):
            wrong = torch.rand(DRAWS) < 0.2
            last = torch.where(wrong, (last + step) % VOCABULARY, favourite[last])
            drafts[:, step] = last
        this_round = make_round(np.zeros(DRAWS), done, bonus, depths, batch=batch)
        window = verifier.pack(this_round, req_to_token)
        verdict, *_ = verifier.run(this_round, window, drafts)
        emitted = verdict.accept_lens.numpy()
        for place in range(CAP + 1):
            is_emitted = (place < emitted) & (done + place < out.shape[1])
            out[is_emitted, (done + place)[is_emitted]] = verdict.tokens[is_emitted, place]
        done = np.minimum(done + emitted, TOKENS)
        bonus = verdict.bonus
    return out[:, :TOKENS]


def joint(p: np.ndarray, place: int) -> np.ndarray:
    """P(token at ``place``, the next one), exactly."""
    now = np.eye(VOCABULARY)[START]
    for _ in range(place + 1):
        now = now @ p
    return now[:, None] * p


def p_values(logits: torch.Tensor, setting: Setting) -> list[float]:
    tokens = decode(TableTarget(logits), setting, seed=17)
    p = target_distribution(logits.numpy(), setting)
    values = []
    for place in range(TOKENS - 1):
        counts = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(counts, (tokens[:, place], tokens[:, place + 1]), 1)
        values.append(p_value(counts, joint(p, place)))
    return values


@pytest.mark.parametrize("setting", SETTINGS)
def test_pairs_of_tokens_follow_the_target(stub_sglang, setting):
    assert min(p_values(make_logits(3), setting)) > SIGNIFICANCE


def accept_the_likely(sampled, drafts, depths, owners, offsets, width):
    """Broken on purpose: the first draft counts as drawn, whatever was drawn."""
    verdict = ragged_accept(sampled, drafts, depths, owners, offsets, width)
    has_draft = depths > 0
    verdict.tokens[has_draft, 0] = drafts[has_draft, 0]
    return ragged_accept(verdict.tokens[owners, offsets], drafts, depths, owners, offsets, width)


def redraw_the_rejected(sampled, drafts, depths, owners, offsets, width):
    """Broken on purpose: looks at a draw, and takes another token where it missed the draft."""
    verdict = ragged_accept(sampled, drafts, depths, owners, offsets, width)
    missed = (verdict.accept_lens == 1) & (depths > 0)
    verdict.tokens[missed, 0] = verdict.tokens[missed, 1]
    return verdict._replace(bonus=torch.where(missed, verdict.tokens[:, 0], verdict.bonus))


@pytest.mark.parametrize("broken", [accept_the_likely, redraw_the_rejected])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_broken_acceptance_rule_is_noticed(stub_sglang, monkeypatch, setting, broken):
    monkeypatch.setattr(verify, "ragged_accept", broken)
    assert min(p_values(make_logits(3), setting)) < SIGNIFICANCE
