"""Start-up checks, before any weight is loaded: one sentence for each thing that cannot work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from faser_sglang import config
from faser_sglang.algorithm import depth_cap

logger = logging.getLogger(__name__)

EAGLE_KEYS = ("draft_vocab_size", "eagle_config")


def validate(server_args: Any) -> None:
    """SGLang's hook for a plugin's own checks; raises ValueError with the way out.

    Runs in the launching process only, before the arguments are resolved further, and applies
    FASER's hooks there.
    """
    from faser_sglang import hooks

    settings = config.load()
    refuse_flags(server_args)
    settings.check_cap(depth_cap(server_args))
    path = server_args.speculative_draft_model_path
    if not path:
        raise ValueError(
            "FASER needs --speculative-draft-model-path: a language model with the target's "
            "vocabulary."
        )
    check_fit(
        server_args.model_path,
        path,
        context_length=server_args.context_length,
        tokenizer_path=server_args.tokenizer_path,
        trust_remote_code=server_args.trust_remote_code,
    )
    hooks.install("launcher")


def refuse_flags(args: Any) -> None:
    """Raise ValueError for the first flag that FASER cannot serve (yet)."""
    steps = args.speculative_num_steps
    cap = depth_cap(args)
    if steps is not None and int(steps) < 0:
        raise ValueError(f"--speculative-num-steps is {steps}; it takes 0 or more.")
    width = args.speculative_num_draft_tokens
    if width is not None and int(width) != cap + 1:
        raise ValueError(
            f"--speculative-num-draft-tokens {width} disagrees with --speculative-num-steps "
            f"{cap}; leave it out, FASER derives it."
        )
    topk = args.speculative_eagle_topk
    if topk is not None and int(topk) != 1:
        raise ValueError(
            f"--speculative-eagle-topk {topk} is not served: FASER drafts chains; use 1."
        )
    for flag, is_set in _unserved(args).items():
        if is_set:
            raise ValueError(f"FASER does not serve {flag} yet; start without it.")


def _unserved(args: Any) -> dict[str, bool]:
    return {
        "--tp-size above 1": args.tp_size > 1,
        "--pp-size above 1": args.pp_size > 1,
        "--dp-size above 1": args.dp_size > 1,
        "--enable-dp-attention": bool(args.enable_dp_attention),
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--speculative-adaptive": bool(args.speculative_adaptive),
        "--speculative-token-map": args.speculative_token_map is not None,
        "--speculative-draft-window-size": args.speculative_draft_window_size is not None,
        "--speculative-use-rejection-sampling": bool(args.speculative_use_rejection_sampling),
        "--speculative-use-block-verification": bool(args.speculative_use_block_verification),
        "--speculative-accept-threshold-single below 1": (
            args.speculative_accept_threshold_single != 1.0
        ),
        "--speculative-accept-threshold-acc below 1": (
            args.speculative_accept_threshold_acc != 1.0
        ),
        "--enable-lora": bool(args.enable_lora),
        "--enable-two-batch-overlap": bool(args.enable_two_batch_overlap),
        "--enable-pdmux": bool(args.enable_pdmux),
        "--enable-hisparse": bool(args.enable_hisparse),
        "--enable-hierarchical-cache": bool(args.enable_hierarchical_cache),
        "--tokenizer-worker-num above 1": args.tokenizer_worker_num > 1,
        "--enable-multi-layer-eagle": bool(args.enable_multi_layer_eagle),
    }


def check_fit(
    target: str,
    draft: str,
    *,
    context_length: int | None = None,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Check that ``draft`` can draft for ``target``; raises ValueError with one sentence.

    Reads configurations and tokenizers only. A draft whose context is shorter than the
    target's is fine and said once: FASER does not draft beyond it.
    """
    from sglang.srt.configs.model_config import get_context_length
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    target_config = get_config(target, trust_remote_code=trust_remote_code)
    draft_config = get_config(draft, trust_remote_code=trust_remote_code)
    _refuse_heads(draft, draft_config)
    target_text, draft_text = get_hf_text_config(target_config), get_hf_text_config(draft_config)
    _check_vocabulary(target, draft, target_text.vocab_size, draft_text.vocab_size, tokenizer_path)
    served = context_length or get_context_length(target_text)
    own = get_context_length(draft_text)
    if own < served:
        logger.warning(
            "FASER: the draft's context is %d tokens, the target's %d; beyond %d no token is "
            "drafted (depth 0).",
            own,
            served,
            own,
        )


def _refuse_heads(draft: str, draft_config: Any) -> None:
    architectures = getattr(draft_config, "architectures", None) or []
    is_head = any("eagle" in name.lower() or "nextn" in name.lower() for name in architectures)
    if is_head or any(getattr(draft_config, key, None) for key in EAGLE_KEYS):
        raise ValueError(
            f"FASER does not serve EAGLE or NEXTN heads yet, and {draft} is one "
            f"({', '.join(architectures) or 'by its config'}); give a language model as the draft."
        )


def _check_vocabulary(
    target: str, draft: str, target_size: int, draft_size: int, tokenizer_path: str | None
) -> None:
    """Same tokens, same ids. Sizes may differ by padding rows if the tokenizers agree."""
    target_vocab = read_vocabulary(tokenizer_path or target)
    draft_vocab = read_vocabulary(draft)
    if target_vocab is not None and draft_vocab is not None:
        if target_vocab != draft_vocab:
            raise ValueError(
                f"the draft {draft} has another vocabulary than the target {target} (same text, "
                "other token ids); give a draft that shares the target's tokenizer."
            )
        if max(target_vocab.values()) < min(target_size, draft_size):
            return
    if target_size != draft_size:
        raise ValueError(
            f"the draft's vocabulary has {draft_size} tokens, the target's {target_size}; give a "
            "draft that shares the target's tokenizer."
        )


def read_vocabulary(path: str) -> dict[str, int] | None:
    """Token to id out of a local ``tokenizer.json``, added tokens included; None without one."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return None
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return {**vocabulary, **added}
