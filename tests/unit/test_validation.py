"""Start-up checks: what cannot work is refused in one sentence that names the way out."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from faser_sglang import config, validation
from faser_sglang.control.cost import CostTable
from faser_sglang.validation import (
    check_draft,
    check_files,
    check_fit,
    check_window,
    checkpoint_kind,
    read_vocabulary,
    refuse_flags,
    validate,
    without_effect,
)
from faser_sglang.worker.origin import cpu_name
from tests.support.arguments import flags, refused

WORDS = {"a": 0, "b": 1, "c": 2, "d": 3}


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


# -- heads --------------------------------------------------------------------------------------

EAGLE = {"architectures": ["LlamaForCausalLMEagle"]}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"]}
AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def target(model):
    return model("target", num_hidden_layers=8)


@pytest.fixture
def eagle3(model):
    """Makes an EAGLE3 head for ``target``: fc of ``reads`` rows, a vocabulary of ``reduced``."""

    def make(*, reads=24, reduced=None, has_map=True, layers=None, name="head", **more):
        if layers is not None:
            more["eagle_config"] = {AUX: layers}
        if reduced is not None:
            more["draft_vocab_size"] = reduced
        folder = model(name, **EAGLE3, **more)
        tensors = {"fc.weight": torch.zeros(8, reads), "norm.weight": torch.zeros(8)}
        if has_map:
            tensors["d2t"] = torch.zeros(reduced or 4, dtype=torch.int64)
        save_file(tensors, f"{folder}/model.safetensors")
        return folder

    return make


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", "lm"),
        ("Qwen2ForCausalLM", "lm"),
        ("LlamaForCausalLMEagle", "eagle"),
        ("Qwen2ForCausalLMEagle", "eagle"),
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("Eagle3LlamaForCausalLM", "eagle3"),
        ("LLAMAFORCAUSALLMEAGLE3", "eagle3"),
    ],
)
def test_the_architecture_tells_the_kind(architecture, kind):
    assert checkpoint_kind("draft", SimpleNamespace(architectures=[architecture])) == kind


@pytest.mark.parametrize("names", [None, []])
def test_a_config_without_an_architecture_is_a_language_model_unless_it_looks_like_a_head(names):
    assert checkpoint_kind("draft", SimpleNamespace(architectures=names)) == "lm"
    head = SimpleNamespace(architectures=names, draft_vocab_size=3)
    assert "no architecture" in refused(checkpoint_kind, "draft", head)


@pytest.mark.parametrize(
    "name", ["DeepseekV3ForCausalLMNextN", "MiMoMTP", "Qwen3NextForCausalLMMTP"]
)
def test_nextn_and_mtp_heads_are_refused(name, model, target):
    draft = model("draft", architectures=[name])
    message = refused(check_fit, target, draft)
    assert draft in message and name in message and "NEXTN or MTP" in message
    assert "give an EAGLE or EAGLE3 head or a language model" in message


@pytest.mark.parametrize(
    "head",
    [{"draft_vocab_size": 3}, {"eagle_config": {AUX: [1, 2, 3]}}],
    ids=lambda head: [*head][0],
)
def test_a_head_under_a_wrong_architecture_is_told_the_right_one(head, model, target):
    draft = model("draft", **head)
    message = refused(check_fit, target, draft)
    assert draft in message and "looks like an EAGLE3 head" in message
    assert "LlamaForCausalLM;" in message and '["LlamaForCausalLMEagle3"]' in message


def test_a_language_model_may_name_keys_of_heads_without_a_value(model, target):
    assert check_fit(target, model("draft", draft_vocab_size=None, eagle_config={})) == "lm"


def test_heads_that_fit_are_told_apart(model, target, eagle3, warnings):
    assert check_fit(target, model("old", **EAGLE)) == "eagle"
    assert check_fit(target, eagle3()) == "eagle3"
    assert warnings() == []


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_a_head_needs_no_tokenizer_of_its_own(kind, model):
    """Its ids are the target's by construction."""
    target = model("words", words=WORDS, num_hidden_layers=8)
    check_fit(target, model("head", words=WORDS | {"a": 1, "b": 0}, **kind))


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_a_head_for_another_hidden_size_is_refused(kind, model, target):
    draft = model("head", hidden_size=16, **kind)
    message = refused(check_fit, target, draft)
    assert draft in message and "hidden size 16" in message and "has 8" in message
    assert "trained for this target" in message


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_a_head_may_be_narrower_than_its_target(kind, model, target):
    check_fit(target, model("head", hidden_size=4, target_hidden_size=8, **kind))
    message = refused(
        check_fit, target, model("other", hidden_size=8, target_hidden_size=4, **kind)
    )
    assert "hidden size 4" in message


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
@pytest.mark.parametrize("size", [3, 5])
def test_a_head_for_another_vocabulary_is_refused(size, kind, model, target):
    draft = model("head", size=size, **kind)
    message = refused(check_fit, target, draft)
    assert draft in message and f"vocabulary of {size} tokens" in message and "has 4" in message
    assert "trained for this target" in message


def test_a_layer_that_the_target_lacks_is_refused(target, eagle3):
    # The last layer's output is never captured, and a layer only once.
    for i, layers in enumerate(([1, 3, 8], [-1, 3, 5], [1, 3, 7], [3, 3, 3], [])):
        message = refused(check_fit, target, eagle3(layers=layers, name=f"head{i}"))
        assert f"output of layers {layers} of a target" in message and "has 8 layers" in message


def test_layers_of_the_target_are_fine(target, eagle3):
    assert check_fit(target, eagle3(layers=[1, 3, 5])) == "eagle3"


@pytest.mark.parametrize("depth", [1, 2, 4, 5, 6])
def test_the_usual_layers_must_be_three(depth, model, eagle3):
    shallow = model("shallow", num_hidden_layers=depth)
    message = refused(check_fit, shallow, eagle3())
    assert f"has {depth} layers" in message and AUX in message
    if depth > 3:
        assert check_fit(shallow, eagle3(layers=[0, 1, 2], name="other")) == "eagle3"


def test_an_eagle_head_reads_no_inner_layers(model):
    assert check_fit(model("shallow", num_hidden_layers=1), model("head", **EAGLE)) == "eagle"


@pytest.mark.parametrize(
    ("reads", "more", "meant"),
    [
        (16, {}, "3 layers of 8"),
        (8, {}, "3 layers of 8"),
        (24, {"layers": [1, 2]}, "2 layers of 8"),
        (24, {"num_aux_hidden_states": 4}, "4 layers of 8"),
        (12, {"hidden_size": 4, "target_hidden_size": 8}, "3 layers of 8"),
    ],
)
def test_weights_that_join_other_layers_than_the_config_says_are_refused(
    reads, more, meant, target, eagle3
):
    draft = eagle3(reads=reads, **more)
    message = refused(check_fit, target, draft)
    assert draft in message and f"joins {reads} hidden values" in message and meant in message
    assert "do not belong together" in message


@pytest.mark.parametrize(
    ("reads", "more"),
    [
        (16, {"layers": [1, 2]}),
        (32, {"num_aux_hidden_states": 4}),
        (24, {"hidden_size": 4, "target_hidden_size": 8}),
    ],
)
def test_weights_that_join_what_the_config_says_are_fine(reads, more, target, eagle3):
    assert check_fit(target, eagle3(reads=reads, **more)) == "eagle3"


def test_a_vocabulary_of_its_own_needs_a_map(target, eagle3):
    message = refused(check_fit, target, eagle3(reduced=3, has_map=False))
    assert "3 tokens" in message and "no map d2t" in message
    assert check_fit(target, eagle3(reduced=3, name="mapped")) == "eagle3"
    assert check_fit(target, eagle3(reduced=4, has_map=False, name="whole")) == "eagle3"


def test_the_map_may_lie_in_any_of_the_files(target, eagle3):
    head = eagle3(reduced=3, has_map=False)
    save_file({"model.d2t": torch.zeros(3, dtype=torch.int64)}, f"{head}/model-2.safetensors")
    assert check_fit(target, head) == "eagle3"


def test_a_head_without_safetensors_is_left_to_sglangs_loader(model, target):
    assert check_fit(target, model("head", draft_vocab_size=3, **EAGLE3)) == "eagle3"


def test_the_shorter_context_of_a_head_is_said_too(model, warnings):
    target = model("target", num_hidden_layers=8, context=64)
    check_fit(target, model("head", context=32, **EAGLE))
    assert len(warnings()) == 1 and "context is 32 tokens" in warnings()[0]


# -- contexts and vocabularies ------------------------------------------------------------------


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
    assert config.load().model_kind == "lm"


def test_a_flag_without_effect_is_said_once_when_the_kind_of_the_draft_is_known(
    model, target, installed, caplog
):
    draft = model("draft", **EAGLE3)
    window = {"speculative_draft_window_size": 64, "speculative_draft_sink_size": 4}
    args = flags(model_path=target, speculative_draft_model_path=draft, **window)
    args.enable_mixed_chunk = True
    validate(args)
    said = [r.getMessage() for r in caplog.records if r.name == "faser_sglang.flags"]
    assert [message.split()[1] for message in said] == [
        "--speculative-draft-sink-size",
        "--enable-mixed-chunk",
    ]


def test_lookup_alone_refuses_a_target_that_cannot_be_verified(model, installed):
    config.configure(drafter="ngram")
    names = {"architectures": ["LlamaForSequenceClassification"]}
    message = refused(validate, flags(model_path=model("target", **names)))
    assert "the target" in message and installed == []


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


@pytest.mark.parametrize(
    ("draft", "kind"), [({}, "lm"), (EAGLE, "eagle"), (EAGLE3, "eagle3")], ids=str
)
@pytest.mark.parametrize("drafter", ["auto", "hybrid"])
def test_the_kind_is_recorded_beside_the_flags(drafter, draft, kind, model, target, installed):
    config.configure(drafter=drafter, depth=2)
    validate(flags(model_path=target, speculative_draft_model_path=model("draft", **draft)))
    assert config.load() == config.FaserConfig(drafter=drafter, depth="2", model_kind=kind)
    assert installed == ["launcher"]


@pytest.mark.parametrize(
    ("drafter", "draft"), [("lm", {}), ("eagle", EAGLE), ("eagle", EAGLE3)], ids=str
)
def test_a_kind_that_was_asked_for_is_taken(drafter, draft, model, target, installed):
    config.configure(drafter=drafter)
    validate(flags(model_path=target, speculative_draft_model_path=model("draft", **draft)))
    assert installed == ["launcher"]


@pytest.mark.parametrize(
    ("drafter", "draft", "what"),
    [
        ("lm", EAGLE, "an EAGLE head"),
        ("lm", EAGLE3, "an EAGLE head"),
        ("eagle", {}, "a language model"),
    ],
    ids=str,
)
def test_another_kind_than_asked_for_is_refused(drafter, draft, what, model, target, installed):
    config.configure(drafter=drafter)
    path = model("draft", **draft)
    message = refused(validate, flags(model_path=target, speculative_draft_model_path=path))
    assert f"--faser-drafter {drafter}" in message and path in message and what in message
    assert "leave the flag out" in message
    assert installed == [] and config.load().model_kind == ""


@pytest.mark.parametrize("path", [None, ""])
def test_lookup_alone_works_without_a_draft_model(path, model, installed):
    config.configure(drafter="ngram")
    validate(flags(model_path=model("target"), speculative_draft_model_path=path))
    assert config.load() == config.FaserConfig(drafter="ngram", model_kind="none")
    assert installed == ["launcher"]


def test_lookup_alone_refuses_a_draft_model(installed):
    config.configure(drafter="ngram")
    message = refused(validate, flags(model_path="m", speculative_draft_model_path="draft"))
    assert "--faser-drafter ngram" in message and "--speculative-draft-model-path" in message
    assert "--faser-drafter hybrid" in message and installed == []


@pytest.mark.parametrize("drafter", ["auto", "lm", "eagle", "hybrid"])
def test_every_other_drafter_needs_a_draft_model(drafter):
    message = refused(check_draft, flags(), drafter)
    assert "--speculative-draft-model-path" in message and "--faser-drafter ngram" in message


# -- the draft's window -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "device", "named"),
    [
        ("eagle3", "cuda", None),
        ("eagle3", "cpu", None),
        ("lm", "cpu", None),
        ("lm", "cuda", "a language model on a GPU"),
        ("eagle", "cpu", "EAGLE heads"),
        ("eagle", "cuda:1", "EAGLE heads"),
        ("none", "cpu", "lookup, which has no draft KV"),
    ],
)
def test_a_draft_window_is_refused_where_nothing_would_honour_it(kind, device, named):
    check_window(flags(device=device), kind)  # without the flag there is nothing to honour
    args = flags(device=device, speculative_draft_window_size=256)
    if named is None:
        check_window(args, kind)
    else:
        message = refused(check_window, args, kind)
        assert "--speculative-draft-window-size" in message and named in message
        assert "leave it out" in message


def test_a_refused_window_leaves_the_kind_of_the_model_open(model, target, installed):
    args = flags(
        model_path=target,
        speculative_draft_model_path=model("head", **EAGLE),
        speculative_draft_window_size=256,
    )
    refused(validate, args)
    assert config.load().model_kind == "" and installed == []


# -- cost table and trace ---------------------------------------------------------------------


@pytest.fixture
def table(tmp_path):
    """Makes the file of a cost table, measured with ``origin``."""

    def make(**origin):
        CostTable(
            requests=[1], windows=[1], verify=[[1.0]], first=[0.0], step=[0.0], catch_up=0.0,
            host=[0.1], origin=origin,
        ).save(tmp_path / "cost.json")  # fmt: skip
        return str(tmp_path / "cost.json")

    return make


def with_table(path, **args):
    check_files(flags(model_path="m", **args), config.FaserConfig(cost_table=path))


def test_a_table_of_the_models_to_be_served_is_taken(table):
    models = {"model": "m", "draft_model": "d", "tp_size": 1}
    with_table(table(**models), speculative_draft_model_path="d", device="cuda")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"model": "other"}, "model other (here m)"),
        ({"draft_model": "other"}, "draft_model other (here d)"),
        ({"tp_size": 2}, "tp_size 2 (here 1)"),
        ({"device": "a 486"}, "device a 486"),
    ],
)
def test_a_table_of_something_else_is_refused_before_processes_start(said, named, table):
    here = {"model": "m", "draft_model": "d", "tp_size": 1, "device": cpu_name()}
    path = table(**{**here, **said})
    assert named in refused(with_table, path, speculative_draft_model_path="d", device="cpu")


@pytest.mark.parametrize(
    "content",
    [None, "", "{", "[]", "3", '{"requests": [1]}', '{"unknown": 1}', "\udcff"],
    ids=repr,
)
def test_a_file_that_is_no_cost_table_is_refused_in_a_sentence(content, tmp_path):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content, errors="surrogateescape")
    message = refused(with_table, str(path))
    assert f"--faser-cost-table {path} cannot be used" in message
    assert "python -m faser_sglang.profile" in message


@pytest.mark.parametrize(
    "change",
    [{"verify": [[-1.0]]}, {"requests": [2, 1]}, {"host": ["x"]}, {"origin": 3}, {"windows": 1}],
    ids=repr,
)
def test_a_cost_table_with_senseless_numbers_is_refused_in_a_sentence(change, table):
    path = table()
    content = json.loads(Path(path).read_text()) | change
    Path(path).write_text(json.dumps(content))
    assert "--faser-cost-table" in refused(with_table, path)


def test_validate_looks_at_the_table_before_it_reads_a_model(installed):
    config.configure(cost_table="nowhere.json")
    args = flags(model_path="nowhere", speculative_draft_model_path="nowhere")
    assert "--faser-cost-table nowhere.json" in refused(validate, args)
    assert installed == []


def test_a_trace_goes_to_a_file_that_can_be_written(tmp_path, monkeypatch):
    def check(trace):
        check_files(flags(), config.FaserConfig(trace=str(trace)))

    check(tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []
    for wrong, why in ((tmp_path, "it is a folder"), (tmp_path / "no" / "t", "there is no folder")):
        message = refused(check, wrong)
        assert f"--faser-trace {wrong}" in message and why in message
    monkeypatch.setattr(validation.os, "access", lambda *_: False)  # root may write anywhere
    assert "may not" in refused(check, tmp_path / "trace.jsonl")


# -- flags that others leave without effect ---------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, []),
        ({"cost_table": "t", "token_limit": 5, "stop": "on", "trim": "off", "trace": "t"}, []),
        ({"depth": 3}, []),
        ({"depth": 3, "trim": "on", "cost_table": "t"}, []),
        ({"depth": "random", "stop": "on", "trim": "on"}, []),
        ({"drafter": "ngram", "trim": "on"}, []),
        ({"depth": 3, "cost_table": "t"}, ["--faser-cost-table … with --faser-depth 3"]),
        ({"depth": "random", "trim": "on", "cost_table": "t"}, ["--faser-cost-table … random"]),
        ({"depth": 3, "trim": "on", "token_limit": 5}, ["--faser-token-limit … --faser-depth 3"]),
        ({"drafter": "ngram", "stop": "on"}, ["--faser-stop … --faser-drafter ngram"]),
        (
            {"mode": "off", "depth": 2, "cost_table": "t", "token_limit": 5, "trim": "on"},
            [
                "--faser-cost-table … --faser-mode off",
                "--faser-token-limit … --faser-mode off",
                "--faser-depth … --faser-mode off",
                "--faser-trim … --faser-mode off",
            ],
        ),
    ],
    ids=str,
)
def test_a_flag_without_effect_beside_others_is_said(values, named):
    said = without_effect(config.FaserConfig(**values), cap=8)
    assert len(said) == len(named)
    for sentence, parts in zip(said, named, strict=True):
        flag, why = parts.split(" … ")
        assert sentence.startswith(f"{flag} has no effect") and sentence.endswith(f"{why}.")


def test_nothing_has_an_effect_where_no_step_is_drafted(model, target, installed, warnings):
    config.configure(trim="on")
    draft = model("draft", num_hidden_layers=8)
    args = {"model_path": target, "speculative_draft_model_path": draft}
    validate(flags(**args, speculative_num_steps=0))
    assert warnings() == ["FASER: --faser-trim has no effect at --speculative-num-steps 0."]
