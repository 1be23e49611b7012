"""Kernels where the contracts do not reach: above their limits, in the relative view, and the guard of signed sums."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.grammar import Spec, Status


def test_clipped_geometric_is_flat_above_its_limit() -> None:
    """z = 400 > M = 300 weighs 1/eps = 1e4, and so does 500; neither has a gradient to its score."""
    q = torch.full((1, 1, 1, 1), 10.0, dtype=torch.float64)
    k = torch.tensor([40.0, 50.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1).requires_grad_()
    eye = torch.eye(3, dtype=torch.float64)[None, None]
    out = regard.attention(q, k, eye, Spec("clipped-geometric", normalise=False)).flatten()
    np.testing.assert_allclose(out.detach().numpy(), [1e4, 1e4, 1 / 1.0001], rtol=1e-10)
    # The slope at 0 is value^2 / M, times q = 10.
    grad = torch.autograd.grad(out.sum(), k)[0].flatten().tolist()
    assert grad[:2] == [0, 0]
    assert math.isclose(grad[2], 10 / 1.0001**2 / 300, rel_tol=1e-12)


# The functions themselves -----------------------------------------------------------------------------------


def test_the_geometric_kernel_is_flat_from_one_on() -> None:
    """Only rounding takes a cosine there; the value is 1 / eps."""
    kernel, a = Spec.parse("geometric*fixed*cosine").kernel, torch.tensor([0.99, 1.0, 6.0], dtype=torch.float64)
    np.testing.assert_allclose(kernel.value(a, {}).numpy(), [100, 2.0**52, 2.0**52], rtol=1e-12)
    np.testing.assert_allclose(kernel.slope(a, {}).numpy(), [1e4, 0, 0], rtol=1e-12)


# Signed sums ------------------------------------------------------------------------------------------------


def signed(z: list[float], spec: str, impl: str) -> tuple[Tensor, Tensor, regard.Diagnostics]:
    """(scores as a leaf, weights, diagnostics) of one row of scores."""
    leaf = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    eye = torch.eye(len(z), dtype=torch.float64)[None, None]
    scale = 1.0 if "cosine" not in spec else None
    out, found = regard.attention(
        one, leaf.view(1, 1, -1, 1), eye, spec, scale=scale, impl=impl, return_diagnostics=True
    )
    return leaf, out.flatten(), found


HELD = 1e-3 * np.sqrt(2 * (1 + 0.999**2))  # more than the sum, 0.001
HELD_OF_THREE = 1e-3 * np.sqrt(3 * (1 + 0.9**2 + 0.0978**2))  # more than the sum, 0.0022; 1e-3 sum |w| is less


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize(
    ("z", "weights", "status"),
    [
        ([3.0, -1.0], [1.5, -0.5], Status.OK),
        ([-3.0, 1.0], [1.5, -0.5], Status.NEGATIVE),  # the sum is -2: signs change
        ([1.0, -1.0], [500.0, -500.0], Status.NEAR_ZERO),  # held at 1e-3 sqrt(2 (1 + 1))
        ([1.0, -0.999], [1 / HELD, -0.999 / HELD], Status.NEAR_ZERO),
        ([0.999, -1.0], [-0.999 / HELD, 1 / HELD], Status.NEAR_ZERO),  # held with its sign
        ([1.0, -0.9, -0.0978], list(np.array([1, -0.9, -0.0978]) / HELD_OF_THREE), Status.NEAR_ZERO),
        ([1.0, -0.9], [10.0, -9.0], Status.OK),
        ([0.0, 0.0], [0.0, 0.0], Status.OK),  # nothing to weigh, nothing to divide
    ],
)
def test_guard_of_normalised_signed_sums(z: list, weights: list, status: Status, impl: str) -> None:
    _, p, found = signed(z, "linear*fixed*normalised", impl)
    np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-9)
    assert found.status.flatten().tolist() == [int(status)]


GUARDED = [[3.0, -1.0, 0.5], [-3.0, 1.0, 0.2], [1.0, -1.2, 0.2003], [1.0, -1.2, 0.1997], [1.0, -0.9, -0.0978]]


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("z", GUARDED)
def test_gradients_through_the_guard(z: list, impl: str) -> None:
    """p_i = a_i / D with a = z + bias and D = sum a, or +-1e-3 sqrt(n sum a^2) where that is larger in size."""
    g = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    leaf = (torch.tensor(z, dtype=torch.float64) - 0.25).requires_grad_()
    bias = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    one, how = torch.ones(1, 1, 1, 1, dtype=torch.float64), {"params": {"bias": bias}, "impl": impl, "scale": 1.0}
    out = regard.attention(one, leaf.view(1, 1, 3, 1), g.view(1, 1, 3, 1), "linear*fixed*normalised", **how).sum()
    a = leaf + bias
    total, size = a.sum(), (3 * a.square().sum()).sqrt()
    held = 1e-3 * size * (1 if total.item() >= 0 else -1)
    plain = (a / (held if abs(total.item()) < 1e-3 * size.item() else total) * g).sum()
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x, (leaf, bias)) for x in (out, plain)), rtol=1e-9, atol=0)
