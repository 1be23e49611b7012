"""Gradients through the writes of fast-weight product-key memory: against finite differences, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.memory.fast_weights import FastWeightState, flush

IMPLS = ("reference", "auto")
CHUNK = 3


def draw(n: int, tokens: int = 11, rows: int = 1, heads: int = 1, seed: int = 0, width: int = 2) -> list[Tensor]:
    """query [rows, tokens, heads, 4], value [rows, tokens, width], gate, keys, values: leaves in float64."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((rows, tokens, heads, 4), (rows, tokens, width), (rows, tokens), (heads, 2, n, 2), (n * n, width))
    query, value, gate, keys, values = (torch.randn(s, generator=make, dtype=torch.float64) for s in shapes)
    return [x.requires_grad_() for x in (query, value, gate.sigmoid(), keys, values)]


def call(given: list[Tensor], **how: Any) -> tuple[Tensor, FastWeightState]:
    options = {"rule": regard.WriteRule(address_weight=0.3), "top_k": 3, "chunk_size": CHUNK, **how}
    return regard.fast_weight_memory(*given, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("n", "rows", "heads"), [(4, 1, 1), (4, 2, 2), (8, 2, 2), (32, 1, 1)])
def test_gradients_through_three_writes(n: int, rows: int, heads: int, impl: str) -> None:
    """Of reads and of the memory that is left, by query, value, gate, first keys and first values."""
    given = draw(n, tokens=10, rows=rows, heads=heads)

    def out(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read, state = call(list(inputs), impl=impl)
        after = flush(state, rule=regard.WriteRule(address_weight=0.3))
        return read, after.keys, after.values.dense()

    assert gradcheck(out, given, fast_mode=n > 4 or rows > 1)


@pytest.mark.parametrize("spec", ["sparsemax", "biweight"])
@pytest.mark.parametrize("key_update", ["entropy", "pooled-entropy", "mse"])
def test_gradients_under_other_weights(spec: str, key_update: str) -> None:
    rule = regard.WriteRule(address_weight=0.3, key_update=key_update)
    assert gradcheck(lambda *x: call(list(x), rule=rule, spec=spec)[0], draw(4), fast_mode=True)


def test_second_derivatives_of_the_reference() -> None:
    given = draw(3, tokens=7)
    assert gradgradcheck(lambda *x: call(list(x), impl="reference")[0], given)


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_changes_no_bit(impl: str) -> None:
    given = [x.detach().float().requires_grad_() for x in draw(5, rows=2)]
    plain, state = call(given, impl=impl)
    grads = torch.autograd.grad(plain.square().sum(), given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, after = call(given, impl=impl)
    assert torch.equal(cast, plain)
    assert torch.equal(after.keys, state.keys)
    for a, b in zip(grads, torch.autograd.grad(cast.square().sum(), given), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    given = [x.detach().to(dtype) for x in draw(5, rows=2)]
    read, state = call(given, storage=torch.float32)
    wide, _ = call([x.float() for x in given])
    assert read.dtype == dtype
    assert state.keys.dtype == torch.float32
    assert torch.equal(read, wide.to(dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_storage_rounds_what_is_written(impl: str) -> None:
    given = [x.detach().float() for x in draw(5, tokens=40, rows=2)]
    exact, _ = call(given, impl=impl)
    read, state = call(given, impl=impl, storage=torch.bfloat16)
    written = state.values.dense()
    assert torch.equal(written, written.bfloat16().to(written.dtype))
    assert read.dtype == state.keys.dtype == torch.float32
    error = float((read - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.02
