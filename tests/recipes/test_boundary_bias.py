"""`regard reproduce boundary-bias` at a tiny size, and its parts against numpy."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from regard.cli import main
from regard_recipes.local_linear import boundary_bias as recipe

TINY = ["--dims", "1", "2", "--sizes", "64", "256", "--samples", "6", "--radii", "24", "--directions", "3"]
NAMES = {"global linear", "local constant", "local linear"}


def record(folder: Path) -> dict:
    return json.loads((folder / "boundary-bias.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("boundary") / "out"
    assert main(["reproduce", "boundary-bias", "--out", str(out), *TINY]) == 0
    return out


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
    config = recipe.BoundaryBiasConfig(noise=0.5)
    x, y = (u.numpy() for u in recipe.design(config, dim, 4000, 0))
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
    again, other = recipe.design(config, dim, 4000, 0)[0], recipe.design(config, dim, 4000, 1)[0]
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
    config = recipe.BoundaryBiasConfig()
    x, y = recipe.design(config, dim, 200, 3)
    at = recipe.places(dim, 12, 3).points
    for degree, name in ((0, "local constant"), (1, "local linear")):
        for h in (0.25, 0.5):
            wanted = fitted(x.numpy(), y.numpy(), at.numpy(), h, degree)
            found = recipe.ESTIMATORS[name][0](x, y, at, h).numpy()
            assert np.abs(found - wanted).max() < 1e-6, (name, h)
    affine = np.concatenate([np.ones((200, 1)), x.numpy()], 1)
    line = np.linalg.solve(affine.T @ affine, affine.T @ y.numpy())
    wanted = np.concatenate([np.ones((len(at), 1)), at.numpy()], 1) @ line
    assert np.abs(recipe.ESTIMATORS["global linear"][0](x, y, at, 1.0).numpy() - wanted).max() < 1e-9


def test_slopes_and_their_errors() -> None:
    sizes = [100, 200, 400, 800]
    law = [(3.0 * n**-0.75, 0.01 * 3.0 * n**-0.75) for n in sizes]
    found, error = recipe.slope(sizes, law)
    assert abs(found + 0.75) < 1e-4
    x = np.log(sizes)
    assert abs(error - 0.01 / np.sqrt(((x - x.mean()) ** 2).sum())) < 1e-4
    assert [round(recipe.ESTIMATORS[name][1](2), 4) for name in recipe.ESTIMATORS] == [0.0, -0.6, -0.6667]


def test_measurements_are_integrals_of_the_best_bandwidth(tiny: Path) -> None:
    run = record(tiny)["runs"]["1"]["64"]["local constant"]
    config = recipe.BoundaryBiasConfig(radii=24, directions=3, samples=6)
    where = recipe.places(1, 24, 3)
    at, weights = where.points.numpy(), where.weights.numpy()
    samples = [recipe.design(config, 1, 64, i) for i in range(6)]

    def errors(h: float) -> np.ndarray:
        off = [fitted(x.numpy(), y.numpy(), at, h, 0) - 2 * (at**2).sum(1)[:, None] for x, y in samples]
        return (np.array(off)[..., 1:] ** 2).mean(-1)

    grid = recipe.bandwidths("local constant", 1, 64)
    whole = [(errors(h) @ weights).mean() for h in grid]
    best = int(np.argmin(whole))
    assert run["h"] == grid[best]
    assert abs(run["whole"][0] / whole[best] - 1) < 1e-3
    own = errors(run["h"])
    layer = 1 - np.abs(at[:, 0]) < run["h"]
    assert abs(run["boundary"][0] / (own[:, layer] @ weights[layer]).mean() - 1) < 1e-3
    assert abs(run["interior"][0] / (own[:, ~layer] @ weights[~layer]).mean() - 1) < 1e-3
    assert abs(run["whole"][1] - (own @ weights).std(ddof=1) / 6**0.5) < 1e-3 * run["whole"][0]


def test_local_models_learn_and_the_global_one_does_not(tiny: Path) -> None:
    found = record(tiny)
    for d in ("1", "2"):
        small, large = (found["runs"][d][n] for n in ("64", "256"))
        assert set(small) == NAMES
        assert large["global linear"]["whole"][0] > 0.8 * small["global linear"]["whole"][0]
        for name in ("local constant", "local linear"):
            assert large[name]["whole"][0] < 0.7 * small[name]["whole"][0]
            assert large[name]["h"] < small[name]["h"]
            assert large[name]["inside_grid"]
        assert (
            large["local linear"]["whole"][0] < large["local constant"]["whole"][0] < large["global linear"]["whole"][0]
        )
        rates = found["rates"][d]
        for name in NAMES:
            log = [np.log(found["runs"][d][n][name]["whole"][0]) for n in ("64", "256")]
            assert abs(rates[name]["whole"][0] - (log[1] - log[0]) / np.log(4)) < 1e-3
            assert rates[name]["theory"] == round(recipe.ESTIMATORS[name][1](int(d)), 4)


def test_the_same_seed_gives_the_same_numbers_and_files(tiny: Path, tmp_path: Path) -> None:
    few = [*TINY, "--dims", "1"]
    for name, seed in (("a", 0), ("b", 1)):
        assert main(["reproduce", "boundary-bias", "--out", str(tmp_path / name), *few, "--seed", str(seed)]) == 0
    first, same, other = record(tiny), record(tmp_path / "a"), record(tmp_path / "b")
    assert first["runs"]["1"] == same["runs"]["1"] != other["runs"]["1"]
    assert set(first["config"]) == {f.name for f in fields(recipe.BoundaryBiasConfig)}
    assert (tiny / "boundary-bias.png").read_bytes().startswith(b"\x89PNG")
    said = first["rates"]["2"]["local linear"]["whole"]
    assert (
        f"| d = 2, local linear | -0.667 | {said[0]:.3f} ± {said[1]:.3f} |" in (tiny / "boundary-bias.md").read_text()
    )


def test_quick_gives_way_to_what_is_asked_for() -> None:
    quick = recipe.effective(recipe.BoundaryBiasConfig(quick=True, samples=3))
    assert quick.samples == 3
    assert quick.sizes == recipe.QUICK["sizes"]
    assert recipe.effective(recipe.BoundaryBiasConfig()).sizes == recipe.BoundaryBiasConfig().sizes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dims", "4"), "--dims is (4,), expected whole numbers from 1 to 3."),
        (("--sizes", "64"), "expected two or more numbers from 32 to 131072."),
        (("--samples", "1"), "--samples is 1, expected at least 2."),
        (("--noise", "0"), "--noise is 0, expected a number between 0 and 1000."),
        (("--seed", "-1"), "--seed is -1, expected 0 to"),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "boundary-bias", "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()
