"""The local linear model by rows, in torch and in numba, against dense systems in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.grammar import Spec
from regard.pairwise.blocked.live_rows import MANY, grouped
from regard.pairwise.blocked.weighted_rows import FewRows, WeightedRows
from regard.pairwise.cpu.implementation import MISSING, NumbaRows

N, Q, D = 2, 9, 5
FORMS: dict[str, Any] = {"torch": grouped}
if MISSING is None:
    FORMS["numba"] = NumbaRows(Spec.parse("biweight")).by_row

pytestmark = [pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("dtype", [torch.float32, torch.float64])]


def drawn(width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [N, Q, width] of 0, 1, 2, ... keys a row and one row of all keys, coordinates and right sides."""
    make = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.rand(*shape, generator=make, dtype=torch.float64)  # noqa: E731
    count = torch.tensor([[0, 1, 2, 3, D, D, 2 * D, 2 * D + 1, width]] * N)
    p = torch.where(rand(N, Q, width).argsort(-1).argsort(-1) < count[..., None], 0.1 + rand(N, Q, width), 0)
    p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    return p, 3 + rand(N, width, D), rand(N, Q, D)


def system_of(kind: Callable[..., WeightedRows], dtype: torch.dtype, p: Tensor, y: Tensor, ridge: Any) -> WeightedRows:
    ridge = ridge.to(dtype) if isinstance(ridge, Tensor) else ridge
    return kind(p.to(dtype), y.to(dtype), torch.ones(y.shape[:2], dtype=torch.bool), ridge, None, y.shape[1], True)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - exact).abs().amax() / exact.abs().amax().clamp(min=1e-30)
    assert error < (2e-4 if dtype == torch.float32 else 1e-11), error


def most_keys(form: str, width: int) -> int:
    """The most weighted keys of a row that is not left to the caller."""
    return width if form == "numba" else 2 * D if width >= MANY * D else D


RIDGES: dict[str, Any] = {
    "number": 0.1,
    "rows": 0.05 + torch.arange(N * Q, dtype=torch.float64).view(N, Q, 1) / 20,
    "coordinates": 0.05 + torch.arange(N * Q * D, dtype=torch.float64).view(N, Q, D) / 100,
}


@pytest.mark.parametrize("kind", [WeightedRows, FewRows])
@pytest.mark.parametrize("ridge", RIDGES)
@pytest.mark.parametrize("width", [40, 16 * D])
@pytest.mark.parametrize("backward", [False, True])
def test_solutions(form: str, dtype: torch.dtype, kind: Any, ridge: str, width: int, backward: bool) -> None:
    """(C + ridge) t = right, for right sides of queries and, backward, for those made of the keys."""
    p, y, right = drawn(width)
    mean = p @ y
    away = y[:, None] - mean[:, :, None]
    source = torch.rand(N, Q, width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    source = source - (p * source).sum(-1, keepdim=True)
    if backward:
        right = (p * source) @ y
    number = RIDGES[ridge]
    diagonal = (number if isinstance(number, Tensor) else torch.full((1,), number, dtype=torch.float64)).expand(N, Q, D)
    matrix = (p[..., None] * away).transpose(-1, -2) @ away + torch.diag_embed(diagonal)
    exact = torch.linalg.solve(matrix, right)
    slopes = p * (away @ exact[..., None])[..., 0]

    system = system_of(kind, dtype, p, y, number)
    given = source.to(dtype).flatten(0, 1) if backward else None
    value, corrections, residual, left, squares = FORMS[form](system, right.to(dtype).flatten(0, 1), given)
    few = (p > 0).sum(-1).flatten() <= most_keys(form, width)
    assert torch.equal(left, ~few)
    empty = (p > 0).sum(-1).flatten() == 0
    close(value[few], exact.flatten(0, 1)[few], dtype)
    close(corrections[few], slopes.flatten(0, 1)[few], dtype)
    assert not corrections[empty].any()
    size = (p @ system.y.double().square().sum(-1, keepdim=True)).flatten()
    if ridge == "coordinates":
        assert (squares[few] >= size[few] * (1 - 1e-5)).all()
    else:
        close(squares[few], size[few], dtype)
    assert residual.max() < (1e-4 if dtype == torch.float32 else 1e-11)


def test_the_residual_is_that_of_the_result(form: str, dtype: torch.dtype) -> None:
    """A tiny ridge leaves a residual that can be measured; without `counted` it is not computed."""
    p, y, right = (x.to(dtype) for x in drawn(40))
    system = system_of(WeightedRows, dtype, p, y, 1e-3 * torch.finfo(dtype).eps ** 0.5)
    flat = right.flatten(0, 1)
    value, corrections, residual, left, _ = FORMS[form](system, flat, None)
    away = (system.y[:, None] - system.mean[:, :, None]).double().flatten(0, 1)
    image = (corrections[:, None].double() @ away)[:, 0]
    rest = (flat.double() - image - system.ridge * value.double()).norm(dim=-1) / flat.double().norm(dim=-1)
    assert rest[~left].max() > 0
    assert torch.allclose(residual[~left].double(), rest[~left], rtol=0.3, atol=4 * torch.finfo(dtype).eps)
    system.counted = False
    assert not FORMS[form](system, flat, None)[2].any()


def test_sums_over_many_keys(form: str, dtype: torch.dtype) -> None:
    """Rounding errors of rows with 60,000 weighted keys are those of rows with few."""
    make = torch.Generator().manual_seed(0)
    p, y, right = (torch.rand(1, *x, generator=make, dtype=torch.float64) for x in ((2, 60_000), (60_000, D), (2, D)))
    system = system_of(WeightedRows, dtype, p / p.sum(-1, keepdim=True), y, 1e-3)
    value, _, residual, left, _ = FORMS[form](system, right.to(dtype).flatten(0, 1), None)
    if form == "torch":
        assert left.all()
        return
    away = (system.y[:, None] - system.mean[:, :, None]).double()
    matrix = (system.p.double()[..., None] * away).transpose(-1, -2) @ away + 1e-3 * torch.eye(D, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, right.to(dtype).double())[0]
    most = 2e-6 if dtype == torch.float32 else 1e-13
    assert (value.double() - exact).norm() < most * exact.norm()
    assert residual.max() < most


def test_singular_systems_are_left(form: str, dtype: torch.dtype) -> None:
    """A row with a ridge of 0, or so small that the dual system is singular, is left to the caller; others are not."""
    p, y, right = drawn(40)
    ridge = torch.full((N, Q, 1), 0.1, dtype=torch.float64)
    ridge[0, 3], ridge[1, 4] = 0.0, 1e-30
    left = FORMS[form](system_of(WeightedRows, dtype, p, y, ridge), right.to(dtype).flatten(0, 1), None)[3]
    expected = (p > 0).sum(-1) > most_keys(form, 40)
    expected[0, 3] = expected[1, 4] = True
    assert torch.equal(left, expected.flatten())


def test_singular_covariances_are_left(form: str, dtype: torch.dtype) -> None:
    """Two equal coordinates and a ridge below their rounding errors: rows with more keys than coordinates are left."""
    p, y, right = drawn(40)
    y[..., 1] = y[..., 0]
    left = FORMS[form](system_of(WeightedRows, dtype, p, y, 1e-25), right.to(dtype).flatten(0, 1), None)[3]
    assert left[(p > 0).sum(-1).flatten() > D].all()


def test_right_sides_with_other_strides(form: str, dtype: torch.dtype) -> None:
    """What is returned does not depend on how the right sides lie in memory."""
    p, y, right = (x.to(dtype) for x in drawn(40))
    flat = right.flatten(0, 1)
    system = system_of(WeightedRows, dtype, p, y, 0.1)
    one, two = (FORMS[form](system, x, None) for x in (flat, flat.t().contiguous().t()))
    assert all(torch.equal(x[~one.left], z[~one.left]) for x, z in zip(one, two, strict=True))


def test_rows_do_not_depend_on_each_other(form: str, dtype: torch.dtype) -> None:
    """A row keeps all bits if others have more, fewer or other keys."""
    p, y, right = drawn(40)
    other = p.clone()
    other[:, 4:] = drawn(40, seed=7)[0].flip(1)[:, 4:]
    systems = [system_of(WeightedRows, dtype, x, y, 0.1) for x in (p, other)]
    one, two = (FORMS[form](system, right.to(dtype).flatten(0, 1), None) for system in systems)
    for x, z in zip(one, two, strict=True):
        assert torch.equal(x.unflatten(0, (N, Q))[:, :4], z.unflatten(0, (N, Q))[:, :4])
