"""The fast-weight product-key memory layer in few bits, compiled, and among numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch
from fwpkm_layers import close, layer, oracle, tokens

from regard.checks import ArgumentError, debug

# Precision and compilation --------------------------------------------------------------------------------------


def test_autocast_leaves_the_memory_in_float32():
    made, x = layer(dtype=torch.float32, spread=5.0), tokens(dtype=torch.float32)
    exact = made(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = made(x)
        out.sum().backward()
    assert out.dtype == torch.float32
    assert state.values.dense().dtype == state.keys.dtype == torch.float32
    assert not torch.equal(out, exact)
    # slots are chosen by rounded queries, so that single tokens may read others
    assert (out - exact).abs().median() < 0.05 * exact.abs().mean()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in made.parameters())


def test_bfloat16():
    made, x = layer(dtype=torch.bfloat16), tokens(dtype=torch.bfloat16)
    out, state = made(x)
    assert out.dtype == torch.bfloat16
    assert state.keys.dtype == torch.float32
    stored = layer(dtype=torch.float32, storage="bfloat16")
    _, state = stored(tokens(dtype=torch.float32))
    values = state.values.dense().float()
    moved = values[(values - stored.values.bfloat16().float()).abs().amax(-1) > 0.1]
    assert len(moved) > 10
    assert torch.equal(moved, moved.bfloat16().float())


def whole_graph(made):
    made.frozen = True
    torch._dynamo.reset()
    return torch.compile(made, fullgraph=True, backend="eager")


@pytest.mark.parametrize("masked", [False, True])
def test_the_read_path_compiles_in_one_graph(masked):
    made, x = layer(dtype=torch.float32), tokens(dtype=torch.float32)
    mask = None
    if masked:
        mask = torch.ones(2, 15, dtype=torch.bool)
        mask[0, :3] = False
    compiled = whole_graph(made)
    close(compiled(x, mask)[0], made(x, mask)[0], 1e-6)


def test_reading_a_written_memory_compiles_in_one_graph():
    made, x = layer(dtype=torch.float32), tokens(dtype=torch.float32)
    with torch.no_grad():
        _, state = made(x)
        compiled = whole_graph(made)
        out, after = compiled(x, state=state)
        close(out, made(x, state=state)[0], 1e-6)
    assert (out - made(x)[0]).abs().max() > 1e-2
    assert torch.equal(after.values.dense(), state.values.dense())


def test_compiled_writes_equal_eager_ones():
    """However many tokens wait, the same graphs serve."""
    made, x = layer(dtype=torch.float32), tokens(24, dtype=torch.float32)
    torch._dynamo.reset()
    compiled, graphs = torch.compile(made, backend="eager"), []
    state = after = None
    for at in range(0, 24, 3):
        out, state = compiled(x[:, at : at + 3].contiguous(), state=state)
        want, after = made(x[:, at : at + 3].contiguous(), state=after)
        close(out, want, 1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    close(state.values.dense(), after.values.dense(), 1e-5)
    assert graphs[-1] == graphs[2]


# What is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rule", ["normalized", "reference"])
def test_tokens_that_are_not_finite_are_in_nobodys_pair(rule, shared):
    """They keep their place in the chunk; who stands before one is bound to who stands after it."""
    made, x = layer(step_rule=rule, shared=shared), tokens(15)
    spoilt = torch.zeros(2, 15, dtype=torch.bool)
    spoilt[0, 2], spoilt[0, 8], spoilt[1, 6], spoilt[1, 7] = True, True, True, True
    x[spoilt] = math.nan
    out, keys, values = oracle(made, step_rule=rule, shared=shared).run(x, spoilt=spoilt)
    found, state = made(x)
    close(found[~spoilt], out[~spoilt])
    close(state.values.dense(), values)
    close(state.keys, keys)
    with debug(), pytest.raises(ArgumentError, match=r"nn.FastWeightProductKeyMemory: hidden holds NaN"):
        made(x)
