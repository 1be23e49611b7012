"""The direct solver against numpy, singular systems included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regard.grammar import Dense, solvers


def positive(seed: int, rank: int, n: int = 5, count: int = 4) -> np.ndarray:
    """Symmetric positive semi-definite matrices [count, n, n] of that rank."""
    x = np.random.default_rng(seed).normal(size=(count, n, rank))
    return x @ np.swapaxes(x, -1, -2)


def test_cholesky_solves_positive_definite_systems() -> None:
    a, b = positive(0, 9), np.random.default_rng(1).normal(size=(4, 5))
    solved = solvers.get("cholesky")().solve(Dense(torch.from_numpy(a), 0.0), torch.from_numpy(b))
    expected = np.stack([np.linalg.solve(m, y) for m, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(solved.value.numpy(), expected, rtol=1e-11)
    assert solved.status.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_singular_systems_have_the_solution_of_least_norm_and_a_status(rank: int) -> None:
    a = np.concatenate([positive(2, rank, count=2), positive(3, 9, count=1)])
    b = np.random.default_rng(4).normal(size=(3, 5))
    solved = solvers.get("cholesky")().solve(Dense(torch.from_numpy(a), 0.0), torch.from_numpy(b))
    expected = np.stack([np.linalg.lstsq(m, y, rcond=1e-10)[0] for m, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(solved.value.numpy(), expected, rtol=1e-8, atol=1e-10)
    assert solved.status.tolist() == [1, 1, 0]


def test_gradients_of_regular_systems_beside_singular_ones() -> None:
    a = torch.from_numpy(np.concatenate([positive(5, 9, count=1), positive(6, 2, count=1)])).requires_grad_()
    b = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    solvers.get("cholesky")().solve(Dense(a, 0.0), b).value[0].sum().backward()
    inverse = np.linalg.inv(a.detach().numpy()[0])
    left, right = inverse.sum(0), inverse.sum(-1)
    # d(1' A^-1 1) = -A^-1 1 (1' A^-1) on the symmetric part.
    symmetric = (a.grad[0] + a.grad[0].T).numpy() / 2
    np.testing.assert_allclose(symmetric, -np.outer(left, right), rtol=1e-9)
    np.testing.assert_allclose(b.grad[0].numpy(), left, rtol=1e-10)
    assert bool(torch.isfinite(a.grad).all())
    assert not bool(a.grad[1].any())
