"""Llama's decoder stack with the Python taken out.

A small model's pass on a CPU is some hundred torch calls of ten microseconds each, and the layers
around them (residual boundaries, parallel linears, fused-op dispatch) take as long again. This
stack calls the same weights, rotary table and attention backend directly, and carries the residual
in float32, so nothing is rounded between two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch.nn.functional import linear, rms_norm, silu

from faser_sglang.cpu.linear import HalfLinearMethod

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Layer:
    """One decoder layer: its linears take and return float32 [rows, ·]."""

    module: LlamaDecoderLayer
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear


class DirectLlama:
    """Stands in for ``LlamaModel.forward``; anything but a plain pass goes to the original."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.original = model.forward
        self.layers = [
            Layer(
                module=layer,
                qkv=_linear(layer.self_attn.qkv_proj),
                o=_linear(layer.self_attn.o_proj),
                gate_up=_linear(layer.mlp.gate_up_proj),
                down=_linear(layer.mlp.down_proj),
            )
            for layer in model.layers
        ]
        first = model.layers[0].self_attn
        self.rotary = first.rotary_emb
        self.dim = first.head_dim
        self.q_heads, self.kv_heads = first.num_heads, first.num_kv_heads

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, AuxHiddenStateList]:
        """``LlamaModel.forward``: [rows, hidden], and the captured layers' inputs if any."""
        is_watched = self.layers[0].module._forward_hooks or pp_proxy_tensors is not None
        if is_watched or input_ids.numel() == 0:
            return self.original(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        embeds = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        dtype = embeds.dtype
        stream = embeds.float()
        angles = self._angles(positions)
        captured = AuxHiddenStateList()
        for i, layer in enumerate(self.layers):
            if i in self.model.layers_to_capture:
                captured.append(stream.to(dtype, copy=True))
            normed = _norm(stream, layer.module.input_layernorm)
            attended = self._attend(layer, normed, angles, forward_batch, dtype)
            stream = stream + layer.o(attended)
            gate_up = layer.gate_up(_norm(stream, layer.module.post_attention_layernorm))
            gate, up = gate_up.chunk(2, dim=-1)
            stream = stream + layer.down(silu(gate).mul_(up))
        out = _norm(stream, self.model.norm).to(dtype)
        return (out, captured) if captured else out

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [rows, 1, dim] of each row's rotation, once a pass."""
        table = self.rotary.cos_sin_cache.index_select(0, positions.flatten()).float()
        cos, sin = table.view(-1, 1, self.dim).chunk(2, dim=-1)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _attend(
        self,
        layer: Layer,
        normed: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        forward_batch: ForwardBatch,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        qkv = layer.qkv(normed).view(-1, self.q_heads + 2 * self.kv_heads, self.dim)
        rotating = qkv[:, : self.q_heads + self.kv_heads]
        first, second = rotating.chunk(2, dim=-1)
        cos, sin = angles
        rotated = torch.addcmul(rotating * cos, torch.cat([second, first], dim=-1), sin).to(dtype)
        attn = layer.module.self_attn.attn
        attended = attn.forward(
            rotated[:, : self.q_heads],
            rotated[:, self.q_heads :],
            qkv[:, self.q_heads + self.kv_heads :].to(dtype),
            forward_batch,
        )
        return attended.float()


def _norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), norm.weight.float(), norm.variance_epsilon)


def _linear(layer: torch.nn.Module) -> Linear:
    method = layer.quant_method
    if isinstance(method, HalfLinearMethod):
        return lambda x: method.multiply(layer.weight, x)
    return lambda x: linear(x.to(layer.weight.dtype), layer.weight).float()


def use_direct_stack(model: torch.nn.Module) -> bool:
    """Let ``model`` run through a DirectLlama; False if it is not a plain Llama.

    Plain: Llama's own classes, one rank, no bias, no quantisation, no LoRA, rotary over whole
    heads.
    """
    if type(model) is not LlamaForCausalLM or type(model.model) is not LlamaModel:
        return False
    parallel = get_parallel()
    if parallel.tp_size > 1 or parallel.pp_size > 1 or get_server_args().enable_lora:
        return False
    if not all(_is_plain(layer) for layer in model.model.layers):
        return False
    model.model.forward = DirectLlama(model.model).forward
    return True


def _is_plain(layer: torch.nn.Module) -> bool:
    if type(layer) is not LlamaDecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    rotary = attention.rotary_emb
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(
            type(proj.quant_method) in (HalfLinearMethod, UnquantizedLinearMethod)
            and proj.bias is None
            for proj in linears
        )
        and all(type(norm) is RMSNorm for norm in norms)
        and type(rotary) is RotaryEmbedding
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
    )
