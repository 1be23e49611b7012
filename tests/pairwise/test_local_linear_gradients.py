"""Derivatives of local linear attention: finite differences, autograd of the dense regression in float64, and what they
must add up to."""

from collections.abc import Callable

import pytest
import torch
from contracts.oracle import dense
from mistakes import refuses
from regression import draw, lower, ratio, textbook
from torch import Tensor
from torch.autograd import gradcheck

import regard
from regard.grammar.solvers import BlockDiagonal, ConjugateGradient

SHAPES = {"scalar": (), "head": (2, 1), "token": (2, 5), "dimension": (1, 2, 5, 3), "one for all": (1, 1, 1, 3)}
SOLVERS = ("cholesky", "auto", ConjugateGradient(tol=1e-14), BlockDiagonal(), BlockDiagonal(1))


def small(length: int = 5, keys: int | None = None, dim: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in draw(1, 2, length, dim, keys=keys, value_dim=2, seed=seed))


def numbers(shape: tuple[int, ...], low: float, seed: int = 1) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=make, dtype=torch.float64) * 0.5 + low).requires_grad_()


def check(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    assert gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


# Finite differences ------------------------------------------------------------------------------------------


CASES = dict.fromkeys([
    *(("auto", "relative", shape, impl) for shape in SHAPES for impl in ("reference", "blocked", "cpu")),
    *((solver, mode, shape, impl) for solver in SOLVERS for impl in ("reference", "blocked")
      for mode, shape in (("relative", "token"), ("absolute", "dimension"))),
])  # fmt: skip


@pytest.mark.parametrize(("solver", "mode", "shape", "impl"), CASES, ids=str)
def test_finite_differences(solver, mode: str, shape: str, impl: str) -> None:
    """q, k, v, the ridge, and the scale where there is one of its own for every row."""

    def run(q: Tensor, k: Tensor, v: Tensor, ridge: Tensor, scale: Tensor) -> Tensor:
        how = {"solver": solver, "ridge_mode": mode, "impl": impl, "spec": "biweight" if impl == "cpu" else "softmax"}
        return regard.local_linear_attention(q, k, v, ridge=ridge, scale=scale, exclude_self=True, **how)

    check(run, (*small(5, 7, seed=2), numbers(SHAPES[shape], 0.2, seed=3), numbers((2, 5), 0.4)))


def test_a_learned_power_beside_an_absolute_ridge_is_for_the_reference() -> None:
    """Its derivative by finite differences; the fast form says that it has none."""

    def run(q: Tensor, k: Tensor, v: Tensor, power: Tensor, impl: str = "reference") -> Tensor:
        spec = "biweight*anchored(margin=1.5)*linear(ridge=0.4,ridge_mode=absolute)"
        return regard.attention(q, k, v, spec, params={"r": power}, is_causal=True, impl=impl)

    inputs = (*small(seed=15), numbers((2, 5), 1.8, seed=16))
    check(run, inputs)
    refuses("learned power", run, *inputs, impl="blocked")


# Against the dense regression --------------------------------------------------------------------------------


def gradients(out: Tensor, inputs: tuple[Tensor, ...], seed: int = 20) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    weight = torch.randn(out.shape, generator=make, dtype=torch.float64)
    return torch.autograd.grad(out, inputs, weight.to(out.dtype), retain_graph=True)


@pytest.mark.parametrize("ridge", [1.0, 0.1, 0.01])
@pytest.mark.parametrize(("spec", "solver"), [("softmax", "auto"), ("softmax", "cholesky"), ("biweight", "auto")])
def test_float32_blocks_against_float64(ridge: float, spec: str, solver: str) -> None:
    """Outputs to 1e-5 of their size and gradients to 1e-4 is what is asked for, and exceeded. Rows with many keys of
    which few have weight lose slopes by rounding over the ridge."""
    dim = 32
    tolerance = 1.5e-6 / ridge if spec == "biweight" else 3e-6
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 400, dim, seed=9, dtype=torch.float32))
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    out = regard.local_linear_attention(q, k, v, ridge=ridge, spec=spec, solver=solver, is_causal=True)
    expected = dense(*exact, lower(400), ridge, spec)
    assert ratio(out, expected) <= tolerance
    for grad, want in zip(gradients(out, (q, k, v)), gradients(expected, exact), strict=True):
        assert grad.dtype == torch.float32
        assert ratio(grad, want) <= max(2e-5, 2 * tolerance)


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_a_constant_added_to_a_row_of_scores(mode: str) -> None:
    """Erratum C3: a coordinate that is c in every query and one in every key adds c to all scores of a row, and nothing
    to a regression, as the keys do not differ in it. A relative ridge must not notice: its gradient by c is 0. An
    absolute ridge is then one of ridge exp(-c)."""
    q, k, v = draw(1, 1, 30, 4, seed=11)
    c = torch.zeros(1, 1, 30, 1, dtype=torch.float64, requires_grad=True)
    wide = lambda x, last: torch.cat([x, last], -1)  # noqa: E731
    make = torch.Generator().manual_seed(12)
    weight = torch.randn(v.shape, generator=make, dtype=torch.float64)
    call = {"is_causal": True, "scale": 1.0, "ridge": 0.1, "ridge_mode": mode}
    for impl in ("reference", "blocked"):
        out = regard.local_linear_attention(wide(q, c), wide(k, torch.ones_like(k[..., :1])), v, impl=impl, **call)
        (found,) = torch.autograd.grad((out * weight).sum(), c)
        if mode == "relative":
            assert float(found.abs().max()) <= 1e-12
            continue
        w = torch.where(lower(30), (q @ k.transpose(-1, -2)).exp(), 0)
        shift = torch.zeros(1, 1, 30, 1, dtype=torch.float64, requires_grad=True)
        (wanted,) = torch.autograd.grad((textbook(w * shift.exp(), q, k, v, 0.1) * weight).sum(), shift)
        assert float((found - wanted).abs().max()) <= 1e-10
        assert float(wanted.abs().max()) > 1e-3


def test_gradients_of_an_iteration_are_those_of_the_solution() -> None:
    """Conjugate gradients to 1e-3 give gradients near those of the exact solution, as the tolerance promises."""
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 200, 24, seed=13))
    expected = gradients(dense(q, k, v, lower(200), 0.1), (q, k, v))
    errors = []
    for tol in (1e-2, 1e-3, 1e-5):
        out = regard.local_linear_attention(q, k, v, solver="cg", tol=tol, is_causal=True, impl="blocked")
        errors.append(max(ratio(g, w) for g, w in zip(gradients(out, (q, k, v)), expected, strict=True)))
    assert all(error <= 5 * tol for error, tol in zip(errors, (1e-2, 1e-3, 1e-5), strict=True))
    assert errors[2] < errors[1] < errors[0]
