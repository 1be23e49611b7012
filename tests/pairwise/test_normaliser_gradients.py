"""First and second derivatives of every normaliser in the scores and in every parameter, by differences."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from normalisers import CALLS, IMPLS, LEARNED, REFERENCE, column
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard

# Rows whose scores lie well apart and away from every threshold used below.
SCORES = torch.tensor(
    [[0.93, -0.21, 0.55, -1.74, 0.17, 0.31], [-0.42, 1.37, 1.18, 0.61, -2.3, 0.97]], dtype=torch.float64
)
MASK = torch.tensor([[True, True, False, True, True, True], [True, False, True, True, True, True]])


NUMBERS: dict[str, Callable[..., Tensor]] = {
    **CALLS,
    **{name: call for name, call in REFERENCE.items() if "straight" not in name},
    "entmax-masked": lambda z, **how: regard.entmax(z, 1.5, mask=MASK, **how),
    "relumax-masked": lambda z, **how: regard.relumax(z, mask=MASK, **how),
    "normrelu-masked": lambda z, **how: regard.normrelu(z, 0.3, mask=MASK, **how),
    "topk_softmax-masked": lambda z, **how: regard.topk_softmax(z, 3, mask=MASK, **how),
    "topk_uniform-soft-masked": lambda z, **how: regard.topk_uniform(z, 3, mask=MASK, gradient="soft", **how),
    "entmax-dim": lambda z, **how: regard.entmax(z, 1.5, dim=0, **how),
}
del NUMBERS["topk_uniform"]  # has no gradient
ALONE = {*REFERENCE, "topk_uniform-soft-masked"}
PARAMETERS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    **LEARNED,
    "alpha-masked": (lambda z, a, **how: regard.entmax(z, a, mask=MASK, **how), column(1.5, 1.2)),
}


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, impl) for name in names for impl in (("reference",) if name in ALONE else IMPLS)]


def call_and_leaves(name: str, impl: str, scores: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The function with its implementation, and its scores and parameter as leaves."""
    z = scores.clone().requires_grad_()
    if name in PARAMETERS:
        call, value = PARAMETERS[name]
        return partial(call, impl=impl), (z, value.clone().requires_grad_())
    return partial(NUMBERS[name], impl=impl), (z,)


@pytest.mark.parametrize(("name", "impl"), pairs([*NUMBERS, *PARAMETERS]))
def test_first_and_second_derivatives(name: str, impl: str) -> None:
    call, leaves = call_and_leaves(name, impl, SCORES)
    assert gradcheck(call, leaves, atol=1e-7)
    assert gradgradcheck(call, leaves, atol=1e-7)


@pytest.mark.parametrize(("name", "impl"), pairs([*NUMBERS, *PARAMETERS]))
def test_second_derivatives_are_finite_where_weights_vanish(name: str, impl: str) -> None:
    """Sparse rows are where square roots at zero give NaN in the second backward pass."""
    call, leaves = call_and_leaves(name, impl, SCORES * 4)
    first = torch.autograd.grad((call(*leaves) * torch.arange(6.0).double()).sum(), leaves, create_graph=True)
    total = sum((g.square().sum() for g in first), torch.zeros((), dtype=torch.float64))
    second = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    assert all(bool(torch.isfinite(g).all()) for g in (*first, *second) if g is not None)
