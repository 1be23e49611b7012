"""The forward pass of local linear attention, stage by stage, against dense float64 solves.

Legend: B batch, H query heads, N key heads, T queries and keys, D and V features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.grammar import SolveStatus
from regard.pairwise.visibility import Visibility, runs_of
from regard.triton.local_linear.forward import moments, output
from regard.triton.local_linear.solve import Rule, solve
from regard.triton.runtime.span import Span
from regard.triton.runtime.tiles import forced

EXACT = Rule(tol=1e-6, limit=400, direct=False, verify=True)
ALONE = EXACT._replace(direct=True)
ROUNDED = Rule(tol=1e-3, limit=400, direct=False, verify=False)
SCALE = 0.4


@dataclass
class Dense:
    """What the kernels are to find, in float64."""

    lse: Tensor
    mean: Tensor
    vmean: Tensor
    matrix: Tensor
    right: Tensor
    t: Tensor
    out: Tensor
    p: Tensor
    away: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, v: Tensor, ridge: Any, seen: Tensor, scale: Any = SCALE) -> Dense:
        group = x.shape[1] // y.shape[1]
        x, y, v = x.double(), y.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        ridge = ridge.double() if isinstance(ridge, Tensor) else torch.full((1,), ridge, dtype=torch.float64)
        scale = scale.double()[..., None] if isinstance(scale, Tensor) else scale
        z = scale * (x @ y.mT)
        seen = seen.expand(z.shape)
        weight = torch.where(seen, (z - torch.where(seen, z, -1e300).amax(-1, keepdim=True)).clamp(max=0).exp(), 0)
        p = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
        lse = torch.where(seen, z, -torch.inf).logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
        mean = p @ y
        away = y[:, :, None] - mean[:, :, :, None]
        matrix = (p[..., None] * away).mT @ away + torch.diag_embed(ridge.expand(x.shape))
        right = torch.where(seen.any(-1, keepdim=True), x - mean, 0)
        t = torch.linalg.solve(matrix, right)
        e = (away @ t[..., None])[..., 0]
        return cls(lse, mean, p @ v, matrix, right, t, (p * (1 + e)) @ v, p, away)


@dataclass
class Found:
    """One run of the kernels."""

    lse: Tensor
    mean: Tensor
    vmean: Tensor
    t: Tensor
    steps: Tensor
    residual: Tensor
    status: Tensor
    out: Tensor
    counts: Tensor


def run(
    x: Tensor, y: Tensor, v: Tensor, ridge: Any, visible: Visibility, rule: Rule = EXACT, scale: Any = SCALE,
    counted: bool = False, **tiles: int,
) -> Found:  # fmt: skip
    span = Span.of(visible, x.device)
    with forced(**({"rows": 16, "keys": 16} | tiles)):
        first = moments(x, y, v, scale, span, True)
        t, statistics, status = solve(first.right, x, y, scale, ridge, first.lse, first.mean, span, rule)
        out, counts = output(t, x, y, v, scale, first, span, counted=counted)
    return Found(*first[:3], t, statistics[..., 0], statistics[..., 1], status, out, counts)


@dataclass
class Case:
    """Sizes and what is visible."""

    queries: int = 37
    keys: int = 37
    heads: tuple[int, int] = (2, 1)
    dim: int = 5
    value_dim: int = 7
    seen: dict[str, Any] = field(default_factory=lambda: {"causal": True})

    def visibility(self, **more: Any) -> Visibility:
        offset = self.keys - self.queries
        return Visibility(self.queries, self.keys, **{"offset": offset, **self.seen, **more})

    def pairs(self) -> Tensor:
        """[1, 1, Tq, Tk], from the words of `Visibility`, pair by pair."""
        at, key = torch.arange(self.queries)[:, None] + self.keys - self.queries, torch.arange(self.keys)[None]
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool)
        if self.seen.get("causal"):
            seen &= (key < at) if self.seen.get("strict") else (key <= at)
        if self.seen.get("window"):
            seen &= key > at - self.seen["window"] - int(self.seen.get("strict", False))
        if "runs" in self.seen:
            start, stop = self.seen["runs"][:, 0]
            seen &= (key >= start[at[:, 0], None]) & (key < stop[at[:, 0], None])
        return seen[None, None] if self.seen.get("mask") is None else seen & self.seen["mask"]

    def draw(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        make = torch.Generator().manual_seed(seed)
        sizes = (self.heads[0], self.queries, self.dim), (self.heads[1], self.keys, self.dim)
        sizes += ((self.heads[1], self.keys, self.value_dim),)
        x, y, v = (torch.randn(1, *size, generator=make).to(dtype) for size in sizes)
        return x, y, v


def ratio(found: Tensor, expected: Tensor) -> float:
    assert not found.isnan().any()
    return float((found.double() - expected).norm() / expected.norm())


IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([9, 1, 20, 7]))
KEEP = torch.rand(1, 1, 1, 37, generator=torch.Generator().manual_seed(3)) > 0.4
CASES = {
    "causal": Case(),
    "all": Case(seen={}),
    "fewer queries": Case(queries=21),
    "strict": Case(seen={"causal": True, "strict": True}),
    "window": Case(seen={"causal": True, "window": 7}, heads=(1, 1), dim=3),
    "segments": Case(seen={"causal": True, "runs": runs_of(IDS[None])}),
    "mask": Case(seen={"causal": True, "mask": KEEP}, heads=(1, 1)),
    "masks of heads": Case(seen={"causal": False, "mask": torch.cat([KEEP, ~KEEP], 1)}),
    "heads": Case(heads=(4, 2), queries=19, keys=19),
}


QUICK = ("causal", "window", "mask")


@pytest.mark.parametrize("name", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_every_stage(name: str, poisoned: None) -> None:
    case = CASES[name]
    x, y, v = case.draw()
    seen = case.pairs()
    found, expected = run(x, y, v, 0.1, case.visibility(), ALONE), Dense.of(x, y, v, 0.1, seen)
    some = seen.any(-1).expand(found.lse.shape)
    assert (found.lse[~some] == torch.inf).all()
    assert ratio(found.lse[some], expected.lse[some]) < 1e-6
    for one in ("mean", "vmean"):
        assert ratio(getattr(found, one), getattr(expected, one)) < 1e-6
    assert ratio(found.t, expected.t) < 1e-5
    assert ratio(found.out, expected.out) < 1e-5
    assert (found.status == SolveStatus.OK).all()
    for one in (found.out, found.t, found.mean, found.vmean):
        assert (one[~some] == 0).all()


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_ridges_of_rows_and_of_coordinates(width: int, poisoned: None) -> None:
    case = Case(queries=21)
    x, y, v = case.draw()
    ridge = torch.rand(1, 2, 21, width, generator=torch.Generator().manual_seed(2)) + 0.05
    scale = torch.rand(1, 2, 21, generator=torch.Generator().manual_seed(4)) + 0.2
    expected = Dense.of(x, y, v, ridge, case.pairs(), scale)
    for rule in (EXACT, ALONE):
        found = run(x, y, v, ridge, case.visibility(), rule, scale)
        assert ratio(found.out, expected.out) < 1e-5
        assert ratio(found.t, expected.t) < 1e-5


def test_the_first_rows_are_exact() -> None:
    """A row with one key is its value to the last bit, whatever t is, and its effective weights sum to one."""
    case = Case(12, 12, (1, 1), 6, 3)
    for dtype, rule in ((torch.float32, EXACT), (torch.bfloat16, ROUNDED), (torch.bfloat16, ALONE)):
        x, y, v = case.draw(dtype)
        x, y = 4 * x, y + 20
        found = run(x, y, v, 0.01, case.visibility(), rule)
        assert torch.equal(found.out[:, :, 0], v[:, :, 0])
        ones = run(x, y, torch.ones_like(v), 0.01, case.visibility(), rule)
        assert (ones.out.float() - 1).abs().max() <= (1e-5 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("ridge", [1e-2, 1e-4])
def test_few_keys_and_a_small_ridge(ridge: float) -> None:
    """Fewer keys than coordinates: t is as long as 1 / ridge, where no key reaches."""
    case = Case(12, 12, (1, 1), 16, 4)
    x, y, v = case.draw()
    found, expected = run(x, y, v, ridge, case.visibility(), ALONE), Dense.of(x, y, v, ridge, case.pairs())
    assert (found.steps == 0).all()
    assert ratio(found.t, expected.t) < 1e-6
    assert ratio(found.out, expected.out) < 1e-6 / ridge
    left = (expected.right - (expected.matrix @ found.t.double()[..., None])[..., 0]).norm(dim=-1)
    true = left / expected.right.norm(dim=-1)
    assert true.max() > 2e-6  # as a long t is rounded
    assert ((found.residual - true).abs() <= 0.02 * true + 1e-6).all()


def test_true_residuals_steps_and_an_early_exit(poisoned: None) -> None:
    """Rows end when they have converged: with a looser tolerance sooner, and then do not change. The residual that is
    told is that of the solution that is given."""
    case = Case(32, 32, (1, 1), 10)
    x, y, v = case.draw()
    expected, before = Dense.of(x, y, v, 0.05, case.pairs()), None
    for tol in (1e-6, 1e-3, 1e-1):
        found = run(x, y, v, 0.05, case.visibility(), EXACT._replace(tol=tol))
        left = (expected.right - (expected.matrix @ found.t.double()[..., None])[..., 0]).norm(dim=-1)
        true = left / expected.right.norm(dim=-1)
        assert (true < tol + 3e-5).all()
        assert ((true - found.residual).abs() < 3e-5).all()
        assert found.steps.max() <= 20
        assert before is None or (found.steps <= before).all()
        assert before is None or found.steps.sum() < 0.9 * before.sum()
        assert found.steps.unique().numel() > 3  # every row by itself
        before = found.steps
    found = run(x, y, v, 0.05, case.visibility(), EXACT._replace(limit=2))
    assert found.steps.max() == 2
    assert (found.status[..., 4:] == SolveStatus.UNCONVERGED).all()
    found = run(x, y, v, 0.05, case.visibility(), EXACT._replace(limit=0))
    assert ratio(found.out, expected.vmean) < 1e-6


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_no_row_hangs_on_what_it_does_not_see(dtype: torch.dtype) -> None:
    """Not by a bit: neither on later keys, which prolong the iteration of their block, nor on another document's."""
    case, rule = Case(24, 24, (1, 1), 3), (EXACT if dtype == torch.float32 else ROUNDED)._replace(direct=True)
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor([20, 4]))
    x, y, v = case.draw(dtype)
    for visible in (case.visibility(), case.visibility(runs=runs_of(ids[None]))):
        one = run(x, y, v, 0.1, visible, rule, rows=32)
        others = [torch.cat([z[:, :, :20], 5 * z[:, :, 20:].flip(2) + 1], 2) for z in (x, y, v)]
        two = run(*others, 0.1, visible, rule, rows=32)
        assert torch.equal(one.out[:, :, :20], two.out[:, :, :20])
        assert torch.equal(one.steps[..., :20], two.steps[..., :20])
        assert not torch.equal(one.out[:, :, 20:], two.out[:, :, 20:])
    front = [torch.cat([5 * z[:, :, :20].flip(2) + 1, z[:, :, 20:]], 2) for z in (x, y, v)]
    two = run(*front, 0.1, visible, rule, rows=32)
    assert torch.equal(one.out[:, :, 20:], two.out[:, :, 20:])


@pytest.mark.parametrize("window", [pytest.param(5, marks=pytest.mark.slow), 40])
def test_windows_on_the_chip_and_off_it(window: int, poisoned: None) -> None:
    """Blocks whose keys fit into four tiles of twice 16 keys, and blocks whose keys do not."""
    case = Case(170, 170, (1, 1), 6, 6, {"causal": True, "window": 100 + window})
    x, y, v = case.draw(torch.bfloat16)
    found = run(x, y, v, 0.3, case.visibility(), ROUNDED, counted=True)
    expected = Dense.of(x, y, v, 0.3, case.pairs())
    assert ratio(found.t, expected.t) < 2e-3
    assert ratio(found.out, expected.out) < 4e-3
    signed = expected.p * (1 + (expected.away @ expected.t[..., None])[..., 0])
    assert ratio(found.counts[..., 1], (expected.p > 0).double().sum(-1)) == 0
    assert ratio(found.counts[..., 2], 1 / (expected.p**2).sum(-1)) < 1e-4
    assert ratio(found.counts[..., 3], signed.clamp(max=0).sum(-1).neg()) < 1e-2


def family(name: str, length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [1, 1, T, D]: standard normal, of length one, anisotropic and far from 0, near another key."""
    make = torch.Generator().manual_seed(7)
    x, y = (torch.randn(1, 1, length, dim, generator=make) for _ in range(2))
    if name == "unit":
        x, y = (z / z.norm(dim=-1, keepdim=True) * dim**0.25 for z in (x, y))
    elif name == "anisotropic":
        spread = torch.logspace(0.3, -1.2, dim)
        x, y = x * spread + 3, y * spread + 3
    elif name == "recall":
        y = y / y.norm(dim=-1, keepdim=True) * 3
        x = y[:, :, torch.randint(length, (length,), generator=make)] + 0.1 * x
    return x.bfloat16(), y.bfloat16()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("normal", marks=pytest.mark.slow),
        pytest.param("unit", marks=pytest.mark.slow),
        "anisotropic",
        pytest.param("recall", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("ridge", [0.1, pytest.param(0.01, marks=pytest.mark.slow)])
def test_bfloat16_reaches_its_floor(name: str, ridge: float) -> None:
    """Beside an exact solve in float64 whose weights p (1 + e) are rounded to bfloat16 once, and the output."""
    length, dim = 64, 16
    x, y = family(name, length, dim)
    v = torch.randn(1, 1, length, dim, generator=torch.Generator().manual_seed(8)).bfloat16()
    case = Case(length, length, (1, 1), dim, dim)
    expected = Dense.of(x, y, v, ridge, case.pairs(), dim**-0.5)
    weights = (expected.p * (1 + (expected.away @ expected.t[..., None])[..., 0])).bfloat16().double()
    floor = ratio((weights @ v.double()).bfloat16(), expected.out)
    found = run(x, y, v, ridge, case.visibility(), ROUNDED._replace(direct=True), dim**-0.5, rows=32, keys=32)
    error = ratio(found.out, expected.out)
    assert error <= (1.5 if ridge == 0.1 else 2) * floor, (error, floor)
    assert (found.status == SolveStatus.OK).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_keys_at_all(dtype: torch.dtype, poisoned: None) -> None:
    case = Case(5, 0, (1, 1))
    found = run(*case.draw(dtype), 0.1, case.visibility(), ROUNDED)
    assert (found.lse == torch.inf).all()
    for one in (found.out, found.t, found.mean, found.vmean, found.steps, found.residual, found.status):
        assert (one == 0).all()


def test_keys_far_from_0(poisoned: None) -> None:
    """Moving all queries' and keys' coordinates together changes scores of rows by a constant alone."""
    case = Case(40, 40, (1, 1), 6)
    x, y, v = case.draw()
    seen = case.pairs()
    found = run(x, y + 100, v, 0.1, case.visibility(), ALONE)
    expected = Dense.of(x, y + 100, v, 0.1, seen)
    assert ratio(found.out, expected.out) < 2e-4
    assert ratio(found.t, expected.t) < 2e-4


@pytest.mark.parametrize("negated", [False, True])
def test_a_slope_that_is_given(negated: bool, poisoned: None) -> None:
    """Parallax: no system, and t or -t at any strides."""
    case = Case(queries=21)
    x, y, v = case.draw()
    given = torch.randn(1, 21, 2, 5, generator=torch.Generator().manual_seed(2)).transpose(1, 2)
    span = Span.of(case.visibility(), x.device)
    with forced(rows=16, keys=16):
        first = moments(x, y, v, SCALE, span, False)
        out, counts = output(given, x, y, v, SCALE, first, span, negated=negated)
    expected = Dense.of(x, y, v, 1.0, case.pairs())
    t = -given.double() if negated else given.double()
    signed = expected.p * (1 + (expected.away @ t[..., None])[..., 0])
    assert ratio(out, signed @ v.double().repeat_interleave(2, 1)) < 1e-6
    assert first.right.numel() == counts.numel() == 0
