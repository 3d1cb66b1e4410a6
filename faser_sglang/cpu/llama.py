"""Llama's decoder stack, and that of an EAGLE3 head, with the Python taken out.

A small model's pass on a CPU is some hundred torch calls of ten microseconds each, and the layers
around them (residual boundaries, parallel linears, fused-op dispatch) take as long again. These
stacks call the same weights, rotary table and attention backend directly, and carry the residual
in float32, so nothing is rounded between two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.models import llama, llama_eagle3
from sglang.srt.runtime_context import get_parallel, get_server_args
from torch.nn.functional import linear, rms_norm, silu

from faser_sglang.cpu.linear import PackedLinearMethod

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Linear = Callable[[torch.Tensor], torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]


class Block:
    """Attention and MLP of one decoder layer; takes and returns float32 [rows, hidden]."""

    def __init__(self, layer: torch.nn.Module) -> None:
        attention = layer.self_attn
        self.attn = attention.attn
        self.q_heads, self.kv_heads = attention.num_heads, attention.num_kv_heads
        self.dim = attention.head_dim
        self.post_norm = layer.post_attention_layernorm
        self._qkv = _linear(attention.qkv_proj)
        self._o = _linear(attention.o_proj)
        self._gate_up = _linear(layer.mlp.gate_up_proj)
        self._down = _linear(layer.mlp.down_proj)

    def run(
        self,
        stream: torch.Tensor,
        normed: torch.Tensor,
        angles: Angles,
        forward_batch: ForwardBatch,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The stream behind the layer; ``normed`` is what its attention reads."""
        stream = stream + self._o(self._attend(normed, angles, forward_batch, dtype))
        gate, up = self._gate_up(norm(stream, self.post_norm)).chunk(2, dim=-1)
        return stream + self._down(silu(gate).mul_(up))

    def _attend(
        self,
        normed: torch.Tensor,
        angles: Angles,
        forward_batch: ForwardBatch,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        turning = self.q_heads + self.kv_heads
        qkv = self._qkv(normed).view(-1, turning + self.kv_heads, self.dim)
        first, second = qkv[:, :turning].chunk(2, dim=-1)
        cos, sin = angles
        turned = torch.addcmul(qkv[:, :turning] * cos, torch.cat([second, first], dim=-1), sin)
        turned = turned.to(dtype)
        attended = self.attn.forward(
            turned[:, : self.q_heads],
            turned[:, self.q_heads :],
            qkv[:, turning:].to(dtype),
            forward_batch,
        )
        return attended.float()


class DirectLlama:
    """Stands in for ``LlamaModel.forward``; anything but a plain pass goes to the original."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.original = model.forward
        self.blocks = [Block(layer) for layer in model.layers]
        self.norms = [layer.input_layernorm for layer in model.layers]
        self.rotary = model.layers[0].self_attn.rotary_emb

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, AuxHiddenStateList]:
        """``LlamaModel.forward``: [rows, hidden], and the captured layers' inputs if any."""
        if _is_watched(self.model) or pp_proxy_tensors is not None or input_ids.numel() == 0:
            return self.original(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        embeds = self.model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        dtype = embeds.dtype
        stream = embeds.float()
        angles = _angles(self.rotary, positions)
        captured = AuxHiddenStateList()
        for i, (block, input_norm) in enumerate(zip(self.blocks, self.norms, strict=True)):
            if i in self.model.layers_to_capture:
                captured.append(stream.to(dtype, copy=True))
            stream = block.run(stream, norm(stream, input_norm), angles, forward_batch, dtype)
        out = norm(stream, self.model.norm).to(dtype)
        return (out, captured) if captured else out


class DirectEagle3:
    """Stands in for the forward of an EAGLE3 head's ``LlamaModel`` of one layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.original = model.forward
        self.layer = model.layers[0]
        self.block = Block(self.layer)
        self.rotary = self.layer.self_attn.rotary_emb
        self._fc = self._packed_fc() if _is_packed(self.layer) else self._plain_fc

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As the original: states for the lm_head and for the next step, [rows, hidden] each."""
        if _is_watched(self.model) or input_embeds is not None or input_ids.numel() == 0:
            return self.original(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        embeds = self.model.embed_tokens(input_ids)
        dtype = embeds.dtype
        states = forward_batch.spec_info.hidden_states
        if states.shape[-1] != embeds.shape[-1]:
            stream = self._fc(states.float())
        else:
            stream = states.float()
        normed = torch.cat(
            [
                norm(embeds.float(), self.layer.input_layernorm),
                norm(stream, self.layer.hidden_norm),
            ],
            dim=-1,
        )
        angles = _angles(self.rotary, positions)
        stream = self.block.run(stream, normed, angles, forward_batch, dtype)
        out = norm(stream, self.model.norm).to(dtype)
        return out, [out if self.model.norm_output else stream.to(dtype)]

    def _packed_fc(self) -> Linear:
        fc = self.model.fc
        fc.packed_copy = type(self.layer.self_attn.qkv_proj.quant_method.copy)()
        return lambda x: fc.packed_copy.multiply(fc.weight, x)

    def _plain_fc(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.model.fc.weight
        return linear(x.to(weight.dtype), weight).float()


def norm(x: torch.Tensor, layer: RMSNorm) -> torch.Tensor:
    """RMSNorm of float32 [rows, hidden], in float32."""
    return rms_norm(x, (x.shape[-1],), layer.weight.float(), layer.variance_epsilon)


def _angles(rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
    """Cosines and signed sines [rows, 1, dim] of each row's rotation, once a pass."""
    table = rotary.cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def _linear(layer: torch.nn.Module) -> Linear:
    method = layer.quant_method
    if isinstance(method, PackedLinearMethod):
        return lambda x: method.copy.multiply(layer.weight, x)
    return lambda x: linear(x.to(layer.weight.dtype), layer.weight).float()


def _is_watched(model: torch.nn.Module) -> bool:
    """Somebody wants to see what passes between the layers."""
    return bool(model.layers[0]._forward_hooks)


def _is_packed(layer: torch.nn.Module) -> bool:
    return isinstance(layer.self_attn.qkv_proj.quant_method, PackedLinearMethod)


def use_direct_stack(model: torch.nn.Module) -> bool:
    """Let ``model`` run through a direct stack; False if it is no plain Llama or EAGLE3 head.

    Plain: SGLang's own classes, one rank, no bias, no quantisation, no LoRA, rotary over whole
    heads; a head of one layer without norms in front of its fc.
    """
    parallel = get_parallel()
    if parallel.tp_size > 1 or parallel.pp_size > 1 or get_server_args().enable_lora:
        return False
    inner = getattr(model, "model", None)
    stack: DirectLlama | DirectEagle3
    if type(model) is llama.LlamaForCausalLM and type(inner) is llama.LlamaModel:
        if not all(_is_plain(layer, llama.LlamaDecoderLayer) for layer in inner.layers):
            return False
        stack = DirectLlama(inner)
    elif type(model) is llama_eagle3.LlamaForCausalLMEagle3:
        is_simple = (
            len(inner.layers) == 1
            and inner.input_norm is None
            and inner.fc_norm is None
            and inner.fc.bias is None
            and not inner.is_mrope_enabled
        )
        if not is_simple or not _is_plain(inner.layers[0], llama_eagle3.LlamaDecoderLayer):
            return False
        stack = DirectEagle3(inner)
    else:
        return False
    inner.forward = stack.forward
    return True


def _is_plain(layer: torch.nn.Module, expected: type) -> bool:
    if type(layer) is not expected:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    rotary = attention.rotary_emb
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(
            type(proj.quant_method) in (PackedLinearMethod, UnquantizedLinearMethod)
            and proj.bias is None
            for proj in linears
        )
        and all(type(each) is RMSNorm for each in norms)
        and type(rotary) is RotaryEmbedding
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
    )
