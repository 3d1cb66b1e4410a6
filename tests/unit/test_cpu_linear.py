"""bf16 layers from fp16 copies: the same products, never a stale copy, nothing out of range."""

import pytest
import torch
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch.nn.functional import embedding

from faser_sglang.cpu.linear import (
    HalfCopy,
    NativeCopy,
    PackedLinearMethod,
    copy_for_this_cpu,
    forget_copies,
    has_bf16_arithmetic,
    use_packed_linears,
)

INPUTS = 67
EPSILON = 2.0**-24  # half a unit in the last place of a float32 at 1
HALF_STEP = 2.0**-25  # the most that fp16 loses of a bf16 value below 2**-14


def layer_of(weight, method=None):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.quant_method = method
    return layer


def random_layer(outputs=50, inputs=INPUTS, scale=0.2, seed=0, method=None):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * scale
    return layer_of(weight.to(torch.bfloat16), method)


def random_rows(rows, inputs=INPUTS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator).to(torch.bfloat16)


def half_method(keeps_float32=True, original=UnquantizedLinearMethod):
    return PackedLinearMethod(original(), HalfCopy(), keeps_float32=keeps_float32)


def assert_linear(out, layer, x, bias=None):
    """Within rounding of the exact product.

    A float32 sum of K products is off by at most K roundings of the sum of their sizes, whatever
    the order; an fp16 weight below 2**-14 by HALF_STEP, times its input; a bf16 result by 2**-8.
    """
    weight, x = layer.weight.double(), x.double()
    exact = x @ weight.T
    sizes = x.abs() @ weight.abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    slack = (x.shape[1] + 1) * EPSILON * sizes + HALF_STEP * x.abs().sum(1, keepdim=True)
    if out.dtype == torch.bfloat16:
        slack = slack + 2.0**-8 * (exact.abs() + slack)
    assert out.shape == exact.shape
    excess = ((out.double() - exact).abs() - slack).max()
    assert excess <= 0, f"off by {excess:.2e} more than rounding explains"


@pytest.mark.parametrize("outputs", [1, 50, 129])
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_result_is_the_float32_product_of_the_bf16_weights(rows, outputs):
    layer, x = random_layer(outputs), random_rows(rows)
    exact = half_method().apply(layer, x)
    assert exact.dtype == torch.float32
    assert_linear(exact, layer, x)
    rounded = half_method(keeps_float32=False).apply(layer, x)
    assert rounded.dtype == torch.bfloat16
    assert_linear(rounded, layer, x)


native = pytest.mark.skipif(not has_bf16_arithmetic(), reason="this CPU has no bf16 arithmetic")


@native
@pytest.mark.parametrize("outputs", [1, 50, 129])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_the_native_copy_gives_what_torchs_own_layer_gives(rows, outputs):
    layer, x = random_layer(outputs), random_rows(rows)
    method = PackedLinearMethod(UnquantizedLinearMethod(), NativeCopy(), keeps_float32=False)
    out = method.apply(layer, x)
    assert out.dtype == torch.bfloat16
    assert_linear(out, layer, x)


@native
def test_the_native_copy_is_renewed_when_the_weight_is_written_or_replaced():
    layer, x = random_layer(), random_rows(3)
    copy = NativeCopy()
    first = copy.multiply(layer.weight, x)
    assert first.dtype == torch.float32
    layer.weight.mul_(-2)
    assert torch.equal(copy.multiply(layer.weight, x), -2 * first)
    layer.weight.data = layer.weight.data * -1  # another tensor
    assert torch.equal(copy.multiply(layer.weight, x), 2 * first)
    layer.weight.data.mul_(0.5)  # leaves no trace
    copy.forget()
    assert torch.equal(copy.multiply(layer.weight, x), first)


def test_the_copy_is_chosen_by_what_the_cpu_can_do(monkeypatch):
    monkeypatch.setattr("faser_sglang.cpu.linear.has_bf16_arithmetic", lambda: False)
    assert copy_for_this_cpu() is HalfCopy
    monkeypatch.setattr("faser_sglang.cpu.linear.has_bf16_arithmetic", lambda: True)
    assert copy_for_this_cpu() in (NativeCopy, None)


def test_a_native_copy_holds_any_weight():
    layer = layer_of(torch.full((4, 3), 1e30, dtype=torch.bfloat16), UnquantizedLinearMethod())
    assert use_packed_linears(Model(layer=layer), NativeCopy) == 1


def test_a_row_does_not_depend_on_the_rows_beside_it():
    layer, x = random_layer(), random_rows(33)
    method = half_method()
    together = method.apply(layer, x)
    for row in (0, 6, 32):
        assert_linear(together[row : row + 1], layer, x[row : row + 1])
        assert_linear(method.apply(layer, x[row : row + 1]), layer, x[row : row + 1])


@pytest.mark.parametrize("keeps_float32", [True, False])
def test_a_bias_is_added(keeps_float32):
    layer, x = random_layer(), random_rows(7)
    bias = (torch.arange(50) - 25.0).to(torch.bfloat16)
    assert_linear(half_method(keeps_float32).apply(layer, x, bias), layer, x, bias)


def test_a_batch_of_sequences_keeps_its_shape():
    layer, x = random_layer(), random_rows(6)
    out = half_method().apply(layer, x.view(2, 3, INPUTS))
    assert out.shape == (2, 3, 50)
    assert_linear(out.view(6, 50), layer, x)


@pytest.mark.parametrize("scale", [2.0**-15, 2.0**-20, 2.0**-30])
def test_tiny_weights_are_off_by_no_more_than_their_last_half_bit(scale):
    layer, x = random_layer(scale=scale), random_rows(7)
    assert_linear(half_method().apply(layer, x), layer, x)


def test_weights_within_halfs_normal_range_are_exact():
    """Products with a one-hot row are the weights themselves."""
    weight = torch.cat([torch.tensor([65280.0, -65280.0, 2.0**-14, 0.0]), torch.randn(60)])
    layer = layer_of(weight.to(torch.bfloat16).view(64, 1))
    out = half_method().apply(layer, torch.ones(1, 1, dtype=torch.bfloat16))
    assert torch.equal(out[0], layer.weight[:, 0].float())


# -- weights that change ------------------------------------------------------------------------


def write_in_place(layer, new):
    layer.weight.copy_(new)


def replace_the_parameter(layer, new):
    layer.weight = torch.nn.Parameter(new, requires_grad=False)


def replace_the_data(layer, new):
    layer.weight.data = new


def load_as_sglang_does(layer, new):
    default_weight_loader(layer.weight, new)


def load_a_shard_as_sglang_does(layer, new):
    """What the loaders of fused layers do: a part of ``.data``, narrowed."""
    layer.weight.data.narrow(0, 0, len(new)).copy_(new)


@pytest.mark.parametrize(
    "change",
    [
        write_in_place,
        replace_the_parameter,
        replace_the_data,
        load_as_sglang_does,
        load_a_shard_as_sglang_does,
    ],
    ids=lambda change: change.__name__,
)
def test_a_changed_weight_is_used_at_once(change):
    layer, x = random_layer(), random_rows(2)
    method = half_method()
    method.apply(layer, x)
    new = random_layer(seed=9).weight.detach().clone()
    change(layer, new)
    if change in (load_as_sglang_does, load_a_shard_as_sglang_does):
        layer.quant_method = method
        forget_copies(layer)  # what hooks/weight_updates.py does after SGLang's updates
    assert torch.equal(layer.weight, new)
    assert_linear(method.apply(layer, x), layer, x)


def test_an_unchanged_weight_is_packed_once():
    layer, x = random_layer(), random_rows(2)
    method = half_method()
    first = method.apply(layer, x)
    packed = method.copy._packed
    assert torch.equal(method.apply(layer, x), first)
    assert method.copy._packed is packed


# -- which layers -------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


@pytest.mark.parametrize("large", [65536.0, -65536.0, 66048.0, float("inf"), 3e38, -3e38])
def test_weights_beyond_halfs_range_keep_their_method(large):
    original = UnquantizedLinearMethod()
    weight = torch.zeros(4, 3)
    weight[2, 1] = large
    layer = layer_of(weight.to(torch.bfloat16), original)
    assert use_packed_linears(Model(layer=layer), HalfCopy) == 0
    assert layer.quant_method is original


def test_the_largest_bf16_value_that_half_holds_is_taken():
    layer = layer_of(torch.full((4, 3), 65280.0, dtype=torch.bfloat16), UnquantizedLinearMethod())
    assert layer.weight.max() <= HalfCopy.largest
    assert use_packed_linears(Model(layer=layer), HalfCopy) == 1


def test_only_plain_bf16_matrices_are_taken():
    class Quantized(UnquantizedLinearMethod):
        pass

    kept = {
        "float32": layer_of(torch.zeros(4, 3), UnquantizedLinearMethod()),
        "float16": layer_of(torch.zeros(4, 3, dtype=torch.float16), UnquantizedLinearMethod()),
        "experts": layer_of(torch.zeros(2, 4, 3).bfloat16(), UnquantizedLinearMethod()),
        "quantized": random_layer(method=Quantized()),
        "no_method": random_layer(),
    }
    methods = {name: layer.quant_method for name, layer in kept.items()}
    linear = random_layer(method=UnquantizedLinearMethod())
    head = random_layer(method=UnquantizedEmbeddingMethod())
    assert use_packed_linears(Model(linear=linear, head=head, **kept), HalfCopy) == 2
    assert all(layer.quant_method is methods[name] for name, layer in kept.items())
    assert isinstance(linear.quant_method, PackedLinearMethod)
    assert isinstance(head.quant_method, PackedLinearMethod)


def test_a_second_call_takes_nothing_again():
    linear = random_layer(method=UnquantizedLinearMethod())
    assert use_packed_linears(Model(linear=linear), HalfCopy) == 1
    method = linear.quant_method
    assert use_packed_linears(Model(linear=linear), HalfCopy) == 0
    assert linear.quant_method is method


def test_logits_keep_float32_and_hidden_states_keep_their_type():
    linear = random_layer(method=UnquantizedLinearMethod())
    head = random_layer(method=UnquantizedEmbeddingMethod())
    use_packed_linears(Model(linear=linear, head=head), HalfCopy)
    x = random_rows(3)
    assert linear.quant_method.apply(linear, x).dtype == torch.bfloat16
    assert head.quant_method.apply(head, x).dtype == torch.float32
    assert_linear(head.quant_method.apply(head, x), head, x)


def test_embeddings_are_looked_up_in_the_original_weight():
    head = random_layer(method=UnquantizedEmbeddingMethod())
    use_packed_linears(Model(head=head), HalfCopy)
    ids = torch.tensor([[0, 49], [7, 7]])
    found = head.quant_method.embedding(head, ids)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, embedding(ids, head.weight))


def test_tied_weights_are_renewed_in_both_layers():
    head = random_layer(method=UnquantizedEmbeddingMethod())
    tied = layer_of(head.weight, UnquantizedLinearMethod())
    tied.weight = head.weight
    use_packed_linears(Model(head=head, tied=tied), HalfCopy)
    x = random_rows(2)
    for _ in range(2):
        for layer in (head, tied):
            assert_linear(layer.quant_method.apply(layer, x), layer, x)
        head.weight.mul_(-3)
