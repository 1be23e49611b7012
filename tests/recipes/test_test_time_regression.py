"""`regard reproduce test-time-regression` at a tiny size: every number against a plain loop in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from oracles import entmax_row

from regard.cli import main
from regard.tasks import ConeRegression
from regard_recipes.lib.intervals import ratio_interval
from regard_recipes.lib.results import Results, load, select
from regard_recipes.local_linear import regression_at_test_time as recipe
from regard_recipes.local_linear import regression_at_test_time_methods as made

SMALL = (
    "--dims 4 16 --segments 8 32 --length 64 --sequences 3 --held-out 1 --query-noise 0.5 --noisy-segment 32 "
    "--workers 0 --specs softmax biweight --residuals softmax+mesa biweight+linear "
    "--scales 0.5 1 --ridges 0.1 1 --tol 1e-4"
)
TINY = SMALL.split()
NAMES = (
    "softmax", "biweight", "local-linear", "local-linear[biweight]", "elu", "linear", "mesa", "softmax+mesa",
    "biweight+linear", "random", "zero", "oracle",
)  # fmt: skip


def rows_of(folder: Path) -> Results:
    return load(recipe.Regression, folder)[1]


def cell(found: Results, protocol: str, dim: int, segment: int, query_noise: float = 0.0) -> pd.DataFrame:
    """The rows of one cell, one for each method, way and sequence."""
    return found.select(kind="error", protocol=protocol, d=dim, S=segment, **{"query noise": query_noise})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("regression") / "out"
    assert main(["reproduce", "test-time-regression", "--out", str(out), *TINY]) == 0
    return out


def plain(name: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: int, scale: float, ridge: float) -> np.ndarray:
    """One prediction from the first `seen` pairs."""
    d = len(q)
    k, v = k[:seen], v[:seen]
    if not seen:
        return np.zeros(d)
    if name == "elu":
        feature = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))  # noqa: E731
        w = feature(k) @ feature(q)
        return w @ v / w.sum()
    if name in ("mesa", "linear"):
        state = k.T @ v
        return q @ (np.linalg.solve(k.T @ k + ridge * np.eye(d), state) if name == "mesa" else state / (seen + d + 1))
    kernel = "biweight" if "biweight" in name else "softmax"
    z = k @ q * scale / np.sqrt(d)
    p = entmax_row(z, 1.5)[0].astype(float) if kernel == "biweight" else np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    if name == kernel:
        return p @ v
    if "+" in name:  # equation 9 as it is written, residual by residual
        fitted = [plain(name.split("+")[1], x, k, v, seen, 1.0, ridge) for x in (*k, q)]
        return p @ (v - np.array(fitted[:-1])) + fitted[-1]
    away = np.concatenate([np.ones((seen, 1)), k - q], 1)  # equation 6, the intercept free, its ridge relative
    penalty = np.diag([0.0] + [ridge] * d)
    return np.linalg.solve(away.T @ (p[:, None] * away) + penalty, away.T @ (p[:, None] * v))[0]


@pytest.mark.parametrize("strict", [False, True])
def test_every_method_is_its_formula(strict: bool) -> None:
    examples = ConeRegression(dim=3, length=24, segment=6, query_noise=0.3).examples(5, range(2))
    q, k, v = (getattr(examples, name).double().numpy() for name in ("queries", "keys", "values"))
    known = made.methods(("softmax", "biweight"), ("softmax+mesa", "biweight+linear", "softmax+linear"), 1e-6, 0)
    for method in known:
        found = method.predict(examples, 1.5, 0.3, strict).double().numpy()
        if method.name in ("random", "zero"):
            continue
        scale = 1.5 if "scale" in method.takes else 1.0
        wanted = [
            [plain(method.name, q[b, i], k[b], v[b], i + (not strict), scale, 0.3) for i in range(24)] for b in range(2)
        ]
        assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max(), method.name


def test_the_random_predictor_has_the_law_of_a_value() -> None:
    task = ConeRegression(dim=16, length=256, segment=64, noise=0.0)
    examples = task.examples(0, range(8))
    (method,) = (m for m in made.methods((), (), 1e-3, 3) if m.name == "random")
    guess = method.predict(examples, 1.0, 0.1, False)
    size = examples.values.square().sum().item()
    assert abs(guess.square().sum().item() / size - 1) < 0.05
    assert abs((guess * examples.values).sum().item() / size) < 0.02
    assert torch.equal(guess, method.predict(examples, 2.0, 1.0, True))


def test_every_cell_is_measured(tiny: Path) -> None:
    found = rows_of(tiny)
    grid = {(d, s, 0.0) for d in (4, 16) for s in (8, 32)} | {(d, 32, 0.5) for d in (4, 16)}
    cells = list(found.select(kind="error").groupby(recipe.KEY))
    assert {key for key, _ in cells} == {(p, *at) for p in recipe.PROTOCOLS for at in grid}
    for (protocol, *_, noise), rows in cells:
        assert tuple(dict.fromkeys(rows["method"])) == NAMES
        ways = ["given"] if protocol == recipe.SELF else ["given", "chosen"]
        assert (rows.groupby(["method", "how"])["sequence"].nunique() == 3).all()
        assert list(dict.fromkeys(rows["how"])) == ways
        given = select(rows, how="given")
        assert set(given["scale"]) == {1.0}
        assert set(given["ridge"]) == {0.1}
        assert set(rows["scale"]) <= {0.5, 1.0}
        assert set(rows["ridge"]) <= {0.1, 1.0}
        curves = found.select(kind="curve", protocol=protocol, method="mesa", **{"query noise": noise})
        assert len(curves) == (0 if noise else 4 * len(ways))


@pytest.mark.parametrize("protocol", ["self-included", "strictly-past"])
def test_numbers_are_those_of_a_plain_loop(tiny: Path, protocol: str) -> None:
    one = select(cell(rows_of(tiny), protocol, 4, 8), how="given")
    task = ConeRegression(dim=4, length=64, segment=8, noise=0.1)
    error: dict[str, list[list[float]]] = {name: [] for name in ("softmax", "local-linear", "mesa", "zero")}
    for index in range(3):
        example = task.example(0, index)
        k, v = example.keys.double().numpy(), example.values.double().numpy()
        for name, rows in error.items():
            guess = [
                np.zeros(4) if name == "zero" else plain(name, k[i], k, v, i + (protocol == "self-included"), 1.0, 0.1)
                for i in range(64)
            ]
            rows.append([float(((g - v[i]) ** 2).sum()) for i, g in enumerate(guess)])
    later = np.arange(64) >= 8
    places = {"first": ~later, "later": later, "late": later & (np.arange(64) % 8 >= 4), "whole": later | True}
    for name, rows in error.items():
        given = select(one, method=name)
        assert given["seed"].tolist() == [0, 1, 2]
        for part, where in places.items():
            means = np.array(rows)[:, where].mean(1)
            assert np.allclose(given[part], means, rtol=2e-3, atol=1e-6), (name, part)
            base = np.array(error["local-linear"])[:, where].mean(1)
            found = ratio_interval(given[part], select(one, method="local-linear")[part])
            ratio = means.mean() / base.mean()
            assert abs(found.mean / ratio - 1) < 2e-3
            half = 4.3027 * ratio * (means / means.mean() - base / base.mean()).std(ddof=1) / np.sqrt(3)  # t of 2
            assert abs(found.half - half) < 1e-2 * ratio
    if protocol == "self-included":
        (curve,) = rows_of(tiny).select(kind="curve", protocol=protocol, d=4, S=8, method="softmax")["curve"]
        assert np.allclose(curve, np.array(error["softmax"]).mean(0), rtol=2e-3)


def test_the_choice_is_the_best_of_the_grid_on_other_sequences(tiny: Path) -> None:
    one = select(cell(rows_of(tiny), "strictly-past", 4, 32), how="chosen", sequence=0)
    example = ConeRegression(dim=4, length=64, segment=32, noise=0.1).example(1, 0)
    k, v = example.keys.double().numpy(), example.values.double().numpy()

    def score(name: str, scale: float, ridge: float) -> float:
        return sum(float(((plain(name, k[i], k, v, i, scale, ridge) - v[i]) ** 2).sum()) for i in range(64))

    for name in ("softmax", "local-linear", "local-linear[biweight]", "mesa"):
        (chosen,) = select(one, method=name).itertuples()
        scales, ridges = (0.5, 1.0) if name != "mesa" else (1.0,), (0.1, 1.0) if name != "softmax" else (0.1,)
        grid = [(scale, ridge) for scale in scales for ridge in ridges]
        assert (chosen.scale, chosen.ridge) == min(grid, key=lambda at: score(name, *at))


def test_the_orderings_of_the_paper_and_of_the_strict_past(tiny: Path) -> None:
    found = rows_of(tiny)
    mean = lambda c, name, part, how: select(c, method=name, how=how)[part].mean()  # noqa: E731
    share = lambda c, name, part, how: mean(c, name, part, how) / mean(c, "zero", part, how)  # noqa: E731
    for segment in (8, 32):
        own = cell(found, "self-included", 16, segment)
        assert share(own, "local-linear", "later", "given") < 0.6 * share(own, "softmax", "later", "given")
        assert share(own, "mesa", "later", "given") > share(own, "local-linear", "later", "given")
        assert share(own, "mesa", "first", "given") < 0.01
        assert share(own, "local-linear[biweight]", "later", "given") < share(own, "biweight", "later", "given")
    past = cell(found, "strictly-past", 16, 8)
    best = min(share(past, name, "later", "chosen") for name in NAMES if name not in ("oracle", "zero"))
    assert best > 0.8  # nothing works: eight pairs of sixteen channels
    assert share(past, "oracle", "later", "chosen") < best
    noisy = cell(found, "self-included", 16, 32, 0.5)
    assert share(noisy, "local-linear", "whole", "given") > share(
        cell(found, "self-included", 16, 32), "local-linear", "whole", "given"
    )


def test_the_same_seed_gives_the_same_numbers(tiny: Path, tmp_path: Path) -> None:
    few = [*TINY, "--dims", "4", "--segments", "32", "--query-noise", "0"]
    found = []
    for name, seed in (("a", 0), ("b", 1)):
        out = str(tmp_path / name)
        assert main(["reproduce", "test-time-regression", "--out", out, *few, "--seed", str(seed)]) == 0
        found.append(cell(rows_of(tmp_path / name), "strictly-past", 4, 32)["whole"].tolist())
    assert found[0] == cell(rows_of(tiny), "strictly-past", 4, 32)["whole"].tolist() != found[1]


def test_what_is_left_behind(tiny: Path) -> None:
    pictures = {path.name for path in tiny.glob("*.png")}
    whats = ("ratio", "self-included", "strictly-past", "noise")
    assert pictures == {f"test-time-regression-{what}.png" for what in whats}
    assert all((tiny / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    text = (tiny / "test-time-regression.md").read_text()
    rows = select(cell(rows_of(tiny), "self-included", 4, 8), how="given")
    own, softmax = (select(rows, method=name)["first"] for name in ("local-linear", "softmax"))
    assert f"| self-included | 4 | 8 | {ratio_interval(own, softmax).text(3)} |" in text
    made, results = load(recipe.Regression, tiny)
    claims = {claim.wording: claim for claim in made.claims(results)}
    wide = claims["LLA adapts to a changed map better than softmax attention"]
    assert list(wide.estimates) == ["d = 16, S = 8", "d = 16, S = 32"]
    assert all(estimate.mean < 1 for estimate in wide.estimates.values())


def test_wide_cells_have_fewer_sequences() -> None:
    small = recipe.RegressionConfig()
    assert [recipe.count(small, d) for d in (8, 32, 64, 128, 4096)] == [32, 32, 16, 8, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--segments", "24"), "length 1024 and segment 24 make"),
        (("--dims", "0"), "dim is 0, expected a whole number >= 1"),
        (("--specs", "biweight"), "--specs lacks softmax"),
        (("--specs", "softmax", "softmx"), "unknown spec 'softmx'. Did you mean"),
        (("--specs", "softmax", "local-linear"), "is a local linear model already"),
        (("--residuals", "softmax+meza"), "unknown state 'meza' of 'softmax+meza'. Did you mean 'mesa'?"),
        (("--ridges", "0"), "--ridges is 0, expected 1e-06 to 1e+06."),
        (("--sequences", "0"), "--sequences is 0, expected at least 1."),
        (("--held-out", "0"), "--held-out is 0, expected at least 1."),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "test-time-regression", "--out", str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "out").exists()
