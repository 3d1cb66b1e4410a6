"""Penalties at every row of a window, against SGLang's own, fed a token at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from faser_sglang.worker.outputs import OutputRecord

VOCAB, WIDTH, POOL_ROWS, CAP = 11, 40, 5, 3
EOS = 2


class Batch(SimpleNamespace):
    """SGLang's orchestrator keeps a weak reference, which a plain namespace allows too."""


def make_req(prompt=4, output=(), frequency=0.0, presence=0.0, repetition=1.0, least=0, stops=()):
    return SimpleNamespace(
        origin_input_ids=list(range(prompt)),
        output_ids=list(output),
        sampling_params=SimpleNamespace(
            frequency_penalty=frequency,
            presence_penalty=presence,
            repetition_penalty=repetition,
            min_new_tokens=least,
            stop_token_ids=set(stops),
        ),
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
        custom_logit_processor=None,
    )


def sglangs_terms(req, output):
    """What SGLang adds and scales by behind ``output``, at [1, vocabulary]."""
    batch = Batch(reqs=[req], device="cpu")
    orchestrator = BatchedPenalizerOrchestrator(
        VOCAB,
        batch,
        {
            BatchedFrequencyPenalizer,
            BatchedMinNewTokensPenalizer,
            BatchedPresencePenalizer,
            BatchedRepetitionPenalizer,
        },
    )
    for token in output:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    additive = torch.zeros(1, VOCAB)
    orchestrator.accumulate_additive_penalties(additive)
    scaling = orchestrator.accumulate_scaling_penalties()
    return additive, torch.ones(1, VOCAB) if scaling is None else scaling


def prefill(record, rows, reqs, bonus):
    batch = SimpleNamespace(
        reqs=reqs,
        req_pool_indices_cpu=torch.tensor(rows),
        prefix_lens=[0] * len(reqs),
        extend_lens=[len(req.origin_input_ids) + len(req.output_ids) for req in reqs],
    )
    record.begin(batch)
    record.note_bonus(batch, torch.tensor(bonus, dtype=torch.int32))


def window_terms(record, rows, lengths, drafts, depths):
    counts = np.array(depths, np.int64) + 1
    owners = torch.from_numpy(np.repeat(np.arange(len(rows)), counts))
    offsets = torch.from_numpy(np.concatenate([np.arange(count) for count in counts]))
    ends = np.array(lengths, np.int64) + 1
    return record.terms(np.array(rows, np.int64), ends, owners, offsets, drafts, counts)


penalised = st.builds(
    make_req,
    prompt=st.integers(1, 6),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    frequency=st.sampled_from([0.0, 0.1, -0.7, 2.0]),
    presence=st.sampled_from([0.0, 0.3, -1.5]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    least=st.sampled_from([0, 1, 3, 6]),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
)
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=CAP, max_size=CAP)


@st.composite
def rounds(draw):
    size = draw(st.integers(1, 3))
    return [
        (draw(penalised), draw(st.integers(0, VOCAB - 1)), draw(tokens), draw(st.integers(0, CAP)))
        for _ in range(size)
    ], draw(st.lists(st.tuples(tokens, st.integers(1, CAP + 1)), max_size=3))


@given(rounds())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_every_row_has_sglangs_terms_behind_its_drafts(case):
    requests, earlier = case
    record = OutputRecord(POOL_ROWS, WIDTH, VOCAB, "cpu")
    rows = [3, 0, 4][: len(requests)]
    reqs = [req for req, *_ in requests]
    prefill(record, rows, reqs, [bonus for _, bonus, *_ in requests])
    outputs = [[*req.output_ids, bonus] for req, bonus, *_ in requests]

    def lengths():
        pairs = zip(reqs, outputs, strict=True)
        return [len(req.origin_input_ids) + len(output) - 1 for req, output in pairs]

    for emitted, count in earlier:  # rounds before, of which ``count`` tokens were accepted
        this_round = SimpleNamespace(
            rows_cpu=np.array(rows, np.int64), lengths_cpu=np.array(lengths(), np.int64)
        )
        said = torch.tensor([[*emitted, 7]] * len(rows))
        record.commit(this_round, said)
        for output in outputs:
            output += said[0, :count].tolist()
    drafts = torch.tensor([drafted for *_, drafted, _ in requests])
    depths = [depth for *_, depth in requests]
    terms = window_terms(record, rows, lengths(), drafts, depths)
    expected = [
        sglangs_terms(req, output + drafted[:place])
        for (req, _, drafted, depth), output in zip(requests, outputs, strict=True)
        for place in range(depth + 1)
    ]
    wanted = torch.cat([additive for additive, _ in expected])
    assert torch.equal(terms.additive.isinf(), wanted.isinf())
    torch.testing.assert_close(terms.additive, wanted, rtol=0, atol=1e-6)
    scaling = torch.ones(len(expected), VOCAB) if terms.scaling is None else terms.scaling
    torch.testing.assert_close(scaling, torch.cat([scaled for _, scaled in expected]))


def test_requests_that_ask_for_nothing_are_not_recorded():
    record = OutputRecord(POOL_ROWS, WIDTH, VOCAB, "cpu")
    prefill(record, [1], [make_req()], [5])
    assert not record.has_penalties(np.array([1]))
    assert record._tokens is None


def test_a_row_forgets_the_request_before():
    record = OutputRecord(POOL_ROWS, WIDTH, VOCAB, "cpu")
    prefill(record, [1], [make_req(frequency=1.0, least=9)], [5])
    assert record.has_penalties(np.array([1]))
    prefill(record, [1], [make_req()], [5])
    assert not record.has_penalties(np.array([1]))
    prefill(record, [2], [make_req(presence=1.0)], [5])
    terms = window_terms(record, [1, 2], [4, 4], None, [0, 0])
    assert terms.additive[0].tolist() == [0.0] * VOCAB
    assert terms.additive[1].tolist() == [-1.0 if i == 5 else 0.0 for i in range(VOCAB)]


@pytest.mark.parametrize("chunk_end", [1, 3])
def test_a_chunk_of_a_prompt_has_no_output(chunk_end):
    record = OutputRecord(POOL_ROWS, WIDTH, VOCAB, "cpu")
    req = make_req(frequency=1.0)
    batch = SimpleNamespace(
        reqs=[req],
        req_pool_indices_cpu=torch.tensor([1]),
        prefix_lens=[0],
        extend_lens=[chunk_end],
    )
    record.begin(batch)
    record.note_bonus(batch, torch.tensor([9]))
    every = torch.zeros(1, dtype=torch.int64)
    terms = record.terms(np.array([1]), np.array([chunk_end]), every, every, None, np.array([1]))
    assert not terms.additive.any()


def test_the_output_of_a_request_is_known_to_its_bonus_token():
    record = OutputRecord(POOL_ROWS, WIDTH, VOCAB, "cpu")
    req = make_req(output=[6, 7])
    req.custom_logit_processor = "x"
    prefill(record, [2], [req], [8])
    assert record.known_output(2, 7) == [6, 7, 8]
