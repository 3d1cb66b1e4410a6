"""The CPU platform's forms of SGLang's small layers equal SGLang's own native ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

from faser_sglang.cpu.norm import rms_norm_forward
from faser_sglang.cpu.rope import rope_forward

# float32: another order of sums. bf16: one more rounding, of values near 1.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = (torch.float32, torch.bfloat16)


def native(layer_class, fields):
    """An object with ``forward_native`` of ``layer_class`` and the given attributes."""
    layer = SimpleNamespace(**fields)
    layer.forward_native = lambda *args: layer_class.forward_native(layer, *args)
    return layer


def make_norm(dtype, **changed):
    weight = 1 + 0.1 * torch.randn(48, generator=torch.Generator().manual_seed(1))
    fields = {
        "hidden_size": 48,
        "weight": weight.to(dtype),
        "variance_epsilon": 1e-5,
        "variance_size_override": None,
        "fp32_residual": False,
        "cast_x_before_out_mul": False,
        "override_orig_dtype": None,
    }
    return native(RMSNorm, fields | changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("has_residual", [False, True])
def test_norm_equals_the_native_one(dtype, rows, has_residual):
    norm = make_norm(dtype)
    x, residual = torch.randn(2, rows, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    arguments = (x, residual) if has_residual else (x,)
    kept = [a.clone() for a in arguments]
    ours = rms_norm_forward(norm, *arguments)
    theirs = norm.forward_native(*kept)
    for a, b in zip(*((o if has_residual else (o,)) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_norm_out_of_the_ordinary_is_left_to_sglang():
    norm = make_norm(torch.float32, variance_size_override=16)
    x = torch.randn(3, 48)
    assert torch.equal(rms_norm_forward(norm, x.clone()), norm.forward_native(x.clone()))


def make_rope(dtype, **changed):
    angles = torch.outer(torch.arange(64), 1e4 ** -(torch.arange(0, 16, 2) / 16))
    fields = {
        "is_neox_style": True,
        "rotary_dim": 16,
        "head_size": 16,
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype),
        "_apply_rotary_emb_wrapped": apply_rotary_emb,
    }
    return native(RotaryEmbedding, fields | changed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changed", [{}, {"is_neox_style": False}])
def test_rotation_equals_the_native_one(dtype, changed):
    rope = make_rope(dtype, **changed)
    generator = torch.Generator().manual_seed(3)
    positions = torch.tensor([0, 5, 5, 63])
    query = torch.randn(4, 9 * 16, generator=generator).to(dtype)
    key = torch.randn(4, 3 * 16, generator=generator).to(dtype)
    ours = rope_forward(rope, positions, query.clone(), key.clone())
    theirs = rope.forward_native(positions, query.clone(), key.clone())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
