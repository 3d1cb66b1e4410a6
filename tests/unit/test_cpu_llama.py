"""The direct stacks against Llama's and EAGLE3's layers written out, in float64."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch.nn.functional import embedding, silu

from faser_sglang.cpu import llama
from faser_sglang.cpu.linear import HalfCopy, PackedLinearMethod, forget_copies

HIDDEN, INNER, WORDS, CONTEXT = 24, 40, 19, 64
HEADS, KV_HEADS, DIM = 3, 1, 8
EPSILON = 1e-5
LAYERS = 3
# Three float32 layers of sums of 40 products near 1, against float64: a few 1e-6.
FLOAT32 = 2e-5


def matrix(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


class Attention:
    """Mixes q, k and v of each row so that any error shows; keeps what it was given."""

    def forward(self, q, k, v, forward_batch):
        forward_batch.seen.append((q, k, v))
        return mixed(q, k, v)


def mixed(q, k, v):
    share = HEADS // KV_HEADS
    k, v = (x.reshape(-1, KV_HEADS, DIM).repeat_interleave(share, 1) for x in (k, v))
    return (torch.tanh(q.reshape(-1, HEADS, DIM) + 2 * k) * v).flatten(1)


def module(**parts):
    made = torch.nn.Module()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def proj(rows, columns, seed, method):
    weight = matrix(rows, columns, seed)
    if method is PackedLinearMethod:
        weight = weight.to(torch.bfloat16)
        method = PackedLinearMethod(UnquantizedLinearMethod(), HalfCopy(), keeps_float32=False)
    else:
        method = method()
    weight = torch.nn.Parameter(weight, requires_grad=False)
    return module(weight=weight, quant_method=method, bias=None)


def make_norm(seed):
    weight = 1 + 0.2 * matrix(1, HIDDEN, seed)[0]
    return module(weight=torch.nn.Parameter(weight, False), variance_epsilon=EPSILON)


def make_rotary():
    angles = torch.outer(torch.arange(CONTEXT), 1e4 ** -(torch.arange(0, DIM, 2) / DIM))
    return module(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=-1))


def make_layer(seed, method, width=HIDDEN):
    qkv = (HEADS + 2 * KV_HEADS) * DIM
    attention = module(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        rotary_emb=make_rotary(),
        qkv_proj=proj(qkv, width, seed + 1, method),
        o_proj=proj(HIDDEN, HEADS * DIM, seed + 2, method),
        attn=Attention(),
    )
    mlp = module(
        gate_up_proj=proj(2 * INNER, HIDDEN, seed + 3, method),
        down_proj=proj(HIDDEN, INNER, seed + 4, method),
    )
    return module(
        self_attn=attention,
        mlp=mlp,
        input_layernorm=make_norm(seed + 5),
        post_attention_layernorm=make_norm(seed + 6),
        hidden_norm=make_norm(seed + 7),
    )


def make_model(method, layers, width=HIDDEN, **more):
    table = matrix(WORDS, HIDDEN, 3) * HIDDEN**0.5
    if method is PackedLinearMethod:
        table = table.to(torch.bfloat16)
    model = module(
        embed_tokens=lambda ids: embedding(ids, table),
        layers=torch.nn.ModuleList(make_layer(100 * i, method, width) for i in range(layers)),
        norm=make_norm(8),
        layers_to_capture=[],
        **more,
    )
    model.forward = lambda *args: ("original", *args)
    return model


# -- the same, written out ------------------------------------------------------------------------


def normed(x, layer):
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * layer.weight.double()


def turned(x, positions, heads):
    """Rotates pairs (i, i + half) of each head, one row at a time."""
    x, half = x.view(-1, heads, DIM), DIM // 2
    out = torch.zeros_like(x)
    for row, position in enumerate(positions.tolist()):
        angle = position * 1e4 ** -(torch.arange(0, DIM, 2).double() / DIM)
        first, second = x[row, :, :half], x[row, :, half:]
        out[row, :, :half] = first * angle.cos() - second * angle.sin()
        out[row, :, half:] = second * angle.cos() + first * angle.sin()
    return out.flatten(1)


def times(x, part):
    return x @ part.weight.double().T


def block(stream, inputs, layer, positions):
    q, k, v = times(inputs, layer.self_attn.qkv_proj).split(
        [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1
    )
    attended = mixed(turned(q, positions, HEADS), turned(k, positions, KV_HEADS), v)
    stream = stream + times(attended, layer.self_attn.o_proj)
    gate, up = times(normed(stream, layer.post_attention_layernorm), layer.mlp.gate_up_proj).chunk(
        2, dim=-1
    )
    return stream + times(silu(gate) * up, layer.mlp.down_proj)


def written_out(model, embeds, positions):
    """States behind the norm, and the stream in front of every layer."""
    stream, inputs = embeds.double(), []
    for layer in model.layers:
        inputs.append(stream)
        stream = block(stream, normed(stream, layer.input_layernorm), layer, positions)
    return normed(stream, model.norm), inputs


def assert_close(found, exact, tolerance=FLOAT32):
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)


IDS = torch.tensor([3, 18, 0, 3, 7])
POSITIONS = torch.tensor([0, 1, 2, 40, 63])


def a_pass(**spec):
    return SimpleNamespace(seen=[], spec_info=SimpleNamespace(**spec))


# -- Llama ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
def test_the_direct_stack_is_llama(rows):
    model = make_model(UnquantizedLinearMethod, LAYERS)
    ids, positions = IDS[-rows:], POSITIONS[-rows:]
    found = llama.DirectLlama(model).forward(ids, positions, a_pass())
    assert_close(found, written_out(model, model.embed_tokens(ids), positions)[0])


def test_given_embeddings_take_the_place_of_the_tokens():
    model = make_model(UnquantizedLinearMethod, LAYERS)
    embeds = matrix(5, HIDDEN, 77)
    found = llama.DirectLlama(model).forward(IDS, POSITIONS, a_pass(), embeds)
    assert_close(found, written_out(model, embeds, POSITIONS)[0])


@pytest.mark.parametrize("captured", [[0], [1], [0, 2], [0, 1, 2]])
def test_captured_layers_give_what_they_were_given(captured):
    """Copies: what a layer adds later must not show in them."""
    model = make_model(UnquantizedLinearMethod, LAYERS)
    direct = llama.DirectLlama(model)
    model.layers_to_capture = captured  # SGLang sets it after loading
    out, states = direct.forward(IDS, POSITIONS, a_pass())
    exact, inputs = written_out(model, model.embed_tokens(IDS), POSITIONS)
    assert_close(out, exact)
    assert len(states) == len(captured)
    for state, layer in zip(states, captured, strict=True):
        assert_close(state, inputs[layer])


def test_half_copies_give_bf16_states_and_the_same_numbers():
    model = make_model(PackedLinearMethod, LAYERS)
    forward_batch = a_pass()
    found = llama.DirectLlama(model).forward(IDS, POSITIONS, forward_batch)
    assert found.dtype == torch.bfloat16
    assert all(x.dtype == torch.bfloat16 for seen in forward_batch.seen for x in seen)
    # bf16 rounds q, k, v and the result, each by 2**-9 of values up to 4.
    assert_close(found, written_out(model, model.embed_tokens(IDS), POSITIONS)[0], 4e-2)


def test_attention_gets_each_head_in_its_place():
    model = make_model(UnquantizedLinearMethod, 1)
    forward_batch = a_pass()
    llama.DirectLlama(model).forward(IDS, POSITIONS, forward_batch)
    ((q, k, v),) = forward_batch.seen
    assert (q.shape, k.shape, v.shape) == ((5, HEADS, DIM), (5, KV_HEADS, DIM), (5, KV_HEADS, DIM))


# -- EAGLE3 ---------------------------------------------------------------------------------------


def make_head(method=UnquantizedLinearMethod, **more):
    fc = torch.nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
    weight = matrix(HIDDEN, 3 * HIDDEN, 50)
    fc.weight = torch.nn.Parameter(
        weight.to(torch.bfloat16) if method is PackedLinearMethod else weight, False
    )
    return make_model(method, 1, 2 * HIDDEN, fc=fc, **({"norm_output": False} | more))


def head_written_out(model, states, positions=POSITIONS):
    """States for the lm_head, and for the next step before the norm."""
    (layer,) = model.layers
    stream = states.double()
    if stream.shape[-1] != HIDDEN:
        stream = times(stream, model.fc)
    embeds = model.embed_tokens(IDS).double()
    inputs = torch.cat(
        [normed(embeds, layer.input_layernorm), normed(stream, layer.hidden_norm)], dim=-1
    )
    stream = block(stream, inputs, layer, positions)
    return normed(stream, model.norm), stream


@pytest.mark.parametrize("width", [3 * HIDDEN, HIDDEN], ids=["the target's", "its own"])
def test_the_direct_head_is_eagle3(width):
    """Three layers of the target go through fc; the head's own state of a step does not."""
    model = make_head()
    states = matrix(5, width, 60) * 5
    out, (state,) = llama.DirectEagle3(model).forward(IDS, POSITIONS, a_pass(hidden_states=states))
    exact, exact_state = head_written_out(model, states)
    assert_close(out, exact)
    assert_close(state, exact_state)


def test_a_head_may_hand_on_the_normed_state():
    model = make_head(norm_output=True)
    states = matrix(5, 3 * HIDDEN, 60)
    out, (state,) = llama.DirectEagle3(model).forward(IDS, POSITIONS, a_pass(hidden_states=states))
    assert state is out


def test_a_head_of_half_copies_follows_its_fc_when_it_is_written():
    model = make_head(PackedLinearMethod)
    direct = llama.DirectEagle3(model)
    states = matrix(5, 3 * HIDDEN, 60).to(torch.bfloat16)
    for scale in (1.0, -3.0):
        model.fc.weight.data.mul_(scale)  # as a weight update does; it leaves no trace
        forget_copies(model)
        out, (state,) = direct.forward(IDS, POSITIONS, a_pass(hidden_states=states))
        assert out.dtype == state.dtype == torch.bfloat16
        exact, exact_state = head_written_out(model, states)
        assert_close(out, exact, 4e-2)
        assert_close(state, exact_state, 4e-2)


# -- what goes to SGLang's own forward ------------------------------------------------------------


@pytest.mark.parametrize("made", [llama.DirectLlama, llama.DirectEagle3])
def test_an_empty_pass_is_left_to_sglang(made):
    model = make_head() if made is llama.DirectEagle3 else make_model(UnquantizedLinearMethod, 2)
    forward_batch = a_pass()
    none = torch.empty(0, dtype=torch.int64)
    found = made(model).forward(none, none, forward_batch)
    assert found == ("original", none, none, forward_batch, None, None)


@pytest.mark.parametrize("made", [llama.DirectLlama, llama.DirectEagle3])
def test_a_stack_that_somebody_watches_is_left_to_sglang(made):
    model = make_head() if made is llama.DirectEagle3 else make_model(UnquantizedLinearMethod, 2)
    direct = made(model)
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    assert direct.forward(IDS, POSITIONS, a_pass())[0] == "original"
    handle.remove()
    states = matrix(5, 3 * HIDDEN, 60)
    assert direct.forward(IDS, POSITIONS, a_pass(hidden_states=states))[0] != "original"


def test_pipelines_and_a_heads_embeddings_are_left_to_sglang():
    plain, head = make_model(UnquantizedLinearMethod, 2), make_head()
    proxy, embeds = object(), matrix(5, HIDDEN, 1)
    found = llama.DirectLlama(plain).forward(IDS, POSITIONS, a_pass(), None, proxy)
    assert found[0] == "original" and found[-1] is proxy
    found = llama.DirectEagle3(head).forward(IDS, POSITIONS, a_pass(), embeds)
    assert found[0] == "original" and found[-2] is embeds


# -- which models ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "lora"), [((1, 1), False), ((2, 1), False), ((1, 2), False), ((1, 1), True)]
)
def test_a_model_that_is_no_plain_llama_keeps_its_forward(parallel, lora, monkeypatch):
    ranks = SimpleNamespace(tp_size=parallel[0], pp_size=parallel[1])
    monkeypatch.setattr(llama, "get_parallel", lambda: ranks)
    monkeypatch.setattr(llama, "get_server_args", lambda: SimpleNamespace(enable_lora=lora))
    inner = make_model(UnquantizedLinearMethod, 1)
    forward = inner.forward
    assert llama.use_direct_stack(module(model=inner)) is False
    assert inner.forward is forward
