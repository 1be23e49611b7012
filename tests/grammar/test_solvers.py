"""Solvers against numpy, singular, ill-conditioned and badly scaled systems included."""

import numpy as np
import pytest
import torch
from mistakes import refuses

from regard.grammar import Dense
from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient, Learned
from regard.grammar.systems import SolveStatus


def positive(seed: int, rank: int, n: int = 5, count: int = 4) -> np.ndarray:
    """Symmetric positive semi-definite matrices [count, n, n] of that rank."""
    x = np.random.default_rng(seed).normal(size=(count, n, rank))
    return x @ np.swapaxes(x, -1, -2)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_singular_systems_have_the_solution_of_least_norm_and_a_status(rank: int) -> None:
    a = np.concatenate([positive(2, rank, count=2), positive(3, 9, count=1)])
    b = np.random.default_rng(4).normal(size=(3, 5))
    solved = solve(Cholesky(), a, b, ridge=0.0)
    expected = np.stack([np.linalg.lstsq(m, y, rcond=1e-10)[0] for m, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(solved.value.numpy(), expected, rtol=1e-8, atol=1e-10)
    assert solved.status.tolist() == [1, 1, 0]


def test_gradients_of_regular_systems_beside_singular_ones() -> None:
    a = torch.from_numpy(np.concatenate([positive(5, 9, count=1), positive(6, 2, count=1)])).requires_grad_()
    b = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    Cholesky().solve(Dense(a, 0.0), b).value[0].sum().backward()
    inverse = np.linalg.inv(a.detach().numpy()[0])
    left, right = inverse.sum(0), inverse.sum(-1)
    # d(1' A^-1 1) = -A^-1 1 (1' A^-1) on the symmetric part.
    symmetric = (a.grad[0] + a.grad[0].T).numpy() / 2
    np.testing.assert_allclose(symmetric, -np.outer(left, right), rtol=1e-9)
    np.testing.assert_allclose(b.grad[0].numpy(), left, rtol=1e-10)
    assert bool(torch.isfinite(a.grad).all())
    assert not bool(a.grad[1].any())


OK, MINIMUM_NORM, NOT_FINITE, UNCONVERGED, JITTER = range(5)  # the numbers are a promise: they stand in results


def spread(seed: int, condition: float, n: int = 12, count: int = 6, dtype: type = np.float64) -> np.ndarray:
    """Positive definite matrices [1, count, n, n] of that condition."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(count, n, n)))[0]
    values = np.logspace(0, -np.log10(condition), n)
    return ((turn * values) @ np.swapaxes(turn, -1, -2))[None].astype(dtype)


def solve(solver, a: np.ndarray, b: np.ndarray, ridge: float | torch.Tensor = 1e-9, **extra):
    return solver.solve(Dense(torch.from_numpy(a), ridge, **extra), torch.from_numpy(b))


def right(a: np.ndarray, seed: int = 50) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=a.shape[:-1]).astype(a.dtype)


def true_residual(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, x, b = (y.astype(np.float64) for y in (a, x, b))
    left = b - (a @ x[..., None])[..., 0]
    return np.linalg.norm(left, axis=-1) / np.linalg.norm(b, axis=-1)


def test_statuses_are_those_numbers() -> None:
    names = ("OK", "MINIMUM_NORM", "NOT_FINITE", "UNCONVERGED", "JITTER", "INACCURATE")
    assert [SolveStatus[name].value for name in names] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("precondition", [False, True])
@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
def test_cg_reports_its_true_residual_and_honours_tol(condition: float, precondition: bool) -> None:
    a = spread(10, condition)
    b = right(a)
    for tol in (1e-1, 1e-4, 1e-8):
        solved = solve(ConjugateGradient(tol=tol, precondition=precondition), a, b)
        residual = true_residual(a, solved.value.numpy(), b)
        assert (residual <= tol).all()
        np.testing.assert_allclose(solved.statistics["residual"].numpy(), residual, rtol=1e-4, atol=1e-12)
        assert (solved.status.numpy() == OK).all()
        if condition == 1.0:
            assert (solved.statistics["iterations"].numpy() <= 1).all()
    if condition == 1e4:
        few = solve(ConjugateGradient(tol=1e-1), a, b).statistics["iterations"].numpy()
        many = solve(ConjugateGradient(tol=1e-8), a, b).statistics["iterations"].numpy()
        assert (few < many).all()


@pytest.mark.parametrize("max_iter", [0, 1, 4])
def test_cg_with_too_few_steps_says_so(max_iter: int) -> None:
    a = spread(12, 1e6)
    b = right(a)
    b[0, 0] = 0  # solved before the first step
    solved = solve(ConjugateGradient(max_iter=max_iter, tol=1e-10), a, b)
    assert solved.status[0].tolist() == [OK] + [UNCONVERGED] * 5
    assert solved.statistics["iterations"][0].tolist() == [0] + [max_iter] * 5
    assert not solved.value[0, 0].any()
    residual = true_residual(a[:, 1:], solved.value.numpy()[:, 1:], b[:, 1:])
    np.testing.assert_allclose(solved.statistics["residual"].numpy()[:, 1:], residual, rtol=1e-9)
    if max_iter == 0:
        assert not solved.value.any()
        np.testing.assert_allclose(residual, 1)


def test_cg_rows_do_not_wait_for_each_other() -> None:
    """Easy rows beside hard ones have the bits that they have beside easy ones."""
    easy, hard = spread(14, 3.0, count=40), spread(15, 1e5, count=40)
    b = right(easy)
    mixed = easy.copy()
    mixed[:, ::2] = hard[:, ::2]
    for solver in (ConjugateGradient(), Auto(), Cholesky()):
        alone, beside = solve(solver, easy, b), solve(solver, mixed, b)
        assert torch.equal(alone.value[:, 1::2], beside.value[:, 1::2])
        assert torch.equal(alone.statistics["iterations"][:, 1::2], beside.statistics["iterations"][:, 1::2])


class Near(Dense):
    """Systems with one matrix that is near to all."""

    def __init__(self, matrices: np.ndarray, near: np.ndarray) -> None:
        super().__init__(torch.from_numpy(matrices), 1e-9)
        self.one = torch.from_numpy(near)

    def near(self) -> torch.Tensor:
        return self.one


def test_preconditioning_takes_fewer_steps_to_the_same_solution() -> None:
    """Matrices that are one badly conditioned matrix and a little more."""
    base = spread(16, 1e5, count=1)
    noise = np.random.default_rng(17).normal(size=(1, 10, 12, 3)) * 1e-4
    a = base + noise @ np.swapaxes(noise, -1, -2)
    b = right(a)
    system = Near(a, base[:, 0])
    plain = ConjugateGradient(tol=1e-9).solve(system, torch.from_numpy(b))
    helped = ConjugateGradient(tol=1e-9, precondition=True).solve(system, torch.from_numpy(b))
    exact = np.linalg.solve(a, b[..., None])[..., 0]
    for solved in (plain, helped):
        assert (true_residual(a, solved.value.numpy(), b) <= 1e-9).all()
        np.testing.assert_allclose(solved.value.numpy(), exact, rtol=1e-3)
    assert helped.statistics["iterations"].max() < plain.statistics["iterations"].min()
    singular = Near(a, np.zeros_like(base[:, 0]))  # a matrix that cannot be factored is not used
    found = ConjugateGradient(tol=1e-9, precondition=True).solve(singular, torch.from_numpy(b))
    assert torch.equal(found.value, plain.value)


def test_a_jitter_makes_singular_matrices_regular_and_is_told() -> None:
    """Ridge above zero but lost: the solution is that of the matrix with the jitter on its diagonal."""
    n = 5
    a = np.concatenate([positive(20, 2, count=2), positive(21, 9, count=1)])
    b = np.random.default_rng(22).normal(size=(3, n))
    solved = solve(Cholesky(), a, b, ridge=1e-30)
    assert solved.status.tolist() == [JITTER, JITTER, OK]
    jitter = solved.statistics["jitter"].numpy()
    assert (jitter[:2] > 0).all()
    assert jitter[2] == 0
    assert (jitter[:2] <= 1e-8 * np.trace(a[:2], axis1=-2, axis2=-1)).all()
    expected = np.linalg.solve(a + jitter[:, None, None] * np.eye(n), b[..., None])[..., 0]
    np.testing.assert_allclose(solved.value.numpy(), expected, rtol=1e-3)
    ridge = torch.tensor([[0.0], [1e-30], [0.5]], dtype=torch.float64)  # by row: least norm, jitter, neither
    assert solve(Cholesky(), a, b, ridge=ridge).status.tolist() == [MINIMUM_NORM, JITTER, OK]


@pytest.mark.parametrize("solver", [Cholesky(), Auto(), BlockDiagonal(), BlockDiagonal(1)])
def test_what_is_not_finite_stays_in_its_row(solver) -> None:
    a = positive(23, 9, count=3)
    b = np.random.default_rng(24).normal(size=(3, 5))
    clean = solve(solver, a, b)
    a[1, 2, 2] = np.nan
    corrupted = solve(solver, a, b)
    assert torch.equal(clean.value[::2], corrupted.value[::2])
    assert corrupted.status[::2].tolist() == [OK, OK]
    assert corrupted.status[1] != OK
    if solver != BlockDiagonal():
        assert bool(corrupted.value[1].isnan().any())
        assert corrupted.status[1] == NOT_FINITE


def test_no_matrix_fails_the_call() -> None:
    """Negative definite by rounding, all zero, or infinite: an answer or NaN in that row, and a status."""
    eye = np.eye(5)
    a = np.stack([-1e3 * eye, 0 * eye, np.inf * np.ones((5, 5)), eye])
    b = np.ones((4, 5))
    solved = solve(Cholesky(), a, b, ridge=0.1)
    assert solved.status[3] == OK
    assert (solved.status[:3] != OK).all()
    np.testing.assert_allclose(solved.value[3].numpy(), b[3])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", [Cholesky(), ConjugateGradient(), BlockDiagonal(4), Auto()])
@pytest.mark.parametrize("size", [1e-15, 1e-6, 1.0, 1e6, 1e15])
def test_the_scale_of_a_system_does_not_matter(dtype: type, solver, size: float) -> None:
    """Very small and very large matrices and right sides: x = A^-1 b all the same. In float32 it is the caller who
    hands conjugate gradients right sides of size one."""
    if isinstance(solver, ConjugateGradient) and dtype == np.float32 and not 1e-6 <= size <= 1e6:
        return
    a = spread(25, 10.0, dtype=dtype)
    if isinstance(solver, BlockDiagonal):
        at = np.arange(12) // 3
        a = np.where(at[:, None] == at, a, 0).astype(dtype)
    b = right(a)
    expected = np.linalg.solve(a.astype(np.float64), b.astype(np.float64)[..., None])[..., 0]
    tolerance = 1e-4 if dtype == np.float32 else 1e-8
    for matrix, side, factor in ((size, 1.0, 1 / size), (1.0, size, size), (size, size, 1.0)):
        solved = solve(solver, (matrix * a).astype(dtype), (side * b).astype(dtype))
        np.testing.assert_allclose(solved.value.numpy() / factor, expected, rtol=0, atol=tolerance * 10)
        assert (solved.status.numpy() == OK).all()


@pytest.mark.parametrize("blocks", [0, 2, 3, 6])
def test_block_diagonal_without_ridge_has_the_least_norm(blocks: int) -> None:
    """Blocks of one, two and more coordinates that are singular: least norm in that block, the others as they are."""
    n = 6
    a = np.zeros((1, 1, n, n))
    a[..., 3:, 3:] = spread(27, 5.0, n=3, count=1)
    a[0, 0, :3, :3] = np.outer([1.0, 0, 2.0], [1.0, 0, 2.0])
    at = np.arange(n) * (blocks or n) // n
    masked = np.where(at[:, None] == at, a, 0)
    b = np.arange(1.0, n + 1)[None, None]
    solved = solve(BlockDiagonal(blocks), a, b, ridge=0.0)
    assert solved.status.tolist() == [[MINIMUM_NORM]]
    assert bool(solved.value.isfinite().all())
    if blocks != 3:  # blocks of two drop what is left of the second coordinate, which is as near but not as short
        expected = np.linalg.pinv(masked[0, 0], rcond=1e-10) @ b[0, 0]
        np.testing.assert_allclose(solved.value.numpy()[0, 0], expected, rtol=1e-9, atol=1e-12)


def test_learned_takes_minus_the_probe() -> None:
    a = spread(29, 5.0)
    probe = torch.from_numpy(right(a, 30))
    solved = solve(Learned(), a, right(a), probe=probe)
    assert torch.equal(solved.value, -probe)
    assert (solved.status.numpy() == OK).all()
    refuses("no probe was given", solve, Learned(), a, right(a))
