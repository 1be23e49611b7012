"""`regard.local_linear_attention(..., impl="triton")` from outside: against dense solves in float64, in every order of
queries and keys; and what a call promises whatever it computes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from dense_oracles import RULES, attend, local_linear, near, ratio, scores, seen_pairs, softmax_rows, with_probe
from linear_calls import BATCH, HEADS, IDS, T, draw, triton, weight_of, wide
from torch import Tensor

import regard
from regard.grammar import SolveStatus
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds")

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


def batch_of(how: dict[str, Any]) -> int:
    """Two sequences only where they differ in what is seen."""
    return BATCH if any(isinstance(x, Tensor) for x in how.values()) else 1


def compared(
    out: Tensor, expected: Tensor, leaves: list[Tensor], exact: list[Tensor], most: tuple[float, float], what: Any = ""
) -> None:
    weight = weight_of(out)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    near([out, *found], [expected, *wanted], (most[0], *[most[1]] * len(leaves)), what)


WIDTHS = [(1, 1), (16, 40), (40, 16), (64, 64), (100, 3), (128, 100), (256, 128), (64, 256)]
MOST = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (4e-3, 6e-3)}
"""Of outputs and of gradients."""


SHAPES = [(), (HEADS, 1), (BATCH, HEADS, T), (HEADS, 1, 5), (BATCH, HEADS, T, 5)]


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


@pytest.mark.parametrize("call", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CALLS])
def test_every_order(call: str, poisoned: None) -> None:
    queries, keys, how = CALLS[call]
    batch = batch_of(how)
    leaves, seen = draw(queries, keys, 5, 3, batch=batch), seen_pairs(batch, HEADS, queries, keys, **how)
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
    batch = batch_of(how)
    leaves = draw(queries, keys, 4, 6, batch=batch, dtype=torch.bfloat16)
    seen, exact = seen_pairs(batch, HEADS, queries, keys, **how), wide(leaves)
    with tiles.forced(rows=16, keys=16):
        out = triton(leaves, ridge=0.1, **how)
        assert out.dtype == torch.bfloat16
        compared(out, local_linear(*exact, seen, 0.1), leaves, exact, (4e-3, 6e-3), call)


@pytest.mark.slow
def test_gradients_of_a_close_fit_in_bfloat16(poisoned: None) -> None:
    """With fewer keys than coordinates little is left of gamma: of it dk is made, beside which u is large."""
    leaves = draw(12, 16, 40, 3, batch=1, dtype=torch.bfloat16)
    seen, exact = seen_pairs(1, HEADS, 12, 16), wide(leaves)
    compared(triton(leaves, ridge=0.2), local_linear(*exact, seen, 0.2), leaves, exact, (4e-3, 4e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [(*w, dtype) for w, dtype in zip(WIDTHS, 4 * [torch.float32, torch.bfloat16], strict=True)],
)
def test_every_width(dim: int, value_dim: int, dtype: torch.dtype, poisoned: None) -> None:
    seen, most = seen_pairs(1, HEADS, 20, 33, is_causal=True), MOST[dtype]
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ridge"), [("normal", 0.1), ("anisotropic", 0.01), ("recall", 0.1)])
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
    ("kind", "dtype"),
    [
        ("zero keys", torch.float32), ("one key many times", torch.bfloat16), ("on a line", torch.float32),
        ("on a line", torch.bfloat16), ("scores of 1e4", torch.float32), ("scores of 1e4", torch.bfloat16),
        ("far from zero", torch.bfloat16), ("small", torch.float32),
    ],
)  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dim"),
    [({}, 40), ({"window": 30, "is_causal": True}, 8), ({"query_offset": torch.tensor([50, -1])}, 8)],
)
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
