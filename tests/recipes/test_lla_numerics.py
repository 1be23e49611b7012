"""`regard reproduce lla-numerics`: its truth and its emulations against the dense oracle, and what a
small run leaves behind."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from contracts import oracle
from tiny_runs import tiny

import regard
from regard.grammar import SolveStatus
from regard_recipes.lib.recipe import select
from regard_recipes.local_linear import lla_numerics as numerics
from regard_recipes.local_linear import lla_numerics_schemes as schemes


@pytest.fixture
def found() -> pd.DataFrame:
    return tiny("lla-numerics")[1].frame


def equation_8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ridge: float) -> np.ndarray:
    """o_i with the ridge times the total weight, in float64."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril()
    spec = regard.Spec.parse(f"gaussian*fixed*linear(ridge={ridge})")
    return oracle.of_one_head(spec, q.double(), k.double(), v.double(), seen).numpy()


def drawn(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(24, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k + 3, v


@pytest.mark.parametrize("ridge", [1.0, 0.01])
def test_the_dense_solution_is_equation_8(ridge: float) -> None:
    q, k, v = drawn()
    t = schemes.dense(q, k, [ridge, 7.0], torch.float64)[ridge]
    np.testing.assert_allclose(schemes.output(q, k, v, t), equation_8(q, k, v, ridge), atol=1e-9)


@pytest.mark.parametrize("name", schemes.SCHEMES)
def test_schemes_without_rounding_are_equation_8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "rounded", lambda x: x)
    monkeypatch.setattr(schemes, "SHIFT", 0.0)
    q, k, v = drawn(1)
    k = k - 3 if name == "q-centred" else k
    outs = dict(schemes.SCHEMES[name](q, k, v, 0.1, (1, 24)))
    expected = equation_8(q, k, v, 0.1)
    assert list(outs) == [1, 24]
    np.testing.assert_allclose(outs[24], expected, atol=1e-4)  # the iteration ends at 1e-6 of the residual
    assert np.abs(outs[1].numpy() - expected).max() > 0.1


def test_products_are_those_of_bfloat16() -> None:
    a = torch.tensor([[1.0, 2**-9]])
    b = torch.tensor([[1.0 + 2**-9], [1.0]])
    assert schemes.product(a, b).item() == 1.0 + 2**-9  # an operand 1 + 2^-9 becomes 1; a sum stays


def test_data_are_what_they_are_called() -> None:
    config = numerics.Numerics(length=512, dim=16)
    q, k, _ = numerics.draw(config, "normalised", 0)
    np.testing.assert_allclose(torch.stack([q, k]).norm(dim=-1), 1.0, atol=1e-6)
    _, k, _ = numerics.draw(config, "anisotropic", 0)
    assert k.shape == (512, 16)
    spread = k.std(0)
    assert 6 < spread[0] / spread[-1] < 16
    assert k.mean(0).norm() > 4
    q, k, _ = numerics.draw(config, "recall", 0)
    near = (q[:, None] - k[None]).norm(dim=-1).tril() + torch.full((512, 512), 99.0).triu(1)
    assert near.amin(1).max() < 1.0
    assert torch.equal(q, numerics.draw(config, "recall", 0)[0])
    assert not torch.equal(q, numerics.draw(config, "recall", 1)[0])
    assert not torch.equal(q, numerics.draw(config, "recall", 0, seed=1)[0])


def budgets(found: pd.DataFrame, family: str, dtype: str, ridge: float) -> pd.DataFrame:
    """The rows of regard itself, by budget."""
    return select(found, kind="budget", data=family, dtype=dtype, ridge=ridge).set_index("budget")


def relative(found: pd.DataFrame, **where: Any) -> float:
    (error,) = select(found, **where)["relative"]
    return float(error)


@pytest.mark.parametrize("family", ["normal", "anisotropic"])
@pytest.mark.parametrize("ridge", [1.0, 0.1])
def test_errors_fall_with_steps_to_what_the_precision_allows(found: pd.DataFrame, family: str, ridge: float) -> None:
    single, half = (budgets(found, family, dtype, ridge) for dtype in ("float32", "bfloat16"))
    for own in (single, half):
        falling = [own["relative"][f"steps {n}"] for n in (1, 4, 16)]
        assert falling == sorted(falling, reverse=True)
        assert own["max_steps"]["steps 16"] <= 16
        assert own["UNCONVERGED"]["steps 1"] > 100
        assert own["OK"]["auto"] == 192
        assert (own[[kind.name for kind in SolveStatus]].sum(axis=1) == 192).all()
        assert (own["not_finite"] == 0).all()
        assert (own["worst_row"] >= 0.5 * own["relative"]).all()
    for tol in (1e-2, 1e-4):
        assert 0 < single["relative"][f"tol {tol:g}"] <= tol
        assert single["max_residual"][f"tol {tol:g}"] <= tol * 1.001
    assert single["relative"]["default"] < 1e-5
    assert 1e-3 < half["relative"]["default"] < 3e-3
    assert single["mean_steps"]["tol 0.01"] < single["mean_steps"]["tol 0.0001"]
    blocks = select(found, kind="block", data=family, dtype="float32", ridge=ridge, budget="default")
    assert blocks["position"].tolist() == [64.0]  # 96 rows are one block
    assert blocks["mean_steps"].tolist() == [single["mean_steps"]["default"]]


def test_stored_errors_are_those_of_equation_8(found: pd.DataFrame) -> None:
    """The schemes' and the floor's data once more, by the textbook form: zero steps would be 1 or more away."""
    q, k, v = (x.bfloat16().float() for x in numerics.draw(numerics.Numerics(length=96, dim=8), "normal", 0))
    expected = equation_8(q, k, v, 1.0)
    np.testing.assert_allclose(schemes.outputs([(q, k, v)], [1.0], torch.float64)[1.0][0], expected, atol=1e-9)
    once, floor = (outs[1.0][0].double().numpy() for outs in schemes.floors_of([(q, k, v)], [1.0]).values())
    off = np.linalg.norm(floor - expected) / np.linalg.norm(expected)
    assert 1e-3 < off < 2e-2
    np.testing.assert_allclose(once, expected, rtol=2**-8)  # half a unit in the last place
    own = {"data": "normal", "dtype": "bfloat16", "ridge": 1.0}
    rounding = relative(found, kind="floor", method="rounding", **own)
    assert 1e-3 < rounding < 2**-8
    assert relative(found, kind="budget", budget="default", **own) == pytest.approx(rounding, rel=0.05)
    assert 0.3 * off < relative(found, kind="floor", method="floor", **own) < 3 * off


def test_errors_leave_out_what_is_not_finite() -> None:
    truth = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]], dtype=torch.float64)
    off = torch.tensor([[[3.0, 4.5], [float("nan"), 0.0]]])
    found = {"absolute": pytest.approx(0.5 / 2**0.5, rel=1e-3), "relative": 0.1, "worst_row": 0.1, "not_finite": 1}
    assert numerics.errors(off, truth) == found
    assert numerics.errors(torch.full((1, 2, 2), torch.inf), truth)["relative"] is None
