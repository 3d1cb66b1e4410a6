"""Read and write Llama checkpoints in the Hugging Face layout.

The JSON files are written here rather than by transformers, so that a recipe gives the same bytes
whatever version of transformers is installed, and without the seconds its import takes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WEIGHTS = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def llama_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    max_positions: int,
    rope_theta: float,
    rms_eps: float,
    tied: bool,
    dtype: str,
    bos: int | None,
    eos: int,
    pad: int,
) -> dict[str, Any]:
    """The contents of `config.json` for a LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": max_positions,
        "rope_theta": rope_theta,  # transformers 4 reads this one,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope_theta,
        },  # transformers 5 this one
        "rms_norm_eps": rms_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }


def eagle_config(target: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `config.json` for a one-layer head of the first EAGLE for a Llama."""
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def eagle3_config(
    target: Mapping[str, Any], draft_vocab_size: int, layers: tuple[int, int, int]
) -> dict[str, Any]:
    """The contents of `config.json` for a one-layer EAGLE3 head of the Llama `target`.

    It reads what comes out of three of the target's `layers`.
    """
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab_size,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(layers),
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"]
) -> None:
    """Write weights, `config.json` and `generation_config.json` (greedy) into `folder`."""
    from safetensors.torch import save_file

    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    write_json(folder / "config.json", config)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(
        folder / "generation_config.json", {key: config[key] for key in ids} | {"do_sample": False}
    )


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, "torch.Tensor"]]:
    """Config and weights of a checkpoint that `write_model` wrote."""
    from safetensors.torch import load_file

    return json.loads((folder / "config.json").read_text(encoding="utf-8")), load_file(
        folder / WEIGHTS
    )


def keep_layers(
    config: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"], kept: list[int]
) -> tuple[dict[str, Any], dict[str, "torch.Tensor"]]:
    """A shallower model: the decoder layers `kept`, renumbered, and all that is no layer."""
    renumbered = {str(old): str(new) for new, old in enumerate(kept)}
    result = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if parts[2] not in renumbered:
                continue
            parts[2] = renumbered[parts[2]]
        result[".".join(parts)] = tensor
    return {**config, "num_hidden_layers": len(kept)}, result
