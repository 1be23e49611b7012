"""First and second derivatives of every normaliser in the scores and in every parameter, by differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard

# Rows whose scores lie well apart and away from every threshold used below.
SCORES = torch.tensor(
    [[0.93, -0.21, 0.55, -1.74, 0.17, 0.31], [-0.42, 1.37, 1.18, 0.61, -2.3, 0.97]], dtype=torch.float64
)
MASK = torch.tensor([[True, True, False, True, True, True], [True, False, True, True, True, True]])


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"entmax-{a:.3g}": (lambda z, a=a: regard.entmax(z, a)) for a in (1.0, 1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)},
    "sparsemax": regard.sparsemax,
    "relumax": lambda z: regard.relumax(z, 0.9),
    "normrelu": lambda z: regard.normrelu(z, 0.3),
    "normrelu-zero": lambda z: regard.normrelu(z, 0.3, empty="zero"),
    "normrelu-nearest": lambda z: regard.normrelu(z, 0.3, empty="nearest"),
    "topk-softmax": lambda z: regard.topk_softmax(z, 3),
    "topk-softmax-soft": lambda z: regard.topk_softmax(z, 3, gradient="soft"),
    "topk-uniform-soft": lambda z: regard.topk_uniform(z, 3, gradient="soft"),
    "entmax-masked": lambda z: regard.entmax(z, 1.5, mask=MASK),
    "sparsemax-masked": lambda z: regard.sparsemax(z, mask=MASK),
    "relumax-masked": lambda z: regard.relumax(z, mask=MASK),
    "normrelu-masked": lambda z: regard.normrelu(z, 0.3, mask=MASK),
    "topk-softmax-masked": lambda z: regard.topk_softmax(z, 3, mask=MASK),
    "topk-uniform-soft-masked": lambda z: regard.topk_uniform(z, 3, mask=MASK, gradient="soft"),
    "entmax-dim": lambda z: regard.entmax(z, 1.5, dim=0),
}

PARAMETERS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "alpha": (regard.entmax, column(1.5, 1.2)),
    "alpha-above-2": (regard.entmax, column(2.6, 3.1)),
    "alpha-at-2": (regard.entmax, column(2.0, 2.0)),
    "alpha-shared": (regard.entmax, torch.tensor(1.4, dtype=torch.float64)),
    "alpha-masked": (lambda z, a: regard.entmax(z, a, mask=MASK), column(1.5, 1.2)),
    "margin": (regard.relumax, column(0.9, 1.6)),
    "bias": (regard.normrelu, column(0.3, -0.5)),
    "bias-shared": (regard.normrelu, torch.tensor(0.25, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_scores(name: str) -> None:
    z = SCORES.clone().requires_grad_()
    assert gradcheck(NUMBERS[name], z, atol=1e-7)
    assert gradgradcheck(NUMBERS[name], z, atol=1e-7)


@pytest.mark.parametrize("name", PARAMETERS)
def test_scores_and_parameter(name: str) -> None:
    call, value = PARAMETERS[name]
    inputs = (SCORES.clone().requires_grad_(), value.clone().requires_grad_())
    assert gradcheck(call, inputs, atol=1e-7)
    assert gradgradcheck(call, inputs, atol=1e-7)


@pytest.mark.parametrize("name", PARAMETERS)
def test_values_at_a_tensor_parameter(name: str) -> None:
    call, value = PARAMETERS[name]
    p = call(SCORES, value)
    for z, seen, row, number in zip(SCORES, MASK, p, value.expand(2, 1).flatten(), strict=True):
        z = (torch.where(seen, z, -torch.inf) if "masked" in name else z).numpy()
        x = float(number)
        if name.startswith("alpha"):
            expected = oracles.entmax_row(z, x)[0]
        else:
            expected = oracles.rectified(z, z.max() - x if name == "margin" else -x, 1)
        np.testing.assert_allclose(row.numpy(), expected.astype(float), rtol=0, atol=2e-15)


@pytest.mark.parametrize("name", [*NUMBERS, *PARAMETERS])
def test_second_derivatives_are_finite_where_weights_vanish(name: str) -> None:
    """Sparse rows are where square roots at zero give NaN in double backward."""
    z = (SCORES * 4).requires_grad_()
    if name in NUMBERS:
        call, leaves = NUMBERS[name], (z,)
    else:
        call, leaves = PARAMETERS[name][0], (z, PARAMETERS[name][1].clone().requires_grad_())
    p = call(*leaves)
    first = torch.autograd.grad((p * torch.arange(6.0, dtype=torch.float64)).sum(), leaves, create_graph=True)
    total = sum((g.square().sum() for g in first), torch.zeros((), dtype=torch.float64))
    second = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    assert all(bool(torch.isfinite(g).all()) for g in (*first, *second) if g is not None)


def test_tied_best_scores_share_the_gradient_of_relumax() -> None:
    """On [1, 1, 0.5] with margin 1: w = (1, 1, .5), W = 2.5. For L = p_3 = (z_3 - m + 1)/W with W = 2 + w_3:
    dL/dw_3 = (W - w_3)/W^2 = .32, so dz_3 = .32 and m takes -.32 in equal parts."""
    z = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    regard.relumax(z)[2].backward()
    # Each tied score also moves its own w: dL/dw_1 = -w_3/W^2 = -.08, and dL/dm = -(-.08 - .08 + .32) = -.16.
    expected = torch.tensor([-0.16, -0.16, 0.32], dtype=torch.float64)
    torch.testing.assert_close(z.grad, expected)
    for impl in ("reference", "blocked"):
        key = z.detach().view(1, 1, 3, 1).clone().requires_grad_()
        one, last = torch.ones_like(key[:, :, :1]).detach(), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        regard.attention(one, key, last.view(1, 1, 3, 1), "relumax", scale=1.0, impl=impl).sum().backward()
        torch.testing.assert_close(key.grad.flatten(), expected)


def test_gradients_of_plain_functions_sum_to_zero_along_the_row() -> None:
    """Shift invariance: no normaliser that looks at differences only has a gradient along (1, ..., 1)."""
    g = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, call in NUMBERS.items():
        if name.startswith("normrelu") or name == "entmax-dim":
            continue
        z = SCORES.clone().requires_grad_()
        (call(z) * g).sum().backward()
        torch.testing.assert_close(z.grad.sum(-1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-14)
        assert float(z.grad.abs().max()) > 1e-3, name
