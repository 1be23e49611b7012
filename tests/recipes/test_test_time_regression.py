"""`regard reproduce test-time-regression` at a tiny size: every number against a plain loop in numpy."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from contracts import oracle
from tiny_runs import tiny

import regard
from regard.tasks import ConeRegression
from regard_recipes.lib.claims import ratio_interval
from regard_recipes.lib.recipe import Results, select
from regard_recipes.local_linear import _estimators as estimators
from regard_recipes.local_linear import regression_at_test_time as recipe


def cell(found: Results, protocol: str, dim: int, segment: int, query_noise: float = 0.0) -> pd.DataFrame:
    """The rows of one cell, one for each method, way and sequence."""
    return found.select(kind="error", protocol=protocol, d=dim, S=segment, **{"query noise": query_noise})


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
    if "+" in name:  # equation 9 as it is written, residual by residual
        kernel, state = name.split("+")
        fitted = np.array([plain(state, x, k, v, seen, 1.0, ridge) for x in (*k, q)])
        return plain(kernel, q, k, v - fitted[:-1], seen, scale, ridge) + fitted[-1]
    spec = regard.Spec.parse(name)
    spec = replace(spec, ridge=ridge) if spec.degree else spec
    visible = torch.ones(1, seen, dtype=torch.bool)
    tensors = (torch.from_numpy(x) for x in (q[None], k, v))
    return oracle.of_one_head(spec, *tensors, visible, scale=scale / np.sqrt(d)).numpy()[0]


@pytest.mark.parametrize("strict", [False, True])
def test_every_method_is_its_formula(strict: bool) -> None:
    examples = ConeRegression(dim=3, length=24, segment=6, query_noise=0.3).examples(5, range(2))
    q, k, v = (getattr(examples, name).double().numpy() for name in ("queries", "keys", "values"))
    known = estimators.methods(("softmax", "biweight"), ("softmax+mesa", "biweight+linear", "softmax+linear"), 1e-6, 0)
    for method in known:
        found = method.predict(examples, estimators.Setting(1.5, 0.3, strict)).double().numpy()
        if method.name in ("random", "zero"):
            continue
        scale = 1.5 if method.takes_scale else 1.0
        wanted = [
            [plain(method.name, q[b, i], k[b], v[b], i + (not strict), scale, 0.3) for i in range(24)] for b in range(2)
        ]
        assert np.abs(found - wanted).max() < 2e-4 * np.abs(wanted).max(), method.name


def test_the_random_predictor_has_the_law_of_a_value() -> None:
    task = ConeRegression(dim=16, length=256, segment=64, noise=0.0)
    examples = task.examples(0, range(8))
    (method,) = (m for m in estimators.methods((), (), 1e-3, 3) if m.name == "random")
    guess = method.predict(examples, estimators.Setting(1.0, 0.1, False))
    size = examples.values.square().sum().item()
    assert abs(guess.square().sum().item() / size - 1) < 0.05
    assert abs((guess * examples.values).sum().item() / size) < 0.02
    assert torch.equal(guess, method.predict(examples, estimators.Setting(2.0, 1.0, True)))


@pytest.mark.parametrize("protocol", ["self-included", "strictly-past"])
def test_numbers_are_those_of_a_plain_loop(protocol: str) -> None:
    one = select(cell(tiny("test-time-regression")[1], protocol, 4, 8), how="given")
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
        curves = tiny("test-time-regression")[1].select(kind="curve", protocol=protocol, d=4, S=8, method="softmax")
        (curve,) = curves["curve"]
        assert np.allclose(curve, np.array(error["softmax"]).mean(0), rtol=2e-3)


def test_the_choice_is_the_best_of_the_grid_on_other_sequences() -> None:
    one = select(cell(tiny("test-time-regression")[1], "strictly-past", 4, 32), how="chosen", sequence=0)
    example = ConeRegression(dim=4, length=64, segment=32, noise=0.1).example(1, 0)
    k, v = example.keys.double().numpy(), example.values.double().numpy()

    def score(name: str, scale: float, ridge: float) -> float:
        return sum(float(((plain(name, k[i], k, v, i, scale, ridge) - v[i]) ** 2).sum()) for i in range(64))

    for name in ("softmax", "local-linear", "local-linear[biweight]", "mesa"):
        (chosen,) = select(one, method=name).itertuples()
        scales, ridges = (0.5, 1.0) if name != "mesa" else (1.0,), (0.1, 1.0) if name != "softmax" else (0.1,)
        grid = [(scale, ridge) for scale in scales for ridge in ridges]
        assert (chosen.scale, chosen.ridge) == min(grid, key=lambda at: score(name, *at))


def test_wide_cells_have_fewer_sequences() -> None:
    assert [recipe.Regression().count(d) for d in (8, 32, 64, 128, 4096)] == [32, 32, 16, 8, 2]
