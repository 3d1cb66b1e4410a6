"""Turn a Llama GGUF with a byte-level BPE tokenizer into a Hugging Face checkpoint in bfloat16."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import checkpoint
from launch.cache import DemoDataError, Progress

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from tokenizers import Tokenizer

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL
SUPPORTED = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}


def convert(gguf_path: Path, folder: Path, progress: Progress) -> None:
    """Write weights, config and tokenizer of the model in `gguf_path` into `folder`.

    Raises `DemoDataError` when the file is of another architecture or tokenizer than this reads.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    for key, supported in SUPPORTED.items():
        if (found := _value(reader, key)) != supported:
            raise DemoDataError(
                f"{gguf_path.name} has {key} {found!r} where only {supported!r} can be read: "
                "use another file."
            )
    progress("reading the tokenizer")
    tokenizer = build_tokenizer(reader)
    tokenizer.save(str(folder / "tokenizer.json"))
    checkpoint.write_json(folder / "tokenizer_config.json", _tokenizer_config(reader))
    config = _config(reader)
    checkpoint.write_model(folder, config, _tensors(reader, config, progress))


def unpermute(weight: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of a q or k projection [heads · head_dim, hidden] in the order of rotate-half RoPE.

    A GGUF of a Llama holds the rows of each head interleaved, (0, d/2, 1, d/2 + 1, …), since
    llama.cpp rotates neighbours; Hugging Face and SGLang rotate row i with row i + d/2.
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)  # [heads, d/2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def build_tokenizer(reader: "GGUFReader") -> "Tokenizer":
    """The fast tokenizer that the GGUF's metadata describes.

    transformers can read it too, but (5.19) leaves out the step of the `smollm` pre-tokenizer that
    makes every digit a word of its own, so that two spaces ahead of a number become other tokens
    than in training.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    kinds = _value(reader, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _tokenizer_config(reader: "GGUFReader") -> dict[str, Any]:
    tokens = _value(reader, "tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {
        key: tokens[_value(reader, f"tokenizer.ggml.{name}_token_id")]
        for key, name in names.items()
    }
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _value(reader, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _value(reader, "tokenizer.chat_template"),
    }


def _config(reader: "GGUFReader") -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _value(reader, f"llama.{key}")

    return checkpoint.llama_config(
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        layers=llama("block_count"),
        heads=llama("attention.head_count"),
        kv_heads=llama("attention.head_count_kv"),
        max_positions=llama("context_length"),
        rope_theta=llama("rope.freq_base"),
        rms_eps=float(
            f"{llama('attention.layer_norm_rms_epsilon'):.6g}"
        ),  # stored as float32: 9.99999974e-06
        tied=all(tensor.name != "output.weight" for tensor in reader.tensors),
        dtype="bfloat16",
        bos=_value(reader, "tokenizer.ggml.bos_token_id"),
        eos=_value(reader, "tokenizer.ggml.eos_token_id"),
        pad=_value(reader, "tokenizer.ggml.padding_token_id"),
    )


def _tensors(reader: "GGUFReader", config: dict[str, Any], progress: Progress) -> dict[str, Any]:
    import torch
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for count, tensor in enumerate(reader.tensors):
        if count % 100 == 0:
            progress(f"dequantising tensor {count} of {len(reader.tensors)}")
        *block, part, _ = tensor.name.split(".")  # blk.<layer>.<part>.weight or <part>.weight
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            weight = unpermute(weight, heads[part])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{TENSOR_NAMES[part]}.weight"] = torch.tensor(weight, dtype=torch.bfloat16)
    return tensors


def _value(reader: "GGUFReader", key: str) -> Any:
    return reader.fields[key].contents()
