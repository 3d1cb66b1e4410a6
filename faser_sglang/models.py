"""Kinds of models that FASER does not serve, by SGLang's own reading of their configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelKind:
    """``is_one`` takes SGLang's ModelConfig; ``note`` is the reason."""

    name: str
    note: str
    is_one: Callable[[Any], bool]


def _has_state(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch == AttentionArch.SSM or mambaish_config(model) is not None


def _has_window(model: Any) -> bool:
    from sglang.srt.configs.model_config import is_hybrid_swa_model

    text = model.hf_text_config
    layers = getattr(text, "layer_types", None) or ()
    is_hybrid = is_hybrid_swa_model(model.hf_config.architectures, text)
    return is_hybrid or any(kind in WINDOWED for kind in layers)


def _is_mla(model: Any) -> bool:
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch == AttentionArch.MLA


KINDS = (
    ModelKind(
        "Mamba or linear attention", "a rejected draft cannot be taken out of its state", _has_state
    ),
    ModelKind(
        "sliding-window or chunked attention",
        "FASER has not been tried with KV that layers forget",
        _has_window,
    ),
    ModelKind("MLA", "FASER has not been tried with its KV pools and kernels", _is_mla),
    ModelKind(
        "encoder and decoder",
        "FASER does not carry an encoder's output along",
        lambda model: model.is_encoder_decoder,
    ),
    ModelKind(
        "multimodal",
        "FASER packs plain text positions",
        lambda model: model.is_multimodal,
    ),
    ModelKind(
        "embedding or reward model",
        "there is nothing to draft without decoding",
        lambda model: not model.is_generation,
    ),
)


def refuse_model(
    role: str, path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Raises ValueError if the model at ``path`` is of a kind that FASER does not serve."""
    from sglang.srt.configs.model_config import ModelConfig

    model = ModelConfig(path, revision=revision, trust_remote_code=trust_remote_code)
    for kind in KINDS:
        if kind.is_one(model):
            raise ValueError(
                f"the {role} {path} is not served ({kind.name}): {kind.note}; give another model, "
                "or start without --speculative-algorithm FASER."
            )
