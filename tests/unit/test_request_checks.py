"""Requests: whatever FASER cannot serve is named, everything else passes."""

from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from faser_sglang.hooks import request_checks
from faser_sglang.hooks.request_checks import unsupported

CAP = 3  # --speculative-num-steps
VOCAB = 100
MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
IN_PARAMETERS = {
    "watermark": ("watermark", SimpleNamespace()),
    "beam search": ("beam_width", 2),
}
IN_REQUEST = {
    "return_sampling_mask": ("return_sampling_mask", True),
    "return_routed_experts": ("return_routed_experts", True),
    "return_indexer_topk": ("return_indexer_topk", True),
    "lora_path": ("lora_id", "adapter"),
    "input_embeds": ("input_embeds", [[0.0]]),
    "embed_overrides": ("positional_embed_overrides", [1]),
    "image, video or audio input": ("mm_inputs", SimpleNamespace()),
}
SERVED = {
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "stop": ["a", "bc"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "logit_bias": {"1": 2.0},
    "sampling_seed": 3,
    "n": 4,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "structural_tag": "{}",
    "beam_width": 1,
    "max_new_tokens": 0,
    "custom_params": {"faser": {"max_depth": 1}},
}


def real_request(**parameters):
    """As the tokenizer makes it, all that a client need not say left out."""
    return TokenizedGenerateReqInput(
        input_text="x",
        input_ids=None,
        input_embeds=None,
        positional_embed_overrides=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(**parameters),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )


def plain_request():
    """The same as a bag of values, so that a test can set any of them."""
    request = real_request()
    parameters, fields = request.sampling_params, type(request).__struct_fields__
    bag = SimpleNamespace(**{name: getattr(request, name) for name in fields})
    bag.sampling_params = SimpleNamespace(
        **{name: getattr(parameters, name) for name in SamplingParams.__struct_fields__}
    )
    return bag


@pytest.fixture
def faser(monkeypatch):
    monkeypatch.setattr(request_checks, "is_faser_process", lambda: True)
    spec = SimpleNamespace(speculative_num_steps=CAP)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)


@pytest.mark.parametrize("make", [real_request, plain_request])
def test_a_plain_request_passes(make, faser):
    assert unsupported(make()) == []
    assert request_checks._check(make(), MANAGER) is None


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_passes(name):
    assert unsupported(real_request(**{name: SERVED[name]})) == []


def test_normalised_parameters_pass_too():
    request = real_request(stop_token_ids=[3], temperature=0.0)
    request.sampling_params.normalize(None)
    request.sampling_params.verify(10)
    assert unsupported(request) == []


def test_null_means_the_default():
    request = real_request(**dict.fromkeys(("frequency_penalty", "repetition_penalty", "regex")))
    assert unsupported(request) == []


@pytest.mark.parametrize("name", IN_PARAMETERS)
def test_each_parameter_that_is_not_served_is_named(name):
    field, value = IN_PARAMETERS[name]
    request = plain_request()
    assert hasattr(request.sampling_params, field)
    setattr(request.sampling_params, field, value)
    assert unsupported(request) == [name]


@pytest.mark.parametrize("name", [name for name in IN_PARAMETERS if name != "watermark"])
def test_each_parameter_is_found_in_real_parameters(name):
    field, value = IN_PARAMETERS[name]
    assert unsupported(real_request(**{field: value})) == [name]


@pytest.mark.parametrize("name", IN_REQUEST)
def test_each_request_field_that_is_not_served_is_named(name):
    field, value = IN_REQUEST[name]
    for request in (plain_request(), real_request()):
        assert hasattr(request, field)
        setattr(request, field, value)
        assert unsupported(request) == [name]


def test_hidden_states_are_served_but_behind_an_eagle_head(monkeypatch):
    request = real_request()
    request.return_hidden_states = True
    for is_head, expected in ((False, []), (True, ["return_hidden_states with an EAGLE head"])):
        settings = SimpleNamespace(is_head=is_head)
        monkeypatch.setattr(request_checks.config, "load", lambda settings=settings: settings)
        assert unsupported(request) == expected


def test_the_refusal_names_everything_at_once_and_the_way_out(faser):
    request = real_request(beam_width=2)
    request.lora_id = "adapter"
    with pytest.raises(ValueError) as error:
        request_checks._check(request, MANAGER, None, extra=1)
    message = str(error.value)
    assert "lora_path, beam search" in message
    assert "send the request without" in message
    assert message.endswith(".") and ". " not in message and "\n" not in message


@pytest.mark.parametrize("depth", range(CAP + 1))
def test_a_depth_up_to_the_cap_passes(depth, faser):
    request = real_request(custom_params={"faser": {"max_depth": depth}})
    assert request_checks._check(request, MANAGER) is None


def test_a_depth_beyond_the_cap_is_refused_with_the_cap(faser):
    request = real_request(custom_params={"faser": {"max_depth": CAP + 1}})
    with pytest.raises(ValueError, match=f"from 0 to {CAP} "):
        request_checks._check(request, MANAGER)


OUTSIDE = {
    "input_ids": ([5, VOCAB], [-1, 5]),
    "token_ids_logprob": ([VOCAB], [5, -7]),
    "top_logprobs_num": (VOCAB + 1, -1),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_the_vocabulary_does_not_have_is_refused(name, faser):
    request = real_request()
    for value in OUTSIDE[name]:
        setattr(request, name, value)
        wrong = {VOCAB, VOCAB + 1} & set(np.ravel(value)) or {np.min(value)}
        with pytest.raises(ValueError, match=f"{name} .*{wrong.pop()}; .*{VOCAB - 1}|{VOCAB},"):
            request_checks._check(request, MANAGER)
    for value in ([], [0, VOCAB - 1], None):
        setattr(request, name, VOCAB if name == "top_logprobs_num" else value)
        assert request_checks._check(request, MANAGER) is None


def test_requests_of_other_algorithms_pass(monkeypatch):
    monkeypatch.setattr(request_checks, "is_faser_process", lambda: False)
    assert request_checks._check(real_request(frequency_penalty=1.0), MANAGER) is None


def test_an_embedding_request_passes(faser):
    assert request_checks._check(SimpleNamespace(sampling_params=None), MANAGER) is None
