"""`regard.local_linear_attention(..., impl="triton")` from outside: against dense solves in float64, in every order of
queries and keys; and what a call promises whatever it computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import bounds
import pytest
import torch
from dense_oracles import RULES, attend, local_linear, near, ratio, scores, seen_pairs, softmax_rows, with_probe
from torch import Tensor

import regard
from regard.grammar import SolveStatus
from regard.ops.triton import tiles

BATCH, HEADS, KV, T = 2, 2, 1, 19
IDS = torch.tensor([[4] * 5 + [2] * 7 + [5] + [4] * 6, [0] * 10 + [1] * 9])
KEEP = torch.rand(BATCH, 1, 1, T, generator=torch.Generator().manual_seed(5)) > 0.4
CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "all": (T, T, {}),
    "causal": (T, T, {"is_causal": True}),
    "strict": (T, T, {"exclude_self": True}),
    "window": (T, T, {"is_causal": True, "window": 6}),
    "strict window": (T, T, {"exclude_self": True, "window": 12}),
    "both sides": (T, T, {"window": 5}),
    "segments": (T, T, {"segment_ids": IDS, "is_causal": True}),
    "segments, both sides": (T, T, {"segment_ids": IDS[:1]}),
    "mask": (T, T, {"attn_mask": KEEP, "is_causal": True}),
    "mask of heads": (T, T, {"attn_mask": KEEP.expand(BATCH, HEADS, 1, T) ^ torch.tensor([[[[True]], [[False]]]])}),
    "fewer queries": (11, T, {"is_causal": True}),
    "more queries": (T, 17, {"is_causal": True}),
    "an offset": (17, T, {"is_causal": True, "query_offset": 7, "window": 9}),
    "offsets": (17, T, {"is_causal": True, "query_offset": torch.tensor([15, -6])}),
    "offsets, both sides": (17, T, {"window": 8, "query_offset": torch.tensor([-20, 12]), "attn_mask": KEEP}),
}
QUICK = ("fewer queries",)


@pytest.fixture(autouse=True)
def no_illegal_access() -> Iterator[None]:
    """Every test here fails where a kernel reads or writes outside of the tensors that it was given."""
    with bounds.watched():
        yield


def draw(
    queries: int = T, keys: int = T, dim: int = 6, value_dim: int | None = None, *, batch: int = BATCH,
    heads: int = HEADS, kv: int = KV, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = True,
) -> list[Tensor]:  # fmt: skip
    make = torch.Generator().manual_seed(seed)
    sizes = ((batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, value_dim or dim))
    return [torch.randn(*size, generator=make).to(dtype).requires_grad_(grad) for size in sizes]


def triton(leaves: list[Tensor], **call: Any) -> Any:
    return regard.local_linear_attention(*leaves, impl="triton", enable_gqa=True, **call)


def weight_of(out: Tensor, seed: int = 9) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)


def wide(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def compared(
    out: Tensor, expected: Tensor, leaves: list[Tensor], exact: list[Tensor], most: tuple[float, float], what: Any = ""
) -> None:
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (most[0], *[most[1]] * len(leaves)), what)


# Values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS])
def test_every_order(call: str, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    leaves, seen = draw(queries, keys, 5, 3), seen_pairs(BATCH, HEADS, queries, keys, **how)
    exact = wide(leaves)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, ridge=0.1, **how)
        compared(out, local_linear(*exact, seen, 0.1), leaves, exact, (1e-5, 1e-4), call)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["causal", "segments", "mask", "offsets"])
def test_every_order_of_wide_heads(call: str, poisoned: None) -> None:
    """More coordinates than many a row has keys; ridges of rows, with their gradients."""
    queries, keys, how = CALLS[call]
    ridge = (torch.rand(BATCH, HEADS, queries, generator=torch.Generator().manual_seed(2)) + 0.05).requires_grad_()
    leaves = [*draw(queries, keys, 20, 12), ridge]
    seen, exact = seen_pairs(BATCH, HEADS, queries, keys, **how), wide(leaves)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves[:3], ridge=ridge, **how)
        compared(out, local_linear(*exact[:3], seen, exact[3]), leaves, exact, (1e-5, 1e-4), call)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["all", "strict", "window", "segments, both sides", "offsets, both sides"])
def test_every_order_in_bfloat16(call: str, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    leaves = draw(queries, keys, 4, 6, dtype=torch.bfloat16)
    seen, exact = seen_pairs(BATCH, HEADS, queries, keys, **how), wide(leaves)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, ridge=0.1, **how)
        assert out.dtype == torch.bfloat16
        compared(out, local_linear(*exact, seen, 0.1), leaves, exact, (1.5e-2, 4e-2), call)


WIDTHS = [(1, 1), (16, 40), (40, 16), (64, 64), (100, 3), (128, 100), (256, 128), (64, 256)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "value_dim"), [w if w == (1, 1) else pytest.param(*w, marks=pytest.mark.slow) for w in WIDTHS]
)
def test_every_width(dim: int, value_dim: int, poisoned: None) -> None:
    seen = seen_pairs(1, HEADS, 20, 33, is_causal=True)
    for dtype, most in ((torch.float32, (1e-5, 1e-4)), (torch.bfloat16, (1.5e-2, 4e-2))):
        leaves = draw(20, 33, dim, value_dim, batch=1, dtype=dtype, seed=dim)
        exact = wide(leaves)
        out = triton(leaves, ridge=0.2, is_causal=True)
        compared(out, local_linear(*exact, seen, 0.2), leaves, exact, most, dtype)


@pytest.mark.parametrize(
    "length", [n if n in (1, 5) else pytest.param(n, marks=pytest.mark.slow) for n in (1, 5, 63, 100, 129)]
)
def test_every_length_with_the_tiles_that_are_shipped(length: int, poisoned: None) -> None:
    leaves = draw(length, length, 16, batch=1)
    exact, seen = wide(leaves), seen_pairs(1, HEADS, length, length, is_causal=True)
    out = triton(leaves, ridge=0.1, is_causal=True)
    compared(out, local_linear(*exact, seen, 0.1), leaves, exact, (1e-5, 3e-4))


@pytest.mark.slow
@pytest.mark.parametrize("window", [3, 20, 90])
def test_windows_with_the_tiles_that_are_shipped(window: int, poisoned: None) -> None:
    how = {"is_causal": True, "window": window}
    leaves = draw(100, 100, 8, batch=1)
    exact, seen = wide(leaves), seen_pairs(1, HEADS, 100, 100, **how)
    compared(triton(leaves, ridge=0.1, **how), local_linear(*exact, seen, 0.1), leaves, exact, (1e-5, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_heads_share_keys(heads: tuple[int, int]) -> None:
    leaves = draw(19, 19, 4, batch=1, heads=heads[0], kv=heads[1])
    exact, seen = wide(leaves), seen_pairs(1, heads[0], 19, 19)
    with tiles.forced(rows=16, keys=16):
        compared(triton(leaves), local_linear(*exact, seen, 0.1), leaves, exact, (1e-5, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [1.0, 0.01, 1e-3])
def test_ridges(ridge: float) -> None:
    """More keys than coordinates, so that a small ridge leaves a regular system."""
    leaves, how = draw(21, 60, 6, batch=1), {"is_causal": True}
    exact, seen = wide(leaves), seen_pairs(1, HEADS, 21, 60, **how)
    with tiles.forced(rows=16, keys=16):
        compared(triton(leaves, ridge=ridge, **how), local_linear(*exact, seen, ridge), leaves, exact, (1e-5, 2e-4))


SHAPES = [(), (HEADS, 1), (BATCH, HEADS, T), (HEADS, 1, 5), (BATCH, HEADS, T, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [*(pytest.param(x, marks=pytest.mark.slow) for x in SHAPES[:4]), SHAPES[4]])
def test_ridges_that_are_tensors(shape: tuple[int, ...], poisoned: None) -> None:
    """One for all, for heads, for rows, for coordinates; with their gradients."""
    ridge = (torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.05).requires_grad_()
    leaves = [*draw(T, T, 5), ridge]
    exact, how = wide(leaves), {"is_causal": True}
    if len(shape) == 3 and shape[-1] == 5:
        shape = (1, *shape)  # three axes would be rows
        with pytest.raises(regard.checks.ArgumentError):
            triton(leaves[:3], ridge=ridge, **how)
    given, own = ridge.view(shape), exact[3].view(shape)
    own = own.expand(BATCH, HEADS, T, 5) if len(shape) == 4 else own.expand(BATCH, HEADS, T)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves[:3], ridge=given, **how)
        expected = local_linear(*exact[:3], seen_pairs(BATCH, HEADS, T, T, **how), own)
        compared(out, expected, leaves, exact, (1e-5, 1e-4), shape)


@pytest.mark.slow
def test_scales_of_rows() -> None:
    """A tensor of scales, with its gradient."""
    scale = (torch.rand(BATCH, HEADS, T, generator=torch.Generator().manual_seed(2)) + 0.2).requires_grad_()
    leaves = [*draw(T, T, 5), scale]
    exact, how = wide(leaves), {"is_causal": True}
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves[:3], scale=scale, **how)
    expected = local_linear(*exact[:3], seen_pairs(BATCH, HEADS, T, T, **how), 0.1, exact[3])  # type: ignore[arg-type]
    compared(out, expected, leaves, exact, (1e-5, 1e-4))


@pytest.mark.parametrize("call", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS])
def test_a_probe_in_place_of_the_solution(call: str, poisoned: None) -> None:
    """Parallax, with the probe's gradient."""
    queries, keys, how = CALLS[call]
    probe = torch.randn(BATCH, HEADS, queries, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
    leaves, seen = [*draw(queries, keys, 7, 5), probe], seen_pairs(BATCH, HEADS, queries, keys, **how)
    exact = wide(leaves)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves[:3], solver="learned", probe=probe, **how)
        compared(out, with_probe(*exact[:3], seen, exact[3]), leaves, exact, (5e-6, 5e-5), call)


@pytest.mark.slow
def test_a_probe_that_is_the_solution_gives_the_same() -> None:
    """Parallax is local linear attention with -t, whose rows see few keys, too."""
    q, k, v = (x.detach() for x in draw(30, 30, 6, batch=1, kv=HEADS))
    seen = seen_pairs(1, HEADS, 30, 30, is_causal=True)
    p = softmax_rows(scores(q.double(), k.double()), seen)
    mean = p @ k.double()
    apart = k.double()[:, :, None] - mean[:, :, :, None]
    matrix = torch.einsum("bhij,bhija,bhijc->bhiac", p, apart, apart) + 0.1 * torch.eye(6, dtype=torch.float64)
    t = torch.linalg.solve(matrix, (q.double() - mean)[..., None])[..., 0]
    with tiles.forced(rows=16, keys=16):
        one = triton([q, k, v], is_causal=True, ridge=0.1)
        other = triton([q, k, v], is_causal=True, solver="learned", probe=-t.float())
    near([one], [other], 2e-5)


# The solver -----------------------------------------------------------------------------------------------------


def steps_of(leaves: list[Tensor], seen: Tensor, ridge: float, count: int) -> tuple[Tensor, Tensor]:
    """(output, relative residual) after so many steps of conjugate gradients from 0, in float64."""
    q, k, v = (x.detach().double() for x in leaves)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    p = softmax_rows(scores(q, k), seen)
    mean = p @ k
    apart = k[:, :, None] - mean[:, :, :, None]
    matrix = torch.einsum("bhij,bhija,bhijc->bhiac", p, apart, apart) + ridge * torch.eye(q.shape[-1]).double()
    right = q - mean
    t, r, d = torch.zeros_like(right), right, right
    for _ in range(count):
        image = (matrix @ d[..., None])[..., 0]
        length = r.square().sum(-1, keepdim=True) / (d * image).sum(-1, keepdim=True)
        t, after = t + length * d, r - length * image
        d = after + d * after.square().sum(-1, keepdim=True) / r.square().sum(-1, keepdim=True)
        r = after
    slopes = (apart @ t[..., None])[..., 0]
    return (p * (1 + slopes)) @ v, r.norm(dim=-1) / right.norm(dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1))])
def test_a_budget_of_steps(count: int) -> None:
    """As many steps as allowed, from 0, and a residual and a status that own up to it; none at all is softmax."""
    leaves, seen = draw(17, 40, 12, batch=1, grad=False), seen_pairs(1, HEADS, 17, 40, is_causal=True)
    expected, residual = steps_of(leaves, seen, 0.05, count)
    with warnings.catch_warnings(), tiles.forced(rows=16, keys=16):
        warnings.simplefilter("ignore", RuntimeWarning)
        how = {"is_causal": True, "ridge": 0.05, "solver": "cg", "max_iter": count, "tol": 1e-6}
        out, told = triton(leaves, return_diagnostics=True, **how)
        near([triton(leaves, **how)], [out], 1e-6)
    near([out], [expected], 2e-5)
    if count == 0:
        near([out], [attend(*(x.double() for x in leaves), seen, RULES["softmax"])], 2e-6)
    else:
        assert float((told.solver["residual"] - residual).abs().max()) <= 1e-4
        assert bool((told.solver["iterations"] == count).all())
    assert bool((told.solver["status"] == int(SolveStatus.UNCONVERGED)).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_ends_where_its_true_residual_is_small(dtype: torch.dtype) -> None:
    """What diagnostics say of the tolerance is true of the output: 4 times it at the most, beyond the dtype's floor."""
    leaves, seen = (
        draw(40, 80, 16, batch=1, grad=False, dtype=dtype),
        seen_pairs(1, HEADS, 40, 80, is_causal=True),
    )
    expected = local_linear(*(x.double() for x in leaves), seen, 0.05)
    for tol in (1e-1, 1e-2, 1e-3):
        with tiles.forced(rows=16, keys=16):
            out, told = triton(leaves, is_causal=True, ridge=0.05, solver="cg", tol=tol, return_diagnostics=True)
        floor = 1e-5 if dtype == torch.float32 else 1.6e-2
        assert ratio(out, expected) <= tol + floor
        assert bool((told.solver["residual"] <= tol * 1.05).all())
        assert bool((told.solver["iterations"] < 40).all())
        assert not told.solver["status"].any()


@pytest.mark.slow
def test_affine_functions_are_reproduced() -> None:
    """v = W k + b, by a ridge of nearly nothing, wherever a row sees enough keys to know it."""
    make = torch.Generator().manual_seed(0)
    q, k, _ = (x.detach() for x in draw(40, 40, 6, batch=1, heads=1))
    slope, start = torch.randn(6, 4, generator=make), torch.randn(4, generator=make)
    with tiles.forced(rows=16, keys=16):
        out = triton([q, k, k @ slope + start], is_causal=True, ridge=1e-5)
    assert float((out - q @ slope - start)[:, :, 20:].abs().max()) <= 2e-3


def family(name: str, length: int, dim: int) -> list[Tensor]:
    """Normal keys; keys on the unit sphere; of very different spread about a mean far off; each query near a key."""
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, length, dim, generator=make) for _ in range(3))
    if name == "unit":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    elif name == "anisotropic":
        spread, offset = torch.logspace(0.5, -1, dim), 3 * torch.randn(dim, generator=make)
        q, k = q * spread + offset, k * spread + offset
    elif name == "recall":
        at = (torch.rand(length, generator=make) * torch.arange(1, length + 1)).long()
        q = k[:, :, at] + 0.1 * q
    return [x.to(torch.bfloat16) for x in (q, k, v)]


FLOOR = {
    ("normal", 0.1): 1.6e-2, ("normal", 0.01): 0.10,
    ("unit", 0.1): 2.1e-3, ("unit", 0.01): 4.4e-3,
    ("anisotropic", 0.1): 1.6e-2, ("anisotropic", 0.01): 5.6e-2,
    ("recall", 0.1): 1.7e-3, ("recall", 0.01): 2.2e-3,
}  # fmt: skip
"""Relative errors of a float32 solve whose weights are rounded to bfloat16 before they meet the values; 1024 keys."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ridge"), [("normal", 0.1), ("anisotropic", 0.1), ("anisotropic", 0.01), ("recall", 0.1)]
)
def test_bfloat16_keys_of_four_kinds(name: str, ridge: float) -> None:
    """Within 1.5 times that floor at ridge .1, twice at .01 (and the rounding of the output)."""
    leaves = family(name, 160, 32)
    scale = 8.0 if name == "unit" else 32**-0.5
    seen = seen_pairs(1, 1, 160, 160, is_causal=True)
    expected = local_linear(*(x.double() for x in leaves), seen, ridge, scale)
    out = triton(leaves, ridge=ridge, scale=scale, is_causal=True)
    assert ratio(out, expected) <= (1.5 if ridge == 0.1 else 2.0) * FLOOR[name, ridge] + 1.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normal", "anisotropic"])
def test_bfloat16_gradients_of_four_kinds(name: str) -> None:
    leaves = [x.requires_grad_() for x in family(name, 80, 16)]
    scale = 8.0 if name == "unit" else 16**-0.5
    exact, seen = wide(leaves), seen_pairs(1, 1, 80, 80, is_causal=True)
    out = triton(leaves, ridge=0.1, scale=scale, is_causal=True)
    expected = local_linear(*exact, seen, 0.1, scale)
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for a, b in zip(found, wanted, strict=True):
        assert ratio(a, b) <= 5e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["zero keys", "one key many times", "on a line", "scores of 1e4", "far from zero", "small"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hard_keys(kind: str, dtype: torch.dtype) -> None:
    """Finite, forward and backward, and right where arithmetic allows it."""
    q, k, v = (x.detach().float() for x in draw(20, 20, 6, batch=1, heads=1, dtype=dtype))
    if kind == "zero keys":
        k = torch.zeros_like(k)
    elif kind == "one key many times":
        k = k[:, :, :1].expand_as(k).contiguous()
    elif kind == "on a line":
        k = k[..., :1] * k[:, :, :1]
    elif kind == "scores of 1e4":
        q, k = q * 100, k * 100
    elif kind == "far from zero":
        k = k + 20
    else:
        k = k * 1e-4
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, ridge=0.1, is_causal=True)
        grads = torch.autograd.grad((out * weight_of(out)).sum(), leaves)
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in grads)
    if kind != "scores of 1e4":
        expected = local_linear(*wide(leaves), seen_pairs(1, 1, 20, 20, is_causal=True), 0.1)
        assert ratio(out, expected) <= (2e-4 if dtype == torch.float32 else 3e-2)


# One query ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"window": 30, "is_causal": True}, {"query_offset": torch.tensor([50, -1])}])
@pytest.mark.parametrize("dim", [8, 40])
def test_one_query(how: dict[str, Any], dim: int, poisoned: None) -> None:
    """Of which no gradient is asked, and of which one is; ridges of rows and of coordinates; a probe."""
    how = {**how, "is_causal": True} if "query_offset" in how else how
    make = torch.Generator().manual_seed(1)
    mask = torch.rand(BATCH, 1, 1, 70, generator=make) > 0.2
    seen = seen_pairs(BATCH, 4, 1, 70, attn_mask=mask, **how)
    own = torch.rand(BATCH, 4, 1, dim, generator=make) + 0.1
    for dtype, most in ((torch.float32, 2e-5), (torch.bfloat16, 1.5e-2)):
        leaves = draw(1, 70, dim, 12, heads=4, kv=2, dtype=dtype)
        exact = wide(leaves)
        with torch.no_grad(), tiles.forced(rows=16, keys=32):
            for ridge in (0.1, own[..., 0], own):
                amount = ridge.double() if isinstance(ridge, Tensor) else ridge
                expected = local_linear(*exact, seen, amount)
                near([triton(leaves, ridge=ridge, attn_mask=mask, **how)], [expected], most, (dtype, how))
            found = triton(leaves, solver="learned", probe=own, attn_mask=mask, **how)
            near([found], [with_probe(*exact, seen, own.double())], most, "probe")
        if dtype == torch.float32:
            out = triton(leaves, ridge=0.1, attn_mask=mask, **how)
            compared(out, local_linear(*exact, seen, 0.1), leaves, exact, (most, 1e-4))


@pytest.mark.slow
def test_one_query_at_a_time_is_the_whole() -> None:
    """With keys far from zero, too."""
    q, k, v = draw(24, 24, 6, batch=1, kv=HEADS, grad=False)
    q, k = q + 3, k + 3
    with tiles.forced(rows=16, keys=16):
        whole = triton([q, k, v], is_causal=True)
        each = [triton([q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]], is_causal=True) for i in range(24)]
    near([torch.cat(each, 2)], [whole], 5e-5)


# Promises -------------------------------------------------------------------------------------------------------


def both(leaves: list[Tensor], weight: Tensor, **call: Any) -> list[Tensor]:
    """Output and gradients in small tiles."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, **call)
        return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


QUICK_KINDS = ("loosely",)
KINDS: dict[str, dict[str, Any]] = {
    "solved": {"ridge": 0.05},
    "loosely": {"ridge": 0.05, "solver": "cg", "tol": 1e-2},
    "probe": {"solver": "learned"},
}


def with_kind(kind: str, rows: int, dim: int, heads: int = HEADS, batch: int = 1) -> dict[str, Any]:
    how = dict(KINDS[kind])
    if kind == "probe":
        how["probe"] = torch.randn(batch, heads, rows, dim, generator=torch.Generator().manual_seed(7))
    return how


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("what", [torch.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.nan, 3e38))])
def test_what_is_hidden_never_matters(kind: str, what: float) -> None:
    """To the last bit, forward and backward; and it has no gradient itself."""
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=1, heads=1))
    mask = torch.ones(1, 1, 1, 34, dtype=torch.bool)
    mask[..., 7:9] = mask[..., 20] = False
    weight, how = weight_of(q), {"attn_mask": mask, "exclude_self": True, **with_kind(kind, 34, 6, 1)}
    before = both([q, k, v], weight, **how)
    k[:, :, 7], v[:, :, 8], k[:, :, 20], v[:, :, 33] = what, what, -what, what
    k[:, :, 33] = 1e6
    after = both([q, k, v], weight, **how)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert not after[2][:, :, [7, 8, 20, 33]].any()
    assert not after[3][:, :, [7, 8, 20, 33]].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_what_is_not_finite_spoils_the_rows_that_see_it(kind: str) -> None:
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=2))
    weight, how = weight_of(q), {"is_causal": True, **with_kind(kind, 34, 6, batch=2)}
    weight[0, :, 20:] = 0
    weight[1, 1, 4] = 0
    before = both([q, k, v], weight, **how)
    k[0, 0, 20, 3], v[0, 0, 25, 0], q[1, 1, 4, 2] = torch.nan, torch.inf, torch.nan
    weight[0, :, 20:] = 1  # passes no gradient
    after = both([q, k, v], weight, **how)
    out = after[0]
    assert bool(out[0, :, 20:].isnan().all())
    assert bool(out[1, 1, 4].isnan().all())
    rest = torch.ones(2, HEADS, 34, dtype=torch.bool)
    rest[0, :, 20:] = rest[1, 1, 4] = False
    assert torch.equal(out[rest], before[0][rest])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert bool(other.isfinite().all())
        near([other], [one], 1e-6, kind)


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_rows_without_a_key(kind: str, poisoned: None) -> None:
    """Are 0 and have gradient 0; so has what only they see."""
    leaves = draw(24, 9, 6)
    mask = torch.ones(BATCH, 1, 1, 9, dtype=torch.bool)
    mask[1] = False
    how = {"attn_mask": mask, "is_causal": True, **with_kind(kind, 24, 6, batch=BATCH)}
    out, dq, dk, dv = both(leaves, weight_of(leaves[0]), **how)
    assert not out[:, :, :15].any()
    assert not out[1].any()
    assert bool(out[0, :, 15:].any(-1).all())
    for x in (dq[:, :, :15], dq[1], dk[1], dv[1]):
        assert not x.any()
    assert not dq[0, :, 15].any() or kind == "probe"  # of one key it sees the value, whatever the query


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_nothing_at_all(sizes: tuple[int, int]) -> None:
    for batch in (0, 1):
        leaves = draw(*sizes, 6, batch=batch)
        out = triton(leaves)
        assert out.shape == (batch, HEADS, sizes[0], 6)
        assert sizes[1] or not out.any()
        grads = torch.autograd.grad(out.sum(), leaves)
        assert [g.shape for g in grads] == [x.shape for x in leaves]
        assert sizes[1] == 1 or not any(bool(g.any()) for g in grads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_weights_sum_to_one(kind: str, poisoned: None) -> None:
    """Values of one give one, whatever is solved and however well."""
    q, k, v = draw(17, 40, 16, batch=1, grad=False)
    how = with_kind(kind, 17, 16)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        with tiles.forced(rows=16, keys=16):
            out = triton([q.to(dtype), k.to(dtype), torch.ones_like(v).to(dtype)], is_causal=True, **how)
        assert float((out.double() - 1).abs().max()) <= most


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_no_bit_of_a_row_depends_on_what_comes_later(kind: str) -> None:
    """Later tokens whose systems take many steps, few, or that are not there; keys far away from all others."""
    q, k, v = draw(21, 21, 4, batch=1, heads=1, grad=False)
    how = {"is_causal": True, **with_kind(kind, 21, 4, 1)}
    with tiles.forced(rows=16, keys=16):
        before = triton([q, k, v], **how)
        for cut in (7, 18):
            part = {**how, "probe": how["probe"][:, :, :cut]} if kind == "probe" else how
            short = triton([x[:, :, :cut] for x in (q, k, v)], **part)
            assert torch.equal(short, before[:, :, :cut]), cut
            for factor, shift in ((0.0, 0.0), (0.01, 0.0), (10.0, 0.0), (1.0, 1e3)):
                a, b, c = (x.clone() for x in (q, k, v))
                for x in (a, b, c):
                    x[:, :, cut:] = x[:, :, cut:] * factor + shift
                assert torch.equal(triton([a, b, c], **how)[:, :, :cut], before[:, :, :cut]), (cut, factor)


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_packed_sequences(kind: str) -> None:
    """Equal calls of their own; and no bit of one depends on another, forward or backward."""
    leaves = draw(T, T, 4, batch=1)
    runs, how = [(0, 5), (5, 12), (12, 13), (13, 19)], with_kind(kind, T, 4)
    weight = weight_of(leaves[0])
    packed = both(leaves, weight, segment_ids=IDS[:1], is_causal=True, **how)
    apart = []
    for a, b in runs:
        own = {**how, "probe": how["probe"][:, :, a:b]} if kind == "probe" else how
        apart.append(both([x[:, :, a:b] for x in leaves], weight[:, :, a:b], is_causal=True, **own))
    most = (1e-2, 1e-1) if kind == "loosely" else (1e-5, 1e-4)
    near(packed, [torch.cat(x, 2) for x in zip(*apart, strict=True)], (most[0], *[most[1]] * 3), kind)
    changed = [x.detach().clone() for x in leaves]
    for x in changed:
        x[:, :, 5:12] = x[:, :, 5:12] * -3 + 50
        x[:, :, 12:13] = torch.nan
    weight[:, :, 5:13] = 100
    other = both(changed, weight, segment_ids=IDS[:1], is_causal=True, **how)
    for one, two in zip(packed, other, strict=True):
        assert torch.equal(one[:, :, :5], two[:, :, :5])
        assert torch.equal(one[:, :, 13:], two[:, :, 13:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_batch_is_a_loop(kind: str) -> None:
    """To the last bit."""
    leaves, how = draw(5, 18, 4, heads=4, kv=2), with_kind(kind, 5, 4, heads=4, batch=BATCH)
    weight = weight_of(leaves[0])
    whole = both(leaves, weight, is_causal=True, **how)
    for b in range(BATCH):
        for h in range(2):
            heads = (slice(b, b + 1), slice(2 * h, 2 * h + 2))
            part = [leaves[0][heads], *(x[b : b + 1, h : h + 1] for x in leaves[1:])]
            own = {**how, "probe": how["probe"][heads]} if kind == "probe" else how
            for place, x in enumerate(both(part, weight[heads], is_causal=True, **own)):
                at = heads if place < 2 else (slice(b, b + 1), slice(h, h + 1))
                assert torch.equal(whole[place][at], x), place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    """And the same again: [B, T, H, D] turned, every other feature, parts of longer rows, one key for all."""
    q, k, v = (x.detach() for x in draw(33, 33, 8, heads=4, kv=2, dtype=dtype))
    expected = both([q, k, v], torch.ones_like(q), is_causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    every = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    across = [x.mT.contiguous().mT for x in (q, k, v)]
    late = [torch.stack([torch.full_like(x, torch.nan), x], 2).flatten(2, 3)[:, :, 33:] for x in (q, k, v)]
    for how in ([q, k, v], turned, every, across, late):
        for one, other in zip(expected, both(how, torch.ones_like(q), is_causal=True), strict=True):
            assert torch.equal(one, other)
    leaves = [x.detach().requires_grad_() for x in turned]
    with tiles.forced(rows=16, keys=16):
        found = torch.autograd.grad(triton(leaves, is_causal=True).sum(), leaves)  # an expanded gradient
    for one, other in zip(expected[1:], found, strict=True):
        assert torch.equal(one, other)


def far(x: Tensor, axis: int) -> Tensor:
    """The same numbers with steps of 2^31 and more elements along an axis, in memory that is not touched elsewhere."""
    stride = list(torch.empty(x.shape).stride())
    stride[axis] = 2**31 + 16
    return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_that_lie_far_apart(axis: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 2^31 and more, between sequences, heads and rows; `direct`: in every kernel, not only in that which
    looks for what is not finite and leaves a copy."""
    if direct:
        from regard.ops.triton.attention import Triton

        monkeypatch.setattr(Triton, "clean", lambda self, x: (x, None))
    sizes = {"batch": 2 if axis == 0 else 1, "heads": 2, "kv": 2 if axis == 1 else 1}
    for length in (2, 1):
        q, k, v = (x.detach() for x in draw(length, 2, 8, dtype=torch.bfloat16, **sizes))
        near_by, spread = [q, k, v], [far(x, axis) for x in (q, k, v)]
        for one, other in zip(*(both(x, torch.ones_like(q)) for x in (near_by, spread)), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(triton(spread), triton(near_by))  # no gradient is asked


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_of_a_block_that_lie_far_apart(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fit in 32 bits, of which those of one block together do not."""
    from regard.ops.triton.attention import Triton

    monkeypatch.setattr(Triton, "clean", lambda self, x: (x, None))
    tensors = [x.detach() for x in draw(18, 18, 8, batch=1, heads=1, dtype=torch.bfloat16)]
    spread = torch.empty_strided((1, 1, 18, 8), (8, 8, 2**28, 1), dtype=torch.bfloat16).copy_(tensors[place])
    apart = [spread if n == place else x for n, x in enumerate(tensors)]
    weight = torch.ones_like(tensors[0])
    for one, other in zip(both(tensors, weight), both(apart, weight), strict=True):
        assert torch.equal(one, other)
    apart[0], tensors[0] = (x[:, :, -1:] for x in (apart[0], tensors[0]))  # one query, of which no gradient is asked
    assert torch.equal(triton(apart), triton(tensors))


# Compilers, autocast, transforms --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("solved", "aot_eager"), *(pytest.param(k, "eager", marks=pytest.mark.slow) for k in ("solved", "probe"))],
)
def test_one_graph(kind: str, backend: str) -> None:
    torch._dynamo.reset()
    how = with_kind(kind, 20, 8, batch=BATCH)
    probe = how.pop("probe", None)
    leaves = draw(20, 20, 8)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.local_linear_attention(
            q, k, v, is_causal=True, enable_gqa=True, impl="triton", probe=probe, **how
        )

    drawn = torch.compile(call, fullgraph=True, backend=backend)
    plain, out = call(*leaves), drawn(*leaves)
    weight = weight_of(out)
    near([out], [plain], 1e-6)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    near(found, torch.autograd.grad((plain * weight).sum(), leaves), 1e-5)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of regard that were called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.made.setdefault(func, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["solved", "probe"])
def test_operators_are_what_they_say(kind: str) -> None:
    """opcheck: schema, fake kernels and autograd of every operator that a call makes."""
    leaves, how = draw(18, 18, 8), with_kind(kind, 18, 8, batch=BATCH)
    calls = Calls()
    with calls:
        triton(leaves, is_causal=True, **how).sum().backward()
        with torch.no_grad():
            own = {**how, "probe": how["probe"][:, :, -1:]} if kind == "probe" else how
            triton([leaves[0][:, :, -1:], *leaves[1:]], **own)
    names = [func.name() for func in calls.made]
    assert any("triton" in name and "linear" in name for name in names), names
    for func, (args, kwargs) in calls.made.items():
        if "triton" not in func.name():
            continue
        leaf = lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x  # noqa: E731
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(func, tuple(leaf(x) for x in args), kwargs, test_utils=checks)


@pytest.mark.slow
def test_autocast_changes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = draw(20, 20, 8, dtype=dtype)
        weight = weight_of(leaves[0])
        plain = both(leaves, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = both(leaves, weight)
        for one, other in zip(plain, cast, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


# What it says ---------------------------------------------------------------------------------------------------

BAD: dict[str, dict[str, Any]] = {
    "wide": {"dim": 257},
    "wide values": {"value_dim": 300},
    "float16": {"dtype": torch.float16},
    "float64": {"dtype": torch.float64},
    "a mask of pairs": {"attn_mask": torch.ones(12, 40, dtype=torch.bool)},
    "compact weights": {"spec": "biweight"},
    "an absolute ridge": {"ridge_mode": "absolute"},
    "cholesky": {"solver": "cholesky"},
    "blocks": {"solver": "block-diagonal"},
    "no ridge": {"ridge": 0.0},
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_do(name: str) -> None:
    """An error that names who can, or the right number; the same without `impl` is a number."""
    how = dict(BAD[name])
    dim, value_dim, dtype = how.pop("dim", 8), how.pop("value_dim", None), how.pop("dtype", torch.float32)
    leaves = draw(12, 40, dim, value_dim, dtype=dtype, grad=False)
    try:
        out = triton(leaves, **how)
    except regard.checks.ArgumentError as error:
        text = str(error)
        assert "impl='triton'" in text
        assert "\n" not in text
        able = text.split("Those that can: ")[1].rstrip(".").split(", ")
        assert {"blocked", "reference"} & set(able)
        assert "triton" not in able
        assert bool(regard.local_linear_attention(*leaves, enable_gqa=True, **how).isfinite().all())
        return
    assert name in ("cholesky", "no ridge"), "given a number where an error was due"
    expected = local_linear(*(x.double() for x in leaves), seen_pairs(BATCH, HEADS, 12, 40), how.get("ridge", 0.1))
    near([out], [expected], 1e-4)


def test_explain() -> None:
    """On a GPU it is chosen; a solver or a weight that it does not know is a reason."""
    shape = (2, 8, 4096, 64)
    memory = []
    for length in (4096, 8192):
        known = (*shape[:2], length, shape[3])
        told = regard.explain("local-linear", known, dtype=torch.bfloat16, device="cuda", is_causal=True)
        assert told.chosen == "triton"
        memory += [cost.bytes for name, _, cost in told.rows if name == "triton" and cost is not None]
    assert 0 < memory[1] <= 2.1 * memory[0]  # linear in the length
    for spec in (
        "local-linear[biweight]", "gaussian*fixed*linear(ridge=0.1,solver=block-diagonal)",
        "gaussian*fixed*linear(ridge=0.1,ridge_mode=absolute)",
    ):  # fmt: skip
        told = regard.explain(spec, shape, device="cuda")
        assert {name: reason for name, reason, _ in told.rows}["triton"]
        assert told.chosen not in ("triton", "nothing")


@pytest.mark.slow
def test_diagnostics() -> None:
    """Of softmax and of the solver; where weights are negative is counted or not said, never said wrongly."""
    leaves, seen = draw(30, 30, 6, batch=1, grad=False), seen_pairs(1, HEADS, 30, 30, is_causal=True)
    with tiles.forced(rows=16, keys=16):
        out, told = triton(leaves, is_causal=True, ridge=0.1, return_diagnostics=True)
        near([triton(leaves, is_causal=True, ridge=0.1)], [out], 1e-6)
    q, k, _ = (x.double() for x in leaves)
    k = k.repeat_interleave(HEADS, 1)
    p = softmax_rows(scores(q, k), seen)
    near([told.effective_sample_size], [1 / p.square().sum(-1)], 1e-4)
    near([told.support.double()], [seen.sum(-1).double()], 1e-6)
    assert not told.empty.any()
    assert told.solver is not None
    assert not told.solver["status"].any()
    assert float(told.solver["residual"].max()) <= 1e-5
    if told.negative_mass is not None:
        mean = p @ k
        apart = k[:, :, None] - mean[:, :, :, None]
        matrix = torch.einsum("bhij,bhija,bhijc->bhiac", p, apart, apart) + 0.1 * torch.eye(6, dtype=torch.float64)
        t = torch.linalg.solve(matrix, (q - mean)[..., None])
        weights = p * (1 + (apart @ t)[..., 0])
        near([told.negative_mass], [weights.clamp(max=0).sum(-1).neg()], 1e-4)
