"""Start-up checks: what cannot work is refused in one sentence that names the way out."""

import json
import logging
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs

from faser_sglang import config, validation
from faser_sglang.validation import check_fit, read_vocabulary, refuse_flags, validate

UNSERVED = [
    ("--tp-size", "tp_size", 2),
    ("--pp-size", "pp_size", 2),
    ("--dp-size", "dp_size", 2),
    ("--enable-dp-attention", "enable_dp_attention", True),
    ("--disaggregation-mode", "disaggregation_mode", "prefill"),
    ("--speculative-adaptive", "speculative_adaptive", True),
    ("--speculative-token-map", "speculative_token_map", "map.pt"),
    ("--speculative-draft-window-size", "speculative_draft_window_size", 256),
    ("--speculative-use-rejection-sampling", "speculative_use_rejection_sampling", True),
    ("--speculative-use-block-verification", "speculative_use_block_verification", True),
    ("--speculative-accept-threshold-single", "speculative_accept_threshold_single", 0.9),
    ("--speculative-accept-threshold-acc", "speculative_accept_threshold_acc", 0.9),
    ("--enable-lora", "enable_lora", True),
    ("--enable-two-batch-overlap", "enable_two_batch_overlap", True),
    ("--enable-pdmux", "enable_pdmux", True),
    ("--enable-hisparse", "enable_hisparse", True),
    ("--enable-hierarchical-cache", "enable_hierarchical_cache", True),
    ("--tokenizer-worker-num", "tokenizer_worker_num", 2),
    ("--enable-multi-layer-eagle", "enable_multi_layer_eagle", True),
]
WORDS = {"a": 0, "b": 1, "c": 2, "d": 3}


def flags(**values):
    """SGLang's defaults as a bag of values, ``values`` set."""
    args = ServerArgs(model_path="target")
    bag = SimpleNamespace(**{name: getattr(args, name) for name in ServerArgs.__struct_fields__})
    for name, value in values.items():
        assert hasattr(bag, name)
        setattr(bag, name, value)
    return bag


def refused(call, *args, **kwargs):
    """The message of the refusal, which is one sentence."""
    with pytest.raises(ValueError) as error:
        call(*args, **kwargs)
    message = str(error.value)
    assert message.endswith(".") and ". " not in message and "\n" not in message, message
    return message


@pytest.fixture
def model(tmp_path):
    """Makes the directory of a model without weights."""

    def make(name, *, size=4, words=None, added=(), context=64, **more):
        folder = tmp_path / name
        folder.mkdir()
        content = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": context,
        }
        (folder / "config.json").write_text(json.dumps(content | more))
        if words is not None:
            tokenizer = {"model": {"type": "BPE", "vocab": words}, "added_tokens": list(added)}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return str(folder)

    return make


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger=validation.logger.name)
    return lambda: [r.getMessage() for r in caplog.records if r.name == validation.logger.name]


# -- flags ------------------------------------------------------------------------------------


def test_sglangs_defaults_are_served():
    refuse_flags(flags())


@pytest.mark.parametrize(("flag", "name", "value"), UNSERVED)
def test_each_flag_that_is_not_served_is_named_with_the_way_out(flag, name, value):
    message = refused(refuse_flags, flags(**{name: value}))
    assert flag in message and "start without it" in message


@pytest.mark.parametrize(
    "served",
    [
        {"speculative_num_steps": 0},
        {"speculative_num_steps": 5},
        {"speculative_eagle_topk": 1},
        {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4},
        {"speculative_num_draft_tokens": config.DEFAULT_DEPTH_CAP + 1},
    ],
)
def test_a_chain_of_any_depth_is_served(served):
    refuse_flags(flags(**served))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"speculative_num_steps": -1}, ("--speculative-num-steps is -1", "0 or more")),
        ({"speculative_eagle_topk": 2}, ("--speculative-eagle-topk 2", "use 1")),
        (
            {"speculative_num_steps": 3, "speculative_num_draft_tokens": 3},
            ("--speculative-num-draft-tokens 3", "--speculative-num-steps 3", "leave it out"),
        ),
        (
            {"speculative_num_draft_tokens": 4},
            ("--speculative-num-draft-tokens 4", "--speculative-num-steps 8", "leave it out"),
        ),
    ],
)
def test_a_shape_that_is_no_chain_is_refused(values, named):
    message = refused(refuse_flags, flags(**values))
    assert all(part in message for part in named)


# -- the pair of models -------------------------------------------------------------------------


def test_models_of_one_vocabulary_fit(model, warnings):
    check_fit(model("target", words=WORDS), model("draft", words=WORDS))
    check_fit(model("bare-target"), model("bare-draft"))  # no tokenizers: equal sizes must do
    assert warnings() == []


def test_other_sizes_without_tokenizers_are_refused(model):
    message = refused(check_fit, model("target", size=4), model("draft", size=6))
    assert "6 tokens" in message and "target's 4" in message
    assert "shares the target's tokenizer" in message


def test_other_sizes_with_one_tokenizer_only_are_refused(model):
    refused(check_fit, model("target", size=4, words=WORDS), model("draft", size=6))


def test_one_size_with_other_ids_is_refused(model):
    draft = model("draft", words=WORDS | {"a": 1, "b": 0})
    message = refused(check_fit, model("target", words=WORDS), draft)
    assert draft in message and "other token ids" in message
    assert "shares the target's tokenizer" in message


def test_an_added_token_that_only_one_side_has_is_refused(model):
    target = model("target", size=8, words=WORDS, added=[{"content": "<end>", "id": 4}])
    refused(check_fit, target, model("draft", size=8, words=WORDS))


def test_padding_rows_do_not_count_where_the_tokenizers_agree(model):
    added = [{"content": "<end>", "id": 4}]
    small = model("small", size=5, words=WORDS, added=added)
    large = model("large", size=64, words=WORDS, added=added)
    check_fit(small, large)
    check_fit(large, small)


def test_a_token_beyond_the_smaller_embedding_is_refused(model):
    words = WORDS | {"e": 4}
    message = refused(
        check_fit, model("target", size=8, words=words), model("draft", size=4, words=words)
    )
    assert "4 tokens" in message and "target's 8" in message


def test_the_tokenizer_that_is_served_counts(model):
    target = model("target", words=WORDS)
    draft = model("draft", words=WORDS | {"a": 1, "b": 0})
    check_fit(target, draft, tokenizer_path=draft)
    refused(check_fit, draft, model("other", words=WORDS), tokenizer_path=draft)


@pytest.mark.parametrize(
    "head",
    [
        {"architectures": ["LlamaForCausalLMEagle"]},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["DeepseekV3ForCausalLMNextN"]},
        {"draft_vocab_size": 3},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
    ],
)
def test_a_draft_head_is_refused(head, model):
    draft = model("draft", **head)
    message = refused(check_fit, model("target"), draft)
    assert draft in message and "EAGLE" in message and "give a language model" in message


@pytest.mark.parametrize(
    ("own", "served", "is_shorter"),
    [(32, None, True), (32, 33, True), (32, 32, False), (128, None, False), (64, 16, False)],
)
def test_a_shorter_draft_context_is_fine_and_said_once(own, served, is_shorter, model, warnings):
    target, draft = model("target", context=64), model("draft", context=own)
    check_fit(target, draft, context_length=served)
    assert len(warnings()) == is_shorter
    for message in warnings():
        assert f"context is {own} tokens" in message and "depth 0" in message


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]]}},
        {"added_tokens": []},
    ],
)
def test_a_tokenizer_that_lists_no_ids_is_unknown(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert read_vocabulary(str(tmp_path)) is None


def test_added_tokens_are_part_of_a_vocabulary(model):
    path = model("m", words=WORDS, added=[{"content": "d", "id": 9}, {"content": "é", "id": 4}])
    assert read_vocabulary(path) == {"a": 0, "b": 1, "c": 2, "d": 9, "é": 4}


# -- the whole check ----------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """The processes whose hooks were installed, instead of installing them."""
    from faser_sglang import hooks

    calls = []
    monkeypatch.setattr(hooks, "install", calls.append)
    monkeypatch.setenv(config.CARRIER, "")
    return calls


def test_a_pair_that_fits_gets_its_hooks(model, installed):
    target, draft = model("target"), model("draft")
    validate(flags(model_path=target, speculative_draft_model_path=draft))
    assert installed == ["launcher"]


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_draft_model_the_flag_is_named(path, model, installed):
    message = refused(
        validate, flags(model_path=model("target"), speculative_draft_model_path=path)
    )
    assert "--speculative-draft-model-path" in message and "language model" in message
    assert installed == []


def test_a_fixed_depth_beyond_the_cap_is_refused_before_any_file_is_read(installed):
    config.configure(depth=4)
    args = flags(
        model_path="nowhere", speculative_draft_model_path="nowhere", speculative_num_steps=3
    )
    message = refused(validate, args)
    assert "--faser-depth 4" in message and "--speculative-num-steps 3" in message


def test_the_length_that_is_served_is_compared_with_the_drafts(model, installed, warnings):
    target, draft = model("target", context=64), model("draft", context=32)
    args = {"model_path": target, "speculative_draft_model_path": draft}
    validate(flags(**args, context_length=32))
    assert warnings() == []
    validate(flags(**args))
    assert len(warnings()) == 1
