"""The table of flags: nothing speculative is missing, and every row does what it says."""

import logging
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sglang.srt.arg_groups.fields.spec import Spec
from sglang.srt.server_args import ServerArgs

from faser_sglang import config
from faser_sglang import flags as table
from faser_sglang.flags import FLAGS, IGNORED, REFUSED, WORKS
from faser_sglang.models import KINDS, refuse_model
from tests.support.arguments import flags, refused

DOCS = Path(__file__).parents[2] / "docs" / "flags.md"
FIELDS = {field.name: field for field in msgspec.structs.fields(ServerArgs)}
# Values for rows whose field tells none: strings of a choice, and two that would be harmless.
VALUES = {
    "disaggregation_mode": "prefill",
    "decoupled_spec_role": "drafter",
    "kv_cache_dtype": "fp8_e4m3",
    "lora_paths": ["adapter"],
    "quantization": "fp8",
    "cuda_graph_bs_decode": [1, 2],
    "cuda_graph_backend_prefill": "disabled",
    "speculative_attention_mode": "decode",
    "attention_backend": "fa3",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "fa3",
    "speculative_eagle_topk": 2,
    "SGLANG_RAGGED_VERIFY_MODE": "compact",
    "SGLANG_SIMULATE_ACC_LEN": "2",
    "SGLANG_RUST_SERVER": "1",
    "speculative_num_draft_tokens": config.DEFAULT_DEPTH_CAP + 1,
    "speculative_num_steps": 3,
}
# What must hold besides for a row that applies in part of the cases only.
CONDITIONS = {
    "on the CPU platform": {"device": "cpu"},
    "with `--faser-drafter ngram`": {"drafter": "ngram"},
    "with an EAGLE3 head": {"model_kind": "eagle3"},
}


def rows(verdict):
    chosen = [flag for flag in FLAGS if flag.verdict == verdict]
    return pytest.mark.parametrize("flag", chosen, ids=lambda flag: f"{flag.flag} {flag.when}")


def value_of(flag):
    """A value other than SGLang's default."""
    if flag.name in VALUES:
        return VALUES[flag.name]
    default = FIELDS[flag.name].default
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "given"


@pytest.fixture
def given(monkeypatch):
    """Makes otherwise plain arguments with a row's flag set, and what its condition asks for."""

    def make(flag):
        monkeypatch.setenv(config.CARRIER, "")
        condition = dict(CONDITIONS.get(flag.when, {}))
        if "drafter" in condition:
            config.configure(drafter=condition.pop("drafter"))
        if "model_kind" in condition:
            config.resolve_model_kind(condition.pop("model_kind"))
        if flag.is_variable:
            monkeypatch.setenv(flag.name, value_of(flag))
            return flags(device="cuda")
        value = value_of(flag)
        if flag.when.startswith("where it verifies"):
            value = "triton"
            if flag.name == "decode_attention_backend":
                condition["speculative_attention_mode"] = "decode"
        return flags(**{"device": "cuda", flag.name: value} | condition)

    return make


def warnings_of(caplog, args):
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger=table.logger.name):
        table.warn(args)
    return [record.getMessage() for record in caplog.records if record.name == table.logger.name]


# -- what the table holds -------------------------------------------------------------------------


def test_no_speculative_flag_of_sglang_is_missing():
    speculative = {name for name in FIELDS if name.lstrip("_").startswith("speculative_")}
    assert speculative | set(Spec.__struct_fields__) <= {flag.name for flag in FLAGS}


def test_every_row_names_a_flag_that_sglang_has():
    from sglang.srt.environ import envs

    for flag in FLAGS:
        assert hasattr(envs, flag.name) if flag.is_variable else flag.name in FIELDS, flag.name


def test_a_flag_with_two_rows_says_when_each_counts():
    names = [flag.name for flag in FLAGS]
    for name in {name for name in names if names.count(name) > 1}:
        cases = [(flag.when, flag.verdict) for flag in FLAGS if flag.name == name]
        assert len(set(cases)) == len(cases)
        assert len([when for when, _ in cases if not when]) <= 1


# -- what the rows do -----------------------------------------------------------------------------


@rows(REFUSED)
def test_a_refused_flag_is_named_with_the_reason_and_the_way_out(flag, given):
    message = refused(table.refuse, given(flag))
    assert flag.flag in message and flag.note in message and message.endswith(f"; {flag.way_out}.")


@rows(IGNORED)
def test_an_ignored_flag_warns_once_and_is_not_refused(flag, given, caplog):
    args = given(flag)
    table.refuse(args)
    (message,) = warnings_of(caplog, args)
    assert flag.flag in message and flag.note in message


@rows(WORKS)
def test_a_flag_that_works_passes_without_a_word(flag, given, caplog):
    args = given(flag)
    table.refuse(args)
    assert warnings_of(caplog, args) == []


def test_sglangs_defaults_pass_without_a_word(caplog):
    for device in ("cpu", "cuda"):
        table.refuse(flags(device=device))
        assert warnings_of(caplog, flags(device=device)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_lora", False),  # a default of None, switched off
        ("lora_paths", []),
        ("speculative_moe_a2a_backend", "none"),
        ("speculative_eagle_topk", 1),
        ("cuda_graph_backend_decode", "disabled"),
        ("attention_backend", "faser_cpu"),
    ],
)
def test_a_flag_that_is_given_for_what_faser_does_anyway_passes(name, value, caplog):
    args = flags(**{name: value})
    table.refuse(args)
    assert warnings_of(caplog, args) == []


@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_a_threshold_of_zero_counts_as_one_that_was_given(threshold):
    refused(table.refuse, flags(speculative_accept_threshold_acc=threshold))


def test_only_the_backend_that_verifies_must_take_ragged_windows():
    mixed = {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"}
    table.refuse(flags(**mixed, attention_backend="triton"))
    message = refused(table.refuse, flags(**mixed, speculative_attention_mode="decode"))
    assert message.startswith("--decode-attention-backend triton")
    message = refused(
        table.refuse, flags(attention_backend="triton", decode_attention_backend="fa3")
    )
    assert message.startswith("--attention-backend triton")


def test_quantisation_that_the_draft_takes_over_is_refused_by_the_targets_flag():
    """SGLang copies the target's value before the checks run."""
    both = {"quantization": "fp8", "speculative_draft_model_quantization": "fp8"}
    message = refused(table.refuse, flags(device="cpu", **both))
    assert message.startswith("--quantization fp8")


# -- kinds of models ------------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
GEMMA3 = LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 8,
    "num_key_value_heads": 1,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN3_NEXT = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_key_value_heads": 1,
}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 1,
}
QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
}
REWARD = LLAMA | {"architectures": ["LlamaForSequenceClassification"]}


@pytest.fixture
def folder(tmp_path):
    def make(content):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(content))
        return str(tmp_path)

    return make


@pytest.mark.parametrize(
    "content", [LLAMA, QWEN2, QWEN2 | {"sliding_window": 32, "use_sliding_window": False}]
)
def test_models_like_llama_are_served(content, folder):
    refuse_model("target", folder(content))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (GEMMA3, "sliding-window or chunked attention"),
        (QWEN3_NEXT, "Mamba or linear attention"),
        (DEEPSEEK, "MLA"),
        (QWEN2_VL, "multimodal"),
        (REWARD, "embedding or reward model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_other_kinds_of_models_are_refused(role, content, name, folder):
    path = folder(content)
    message = refused(refuse_model, role, path)
    assert f"the {role} {path}" in message and name in message
    assert "start without --speculative-algorithm FASER" in message


def test_every_kind_of_model_is_told_by_its_own_mark():
    """The kinds that SGLang marks on its record, without a checkpoint of each."""
    kinds = {kind.name: kind for kind in KINDS}
    marked = SimpleNamespace(is_encoder_decoder=True, is_multimodal=True, is_generation=False)
    plain = SimpleNamespace(is_encoder_decoder=False, is_multimodal=False, is_generation=True)
    for name in ("encoder and decoder", "multimodal", "embedding or reward model"):
        assert kinds[name].is_one(marked) and not kinds[name].is_one(plain)


# -- the document ---------------------------------------------------------------------------------


def test_the_document_is_the_table():
    assert DOCS.read_text(encoding="utf-8") == table.render(), (
        "run: python -m faser_sglang.flags > docs/flags.md"
    )


def test_the_readme_links_the_document():
    assert "(docs/flags.md)" in (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")
