"""Derivatives against finite differences in float64, second derivatives, and torch.func."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from normalisers import HOW, function
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard.checks import ArgumentError

from . import oracle
from .cases import FAST, PAIRS, REPRESENTATIVES, SPECS, attend, close, draw, impls_of, learned, masks, named


def smooth(label: str) -> bool:
    """Straight-through means another derivative than that of the output."""
    return getattr(SPECS[label].bandwidth, "gradient", "hard") != "straight-through"


def call_of(label: str, impl: str, how: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The output by query, key, value, every learned number and the scale, on rows of one, two, some and no keys."""
    spec = SPECS[label]
    data = draw(4, 5, batch=1, heads=1, dim=2, seed=3).leaves()
    call = masks(*data.sizes)[how]
    params, scale = learned(spec, data, seed=1)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        given = dict(zip(params, rest, strict=False))
        return regard.attention(
            q, k, v, spec, impl=impl, params=given, scale=rest[-1] if scale is not None else None, **call
        )

    return run, tuple(named(data, params, scale).values())


@pytest.mark.parametrize(("label", "impl"), [(label, impl) for label, impl in PAIRS if smooth(label)])
def test_first_derivatives(label: str, impl: str) -> None:
    run, inputs = call_of(label, impl, "padding, causal" if impl == "sdpa" else "strict")
    assert gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("label", [label for label in SPECS if smooth(label)])
def test_second_derivatives(label: str) -> None:
    """gradgradcheck of the reference: entry by entry for one of each kind, along random directions for all."""
    run, inputs = call_of(label, "reference", "strict")
    entries = label in REPRESENTATIVES
    assert gradgradcheck(run, inputs, eps=1e-6, atol=1e-5, rtol=1e-4, fast_mode=not entries)


@pytest.mark.parametrize(("label", "impl"), FAST)
def test_second_derivatives_are_right_or_refused(label: str, impl: str) -> None:
    """Implementations other than the reference: an error that says so, never silently wrong."""
    run, inputs = call_of(label, impl, "padding")
    first = torch.autograd.grad(run(*inputs).square().sum(), inputs[0], create_graph=True)[0]
    with pytest.raises((ArgumentError, RuntimeError), match=r"differentiable once|is not implemented") as caught:
        torch.autograd.grad(first.square().sum(), inputs[1])
    if impl == "blocked":
        assert isinstance(caught.value, ArgumentError)
        assert "impl='reference'" in str(caught.value)


@pytest.mark.parametrize("label", [label for label in SPECS if not smooth(label)])
def test_straight_through_differentiates_softmax(label: str) -> None:
    """The weights' derivative is that of softmax over all visible keys, computed here by its formula."""
    data = draw(5, 7, batch=1, heads=1).leaves()
    if SPECS[label].degree:
        data = data.with_(q=data.q.detach(), k=data.k.detach())  # values alone: p is not a function of them
    for impl in impls_of(label):
        out = attend(SPECS[label], impl, data)
        if SPECS[label].degree:
            assert torch.autograd.grad(out.sum(), data.v)[0].isfinite().all()
            continue
        weight = torch.ones_like(out)
        dq, dk = torch.autograd.grad(out, (data.q, data.k), weight)
        z = data.q.detach() @ data.k.detach().transpose(-1, -2) * 3**-0.5
        p = z.softmax(-1)
        g = weight @ data.v.detach().transpose(-1, -2)
        dz = p * (g - (p * g).sum(-1, keepdim=True)) * 3**-0.5
        close(dq, dz @ data.k.detach(), 1e-10)
        close(dk, dz.transpose(-1, -2) @ data.q.detach(), 1e-10)


@pytest.mark.parametrize("name", HOW)
def test_torch_func(name: str) -> None:
    """vmap is the batch, jacrev, jacfwd and vmap(jacrev) are the formula, jvp is its product."""
    rows = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tangent = torch.randn(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weighting, formula = function(name, "auto"), partial(oracle.of_scores, **HOW[name])
    close(torch.func.vmap(weighting)(rows), formula(rows), 1e-12, "vmap")
    expected = torch.stack([torch.autograd.functional.jacobian(formula, row) for row in rows])
    close(torch.func.vmap(torch.func.jacrev(weighting))(rows), expected, 1e-10, "vmap of jacrev")
    for row, matrix in zip(rows, expected, strict=True):
        close(torch.func.jacrev(weighting)(row), matrix, 1e-10, "jacrev")
        close(torch.func.jacfwd(weighting)(row), matrix, 1e-10, "jacfwd")
        value, push = torch.func.jvp(weighting, (row,), (tangent,))
        close(value, formula(row), 1e-12, "jvp")
        close(push, matrix @ tangent, 1e-10, "jvp")


@pytest.mark.parametrize("name", HOW)
def test_torch_func_twice(name: str) -> None:
    row = torch.randn(7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def loss(z: Tensor) -> Tensor:
        return (function(name, "auto")(z) * torch.arange(7.0, dtype=torch.float64)).square().sum()

    found: Any = torch.func.jacrev(torch.func.jacrev(loss))(row)
    close(found, torch.autograd.functional.hessian(loss, row), 1e-10)
