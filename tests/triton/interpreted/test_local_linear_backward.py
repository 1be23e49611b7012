"""The backward pass of local linear attention, against autograd through a dense float64 solve.

Legend: B batch, H query heads, N key heads, Q queries, K keys, D and V dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.estimators import Visibility
from regard.estimators.visibility import runs_of
from regard.ops.triton.local_linear_backward import Gradients, Kept, backward
from regard.ops.triton.local_linear_solve import Rule
from regard.ops.triton.span import Span
from regard.ops.triton.tiles import forced

EXACT = Rule(tol=1e-7, limit=400, direct=False, verify=True)


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
    spread: float = 1.0

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
    ridge: float | Tensor | None = 0.3
    probe = None
    if case.ridge == "rows":
        ridge = 0.2 + torch.rand(*rows, 1, generator=generator)
    elif case.ridge == "dims":
        ridge = 0.2 + torch.rand(*rows, case.dim, generator=generator)
    elif case.ridge == "probe":
        ridge, probe = None, torch.randn(*rows, case.dim, generator=generator) * 0.5
    scale = torch.logspace(0.0, math.log10(case.spread), case.dim)
    return Data(
        normal(*rows, case.dim),
        (normal(case.batch, case.key_heads, case.keys, case.dim).float() * scale).to(case.dtype),
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


def compare(case: Case, tolerance: float, seed: int = 0, **tiles: Any) -> tuple[Gradients, Data, Tensor]:
    data = draw(case, seed)
    seen = case.seen(data.mask)
    expected, kept = dense(data, seen)
    span = Span.of(case.visibility(data.mask), torch.device("cpu"))
    rule = None if data.ridge is None else EXACT
    with forced(**{"rows": 16, "keys": 16, **tiles}):
        found = backward(data.grad, data.x, data.y, data.v, data.factor, data.ridge, span, kept, rule)
    given = {"x": found.dx, "y": found.dy, "v": found.dv}
    optional = {"factor": found.dfactor, "ridge": found.dridge, "probe": found.dprobe}
    given |= {name: z for name, z in optional.items() if z is not None}
    assert set(given) == set(expected)
    for name, value in given.items():
        assert value.is_contiguous()
        error = (value.double() - expected[name]).norm() / expected[name].norm()
        assert error < tolerance, f"d{name}: {error:.2e}"
    return found, data, seen


@pytest.mark.parametrize("ridge", ["number", "rows", "dims", "probe"])
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(causal=False, queries=21, keys=45),
        Case(strict=True, heads=2, key_heads=2),
    ],
    ids=["causal", "cross", "strict"],
)
def test_all_gradients_are_those_of_the_dense_solve(case: Case, ridge: str) -> None:
    case.ridge, case.factor = ridge, "rows"
    compare(case, 1e-4)
