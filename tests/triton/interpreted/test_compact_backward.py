"""The backward pass of compact attention against dense float64 formulas, from row statistics made here.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys; z scores, `seen` boolean, both [B, H, Tq, Tk].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from attention_calls import draw, triton, weight_of
from dense_oracles import RULES as RULES_OF
from dense_oracles import attend, near, seen_pairs
from torch import Tensor

from regard.triton.compact.backward import backward
from regard.triton.runtime.span import Span
from regard.triton.runtime.tiles import forced

SOFTMAX, ADAPTIVE, ANCHORED, FIXED = range(4)
UNIFORM, ZERO, NEAREST = range(3)
BLOCK = 16


@dataclass(frozen=True)
class Case:
    """One call. `order`: causal, strict, both, window or segments. `number`: margin or bias; a tensor where `given`."""

    rule: int
    r: int = 1
    stand: int = UNIFORM
    order: str = "causal"
    queries: int = 45
    keys: int = 45
    heads: int = 2
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    number: float = 1.5
    given: bool = False
    factors: bool = False
    masked: bool = False
    ties: bool = False
    batch: int = 1
    dtype: torch.dtype = torch.float32
    spread: float = 1.0
    seed: int = 0


@dataclass
class Made:
    """The inputs of a call, and which pairs are seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    factor: Tensor | float
    number: Tensor
    span: Span
    seen: Tensor
    leaves: list[Tensor] = field(default_factory=list)


def ends(case: Case) -> tuple[Tensor, Tensor]:
    """[B, Tq] each: query i sees keys [low, high) but for a mask."""
    offset = case.keys - case.queries
    low, high = torch.zeros(2, case.batch, case.queries, dtype=torch.int32)
    for b in range(case.batch):
        cuts = [0, 7 + b, 23, 24, case.keys + 999]
        for i in range(case.queries):
            at = i + offset
            start, stop = 0, at + 1
            if case.order == "strict":
                stop = at
            elif case.order == "both":
                stop = case.keys
            elif case.order == "window":
                start = at - 10
            elif case.order == "segments":
                start = max(c for c in cuts if c <= max(at, 0))
                stop = min(c for c in cuts if c > at) if b else stop
            low[b, i], high[b, i] = min(max(start, 0), case.keys), min(max(stop, 0), case.keys)
    return low, high


def made(case: Case) -> Made:
    """Random inputs, laid out [B, T, H, D] in memory; with ties, keys that repeat among the best."""
    torch.manual_seed(case.seed)
    shapes = ((case.queries, case.heads, case.dim), (case.keys, case.kv_heads, case.dim))
    q, k = (torch.randn(case.batch, *s).transpose(1, 2) for s in shapes)
    v = torch.randn(case.batch, case.keys, case.kv_heads, case.value_dim).transpose(1, 2)
    grad = torch.randn(case.batch, case.queries, case.heads, case.value_dim).transpose(1, 2)
    if case.ties:
        k[:, :, [1, 4, 20]] = k[:, :, [0]] * 2
        k[:, :, [2, 40]] = k[:, :, [3]] * 2
        k[:, :, [9, 30]] = k[:, :, [9]] * 2
        k[:, :, 0], k[:, :, 3] = k[:, :, 1], k[:, :, 2]
    q = q * (case.spread / case.dim**0.25)
    k = k * (case.spread / case.dim**0.25)
    if (
        case.rule == FIXED
    ):  # exact scores: a key on the edge is there for everyone, and none a hair inside, where slopes are steep
        q, k = ((x * 2).round() / 2 for x in (q, k))
    q, k, v, grad = (x.to(case.dtype) for x in (q, k, v, grad))
    line = (case.batch, case.heads, case.queries)
    factor = torch.randint(4, 12, line) / 8 if case.factors else 1.25
    number = torch.randint(0, 4, line) / 8 + case.number if case.given else torch.full(line, case.number)
    low, high = ends(case)
    key = torch.arange(case.keys)
    mask = (torch.rand(case.batch, 1, case.keys) < 0.8).to(torch.uint8) if case.masked else None
    seen = ((key >= low[..., None]) & (key < high[..., None]))[:, None].expand(-1, case.heads, -1, -1)
    if mask is not None:
        seen = seen & (mask[:, :, None] != 0)
    first = (high[:, :, None] <= key).sum(1).int()
    last = torch.maximum(first, (low[:, :, None] <= key).sum(1).int())
    return Made(q, k, v, grad, factor, number, Span(low, high, first, last, mask), seen)


# The formulas ---------------------------------------------------------------------------------------------------


def threshold(z: Tensor, seen: Tensor, case: Case, number: Tensor) -> Tensor:
    """theta [B, H, Tq, 1] with its derivatives."""
    if case.rule == FIXED:
        return -number[..., None]
    best = torch.where(seen, z, -torch.inf).amax(-1, keepdim=True)  # whose gradient keys that tie share
    best = torch.where(seen.any(-1, keepdim=True), best, 0)
    if case.rule == ANCHORED:
        return best - number[..., None]
    r, h = case.r, torch.where(seen, z, -torch.inf)
    low, high = best.detach() - r, best.detach()
    for _ in range(80):  # of theta: sum [(z - theta) / r]_+^r falls from at least 1 to 0
        middle = (low + high) / 2
        above = (((h - middle) / r).relu() ** r).sum(-1, keepdim=True).detach() > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    a = torch.where(seen, (z - low) / r, 0).relu()
    slope = (a ** (r - 1) * (a > 0)).sum(-1, keepdim=True).detach()
    step = ((a**r).sum(-1, keepdim=True) - 1) / torch.where(slope > 0, slope, 1)
    return low + step  # one Newton step, which carries the derivative


def weights(z: Tensor, seen: Tensor, case: Case, number: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """p [B, H, Tq, Tk], and what is known of the rows."""
    empty = ~seen.any(-1, keepdim=True)
    top = torch.where(empty, 0, torch.where(seen, z, -torch.inf).amax(-1, keepdim=True)).detach()
    known = {"top": top, "empty": empty, "fallback": torch.zeros_like(empty), "lone": torch.zeros_like(seen)}
    if case.rule == SOFTMAX:
        e = torch.where(seen, z - top, -torch.inf).exp()
        mass = torch.where(empty, 1, e.sum(-1, keepdim=True))
        return e / mass, known | {"theta": -torch.inf * torch.ones_like(top), "reach": top * 0 + 1, "mass": mass}
    theta = threshold(z, seen, case, number)
    e = torch.where(seen, z - theta, 0).relu()
    fallback = ~empty & (e.sum(-1, keepdim=True) == 0)
    known["reach"] = torch.where(empty | fallback, 1, top - theta)
    known["theta"] = torch.where(empty, -1, theta)
    relative = (e / known["reach"].detach()) ** case.r
    known["mass"] = torch.where(empty | fallback, 1, relative.sum(-1, keepdim=True))
    p = relative / known["mass"]
    if case.stand == UNIFORM:
        lone = seen
    else:
        lone = torch.zeros_like(seen).scatter(-1, torch.where(seen, z, -torch.inf).argmax(-1, keepdim=True), True)
    lone = lone & fallback & (case.stand != ZERO)
    alike = lone.double() / lone.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(fallback, alike, p), known | {"fallback": fallback, "lone": lone}


def statistics(z: Tensor, seen: Tensor, p: Tensor, known: dict[str, Tensor], case: Case) -> tuple[Tensor, ...]:
    """(floats, flags, index, live) as the forward pass keeps them."""
    names = ("top", "theta", "reach", "mass")
    floats = torch.cat([*(known[n].expand(*z.shape[:3], 1) for n in names), *[torch.zeros(*z.shape[:3], 2)]], -1)
    flags = torch.cat([known["empty"].int(), known["fallback"].int(), torch.zeros(*z.shape[:3], 1).int()], -1)
    index, alive = flags[..., :0], p > 0
    if case.rule == ANCHORED:
        best = seen & (z == known["top"])
        numbers = torch.arange(z.shape[-1])
        last = torch.where(best, numbers, -1).amax(-1)
        first = torch.where(best, numbers, 10**6).amin(-1)
        index = torch.stack([torch.where(last < 0, -1, first), last, best.sum(-1)], -1)
    elif case.rule == FIXED:
        of = known["lone"].sum(-1) if case.stand == UNIFORM else known["lone"].int().argmax(-1)
        index = torch.where(known["lone"].any(-1), of, -1)[..., None]
    rows, keys = (-(-n // BLOCK) for n in z.shape[2:])
    padded = torch.zeros(*z.shape[:2], rows * BLOCK, keys * BLOCK, dtype=torch.bool)
    padded[:, :, : z.shape[2], : z.shape[3]] = alive
    live = padded.unflatten(3, (keys, BLOCK)).unflatten(2, (rows, BLOCK)).any(5).any(3)
    return floats.float(), flags, index.int(), live.to(torch.uint8)


def expected(case: Case, x: Made, drop: Tensor | None = None) -> tuple[list[Tensor], tuple[Tensor, ...], Tensor]:
    """Gradients of q, k, v, factor and number in float64, statistics of the rows, and tilt."""
    group = case.heads // case.kv_heads
    leaves = [t.double().clone().requires_grad_() for t in (x.q, x.k, x.v, torch.as_tensor(x.factor), x.number)]
    q, k, v, factor, number = leaves
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    dots = (q[:, :, :, None] * keys[:, :, None]).sum(-1)  # pair by pair, so that equal keys have equal scores
    z = dots * (factor[..., None] if case.factors else factor)
    p, known = weights(z, x.seen, case, number)
    kept = statistics(z.detach(), x.seen, p.detach(), {n: t.detach() for n, t in known.items()}, case)
    out = p @ values
    tilt = out.detach()
    if case.rule == ADAPTIVE:
        slope = torch.where(p > 0, p, 0) ** ((case.r - 1) / case.r) * (p > 0)
        tilt = ((slope / slope.sum(-1, keepdim=True).clamp(min=1e-30)) @ values).detach()
    gradients = torch.autograd.grad((out * x.grad.double()).sum(), leaves, allow_unused=True)
    found = [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, gradients, strict=True)]
    return found, kept, tilt


def run(
    case: Case, x: Made, kept: tuple[Tensor, ...], tilt: Tensor, tile: tuple[int, int] = (BLOCK, BLOCK)
) -> tuple[Tensor, ...]:
    """Blocks of `tile` queries and keys; marks of the size they have."""
    floats, flags, index, live = kept
    tilt = tilt.float() if case.rule == ADAPTIVE else tilt.to(case.dtype)
    granule = (BLOCK, BLOCK) if live.shape[2] == -(-case.queries // BLOCK) else (2 * BLOCK, 2 * BLOCK)
    with forced(rows=tile[0], keys=tile[1]):
        return backward(
            x.grad, x.q, x.k, x.v, x.factor, x.span, floats, flags, index, tilt, live, granule,
            case.rule, case.r, case.stand, case.given,
        )  # fmt: skip


def compare(case: Case, found: tuple[Tensor, ...], want: list[Tensor]) -> None:
    for name, mine, right in zip(("q", "k", "v", "factor", "number"), found, want, strict=True):
        if (name == "factor" and not case.factors) or (name == "number" and not case.given):
            assert mine.shape == (0,)
            continue
        error = (mine.double() - right).abs().max() / right.abs().max().clamp(min=1e-3)
        rms = (mine.double() - right).square().mean().sqrt() / right.square().mean().sqrt().clamp(min=1e-3)
        assert mine.isfinite().all(), name
        bad = rms > 0.01 if case.dtype == torch.bfloat16 else error > 1e-5
        assert not bad, f"{name}: {error:.2e} {rms:.2e}"


def check(case: Case) -> None:
    x = made(case)
    want, kept, tilt = expected(case, x)
    compare(case, run(case, x, kept, tilt), want)


RULES = [
    Case(SOFTMAX),
    *(Case(ADAPTIVE, r) for r in (1, 2, 3)),
    *(Case(ANCHORED, r) for r in (1, 2, 3)),
    *(Case(FIXED, r, stand, number=-1.0) for r, stand in ((1, UNIFORM), (2, ZERO), (3, NEAREST))),
]
NAMES = ["softmax", *(f"{rule}{r}" for rule in ("adaptive", "anchored", "fixed") for r in (1, 2, 3))]


ORDERS = ["causal", "strict", "both", "window", "segments"]
FLAGS = {
    "more-keys": {"queries": 21, "keys": 70, "dim": 20, "value_dim": 40},
    "more-queries": {"queries": 50, "keys": 19, "dim": 36, "value_dim": 5},
    "heads": {"heads": 6, "kv_heads": 2, "queries": 34, "keys": 34},
    "batches": {"batch": 2, "order": "segments", "masked": True, "queries": 40, "keys": 40},
    "mask": {"masked": True, "order": "both", "queries": 33, "keys": 49, "heads": 4, "kv_heads": 2},
    "numbers": {"factors": True, "given": True, "heads": 4, "kv_heads": 2, "queries": 33, "keys": 49},
    "wide": {"dim": 100, "value_dim": 33, "queries": 20, "keys": 33},
}
ALL = [
    pytest.param(case, flags, id=f"{name}-{flag}", marks=() if (i + j) % 9 == 0 else pytest.mark.slow)
    for i, (name, case) in enumerate(zip(NAMES, RULES, strict=True))
    for j, (flag, flags) in enumerate([*FLAGS.items(), *((order, {"order": order}) for order in ORDERS)])
]
"""Every rule with every flag and order; a fair part of the pairs always."""


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("case", "flags"), ALL)
def test_gradients_are_those_of_the_formula(case: Case, flags: dict[str, Any]) -> None:
    check(replace(case, **(flags | {"given": "given" in flags and case.rule in (ANCHORED, FIXED)})))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("order", ["both", pytest.param("causal", marks=pytest.mark.slow)])
@pytest.mark.parametrize("r", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_keys_that_tie_for_the_best_share_its_gradient(r: int, order: str) -> None:
    case = Case(ANCHORED, r, order=order, ties=True, heads=2, kv_heads=1, queries=37, keys=45, factors=r == 2)
    x = made(case)
    counts = expected(case, x)[1][2][..., 2]
    assert {1, 2, 3} <= set(counts.unique().tolist())
    check(case)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", [RULES[0], RULES[2], RULES[4]], ids=[NAMES[0], NAMES[2], NAMES[4]])
def test_bfloat16(case: Case) -> None:
    check(replace(case, dtype=torch.bfloat16, queries=33, keys=33, dim=24))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("tile", "coarse"), [((16, 32), False), ((16, 16), True), ((32, 64), True)])
def test_blocks_of_another_size_than_the_marks(tile: tuple[int, int], coarse: bool) -> None:
    case = Case(ANCHORED, 2, order="window", queries=40, keys=50, heads=2, kv_heads=1, ties=True)
    x = made(case)
    want, (floats, flags, index, live), tilt = expected(case, x)
    if coarse:
        padded = torch.nn.functional.pad(live, (0, live.shape[3] % 2, 0, live.shape[2] % 2))
        live = padded.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5)).contiguous()
    compare(case, run(case, x, (floats, flags, index, live), tilt, tile), want)


@pytest.mark.usefixtures("poisoned")
def test_blocks_without_a_mark_are_not_visited() -> None:
    case = Case(ADAPTIVE, 2)
    x = made(case)
    _, (*kept, live), tilt = expected(case, x)
    found = run(case, x, (*kept, torch.zeros_like(live)), tilt)
    assert all(bool((g == 0).all()) for g in found[:3])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("sizes", [(0, 20), (20, 0)])
@pytest.mark.parametrize("rule", [SOFTMAX, ADAPTIVE])
def test_nothing_to_attend_to_or_nobody_who_does(rule: int, sizes: tuple[int, int]) -> None:
    case = Case(rule, order="both", queries=sizes[0], keys=sizes[1])
    q, k, grad = torch.randn(1, 2, sizes[0], 16), torch.randn(1, 1, sizes[1], 16), torch.randn(1, 2, sizes[0], 16)
    low, first = (torch.zeros(1, n, dtype=torch.int32) for n in sizes)
    floats = torch.tensor([0.0, -1, 1, 1, 0, 0]).expand(1, 2, sizes[0], 6).contiguous()
    flags = torch.tensor([1, 0, 0], dtype=torch.int32).expand(1, 2, sizes[0], 3).contiguous()
    x = Made(q, k, k, grad, 1.0, floats, Span(low, low, first, first, None), low.bool())
    live = torch.zeros(1, 2, -(-sizes[0] // BLOCK), -(-sizes[1] // BLOCK), dtype=torch.uint8)
    found = run(case, x, (floats, flags, flags[..., :0], live), torch.zeros_like(grad))
    assert [g.shape for g in found[:3]] == [q.shape, k.shape, k.shape]
    assert all(bool((g == 0).all()) for g in found[:3])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("size", [1e-30, 1e-5])
def test_above_a_threshold_of_zero_scores_of_any_size_weigh_alike(size: float) -> None:
    """Their factor [B, H, Tq] cancels, so that it has no gradient, although each key's share of that is 1 / factor."""
    leaves = draw(33, 33, 8)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    factor = torch.full((2, 2, 33), size).requires_grad_()
    with forced(rows=16, keys=16):
        out = triton(leaves, "normrelu", scale=factor, is_causal=True)
        found = torch.autograd.grad((out * weight_of(out)).sum(), [*leaves, factor])
    right = attend(*exact, seen_pairs(2, 2, 33, 33, is_causal=True), RULES_OF["fixed 1"], 1.0)
    wanted = torch.autograd.grad((right * weight_of(out).double()).sum(), exact)
    near([out, *found[:3]], [right, *wanted], (1e-5, 1e-4, 1e-4, 1e-4))
    assert (found[3] == 0).all()
