"""`regard reproduce lla-variants`: the paper's blocks and the formulas written out, and what a small run leaves."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from contracts import oracle
from tiny_runs import tiny

import regard
from regard.grammar.solvers import BlockDiagonal, Cholesky
from regard.tasks import ConeRegression
from regard_recipes.lib.recipe import select
from regard_recipes.local_linear import lla_variants as recipe
from regard_recipes.local_linear._variants import COSTS, costs
from regard_recipes.local_linear.lla_numerics_schemes import q_centred_blocks


@pytest.fixture
def found() -> pd.DataFrame:
    return tiny("lla-variants")[1].frame


def weighted(k: np.ndarray, i: int, seen: slice) -> tuple[np.ndarray, np.ndarray]:
    """Kernel weights with sum 1 of the keys that position i sees, and those keys less the query."""
    score = k[seen] @ k[i] / np.sqrt(k.shape[1])
    w = np.exp(score - score.max())
    return w / w.sum(), k[seen] - k[i]


def masked_blocks(matrix: np.ndarray, count: int) -> np.ndarray:
    """With 0 outside its diagonal blocks."""
    place = np.arange(len(matrix)) // (len(matrix) // count)
    return np.where(place[:, None] == place[None, :], matrix, 0.0)


def papers(k: np.ndarray, v: np.ndarray, ridge: float, count: int, strict: bool) -> tuple[np.ndarray, np.ndarray]:
    """Equation 8 with the diagonal blocks of Sigma, and delta / omega."""
    outs, deltas = [np.zeros(v.shape[1])] * strict, [1.0] * strict
    for i in range(strict, len(k)):
        seen = slice(0, i if strict else i + 1)
        w, z = weighted(k, i, seen)
        sigma = masked_blocks((w[:, None] * z).T @ z + ridge * np.eye(k.shape[1]), count)
        rho = np.linalg.solve(sigma, w @ z)
        deltas.append(1 - w @ z @ rho)
        outs.append((w * (1 - z @ rho)) @ v[seen] / deltas[-1])
    return np.array(outs), np.array(deltas)


def covariances(k: np.ndarray, v: np.ndarray, ridge: float, count: int, window: int | None, strict: bool) -> np.ndarray:
    """The same with the diagonal blocks of the covariance."""
    solver = BlockDiagonal(count) if count > 1 else Cholesky()
    spec = replace(regard.Spec.parse("local-linear"), ridge=ridge, solver=solver)
    seen = oracle.visible(1, 1, len(k), len(k), is_causal=True, window=window, exclude_self=strict)[0, 0]
    keys, values = torch.from_numpy(k), torch.from_numpy(v)
    return oracle.of_one_head(spec, keys, keys, values, seen).numpy()


def sequences() -> list[tuple[np.ndarray, np.ndarray]]:
    data = ConeRegression(8, 128, 32, 0.1).examples(0, range(3))
    return list(zip(data.keys.double().numpy(), data.values.double().numpy(), strict=True))


def error(outs: list[np.ndarray], pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    off = sum(((out - v)[32:] ** 2).sum() for out, (_, v) in zip(outs, pairs, strict=True))
    return float(off / sum((v[32:] ** 2).sum() for _, v in pairs))


def record(found: pd.DataFrame, name: str, ridge: float | None, protocol: str = recipe.SELF) -> Any:
    rows = select(found, variant=name, protocol=protocol)
    (one,) = rows[rows["ridge"].isna() if ridge is None else rows["ridge"] == ridge].itertuples()
    return one


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_papers_blocks_are_those_of_sigma(count: int, strict: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    k, v = (torch.randn(140, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out, delta = q_centred_blocks(k, v, [0.5], [count], strict)[0.5, count]
    expected, share = papers(k.numpy(), v.numpy(), 0.5, count, strict)
    np.testing.assert_allclose(delta, share, atol=1e-9)
    np.testing.assert_allclose(out * delta[:, None], expected * share[:, None], atol=1e-8)


@pytest.mark.parametrize("protocol", ["self-included", "strictly-past"])
def test_stored_errors_are_those_of_the_formulas(found: pd.DataFrame, protocol: str) -> None:
    pairs = sequences()
    strict = protocol == "strictly-past"
    for name, ridge, count, window in (
        ("auto", 0.1, 1, None), ("cholesky", 1.0, 1, None), ("blocks 8", 1.0, 8, None), ("blocks 2", 0.1, 2, None),
        ("window 16", 0.1, 1, 16), ("blocks 4, window 32", 1.0, 4, 32),
    ):  # fmt: skip
        expected = error([covariances(k, v, ridge, count, window, strict) for k, v in pairs], pairs)
        assert record(found, name, ridge, protocol).error == pytest.approx(expected, rel=5e-3), name
    for their in select(found, group=recipe.SIGMA, protocol=protocol, blocks=[1, 8]).itertuples():
        made = [papers(k, v, their.ridge, int(their.blocks), strict) for k, v in pairs]
        assert their.error == pytest.approx(error([out for out, _ in made], pairs), rel=1e-3)
        assert their.not_positive == pytest.approx(np.mean([delta[32:] <= 0 for _, delta in made]), abs=1e-3)


def test_budgets_end_at_what_they_approximate(found: pd.DataFrame) -> None:
    softmax = {protocol: record(found, "softmax", None, protocol) for protocol in (recipe.SELF, recipe.PAST)}
    assert record(found, "sdpa", None).error == pytest.approx(softmax[recipe.SELF].error, rel=1e-2)
    for ridge in (0.1, 1):
        for protocol, plain in softmax.items():
            none, full = (record(found, name, ridge, protocol) for name in ("steps 0", "auto"))
            assert (none.error, none.half) == pytest.approx((plain.error, plain.half), rel=1e-2)
            assert record(found, "tol 0.001", ridge, protocol).error == pytest.approx(full.error, rel=5e-3)
        counts = [record(found, f"steps {n}", ridge).steps for n in (0, 1, 4)]
        assert counts[0] == 0
        assert 0.9 < counts[1] <= 1
        assert 2 < counts[2] <= 4
        assert np.isnan(record(found, "cholesky", ridge).steps)


def test_costs_are_those_of_counted_operations() -> None:
    """Written out as sums of products: an [a, b] by [b, c] product is 2 a b c operations."""
    n, d, steps, g, tile = 100, 16, 5, 4, 128
    columns = {"cost": list(COSTS), "keys": n, "steps": steps, "blocks": g, "microseconds": 2.0}
    found = costs(pd.DataFrame(columns, list(COSTS)), d)
    assert found.index.tolist() == list(COSTS)
    product, s = 2 * n * d, d // g
    forming = {size: 2 * n * blocks * size * (size + 1) / 2 for blocks, size in ((1, d), (g, s))}  # symmetric matrices
    assert found["flops"].to_dict() == pytest.approx({
        "softmax": 2 * product,
        "mesa": steps * 2 * d * d + 3 * 2 * d * d,
        "lla, weights again": 2 * product + 3 * product * steps + 3 * product,
        "lla, weights kept": 2 * product + 2 * product * steps + 2 * product,
        "lla, direct": forming[d] + d**3 / 3 + 4 * product,
        "block-diagonal, cg": forming[s] + steps * g * 2 * s * s + 4 * product,
        "block-diagonal, direct": forming[s] + g * s**3 / 3 + 4 * product,
    })  # fmt: skip
    assert found["numbers"][:3].tolist() == [2 * n * d / tile, 4 * d, (steps + 3) * n * d / tile]
    assert found["speed"]["softmax"] == 2 * product / 2e3


def test_every_row_has_its_cost_and_times(found: pd.DataFrame) -> None:
    own = found[found["group"] != recipe.SIGMA]
    some = {f"blocks {g}" for g in (1, 2, 4, 8)} | {"sdpa", "mesa", "window 16", "softmax, window 32"}
    assert some <= set(own["variant"])
    assert (own["fastest"] > 0).all()
    assert own["microseconds"].between(own["fastest"], own["slowest"]).all()
    assert record(found, "auto", 1).keys == 64.5
    assert record(found, "window 16", 1).keys == (sum(range(1, 16)) + 113 * 16) / 128
    measured = costs(own, 8)
    assert record(measured, "softmax", None).flops == 4 * 64.5 * 8
    steps = record(found, "tol 0.1", 1).steps
    assert record(measured, "tol 0.1", 1).flops == pytest.approx((4 * steps + 8) * 64.5 * 8)
