"""FwMLP against its definition (fwmlp_oracle.py), and what it makes of numbers, dtypes and mistakes."""

from __future__ import annotations

import pytest
import torch
from fwmlp_oracle import CHUNK, DIN, DV, MASK, RATE, B, C, F, T, close, layer, network, numbers, stream, tokens, weights
from torch import Tensor
from torch.autograd import grad, gradcheck

from regard.checks import ArgumentError, debug
from regard.memory.fast_weight_mlp import SwiGLU, fast_weight_mlp
from regard.nn import FastWeightMLP
from regard.nn.memories import memory_layers

# The definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["mean", "look-ahead"])
@pytest.mark.parametrize("chunk", [2, 4, 5, 20])
def test_reads_and_writes_are_gradient_steps_on_the_loss(target, chunk):
    query, value, w = numbers(B, T, DIN), numbers(B, T, DV, seed=1), weights()
    out, state = fast_weight_mlp(query, value, w, chunk_size=chunk, learning_rate=RATE, target=target)
    for b in range(B):
        expected, after = stream(query[b], value[b], w, target, chunk)
        close(out[b], expected)
        for name, x in zip(("gate", "up", "down"), after, strict=True):
            close(getattr(state, name)[b], x)
    assert state.writes == ((T - 1) // chunk,) * B
    assert chunk > T or (out - network(query, w)).abs().max() > 1e-2  # the writes could be seen


def test_gradients_reach_all_inputs_through_the_writes():
    w = weights()
    leaves = [x.requires_grad_() for x in (numbers(1, T, DIN), numbers(1, T, DV, seed=1), *w)]
    probe = numbers(1, T, DV, seed=9)
    out, _ = fast_weight_mlp(
        leaves[0], leaves[1], (leaves[2], leaves[3], leaves[4]), chunk_size=CHUNK, learning_rate=RATE
    )
    expected, _ = stream(leaves[0][0], leaves[1][0], (leaves[2], leaves[3], leaves[4]))
    for a, b in zip(grad((out * probe).sum(), leaves), grad((expected[None] * probe).sum(), leaves), strict=True):
        close(a, b, 1e-10)


@pytest.mark.parametrize("meta_grad", [True, 2])
def test_derivatives_by_finite_differences_through_three_chunks(meta_grad):
    def read(query: Tensor, value: Tensor, *w: Tensor) -> Tensor:
        return fast_weight_mlp(query, value, (w[0], w[1], w[2]), chunk_size=2, learning_rate=RATE, meta_grad=meta_grad)[
            0
        ][:, -1 if meta_grad is True else slice(0, 4)]

    inputs = [x.requires_grad_() for x in (numbers(2, 7, DIN), numbers(2, 7, DV, seed=1), *weights())]
    assert gradcheck(read, inputs, atol=1e-7)


def test_closed_form_gradients_with_a_rate_for_every_token_and_matrix():
    w = [x.requires_grad_() for x in weights()]
    x, error, rates = numbers(5, DIN), numbers(5, DV, seed=1), numbers(3, 5, 1, seed=2).abs()
    found = SwiGLU(*w).gradients(x, error, SwiGLU(*rates))
    for i, part in enumerate(found):
        expected = sum(rates[i, t] * grad((network(x[t], (w[0], w[1], w[2])) * error[t]).sum(), w)[i] for t in range(5))
        close(part, expected)


def test_a_write_lowers_the_loss_of_its_pairs():
    query, value, w = numbers(1, 5, DIN), numbers(1, 5, DV, seed=1), weights()
    _, state = fast_weight_mlp(query, value, w, chunk_size=4, learning_rate=0.05)
    wanted = (value[0, :4] + value[0, 1:]) / 2
    after = (state.gate[0], state.up[0], state.down[0])
    losses = [((network(query[0, :4], x) - wanted) ** 2).mean() for x in (w, after)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize("value_norm", [True, False])
@pytest.mark.parametrize("gating", [True, False])
def test_layer_is_the_projections_around_the_memory(value_norm, gating):
    made, hidden = layer(value_norm=value_norm, gating=gating), tokens()
    p = dict(made.named_parameters())

    def projected(name: str) -> Tensor:
        gain = p[f"projections.{name}_norm.weight"]
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        return normed @ p[f"projections.{name}_proj.weight"].T + p[f"projections.{name}_proj.bias"]

    value = projected("v")
    if value_norm:
        centred = value - value.mean(-1, keepdim=True)
        value = centred / ((centred.square().sum(-1, keepdim=True) / (DV - 1)).sqrt() + 1e-6)
    read = torch.stack(
        [stream(q, v, (made.gate, made.up, made.down))[0] for q, v in zip(projected("q"), value, strict=True)]
    )
    mixed = read + value
    if gating:
        gate = torch.sigmoid(projected("gate").mean(-1, keepdim=True))
        mixed = gate * read + (1 - gate) * value
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["projections.out_norm.weight"]
    expected = normed @ p["projections.out_proj.weight"].T + p["projections.out_proj.bias"]
    close(made(hidden)[0], expected, 1e-10)


def test_sizes_of_the_paper():
    made = FastWeightMLP(768)
    assert made.fast_numbers() == 2 * 2304 * 513 + 512 * 2305 == 3_544_064
    assert sum(x.numel() for x in made.parameters()) == 1_190_408
    assert made.chunk_size == 512
    assert made.rule == (0.1, "mean")
    learned = FastWeightMLP(8, in_dim=4, hidden_dim=4, value_dim=4, learn_initial=True)
    assert learned.fast_numbers() == 0
    assert isinstance(learned.down, torch.nn.Parameter)
    assert memory_layers.get("fwmlp") is FastWeightMLP


# Whatever comes -------------------------------------------------------------------------------------------------


def test_a_token_that_is_not_finite_is_neither_learned_nor_learned_from():
    made, hidden = layer(chunk_size=5), tokens(9, rows=1)
    spoilt = hidden.clone()
    spoilt[0, 2, 1] = torch.nan
    leaf = spoilt.requires_grad_()
    out, state = made(leaf)
    assert out[0, 2].isnan().all()
    others = [t for t in range(9) if t != 2]
    assert out[0, others].isfinite().all()
    assert grad(out[0, others].sum(), leaf)[0][0, others].isfinite().all()
    made.chunk_size = 4  # without the token the first chunk has one token less
    expected, clean = made(hidden[:, [0, 1, 3, 4, 5, 6, 7, 8]])
    close(out[0, [0, 1, 3, 4]], expected[0, :4])
    close(out[0, 5:], expected[0, 4:])
    close(state.down, clean.down)
    with debug(), pytest.raises(ArgumentError, match="NaN"):
        made(leaf)


def test_numbers_beyond_all_bounds_count_as_not_finite():
    made, hidden = layer().float(), tokens().float()
    hidden[1, 3] = 1e30
    out, state = made(hidden)
    assert out[1, 3].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert state.gate.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_is_wide_whatever_the_layer_is(dtype):
    made, hidden = layer().to(dtype), tokens().to(dtype)
    out, state = made(hidden)
    assert out.dtype == dtype
    assert state.gate.dtype == torch.float32
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


def test_autocast_does_not_reach_the_memory():
    made, hidden = layer().float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = made(hidden)
    assert state.gate.dtype == torch.float32
    assert out.dtype == torch.float32
    assert out.isfinite().all()


def test_hooks_see_gates_and_readings_and_may_replace_them():
    made, hidden = layer(), tokens()
    seen = {}
    made.hook_gate.register_forward_hook(lambda module, inputs, out: seen.setdefault("gate", out))
    handle = made.hook_read.register_forward_hook(lambda module, inputs, out: seen.setdefault("read", out))
    out, _ = made(hidden)
    assert seen["gate"].shape == (B, T)
    assert seen["read"].shape == (B, T, DV)
    handle.remove()
    made.hook_read.register_forward_hook(lambda module, inputs, out: out + 1)
    assert (made(hidden)[0] - out).abs().max() > 1e-3


MISTAKES = {
    "chunk_size is 0": lambda: layer(chunk_size=0),
    "chunk_size is 1": lambda: layer(chunk_size=1),
    "chunk_size is 2.5": lambda: layer(chunk_size=2.5),
    "hidden_dim is 0": lambda: layer(hidden_dim=0),
    "in_dim is -1": lambda: layer(in_dim=-1),
    "learning_rate is -1": lambda: layer(learning_rate=-1.0),
    "unknown target='meen'. Did you mean 'mean'": lambda: layer(target="meen"),
    "meta_grad is 0": lambda: layer(meta_grad=0),
    "shared is 1": lambda: layer(shared=1),
    "value_dim >= 2": lambda: layer(value_dim=1),
    "hidden has shape": lambda: layer()(torch.zeros(2, 3, C + 1, dtype=torch.float64)),
    "T >= 1": lambda: layer()(torch.zeros(2, 0, C, dtype=torch.float64)),
    "mask has shape": lambda: layer()(tokens(), MASK[:, :3]),
    "expected torch.bool": lambda: layer()(tokens(), MASK.long()),
    "segment_ids has shape": lambda: layer()(tokens(), segment_ids=torch.zeros(B, 3, dtype=torch.long)),
    "segment_ids is a torch.float32 tensor": lambda: layer()(tokens(), segment_ids=torch.zeros(B, T)),
    "segment_ids need a memory per document": lambda: layer(shared=True)(tokens(), segment_ids=MASK.long()),
    "state is a str": lambda: layer()(tokens(), state="x"),
    "state is of 2 rows": lambda: layer()(tokens(), state=layer()(tokens(rows=2))[1]),
    "state holds gate [3, 5, 5]": lambda: layer()(tokens(), state=layer(hidden_dim=5)(tokens())[1]),
    "state has shared=True": lambda: layer()(tokens(), state=layer(shared=True)(tokens())[1]),
    "state is torch.float32": lambda: layer()(tokens(), state=layer().float()(tokens().float())[1]),
    "weights gate are [6, 4]": lambda: fast_weight_mlp(
        numbers(1, 2, DIN), numbers(1, 2, DV), (numbers(F, DIN), numbers(F, DIN), numbers(DV, F))
    ),
    "value has shape [1, 3, 3]": lambda: fast_weight_mlp(numbers(1, 2, DIN), numbers(1, 3, DV), weights()),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    with pytest.raises(ArgumentError) as error:
        MISTAKES[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
