"""Random tiny Llamas, and drafters that agree with them now and then.

Weights are uniform, not normal: a uniform float32 is an integer times a power of two, so the same
seed gives the same bits on every CPU, whichever vector instructions its normal sampler would use.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import checkpoint

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TinyLlama:
    """A random Llama. Every matrix keeps the scale of its input, times the gain given for it."""

    seed: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    max_positions: int
    layer_gains: tuple[
        float, ...
    ]  # how much each layer adds to the residual stream, whose embeddings have scale 1
    attention_gain: float  # of q and k: scores have about the square of it as standard deviation
    logit_gain: float  # standard deviation of the logits, about
    tied: bool
    bos: int | None
    eos: int
    pad: int

    @property
    def layers(self) -> int:
        return len(self.layer_gains)

    def config(self) -> dict[str, Any]:
        """The contents of `config.json`."""
        return checkpoint.llama_config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            max_positions=self.max_positions,
            rope_theta=10000.0,
            rms_eps=1e-5,
            tied=self.tied,
            dtype="float32",
            bos=self.bos,
            eos=self.eos,
            pad=self.pad,
        )

    def tensors(self) -> dict[str, "torch.Tensor"]:
        """The float32 weights, bit-reproducible from the seed."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)

        def matrix(rows: int, columns: int, gain: float) -> "torch.Tensor":
            # Uniform on ±scale, so that an output has the variance gain² · mean squared input.
            scale = gain * math.sqrt(3 / columns)
            return torch.rand((rows, columns), generator=generator).mul_(2).sub_(1).mul_(scale)

        hidden, head_dim = self.hidden_size, self.hidden_size // self.heads
        ones = torch.ones(hidden)
        embedding = matrix(self.vocab_size, hidden, math.sqrt(hidden))
        tensors = {"model.embed_tokens.weight": embedding}
        for layer, gain in enumerate(self.layer_gains):
            prefix = f"model.layers.{layer}."
            shapes = {
                "self_attn.q_proj": (self.heads * head_dim, hidden, self.attention_gain),
                "self_attn.k_proj": (self.kv_heads * head_dim, hidden, self.attention_gain),
                "self_attn.v_proj": (self.kv_heads * head_dim, hidden, 1.0),
                "self_attn.o_proj": (hidden, self.heads * head_dim, gain),
                "mlp.gate_proj": (self.intermediate_size, hidden, 1.0),
                "mlp.up_proj": (self.intermediate_size, hidden, 1.0),
                # Its input, silu(gate) · up, has about half the scale of the others.
                "mlp.down_proj": (hidden, self.intermediate_size, 2 * gain),
            }
            tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{name}.weight"] = ones.clone()
        if self.tied:  # embeddings of scale 1 times normed states give scale sqrt(hidden)
            tensors["model.norm.weight"] = ones * (self.logit_gain / math.sqrt(hidden))
        else:
            tensors["model.norm.weight"] = ones.clone()
            tensors["lm_head.weight"] = matrix(self.vocab_size, hidden, self.logit_gain)
        return tensors


def first_layers(folder: Path, tiny: Path, count: int) -> None:
    """A drafter out of the first `count` layers, embeddings and head of the model in `tiny`."""
    config, tensors = checkpoint.read_model(tiny)
    checkpoint.write_model(folder, *checkpoint.keep_layers(config, tensors, list(range(count))))


def with_noise(folder: Path, tiny: Path, seed: int, amount: float) -> None:
    """A drafter out of the checkpoint in `tiny`, with uniform noise on every matrix.

    `amount` is the noise's largest size, as a fraction of the matrix's largest weight.
    """
    import torch

    config, tensors = checkpoint.read_model(tiny)
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(tensors):
        weight = tensors[name]
        if weight.dim() == 2:
            noise = torch.rand(weight.shape, generator=generator).mul_(2).sub_(1)
            tensors[name] = weight + noise.mul_(amount * weight.abs().max().item())
    checkpoint.write_model(folder, config, tensors)


def with_head(
    folder: Path,
    tiny: Path,
    *,
    seed: int,
    hot: list[int],
    layers: tuple[int, int, int],
    sharpness: float,
    hidden_gain: float,
) -> None:
    """An EAGLE3 head for the model in `tiny` that guesses as if the model had no layers.

    Its attention looks at its own position only (queries and keys are the token's embedding, times
    the root of `sharpness`) and passes that embedding on. The target's hidden states behind
    `layers` add noise of scale `hidden_gain`. Its vocabulary is `hot`.
    """
    import torch

    config, target = checkpoint.read_model(tiny)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError("this head passes a whole embedding on: it needs a KV head for each head")
    identity, zeros = torch.eye(hidden), torch.zeros
    asks = identity * math.sqrt(sharpness)

    def on_embedding(weight: "torch.Tensor") -> "torch.Tensor":
        return torch.cat([weight, torch.zeros_like(weight)], dim=1)

    noise = torch.rand((hidden, 3 * hidden), generator=torch.Generator().manual_seed(seed))
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
    ids = torch.tensor(hot)
    ones = torch.ones(hidden)
    tensors = {
        "fc.weight": noise.mul_(2).sub_(1).mul_(hidden_gain * math.sqrt(1 / hidden)),
        "midlayer.self_attn.q_proj.weight": on_embedding(asks),
        "midlayer.self_attn.k_proj.weight": on_embedding(asks),
        "midlayer.self_attn.v_proj.weight": on_embedding(identity),
        "midlayer.self_attn.o_proj.weight": identity,
        "midlayer.mlp.gate_proj.weight": zeros(inner, hidden),
        "midlayer.mlp.up_proj.weight": zeros(inner, hidden),
        "midlayer.mlp.down_proj.weight": zeros(hidden, inner),
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.hidden_norm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": head[ids].clone(),
        "d2t": ids - torch.arange(len(hot)),
    }
    checkpoint.write_model(folder, checkpoint.eagle3_config(config, len(hot), layers), tensors)


def with_first_head(folder: Path, tiny: Path, *, seed: int, hidden_gain: float) -> None:
    """A head of the first EAGLE for the model in `tiny`; it guesses as if there were no layers.

    Its layer adds nothing, so that its state is the last token's embedding, and noise of scale
    `hidden_gain` from the state before. Embedding and lm_head are the target's.
    """
    import torch

    config, _ = checkpoint.read_model(tiny)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    noise = torch.rand((hidden, hidden), generator=torch.Generator().manual_seed(seed))
    noise = noise.mul_(2).sub_(1).mul_(hidden_gain * math.sqrt(3 / hidden))
    zeros, at = torch.zeros, "layers.0."
    tensors = {
        "fc.weight": torch.cat([torch.eye(hidden), noise], dim=1),
        "fc.bias": zeros(hidden),
        f"{at}self_attn.q_proj.weight": zeros(hidden, hidden),
        f"{at}self_attn.k_proj.weight": zeros(kv, hidden),
        f"{at}self_attn.v_proj.weight": zeros(kv, hidden),
        f"{at}self_attn.o_proj.weight": zeros(hidden, hidden),
        f"{at}mlp.gate_proj.weight": zeros(inner, hidden),
        f"{at}mlp.up_proj.weight": zeros(inner, hidden),
        f"{at}mlp.down_proj.weight": zeros(hidden, inner),
        f"{at}post_attention_layernorm.weight": torch.ones(hidden),
    }
    checkpoint.write_model(folder, checkpoint.eagle_config(config), tensors)


def write_word_tokenizer(folder: Path, vocab_size: int, max_positions: int) -> None:
    """A tokenizer with the words `<|end|>`, `<|unk|>`, `t2`, `t3`, …: each `t` names its own id."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    words = ["<|end|>", "<|unk|>", *(f"t{index}" for index in range(2, vocab_size))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in words[:2]]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "unk_token": "<|unk|>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    checkpoint.write_json(folder / "tokenizer_config.json", config)
