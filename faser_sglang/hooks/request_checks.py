"""Refuses, with a 400, what a request may ask for and FASER does not serve yet.

Also token ids that the target does not have, of which one would end the scheduler for everybody.

SGLang: ``TokenizerManager._create_tokenized_object(obj, ...)`` returns the tokenized request;
a ValueError raised there reaches the client as a 400. Ours runs after it.
"""

from __future__ import annotations

from typing import Any

from faser_sglang import config
from faser_sglang.compat import HookType, is_faser_process
from faser_sglang.hooks import Hook
from faser_sglang.request_params import max_depth

_MODULE = "sglang.srt.managers.tokenizer_manager"


def unsupported(request: Any) -> list[str]:
    """Names of the fields of a tokenized generate request that FASER cannot serve yet."""
    params = request.sampling_params
    asked = {
        "return_hidden_states with an EAGLE head": (
            bool(request.return_hidden_states) and config.load().is_head
        ),
        "return_sampling_mask": bool(request.return_sampling_mask),
        "return_routed_experts": bool(request.return_routed_experts),
        "return_indexer_topk": bool(request.return_indexer_topk),
        "lora_path": request.lora_id is not None,
        "input_embeds": request.input_embeds is not None,
        "embed_overrides": request.positional_embed_overrides is not None,
        "image, video or audio input": request.mm_inputs is not None,
        "watermark": getattr(params, "watermark", None) is not None,
        "beam search": (getattr(params, "beam_width", None) or 1) > 1,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def check_ids(request: Any, vocab_size: int) -> None:
    """Raises ValueError for ids outside the vocabulary, and for more top logprobs than it has."""
    for name in ("input_ids", "token_ids_logprob"):
        ids = getattr(request, name)
        if ids is not None and len(ids) and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{name} holds {wrong}; the model's ids are 0 to {vocab_size - 1}.")
    if not 0 <= (request.top_logprobs_num or 0) <= vocab_size:
        raise ValueError(
            f"top_logprobs_num is {request.top_logprobs_num}; it takes 0 to {vocab_size}, the "
            "model's vocabulary."
        )


def _check(tokenized: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    if not hasattr(tokenized, "custom_logit_processor") or not is_faser_process():
        return  # an embedding request, or another algorithm
    max_depth(tokenized.sampling_params.custom_params, get_spec().speculative_num_steps)
    check_ids(tokenized, manager.model_config.vocab_size)
    names = unsupported(tokenized)
    if names:
        raise ValueError(
            f"FASER does not serve {', '.join(names)} yet; send the request without, or start "
            "the server without --speculative-algorithm FASER."
        )


HOOK = Hook(
    f"{_MODULE}.TokenizerManager._create_tokenized_object",
    _MODULE,
    _check,
    HookType.AFTER,
    ("launcher",),
)
