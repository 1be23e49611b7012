"""FwMLP against its definition (fwmlp_oracle.py), shared networks, dtypes and errors.

What every memory keeps is tested in `tests/memory/test_streams.py` (the function) and `tests/contracts` (the layer)."""

import pytest
import torch
from fwmlp_oracle import (
    CHUNK,
    DIN,
    DV,
    MASK,
    RATE,
    B,
    F,
    T,
    close,
    layer,
    network,
    numbers,
    stream,
    taught,
    tokens,
    weights,
)  # fmt: skip
from fwpkm_layers import mixed, projected
from mistakes import error_of
from torch.autograd import grad

from regard.checks import ArgumentError, debug
from regard.memory.fast_weight_mlp import SwiGLU, fast_weight_mlp, flush
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
    close(grad((out * probe).sum(), leaves), grad((expected[None] * probe).sum(), leaves), 1e-10)


def test_closed_form_gradients_with_a_rate_for_every_token_and_matrix():
    w = [x.requires_grad_() for x in weights()]
    x, error, rates = numbers(5, DIN), numbers(5, DV, seed=1), numbers(3, 5, 1, seed=2).abs()
    found = SwiGLU(*w).gradients(x, error, SwiGLU(*rates))
    for i, part in enumerate(found):
        expected = sum(rates[i, t] * grad((network(x[t], (w[0], w[1], w[2])) * error[t]).sum(), w)[i] for t in range(5))
        close(part, expected)


@pytest.mark.parametrize("value_norm", [True, False])
@pytest.mark.parametrize("gating", [True, False])
def test_layer_is_the_projections_around_the_memory(value_norm, gating):
    made, hidden = layer(value_norm=value_norm, gating=gating), tokens()
    p, net = dict(made.named_parameters()), (made.gate, made.up, made.down)
    query, value, gate = projected(p, hidden, value_norm, gating)
    read = torch.stack([stream(q, v, net)[0] for q, v in zip(query, value, strict=True)])
    close(made(hidden)[0], mixed(p, read, value, gate), 1e-10)


def test_sizes_of_the_paper():
    made = FastWeightMLP(768)
    assert made.fast_numbers() == 2 * 2304 * 513 + 512 * 2305 == 3_544_064
    assert sum(x.numel() for x in made.parameters()) == 1_190_408
    assert made.chunk_size == 512
    assert (made.settings.learning_rate, made.settings.target) == (0.1, "mean")
    learned = FastWeightMLP(8, in_dim=4, hidden_dim=4, value_dim=4, learn_initial=True)
    assert learned.fast_numbers() == 0
    learned(torch.randn(1, 9, 8))[0].sum().backward()
    assert all(learned.get_parameter(name).grad is not None for name in ("gate", "up", "down"))
    assert memory_layers.get("fwmlp") is FastWeightMLP


# Streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [[T], [3, 4, 7]], ids=["once", "pieces"])
def test_a_shared_network_learns_from_all_rows_at_once(parts):
    query, value, w = numbers(B, T, DIN), numbers(B, T, DV, seed=1), weights()
    now, out = None, []
    for q, v in zip(query.split(parts, 1), value.split(parts, 1), strict=True):
        options = {"chunk_size": CHUNK, "learning_rate": RATE, "shared": True}
        part, now = fast_weight_mlp(q, v, w, state=now, **options)
        out.append(part)
    net = w
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        close(torch.cat(out, 1)[:, start:stop], network(query[:, start:stop], net))
        if start + CHUNK < T:
            rows = [[(query[b, t], value[b, t]) for t in range(start, stop + 1)] for b in range(B)]
            net = taught(net, rows, "mean")
    close(now.down[0], net[2])
    assert now.down.shape[0] == 1


def test_shared_network_and_padding():
    query, value, w = numbers(2, 6, DIN), numbers(2, 6, DV, seed=1), weights()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2], mask[1, 5:], mask[:, 3] = False, False, False
    options = {"chunk_size": 4, "learning_rate": RATE, "shared": True}
    out, state = fast_weight_mlp(query.masked_fill(~mask[..., None], torch.nan), value, w, mask=mask, **options)
    columns = [0, 1, 2, 4, 5]  # the clock of the batch does not count column 3
    rows = [[(query[b, t], value[b, t]) for t in columns if mask[b, t]] for b in range(2)]
    net = taught(w, rows, "mean")
    close(state.down[0], net[2])
    close(out[0, 5], network(query[0, 5], net))
    assert (out[~mask] == 0).all()


def test_flush_writes_the_pairs_that_are_there():
    query, value, w = numbers(1, 7, DIN), numbers(1, 7, DV, seed=1), weights()
    _, state = fast_weight_mlp(query, value, w, chunk_size=4, learning_rate=RATE)
    after = flush(state, learning_rate=RATE)
    rows = list(zip(query[0], value[0], strict=True))
    expected = taught(taught(w, [rows[:5]], "mean"), [rows[4:]], "mean")
    close(after.up[0], expected[1])
    assert after.waits == (0,)
    assert flush(after) is after


# Whatever comes -------------------------------------------------------------------------------------------------


def test_a_token_that_is_not_finite_is_neither_learned_nor_learned_from():
    made, hidden = layer(chunk_size=5), tokens(9, rows=1)
    spoilt = hidden.clone()
    spoilt[0, 2, 1] = torch.nan
    out, state = made(spoilt)
    made.chunk_size = 4  # without the token the first chunk has one token less
    expected, clean = made(hidden[:, [0, 1, 3, 4, 5, 6, 7, 8]])
    close(out[0, [0, 1, 3, 4]], expected[0, :4])
    close(out[0, 5:], expected[0, 4:])
    close(state.down, clean.down)
    with debug(), pytest.raises(ArgumentError, match="NaN"):
        made(spoilt)


def test_numbers_beyond_all_bounds_count_as_not_finite():
    made, hidden = layer().float(), tokens().float()
    hidden[1, 3] = 1e30
    out, state = made(hidden)
    assert out[1, 3].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert state.gate.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_is_float32_whatever_the_layer_is(dtype):
    made, hidden = layer().to(dtype), tokens().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        out, state = made(hidden)
    assert out.dtype == dtype
    assert state.gate.dtype == torch.float32
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


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
    "chunk_size is 1": lambda: layer(chunk_size=1),
    "unknown target='meen'. Did you mean 'mean'": lambda: layer(target="meen"),
    "value_dim >= 2": lambda: layer(value_dim=1),
    "segment_ids need a memory per document": lambda: layer(shared=True)(tokens(), segment_ids=MASK.long()),
    "state is of 2 rows": lambda: layer()(tokens(), state=layer()(tokens(rows=2))[1]),
    "state holds gate [3, 5, 5]": lambda: layer()(tokens(), state=layer(hidden_dim=5)(tokens())[1]),
    "state has shared=True": lambda: layer()(tokens(), state=layer(shared=True)(tokens())[1]),
    "state is torch.float32": lambda: layer()(tokens(), state=layer().float()(tokens().float())[1]),
    "weights gate are [6, 4]": lambda: fast_weight_mlp(
        numbers(1, 2, DIN), numbers(1, 2, DV), (numbers(F, DIN), numbers(F, DIN), numbers(DV, F))
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    assert message in error_of(MISTAKES[message])
