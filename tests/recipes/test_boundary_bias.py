"""`regard reproduce boundary-bias` at a tiny size, and its parts against numpy."""

import numpy as np
import pandas as pd
import pytest
from tiny_runs import tiny

from regard_recipes.lib.claims import log_slope
from regard_recipes.lib.recipe import frame_of, select
from regard_recipes.local_linear import boundary_bias as recipe

NAMES = {"global linear", "local constant", "local linear"}


def chosen() -> pd.DataFrame:
    return recipe.best(tiny("boundary-bias")[1])


@pytest.mark.parametrize(("dim", "volume"), [(1, 2.0), (2, np.pi), (3, 4 * np.pi / 3)])
def test_the_quadrature_is_that_of_the_ball(dim: int, volume: float) -> None:
    where = recipe.places(dim, 20, 5)
    points, weights, depths = (x.numpy() for x in (where.points, where.weights, where.depths))
    assert abs(weights.sum() - volume) < 1e-12
    square = (points**2).sum(1)
    assert abs(weights @ square - volume * dim / (dim + 2)) < 1e-12
    assert np.abs(1 - np.sqrt(square) - depths).max() < 1e-12


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_design_is_uniform_with_values_of_f_and_noise(dim: int) -> None:
    x, y = (u.numpy() for u in recipe.design(dim, 4000, 0, 0.5))
    radius = np.sqrt((x**2).sum(1))
    assert x.shape == (4000, dim)
    assert radius.max() <= 1
    for r in (0.3, 0.6, 0.9):
        assert abs((radius < r).mean() - r**dim) < 0.03
    assert np.abs(x.mean(0)).max() < 0.04
    assert np.abs(y[:, 0] - 2 * radius**2).max() < 1e-12
    noise = y[:, 1:] - y[:, :1]
    assert abs(noise.std() / 0.5 - 1) < 0.02
    assert abs(noise.mean()) < 0.02
    again, other = (recipe.design(dim, 4000, seed, 0.5)[0] for seed in (0, 1))
    assert np.array_equal(x, again.numpy())
    assert not np.array_equal(x, other.numpy())


def fitted(x: np.ndarray, y: np.ndarray, at: np.ndarray, h: float, degree: int) -> np.ndarray:
    """Weighted least squares at every point, the textbook's; the nearest value where the window is empty."""
    found = []
    for point in at:
        distance = ((x - point) ** 2).sum(1)
        w = np.maximum(1 - distance / h**2, 0)
        if w.sum() == 0:
            found.append(y[distance.argmin()])
            continue
        w = w / w.sum()
        basis = np.concatenate([np.ones((len(x), 1)), (x - point) * degree], 1)
        penalty = np.diag([0.0] + [1e-6 * h * h if degree else 1.0] * x.shape[1])
        found.append(np.linalg.solve(basis.T @ (w[:, None] * basis) + penalty, basis.T @ (w[:, None] * y))[0])
    return np.array(found)


@pytest.mark.parametrize("dim", [1, 2])
def test_estimators_are_the_textbooks(dim: int) -> None:
    x, y = recipe.design(dim, 200, 3, 0.5)
    at = recipe.places(dim, 12, 3).points
    for degree in (0, 1):
        for h in (0.25, 0.5):
            wanted = fitted(x.numpy(), y.numpy(), at.numpy(), h, degree)
            assert np.abs(recipe.local(x, y, at, h, degree).numpy() - wanted).max() < 1e-6, (degree, h)
    affine = np.concatenate([np.ones((200, 1)), x.numpy()], 1)
    line = np.linalg.solve(affine.T @ affine, affine.T @ y.numpy())
    wanted = np.concatenate([np.ones((len(at), 1)), at.numpy()], 1) @ line
    assert np.abs(recipe.global_linear(x, y, at).numpy() - wanted).max() < 1e-9


def test_slopes_and_their_errors() -> None:
    """Means 3 n^-0.75 with a standard error of 1 % each, three seeds at each n."""
    off = 0.01 * np.sqrt(3)
    law = [{"n": n, "seed": i, "y": 3 * n**-0.75 * (1 + off * (i - 1))} for n in (100, 200, 400, 800) for i in range(3)]
    found = log_slope(frame_of(law), "n", "y")
    assert abs(found.mean + 0.75) < 1e-9
    x = np.log([100, 200, 400, 800])
    assert found.half == pytest.approx(2.306 * 0.01 / np.sqrt(((x - x.mean()) ** 2).sum()), rel=1e-3)  # t of 8
    assert [round(theory(2), 4) for theory in recipe.THEORY.values()] == [0.0, -0.6, -0.6667]


def test_measurements_are_integrals_of_the_best_bandwidth() -> None:
    run = select(chosen(), d=1, n=64, estimator="local constant").mean(numeric_only=True)
    where = recipe.places(1, 24, 3)
    at, weights = where.points.numpy(), where.weights.numpy()
    samples = [recipe.design(1, 64, i, 0.5) for i in range(6)]

    def errors(h: float) -> np.ndarray:
        off = [fitted(x.numpy(), y.numpy(), at, h, 0) - 2 * (at**2).sum(1)[:, None] for x, y in samples]
        return (np.array(off)[..., 1:] ** 2).mean(-1)

    grid = recipe.bandwidths("local constant", 1, 64)
    whole = [(errors(h) @ weights).mean() for h in grid]
    best = int(np.argmin(whole))
    assert run["bandwidth"] == pytest.approx(grid[best])
    assert abs(run["whole"] / whole[best] - 1) < 1e-3
    own = errors(grid[best])
    layer = 1 - np.abs(at[:, 0]) < grid[best]
    assert abs(run["boundary"] / (own[:, layer] @ weights[layer]).mean() - 1) < 1e-3
    assert abs(run["interior"] / (own[:, ~layer] @ weights[~layer]).mean() - 1) < 1e-3
