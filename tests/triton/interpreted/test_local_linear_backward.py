"""The backward pass of local linear attention, against autograd through a dense float64 solve.

Legend: B batch, H query heads, N key heads, Q queries, K keys, D and V dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.pairwise.visibility import Visibility, runs_of
from regard.triton.local_linear import solve as local_linear_solve
from regard.triton.local_linear.backward import Kept, backward
from regard.triton.local_linear.solve import Rule
from regard.triton.runtime.span import Span
from regard.triton.runtime.tiles import forced

EXACT = Rule(tol=1e-7, limit=400, direct=False, verify=True)
ROUGH = Rule(tol=1e-2, limit=20, direct=False, verify=False)


@dataclass
class Case:
    """Sizes and what is visible; `segments` are lengths of packed sequences."""

    batch: int = 1
    heads: int = 2
    key_heads: int = 1
    queries: int = 37
    keys: int = 37
    dim: int = 8
    value_dim: int = 12
    causal: bool = True
    strict: bool = False
    window: int | None = None
    segments: tuple[int, ...] = ()
    masked: bool = False
    per_head: bool = False
    dtype: torch.dtype = torch.float32
    factor: str = "number"
    ridge: str = "number"
    spread: float = 1.0  # of the longest coordinate of keys against the shortest
    away: float = 0.0
    penalty: float = 0.3

    @property
    def offset(self) -> int:
        return self.keys - self.queries

    def seen(self, mask: Tensor | None) -> Tensor:
        """[B or 1, H or 1, Q, K]."""
        at, key = torch.arange(self.queries)[:, None] + self.offset, torch.arange(self.keys)[None]
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool)
        if self.causal:
            seen &= (key < at) if self.strict else (key <= at)
        if self.window is not None:
            seen &= (at - key - int(self.strict) < self.window) & (self.causal | (key - at < self.window))
        if self.segments:
            ids = torch.repeat_interleave(torch.arange(len(self.segments)), torch.tensor(self.segments))
            seen &= ids[:, None] == ids[None]
        return seen[None, None] if mask is None else seen & mask

    def visibility(self, mask: Tensor | None) -> Visibility:
        runs = None
        if self.segments:
            ids = torch.repeat_interleave(torch.arange(len(self.segments)), torch.tensor(self.segments))
            runs = runs_of(ids[None])
        return Visibility(
            self.queries, self.keys, self.causal, self.strict, self.window, self.offset, mask=mask, runs=runs
        )


@dataclass
class Data:
    x: Tensor
    y: Tensor
    v: Tensor
    grad: Tensor
    factor: float | Tensor
    ridge: float | Tensor | None
    probe: Tensor | None
    mask: Tensor | None


def draw(case: Case, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    rows = (case.batch, case.heads, case.queries)
    mask = None
    if case.masked:
        heads = case.heads if case.per_head else 1
        mask = torch.rand(case.batch, heads, 1, case.keys, generator=generator) > 0.3
    factor: float | Tensor = 0.5 / math.sqrt(case.dim)
    if case.factor == "rows":
        factor = factor * (0.5 + torch.rand(*rows, generator=generator))
    ridge: float | Tensor | None = case.penalty
    probe = None
    if case.ridge == "rows":
        ridge = 0.2 + torch.rand(*rows, 1, generator=generator)
    elif case.ridge == "dims":
        ridge = 0.2 + torch.rand(*rows, case.dim, generator=generator)
    elif case.ridge == "probe":
        ridge, probe = None, torch.randn(*rows, case.dim, generator=generator) * 0.5
    scale = torch.logspace(-math.log10(case.spread), 0.0, case.dim)
    return Data(
        normal(*rows, case.dim) + case.away,
        (normal(case.batch, case.key_heads, case.keys, case.dim).float() * scale + case.away).to(case.dtype),
        normal(case.batch, case.key_heads, case.keys, case.value_dim),
        normal(*rows, case.value_dim),
        factor,
        ridge,
        probe,
        mask,
    )


def dense(data: Data, seen: Tensor) -> tuple[dict[str, Tensor], Kept]:
    """Gradients by name, and what a forward pass saves: formulas written out, pairs and matrices formed."""
    leaf: dict[str, Tensor] = {}
    for name in ("x", "y", "v", "factor", "ridge", "probe"):
        value = getattr(data, name)
        if isinstance(value, Tensor):
            leaf[name] = value.double().requires_grad_()
    x, group = leaf["x"], data.x.shape[1] // data.y.shape[1]
    y, v = (leaf[name].repeat_interleave(group, 1) for name in ("y", "v"))
    factor = leaf["factor"][..., None] if "factor" in leaf else data.factor
    seen = seen.expand(*x.shape[:3], y.shape[2])
    some = seen.any(-1, keepdim=True)
    logits = torch.where(seen, factor * (x @ y.transpose(-1, -2)), -1e30)
    p = torch.where(seen & some, logits.softmax(-1), 0.0)
    kbar, vbar = p @ y, p @ v
    away = y[:, :, None] - kbar[:, :, :, None]
    if "probe" in leaf:
        t = -leaf["probe"]
    else:
        ridge = leaf["ridge"] if "ridge" in leaf else torch.tensor(data.ridge, dtype=torch.float64)
        spread = torch.einsum("bhqk,bhqkd,bhqke->bhqde", p, away, away)
        t = torch.linalg.solve(spread + ridge[..., None] * torch.eye(x.shape[-1]), x - kbar)
    weights = p * (1 + torch.einsum("bhqkd,bhqd->bhqk", away, t))
    out = weights @ v
    names = list(leaf)
    found = dict(zip(names, torch.autograd.grad(out, list(leaf.values()), data.grad.double()), strict=True))
    lse = torch.where(some[..., 0], logits.logsumexp(-1) / math.log(2), torch.inf)
    t = torch.where(some, t, 0.0)
    return found, Kept(*(z.detach().float().contiguous() for z in (t, lse, kbar, vbar)))


def solved(data: Data, seen: Tensor) -> Any:
    """What stands in for the solver where kernels alone are looked at: every system formed and factored in float64."""

    def solve(right: Tensor, x: Tensor, y: Tensor, factor: Any, ridge: Any, *_: Any) -> tuple[Tensor]:
        x, y = x.double(), y.double().repeat_interleave(x.shape[1] // y.shape[1], 1)
        z = (factor.double()[..., None] if isinstance(factor, Tensor) else factor) * (x @ y.transpose(-1, -2))
        p = torch.where(seen, z, -1e30).softmax(-1) * seen
        away = y[:, :, None] - (p @ y)[:, :, :, None]
        ridge = ridge.double() if isinstance(ridge, Tensor) else torch.tensor(ridge, dtype=torch.float64)
        spread = torch.einsum("bhqk,bhqkd,bhqke->bhqde", p, away, away)
        return (
            torch.linalg.solve(spread + ridge[..., None] * torch.eye(x.shape[-1]), right.double()).float().contiguous(),
        )

    return solve


def run(case: Case, data: Data, kept: Kept, rule: Rule | None = EXACT, **sizes: int) -> dict[str, Tensor]:
    """Gradients by name."""
    span = Span.of(case.visibility(data.mask), torch.device("cpu"))
    rule = None if data.ridge is None else rule
    with forced(**{"rows": 16, "keys": 16, **sizes}):
        dx, dy, dv, *rest = backward(data.grad, data.x, data.y, data.v, data.factor, data.ridge, span, kept, rule)
    given = {name: z for name, z in zip(("factor", "ridge", "probe"), rest, strict=True) if z is not None}
    return {"x": dx, "y": dy, "v": dv, **given}


def compare(
    case: Case, most: float, patch: pytest.MonkeyPatch | None, seed: int = 0, rule: Rule = EXACT, **sizes: int
) -> dict[str, Tensor]:
    """Every gradient against the dense ones; with a `patch`, u comes from a dense solve too."""
    data = draw(case, seed)
    seen = case.seen(data.mask)
    expected, kept = dense(data, seen)
    if patch is not None:
        patch.setattr(local_linear_solve, "solve", solved(data, seen))
    found = run(case, data, kept, rule, **sizes)
    assert set(found) == set(expected)
    for name, value in found.items():
        like = getattr(data, name)
        assert value.shape == like.shape
        assert value.is_contiguous()
        assert value.dtype == (like.dtype if name in "xyv" else torch.float32)
        error = float((value.double() - expected[name]).norm() / expected[name].norm())
        assert error < most, f"d{name}: {error:.2e}"
    return found


CASES = {
    "causal": Case(),
    "all": Case(causal=False, queries=21, keys=37, heads=4, key_heads=2, dim=5, value_dim=19),
    "strict": Case(strict=True, heads=2, key_heads=2, value_dim=3),
    "window": Case(window=7, heads=3),
    "window of several blocks": Case(window=37, queries=63, keys=63, heads=1),
    "both sides": Case(causal=False, window=9, dim=9),
    "fewer queries": Case(queries=19, keys=50, window=30),
    "more queries": Case(queries=50, keys=19),
    "segments": Case(segments=(9, 20, 1, 17), queries=47, keys=47),
    "segments, all": Case(segments=(30, 17), queries=47, keys=47, causal=False),
    "mask": Case(masked=True, batch=2, heads=1, queries=21),
    "mask of heads": Case(masked=True, per_head=True, heads=4, key_heads=2, causal=False, window=20, queries=21),
    "wide": Case(dim=33, value_dim=17, heads=1),
}
RIDGES = ("number", "rows", "dims", "probe")
QUICK = ("causal", "all", "strict", "window", "fewer queries", "segments", "mask of heads", "wide")


@pytest.mark.parametrize("turn", range(len(QUICK)), ids=QUICK)
def test_gradients_are_those_of_the_dense_formulas(turn: int, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    factor = ("rows", "number")[(turn + turn // 4) % 2]
    compare(replace(CASES[QUICK[turn]], ridge=RIDGES[turn % 4], factor=factor), 1e-4, monkeypatch, turn)


@pytest.mark.slow
@pytest.mark.parametrize(("ridge", "factor"), list(zip(RIDGES, ("rows", "number", "rows", "number"), strict=True)))
@pytest.mark.parametrize("name", CASES)
def test_every_case_with_every_ridge(
    name: str, ridge: str, factor: str, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    compare(replace(CASES[name], ridge=ridge, factor=factor), 1e-4, monkeypatch, 3)


@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (32, 16)])
def test_rows_and_keys_of_a_block_need_not_be_as_many(
    rows: int, keys: int, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    compare(replace(CASES["window"], ridge="dims"), 1e-4, monkeypatch, rows=rows, keys=keys)


@pytest.mark.parametrize("direct", [False, True], ids=["iterated", "rows with few keys by themselves"])
def test_u_comes_from_the_solver(direct: bool, poisoned: None) -> None:
    case = Case(heads=1, queries=35, keys=35, dim=6, ridge="rows", factor="rows")
    compare(case, 1e-4, None, rule=EXACT._replace(direct=direct))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "segments", "mask of heads", "more queries"])
def test_u_comes_from_the_solver_in_every_order(name: str, poisoned: None) -> None:
    compare(replace(CASES[name], ridge="dims"), 1e-4, None)


@pytest.mark.parametrize(
    ("ridge", "spread", "most"), [("rows", 1.0, 5e-3), ("probe", 1.0, 5e-3), ("number", 10.0, 5e-3)]
)
def test_bfloat16_is_as_near_as_its_operands_allow(
    ridge: str, spread: float, most: float, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    case = Case(dtype=torch.bfloat16, ridge=ridge, queries=37, keys=37, dim=16, spread=spread, heads=1)
    compare(case, most, monkeypatch)


def test_slopes_of_long_t_in_bfloat16_are_those_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    """Where keys hardly vary along some coordinates, t is long there, and rounding it would bend a_ij, all of dv."""
    case = Case(dtype=torch.bfloat16, queries=37, keys=37, dim=16, spread=30.0, heads=1, penalty=0.01)
    data = draw(case)
    expected, kept = dense(data, case.seen(None))
    monkeypatch.setattr(local_linear_solve, "solve", solved(data, case.seen(None)))
    found = run(case, data, kept)["v"]
    assert (found.double() - expected["v"]).norm() < 4e-3 * expected["v"].norm()


def test_far_keys_in_bfloat16_cost_nothing(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Keys that share a mean as long as 30 deviations: products are centred at each row's own."""
    case = Case(dtype=torch.bfloat16, queries=37, keys=37, dim=16, away=30.0, heads=1)
    compare(case, 1.5e-2, monkeypatch)


def test_no_bit_depends_on_what_a_query_does_not_see(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    case = Case(queries=37, keys=37, ridge="dims", factor="rows", heads=1)
    data = draw(case)
    kept = dense(data, case.seen(None))[1]
    other = draw(case, 1)
    cut = 21
    late = replace(
        data, **{n: torch.cat([getattr(data, n)[:, :, :cut], getattr(other, n)[:, :, cut:]], 2) for n in "xyv"}
    )
    late = replace(late, grad=torch.cat([data.grad[:, :, :cut], 5 * other.grad[:, :, cut:]], 2))
    assert not late.y.equal(data.y)
    kept_late = dense(late, case.seen(None))[1]
    kept_late = Kept(
        *(torch.cat([a[:, :, :cut], b[:, :, cut:]], 2).contiguous() for a, b in zip(kept, kept_late, strict=True))
    )
    first, second = run(case, data, kept, ROUGH), run(case, late, kept_late, ROUGH)
    for name in ("x", "factor", "ridge"):
        assert first[name][:, :, :cut].equal(second[name][:, :, :cut]), name
        assert not first[name][:, :, cut:].equal(second[name][:, :, cut:])


def test_documents_packed_together_know_nothing_of_each_other(poisoned: None) -> None:
    case = Case(queries=37, keys=37, segments=(17, 20), ridge="rows", heads=1)
    data, other = draw(case), draw(case, 1)
    cut = 17
    mixed = replace(
        data,
        **{
            n: torch.cat([getattr(data, n)[:, :, :cut], getattr(other, n)[:, :, cut:]], 2)
            for n in ("x", "y", "v", "grad")
        },
    )
    seen = case.seen(None)
    kept, kept_mixed = dense(data, seen)[1], dense(mixed, seen)[1]
    kept_mixed = Kept(
        *(torch.cat([a[:, :, :cut], b[:, :, cut:]], 2).contiguous() for a, b in zip(kept, kept_mixed, strict=True))
    )
    first, second = run(case, data, kept, ROUGH), run(case, mixed, kept_mixed, ROUGH)
    for name in first:
        assert first[name][:, :, :cut].equal(second[name][:, :, :cut]), name


def test_any_strides_do(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """Heads beside features, keys broadcast over sequences, a gradient that is one number."""
    case = Case(batch=2, heads=2, queries=21, keys=21, ridge="rows", value_dim=6)
    data = draw(case)
    y, v = data.y[:1].expand_as(data.y), data.v.transpose(2, 3).contiguous().transpose(2, 3)
    data = replace(data, y=y, v=v, grad=torch.ones(()).expand_as(data.grad))
    data = replace(data, x=data.x.transpose(1, 2).contiguous().transpose(1, 2))
    expected, kept = dense(data, case.seen(None))
    monkeypatch.setattr(local_linear_solve, "solve", solved(data, case.seen(None)))
    for name, value in run(case, data, kept).items():
        assert (value - expected[name]).norm() < 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize("name", ["y", "grad"])
def test_rows_may_lie_far_apart(name: str) -> None:
    """A tile of 16 rows spans 2^31 numbers: int32 offsets would wrap. Pages that nobody touches take no memory."""
    case = Case(queries=21, keys=21, heads=1, ridge="probe", value_dim=6, dtype=torch.bfloat16)
    data = draw(case)
    near = getattr(data, name)
    step = 2**27 + 8
    far = torch.empty(21 * step, dtype=torch.bfloat16).as_strided(near.shape, (1, 1, step, 1)).copy_(near)
    expected, kept = dense(data, case.seen(None))
    for leaf, value in run(case, replace(data, **{name: far}), kept).items():
        assert (value.double() - expected[leaf]).norm() < 1e-2 * expected[leaf].norm(), leaf


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-3)])
def test_rows_and_keys_without_partners_get_zeros(
    dtype: torch.dtype, most: float, monkeypatch: pytest.MonkeyPatch, poisoned: None
) -> None:
    case = Case(
        queries=37, keys=37, causal=False, masked=True, per_head=True, ridge="rows", batch=2, heads=1, dtype=dtype
    )
    data = draw(case)
    assert data.mask is not None
    data.mask[0] = False
    data.mask[1, :, :, 5:25] = False
    seen = case.seen(data.mask)
    expected, kept = dense(data, seen)
    monkeypatch.setattr(local_linear_solve, "solve", solved(data, seen))
    found = run(case, data, kept)
    for name in "xyv":
        assert not found[name][0].any(), name
        assert (found[name][1] - expected[name][1]).norm() < most * expected[name][1].norm()
    assert not found["y"][1, :, 5:25].any()
    assert not found["v"][1, :, 5:25].any()


@pytest.mark.parametrize(("queries", "keys"), [(0, 20), (20, 0)])
def test_nothing_is_no_gradient(queries: int, keys: int, poisoned: None) -> None:
    case = Case(queries=queries, keys=keys, causal=False, ridge="probe")
    data = draw(case)
    kept = Kept(*(torch.zeros(1, 2, queries, *width) for width in ((8,), (), (8,), (12,))))
    kept.lse.fill_(torch.inf)
    assert not any(z.any() for z in run(case, data, kept).values())
