"""First and second derivatives of every normaliser in the scores and in every parameter, by differences.

Weights and gradients of entmax in float32, alpha from 1.1 to 5, against extended precision of the same float32
scores; through `regard.entmax` and through `regard.attention`, alpha a number or a tensor.

The error of a row is its largest absolute error over its largest exact entry. In two cases an absolute error of 2e-7
of the incoming gradient is allowed on top, because the exact gradient of a row is small and only rounding is left:

- alpha < 2, where a single score may lie just inside the threshold.
- The reference of `regard.entmax`, if all keys with weight have nearly the same dL/dp. Autograd multiplies dL/dp before
  it subtracts the mean, which leaves about 1e-7 of it. The worst of 24,000 rows: 9.1e-8 beside 8.7e-5 at alpha = 4.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial

import numpy as np
import oracles
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
MASKED = (lambda z, a, **how: regard.entmax(z, a, mask=MASK, **how), column(1.5, 1.2))
PARAMETERS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {**LEARNED, "alpha-masked": MASKED}


def pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, impl) for name in names for impl in (("reference",) if name in ALONE else IMPLS)]


def call_and_leaves(name: str, impl: str, scores: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
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


ALPHAS = (1.1, 1.5, 1.9, 2.0, 2.1, 2.5, 3.0, 4.0, 5.0)
BOUND = 1e-3
COLUMNS = 12


@cache
def rows(count: int) -> tuple[Tensor, Tensor]:
    """Normal scores of scale 0.01 to 100, and dL/dp."""
    make = torch.Generator().manual_seed(16)
    scale = 10 ** (4 * torch.rand(count, 1, generator=make, dtype=torch.float64) - 2)
    z, g = (torch.randn(count, COLUMNS, generator=make, dtype=torch.float64) for _ in range(2))
    return (z * scale).float(), g.float()


def normaliser(impl: str, z: Tensor, alpha: float | Tensor) -> Tensor:
    return regard.entmax(z, alpha, impl=impl)


def attention(impl: str, z: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights as the output of attention: one query of 1 and keys that are the scores, one feature wide."""
    count = z.shape[0]
    query, key = z.new_ones(count, 1, 1, 1), z[:, None, :, None]
    value = torch.eye(COLUMNS).expand(count, 1, COLUMNS, COLUMNS)
    spec = "biweight*adaptive" if isinstance(alpha, Tensor) else f"polynomial(r={1 / (alpha - 1)!r})*adaptive"
    params = {"alpha": alpha[:, None]} if isinstance(alpha, Tensor) else None
    return regard.attention(query, key, value, spec, scale=1.0, params=params, impl=impl)[:, 0, 0]


ENTMAX = [(normaliser, impl) for impl in ("reference", "cpu")]
ENTMAX += [(attention, impl) for impl in ("reference", "blocked", "cpu")]


def error(found: Tensor, exact: np.ndarray, slack: np.ndarray | float = 0.0) -> float:
    """The worst row: the largest error, but for `slack`, over the largest entry."""
    gap = np.abs(found.double().numpy() - exact).max(-1) - slack
    size = np.abs(exact).max(-1)
    worst = np.where(size > 0, gap / np.where(size > 0, size, 1), gap)
    assert np.isfinite(worst).all()
    return float(worst.max())


@pytest.mark.parametrize("count", [1500, pytest.param(24000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("call", "impl"), ENTMAX)
def test_float32(call, impl: str, alpha: float, tensor: bool, count: int) -> None:
    z, g = rows(count)
    leaf = z.clone().requires_grad_()
    number = torch.full((count, 1), alpha).requires_grad_()
    p = call(impl, leaf, number if tensor else alpha)
    p.backward(g)
    exact = float(number.detach()[0, 0]) if tensor else alpha
    weights, dz, dalpha = oracles.entmax_derivatives(z.numpy(), exact, g.numpy())
    size = g.abs().amax(-1).numpy()
    assert error(p.detach(), weights) <= 1e-5
    rounded = alpha < 2 or (call is normaliser and impl == "reference")
    assert error(leaf.grad, dz, 2e-7 * size if rounded else 0.0) <= BOUND
    if tensor:  # a sum of terms of the size of dL/dp, which may cancel
        off = np.abs(number.grad[:, 0].double().numpy() - dalpha)
        assert (off <= BOUND * np.maximum(np.abs(dalpha), 1e-2 * size)).all()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("alpha", [2.5, 4.0, 5.0])
def test_a_score_just_inside_the_threshold(alpha: float, impl: str) -> None:
    """The lowest weight is 1e-6 to 1e-3, and its slope up to 1e18 times that of the others."""
    r = 1 / (alpha - 1)
    tails = torch.logspace(-6, -3, 40, dtype=torch.float64)[:, None]
    others = torch.tensor([[0.3, 0.7]], dtype=torch.float64) * (1 - tails)
    p = torch.cat([tails, others], -1)
    z = (p ** (1 / r) * r).float()
    g = torch.tensor([1.0, -2.0, 0.5]).expand(40, 3)
    leaf = z.clone().requires_grad_()
    regard.entmax(leaf, alpha, impl=impl).backward(g)
    _, dz, _ = oracles.entmax_derivatives(z.numpy(), alpha, g.numpy())
    assert error(leaf.grad, dz) <= BOUND


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("alpha", [3.0, 5.0])
def test_scores_that_tie_at_the_threshold(alpha: float, impl: str) -> None:
    """Equal scores with equal dL/dp share the gradient of one, whatever their slope."""
    z = torch.tensor([[0.0, 0.0, 0.0, 0.33, 0.1]]) + 2.0
    g = torch.tensor([[1.0, 1.0, 1.0, -1.0, 3.0]])
    leaf = z.clone().requires_grad_()
    regard.entmax(leaf, alpha, impl=impl).backward(g)
    _, dz, _ = oracles.entmax_derivatives(z.numpy(), alpha, g.numpy())
    assert error(leaf.grad, dz) <= BOUND
    assert leaf.grad[0, :3].unique().numel() == 1 or impl == "reference"


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_tensor_alpha_of_one_is_softmax_and_one_below_is_nan(impl: str) -> None:
    z, g = rows(1500)
    z = z.clamp(-20, 20)
    leaf = z.clone().requires_grad_()
    p = regard.entmax(leaf, torch.ones(1500, 1), impl=impl)
    p.backward(g)
    exact = torch.softmax(z.double(), -1)
    assert (p.detach() - exact).abs().max() < 1e-6
    centred = g - (exact * g).sum(-1, keepdim=True)
    assert (leaf.grad - exact * centred).abs().max() < 1e-5
    below = torch.tensor([[1.5], [0.99], [1.5]])
    assert regard.entmax(z[:3], below, impl=impl).isnan().any(-1).tolist() == [False, True, False]
    with regard.checks.debug(), pytest.raises(regard.checks.ArgumentError, match="alpha"):
        regard.entmax(z[:3], below, impl=impl)


@pytest.mark.parametrize(("call", "impl"), ENTMAX)
@pytest.mark.parametrize("alpha", [1.0001, 1.001, 1.01])
def test_gradient_of_alpha_near_softmax(call, impl: str, alpha: float) -> None:
    z, g = rows(100)
    z = z.clamp(-3, 3)
    number = torch.full((100, 1), alpha, requires_grad=True)
    call(impl, z, number).backward(g)
    exact = oracles.entmax_derivatives(z.numpy(), float(number.detach()[0, 0]), g.numpy())[2]
    assert abs(number.grad[:, 0].numpy() - exact).max() < 1e-4
