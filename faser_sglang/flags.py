"""What FASER makes of SGLang's flags: one table for checks, tests and ``docs/flags.md``.

Each row says *works*, *refused* (a ValueError at start-up, with the way out) or *ignored* (one
warning). ``python -m faser_sglang.flags`` prints the table.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from faser_sglang import config

logger = logging.getLogger(__name__)

WORKS, REFUSED, IGNORED = "works", "refused", "ignored"

# Attention backends that verify windows of different lengths in one pass, without graphs.
RAGGED_BACKENDS = ("fa3", "fa4", "trtllm_mha", "faser_cpu")


@dataclass(frozen=True)
class Flag:
    """A field of ServerArgs, or a variable of the environment, and what FASER makes of it.

    ``note`` is the reason, and ``way_out`` what to do where the flag is refused. ``when`` says
    what ``is_set`` tests, beyond the value being another than SGLang's default.
    """

    name: str
    verdict: str
    note: str
    way_out: str = "start without it"
    when: str = ""
    is_set: Callable[[Any], bool] | None = None

    @property
    def flag(self) -> str:
        if self.is_variable or self.name.startswith("_"):
            return self.name
        return "--" + self.name.replace("_", "-")

    @property
    def is_variable(self) -> bool:
        return self.name.isupper()

    def applies(self, args: Any) -> bool:
        return differs(self.name)(args) if self.is_set is None else self.is_set(args)

    def message(self, args: Any) -> str:
        """One sentence: the flag with its value, the verdict, the reason and the way out."""
        value = None if self.is_variable else getattr(args, self.name)
        given = f"{self.flag} {value}" if type(value) in (int, float, str) else self.flag
        if self.verdict == REFUSED:
            return f"{given} is not served: {self.note}; {self.way_out}."
        return f"FASER: {given} has no effect: {self.note}."


@functools.cache
def _defaults() -> dict[str, Any]:
    import msgspec
    from sglang.srt.server_args import ServerArgs

    return {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}


# -- when a row applies ---------------------------------------------------------------------------


def differs(name: str) -> Callable[[Any], bool]:
    """The value is another than SGLang's default; None, False and empty are one."""

    def is_set(args: Any) -> bool:
        value, default = getattr(args, name), _defaults()[name]
        return value != default and bool(value or default)

    return is_set


def _on_cpu(name: str) -> Callable[[Any], bool]:
    return lambda args: str(args.device or "").startswith("cpu") and differs(name)(args)


def _own_on_cpu(name: str) -> Callable[[Any], bool]:
    """As ``_on_cpu``, for a draft's flag that takes over the target's ``--quantization``."""
    return lambda args: getattr(args, name) != args.quantization and _on_cpu(name)(args)


def _without_draft_model(name: str) -> Callable[[Any], bool]:
    return lambda args: config.load().drafter == "ngram" and differs(name)(args)


def _with_eagle3(name: str) -> Callable[[Any], bool]:
    return lambda args: config.load().model_kind == "eagle3" and differs(name)(args)


def _verifies_uniformly(name: str) -> Callable[[Any], bool]:
    """The flag decides which attention backend verifies, and that one takes no ragged windows."""

    def is_set(args: Any) -> bool:
        own = f"{args.speculative_attention_mode}_attention_backend"
        decides = own if getattr(args, own) else "attention_backend"
        return decides == name and getattr(args, name) not in (None, *RAGGED_BACKENDS)

    return is_set


def _is_graphed(args: Any) -> bool:
    return args.cuda_graph_backend_decode not in (None, "disabled")


def _variable(name: str) -> Callable[[Any], bool]:
    def is_set(_args: Any) -> bool:
        from sglang.srt.environ import envs

        variable = getattr(envs, name)
        return variable.get() != variable.default

    return is_set


# -- the table ------------------------------------------------------------------------------------


def _rows(names: str, verdict: str, note: str, *, when: str = "", is_set=None) -> list[Flag]:
    """Rows of one note; ``is_set`` makes the test out of a name."""
    return [
        Flag(name, verdict, note, when=when, is_set=is_set and is_set(name))
        for name in names.split()
    ]


_UNTRIED = "FASER has not been tried with it"
_OTHER = "it belongs to SGLang's own "
_TESTED = "tested on the CPU platform"
_UNTOUCHED = "not touched by FASER"
_GPU = "untested on a GPU"
_NO_GRAPHS = "FASER verifies without graphs for now"
_RAGGED = "it does not verify windows of different lengths"
_RAGGED_WAY_OUT = "use fa3, fa4 or trtllm_mha on a GPU, and no such flag on the CPU platform"
_CPU = "on the CPU platform"
_OWN_TYPE = "the CPU platform runs the model's own type"
_MIGRATES = "FASER cannot tell whether KV that was moved is still the draft's"

SECTIONS: dict[str, list[Flag]] = {
    "Drafting and verification": [
        Flag("speculative_algorithm", WORKS, "`FASER`"),
        Flag(
            "speculative_num_steps",
            WORKS,
            f"0 or more, the largest depth, 8 by default; refused below 0; {_TESTED}",
        ),
        Flag(
            "speculative_num_draft_tokens",
            WORKS,
            "one more than `--speculative-num-steps`, or left out; refused otherwise",
        ),
        Flag(
            "speculative_eagle_topk",
            REFUSED,
            "FASER drafts chains",
            "use 1",
            "other than 1",
            lambda args: args.speculative_eagle_topk not in (None, 1),
        ),
        Flag(
            "speculative_use_rejection_sampling",
            REFUSED,
            "FASER samples from the target and accepts drafts that agree, which is lossless too",
        ),
        Flag(
            "speculative_use_block_verification",
            REFUSED,
            "FASER accepts drafts one by one",
        ),
        *_rows(
            "speculative_accept_threshold_single speculative_accept_threshold_acc",
            REFUSED,
            "FASER is lossless and has no thresholds",
            when="other than 1",
        ),
        Flag(
            "speculative_adaptive",
            REFUSED,
            "FASER chooses the depth of each request itself",
            "use --faser-depth",
        ),
        Flag(
            "speculative_adaptive_config",
            IGNORED,
            "it is for `--speculative-adaptive`; `--faser-depth` takes its place",
        ),
        Flag("speculative_attention_mode", WORKS, f"which backend verifies; {_GPU}"),
        *[
            Flag(
                name,
                REFUSED,
                _RAGGED,
                _RAGGED_WAY_OUT,
                f"where it verifies, other than {', '.join(RAGGED_BACKENDS)}",
                _verifies_uniformly(name),
            )
            for name in (
                "attention_backend",
                "prefill_attention_backend",
                "decode_attention_backend",
            )
        ],
        *_rows(
            "attention_backend prefill_attention_backend decode_attention_backend",
            WORKS,
            f"`faser_cpu` is {_TESTED}, the others are {_GPU}",
            when=", ".join(RAGGED_BACKENDS),
        ),
        Flag(
            "SGLANG_RAGGED_VERIFY_MODE",
            IGNORED,
            "FASER's verification is always ragged",
            is_set=_variable("SGLANG_RAGGED_VERIFY_MODE"),
        ),
        Flag(
            "SGLANG_SIMULATE_ACC_LEN",
            IGNORED,
            "FASER accepts what the target says",
            is_set=_variable("SGLANG_SIMULATE_ACC_LEN"),
        ),
    ],
    "The draft model": [
        Flag("speculative_draft_model_path", WORKS, f"needed, but for lookup alone; {_TESTED}"),
        Flag(
            "speculative_draft_model_revision",
            WORKS,
            "for the checks at start-up, and for SGLang's loader",
        ),
        Flag("_speculative_draft_quantization_explicitly_set", WORKS, "SGLang's own note, no flag"),
        Flag("speculative_boundary_reduction", WORKS, "SGLang's own note, no flag"),
        Flag("speculative_draft_load_format", WORKS, f"{_UNTOUCHED}: SGLang loads the draft"),
        Flag(
            "speculative_draft_window_size",
            WORKS,
            "a language model on the CPU platform, and EAGLE3 heads; refused for all others; "
            f"{_TESTED}",
        ),
        Flag("speculative_draft_sink_size", WORKS, "a language model on the CPU platform"),
        Flag(
            "speculative_draft_sink_size",
            IGNORED,
            "SGLang's EAGLE3 heads see no first tokens beside a window",
            when="with an EAGLE3 head",
            is_set=_with_eagle3("speculative_draft_sink_size"),
        ),
        Flag("speculative_draft_attention_backend", WORKS, _GPU),
        Flag("speculative_draft_model_quantization", WORKS, _GPU, when="on a GPU"),
        Flag("speculative_draft_kv_cache_dtype", WORKS, _GPU, when="on a GPU"),
        Flag("speculative_moe_runner_backend", WORKS, _GPU),
        *_rows(
            "speculative_draft_load_format speculative_draft_attention_backend "
            "speculative_draft_kv_cache_dtype",
            IGNORED,
            "lookup has no draft model",
            when="with `--faser-drafter ngram`",
            is_set=_without_draft_model,
        ),
        *_rows(
            "speculative_draft_model_quantization speculative_draft_kv_cache_dtype",
            REFUSED,
            _OWN_TYPE,
            when=_CPU,
            is_set=_own_on_cpu,
        ),
        Flag(
            "speculative_moe_a2a_backend",
            REFUSED,
            _UNTRIED,
            when="other than none",
            is_set=lambda args: args.speculative_moe_a2a_backend not in (None, "none"),
        ),
        Flag(
            "speculative_token_map",
            REFUSED,
            "FASER takes a reduced vocabulary from an EAGLE3 head's own map d2t only",
        ),
        Flag(
            "enable_multi_layer_eagle",
            REFUSED,
            "FASER drafts with one head",
        ),
    ],
    "Other algorithms": [
        *_rows(
            "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth "
            "speculative_ngram_match_type speculative_ngram_max_trie_depth "
            "speculative_ngram_capacity speculative_ngram_external_corpus_path "
            "speculative_ngram_external_sam_budget speculative_ngram_external_corpus_max_tokens",
            IGNORED,
            f"{_OTHER}NGRAM, and FASER's lookup has no such setting",
        ),
        Flag("speculative_dflash_block_size", IGNORED, f"{_OTHER}DFLASH"),
        Flag("speculative_domino_candidate_pool_size", IGNORED, f"{_OTHER}Domino"),
        *_rows(
            "speculative_dspark_block_size speculative_dspark_sps_table_path "
            "speculative_dspark_confidence_sts_path "
            "speculative_dspark_align_verify_tokens_to_graph_tier",
            IGNORED,
            f"{_OTHER}DSPARK",
        ),
        Flag("uno_lora_path", IGNORED, f"{_OTHER}UNO"),
        *_rows(
            "speculative_dsa_topk_backend speculative_enable_w4a4_mxfp4_megamoe",
            IGNORED,
            "it is for draft models of the DeepSeek family, which FASER does not serve",
        ),
        Flag("spec_trace_dir", IGNORED, f"{_OTHER}decoupled speculation"),
        Flag(
            "decoupled_spec_role",
            REFUSED,
            "FASER drafts and verifies in one server",
        ),
        Flag("dllm_algorithm", REFUSED, "a diffusion model has no next token to draft"),
    ],
    "Parallelism": [
        Flag("tp_size", WORKS, f"{_TESTED} with 2 ranks; {_GPU}"),
        Flag("pp_size", REFUSED, _UNTRIED, when="above 1"),
        Flag("dp_size", REFUSED, _UNTRIED, "start a server for each replica", "above 1"),
        *_rows(
            "dwdp_size attn_dp_size attn_cp_size dcp_size moe_dp_size ep_size nnodes",
            REFUSED,
            _UNTRIED,
            when="above 1",
        ),
        *_rows("enable_dp_attention enable_prefill_cp enable_kv_cache_sharding", REFUSED, _UNTRIED),
        *_rows("enable_eplb elastic_ep_backend moe_a2a_backend", REFUSED, _UNTRIED),
        Flag(
            "use_ray",
            REFUSED,
            "the --faser-* flags travel in the environment, which Ray's processes need not inherit",
        ),
        Flag(
            "disaggregation_mode",
            REFUSED,
            "FASER's draft KV does not travel between servers",
        ),
        *_rows("encoder_only language_only", REFUSED, "FASER takes no images, video or audio"),
        *_rows(
            "enable_two_batch_overlap enable_single_batch_overlap",
            REFUSED,
            "FASER's ragged windows are not split for it",
        ),
        Flag("enable_pdmux", REFUSED, "FASER's passes do not share the device with prefills"),
    ],
    "Memory and caching": [
        Flag("page_size", WORKS, f"1 and 16 are {_TESTED}"),
        Flag("max_total_tokens", WORKS, _TESTED),
        *_rows("mem_fraction_static max_prefill_tokens", WORKS, _UNTOUCHED),
        Flag("disable_radix_cache", WORKS, _UNTOUCHED),
        Flag("radix_eviction_policy", WORKS, _UNTOUCHED),
        *_rows(
            "enable_hierarchical_cache enable_lmcache enable_flexkv "
            "enable_unified_cache_external_linker radix_cache_backend",
            REFUSED,
            _MIGRATES,
        ),
        *_rows(
            "enable_streaming_session enable_session_radix_cache",
            REFUSED,
            _UNTRIED,
        ),
        *_rows(
            "enable_unified_memory enable_page_major_kv_layout enable_hisparse",
            REFUSED,
            "FASER addresses KV slot by slot in SGLang's plain pools",
        ),
        Flag("prefill_only_disable_kv_cache", REFUSED, "FASER drafts behind cached tokens"),
        Flag("kv_canary", REFUSED, _UNTRIED),
        Flag("quantization", WORKS, _GPU, when="on a GPU"),
        Flag("kv_cache_dtype", WORKS, _GPU, when="on a GPU"),
        *_rows(
            "quantization kv_cache_dtype",
            REFUSED,
            _OWN_TYPE,
            when=_CPU,
            is_set=_on_cpu,
        ),
        *_rows("cpu_offload_gb offload_group_size", WORKS, _GPU),
        *_rows("enable_memory_saver enable_draft_weights_cpu_backup", WORKS, _GPU),
    ],
    "Scheduling and execution": [
        Flag("disable_overlap_schedule", WORKS, f"with it and without, {_TESTED}"),
        Flag("chunked_prefill_size", WORKS, _TESTED),
        Flag("max_running_requests", WORKS, "48 if it is not given"),
        *_rows("schedule_policy enable_priority_scheduling retraction_policy", WORKS, _UNTOUCHED),
        Flag(
            "enable_mixed_chunk",
            IGNORED,
            "FASER does not mix prefills with its rounds",
        ),
        Flag(
            "cuda_graph_backend_decode",
            IGNORED,
            _NO_GRAPHS,
            when="other than disabled",
            is_set=_is_graphed,
        ),
        *_rows(
            "cuda_graph_max_bs_decode cuda_graph_bs_decode enable_torch_compile",
            IGNORED,
            _NO_GRAPHS,
        ),
        *_rows("disable_cuda_graph disable_decode_cuda_graph", WORKS, _NO_GRAPHS),
        *_rows("cuda_graph_backend_prefill disable_prefill_cuda_graph", WORKS, _GPU),
        *_rows(
            "enable_nvidia_megakernel enable_amd_monokernel",
            REFUSED,
            "it replaces the passes that FASER drives",
        ),
        Flag(
            "enable_deterministic_inference",
            WORKS,
            f"{_GPU}; SGLang refuses it with the attention backend of the CPU platform",
        ),
        *_rows("dtype random_seed context_length", WORKS, _TESTED),
        Flag("trust_remote_code", WORKS, "for target and draft alike"),
    ],
    "What the server offers": [
        *_rows("enable_custom_logit_processor enable_return_hidden_states", WORKS, _TESTED),
        Flag("enable_lora", REFUSED, "the draft would not follow the adapters"),
        Flag("lora_paths", REFUSED, "the draft would not follow the adapters"),
        Flag("enable_watermark", REFUSED, "FASER's verification draws without it"),
        Flag(
            "enable_strict_thinking",
            REFUSED,
            "its grammars have not been tried over FASER's windows",
        ),
        *_rows(
            "enable_return_routed_experts enable_return_indexer_topk",
            REFUSED,
            "FASER does not sort out whose rows were accepted",
        ),
        Flag(
            "enable_return_aux_hidden_states",
            REFUSED,
            "SGLang switches speculation off for it",
        ),
        *_rows("is_embedding enable_mis", REFUSED, "there is nothing to draft without decoding"),
        Flag("sampling_mask_max_tokens", WORKS, "a request for sampling masks gets a 400"),
        Flag("skip_tokenizer_init", WORKS, _UNTOUCHED),
        Flag(
            "grammar_backend",
            REFUSED,
            "only xgrammar has been tried over FASER's windows",
            "use xgrammar or none",
            "other than xgrammar, none",
            lambda args: args.grammar_backend not in (None, "xgrammar", "none"),
        ),
        Flag("reasoning_parser", WORKS, _UNTOUCHED),
        Flag("tool_call_parser", WORKS, _UNTOUCHED),
        Flag(
            "tokenizer_worker_num",
            REFUSED,
            "FASER checks requests in the launching process",
            when="above 1",
        ),
        Flag("detokenizer_worker_num", WORKS, _UNTOUCHED),
        *_rows(
            "smg_grpc_mode grpc_mode",
            REFUSED,
            "FASER checks requests in SGLang's tokenizer manager, which gRPC goes around",
        ),
        Flag(
            "SGLANG_RUST_SERVER",
            REFUSED,
            "FASER checks requests in SGLang's tokenizer manager, which Rust's goes around",
            "unset it",
            is_set=_variable("SGLANG_RUST_SERVER"),
        ),
    ],
}
FLAGS: list[Flag] = [flag for rows in SECTIONS.values() for flag in rows]


def refuse(args: Any) -> None:
    """Raises ValueError for the first flag of ``args`` that is refused."""
    for flag in FLAGS:
        if flag.verdict == REFUSED and flag.applies(args):
            raise ValueError(flag.message(args))


def warn(args: Any) -> None:
    """One warning for each flag of ``args`` that has no effect; after the draft's kind is known."""
    for flag in FLAGS:
        if flag.verdict == IGNORED and flag.applies(args):
            logger.warning("%s", flag.message(args))


# -- the table as text ----------------------------------------------------------------------------

INTRODUCTION = """\
# SGLang's flags under FASER

Printed by `python -m faser_sglang.flags`, for SGLang 0.5.23. *Refused* is an error at start-up
that names the reason and the way out, *ignored* a warning. FASER has run on the CPU platform with
targets like Llama; *untested on a GPU* means that the code is written for it and has not run.
FASER does not look at flags that are not listed. `--faser-*` flags and what requests may ask for
are in the [README](../README.md)."""


def render() -> str:
    """``docs/flags.md``."""
    from faser_sglang.models import KINDS

    parts = [INTRODUCTION]
    for title, flags in SECTIONS.items():
        parts += [f"## {title}", _table("flag", (_cells(flag) for flag in flags))]
    kinds = ((f"{kind.name}", REFUSED, kind.note) for kind in KINDS)
    parts += ["## Models", _table("target, or language model as the draft", kinds)]
    return "\n\n".join(parts) + "\n"


def _cells(flag: Flag) -> tuple[str, str, str]:
    name = f"`{flag.flag}`" + (f" {flag.when}" if flag.when else "")
    if flag.verdict != REFUSED or flag.way_out == "start without it":
        return name, flag.verdict, flag.note
    return name, flag.verdict, f"{flag.note}; {flag.way_out}"


def _table(head: str, rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [(head, "verdict", "why"), ("---", "---", "---"), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(render(), end="")
