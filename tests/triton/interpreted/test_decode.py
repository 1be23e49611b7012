"""Decoding with split keys, against dense formulas in float64: every rule, local linear attention, balls around blocks
of keys that leave them unread. Tiles of 16 keys, so that short caches have many, and several splits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dense_oracles import RULES, Rule, attend, local_linear, near, ratio, scores, seen_pairs, with_probe
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.pairwise.visibility import Visibility
from regard.triton.decode import local_linear as local_linear_decode
from regard.triton.decode.decode import KeyBounds, decode_attention
from regard.triton.runtime.tiles import forced

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
"""Of relative root mean squares; in bfloat16 the output is rounded to 2^-9."""
LOOSE = {torch.float32: 1e-4, torch.bfloat16: 8e-3}
"""Of local linear attention, whose systems multiply rounding by their condition."""


SLOW_100 = pytest.param(100, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_tiles(poisoned: None) -> Iterator[None]:
    with forced(keys=16):
        yield


def tensors(
    keys: int, dtype: torch.dtype = torch.float32, batch: int = 1, heads: int = 2, kv_heads: int = 1, queries: int = 1,
    dim: int = 8, value_dim: int = 5, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, dim, generator=g)
    k = torch.randn(batch, kv_heads, keys, dim, generator=g)
    return q.to(dtype), k.to(dtype), torch.randn(batch, kv_heads, keys, value_dim, generator=g).to(dtype)


def seen_by(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    return seen_pairs(q.shape[0], q.shape[1], q.shape[2], k.shape[2], **options)


def check(rule: Rule, q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, hidden: float = 0.0, **options: Any) -> None:
    """`decode_attention` against the dense formula; what nobody sees is `hidden` for the kernels."""
    seen = seen_by(q, k, **options)
    expected = attend(q.double(), k.double(), v.double(), seen, rule, scale)
    lost = ~seen.unflatten(1, (k.shape[1], -1)).any((2, 3))[..., None]
    k, v = torch.where(lost, hidden, k), torch.where(lost, hidden, v)
    found = decode_attention(q, k, v, rule.text, scale=scale, **options)
    assert found.dtype == q.dtype
    near([found], [expected], TOLERANCE[q.dtype], rule.text)


# Every rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_rules_with_a_mask_and_offsets_of_their_own(name: str) -> None:
    q, k, v = tensors(40, batch=2)
    mask = torch.rand(2, 1, 1, 40, generator=torch.Generator().manual_seed(1)) < 0.8
    options = {"is_causal": True, "query_offset": torch.tensor([39, 20]), "attn_mask": mask}
    check(RULES[name], q, k, v, hidden=torch.nan, **options)


@pytest.mark.parametrize("keys", [1, 2, 17, SLOW_100, 257])
@pytest.mark.parametrize("name", ["softmax", "adaptive 1"])
def test_lengths(name: str, keys: int) -> None:
    check(RULES[name], *tensors(keys, torch.bfloat16), is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "fixed 1"])
def test_several_splits_in_float32(name: str) -> None:
    check(RULES[name], *tensors(140, heads=1), is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "anchored 1", "fixed 3"])
def test_rows_of_a_tile_in_bfloat16(name: str) -> None:
    """Three queries of each of two query heads meet the keys together, each within a window of its own."""
    q, k, v = tensors(60, torch.bfloat16, heads=4, kv_heads=2, queries=3)
    check(RULES[name], q, k, v, hidden=torch.nan, window=37, is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 3", "fixed 1"])
def test_one_head_a_key_head_in_bfloat16_and_a_wide_value(name: str) -> None:
    check(RULES[name], *tensors(50, torch.bfloat16, kv_heads=2, dim=5, value_dim=20), exclude_self=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "fixed 2"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_that_see_nothing_are_zero(name: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(20, dtype, batch=2, queries=2)
    k[0], v[0] = torch.nan, torch.nan
    offset = torch.tensor([-7, 19])
    found = decode_attention(q, k, v, RULES[name].text, is_causal=True, query_offset=offset, scale=1.0)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[1].abs().amin() > 0


@pytest.mark.parametrize("empty", ["uniform", "zero", "nearest"])
def test_rows_without_a_key_inside(empty: str) -> None:
    q, k, v = tensors(40, batch=2)
    rule = Rule(f"biweight*fixed(bias=-40,empty={empty})", "fixed", 2, -40.0, empty)
    assert not ((scores(q, k, 1.0) - 40) > 0).any()
    mask = torch.ones(2, 2, 1, 40, dtype=torch.bool)
    mask[0, 1, :, ::3] = mask[1, :, :, 20:] = False
    if empty == "zero":
        assert torch.equal(decode_attention(q, k, v, rule.text, scale=1.0), torch.zeros(2, 2, 1, 5))
    else:
        check(rule, q, k, v, attn_mask=mask)


def test_the_first_of_keys_that_tie() -> None:
    q, k, v = tensors(40, heads=1)
    k[:, :, 33] = k[:, :, 7] = q[:, :, 0] * 9
    k[:, :, 21] = k[:, :, 7]
    found = decode_attention(q, k, v, "biweight*fixed(bias=-1e4,empty=nearest)", scale=1.0)
    assert torch.equal(found, v[:, :, [7]])


def test_numbers_of_rows() -> None:
    """Scales, margins and biases that differ from row to row."""
    q, k, v = tensors(30)
    g = torch.Generator().manual_seed(4)
    scale, number = torch.rand(1, 2, 1, generator=g) + 0.5, torch.rand(1, 2, 1, generator=g) + 0.2
    for name, label in (("anchored 2", "margin"), ("fixed 2", "bias")):
        found = decode_attention(q, k, v, RULES[name].text, scale=scale, params={label: number})
        wide = (x.double() for x in (q, k, v))
        expected = attend(*wide, seen_by(q, k), RULES[name], scale.double(), number.double())
        near([found], [expected], 2e-5, name)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_flat_rows_of_many_keys_are_shared_out_equally(power: int) -> None:
    """The longest search: every key is inside until the very end."""
    q, k, v = tensors(257, heads=1)
    found = decode_attention(q, torch.zeros_like(k), v, RULES[f"adaptive {power}"].text)
    assert ratio(found, v.double().mean(2, keepdim=True)) < 1e-5


def test_scores_far_from_zero_lose_nothing() -> None:
    """Every score is raised by 4096 exactly, and the steps between float32 numbers are then 2^-11."""
    q, k, v = tensors(60, heads=1, dim=2)
    q[...] = torch.tensor([1.0, 4096.0])
    k[..., 0], k[..., 1] = (k[..., 0] * 64).round() / 64, 1.0
    for name in ("adaptive 2", "anchored 1"):
        expected = attend(*(x.double() for x in (q, k, v)), seen_by(q, k), RULES[name], 1.0)
        assert ratio(decode_attention(q, k, v, RULES[name].text, scale=1.0), expected) < 1e-5


def test_strides_of_a_cache_laid_out_by_tokens() -> None:
    q, k, v = tensors(40, torch.bfloat16, heads=4, kv_heads=2)
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert not moved[1].is_contiguous()
    same = [decode_attention(*x, "biweight") for x in ((q, k, v), moved)]
    assert torch.equal(*same)


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "linear"])
def test_keys_of_a_tile_may_lie_more_than_2_31_numbers_apart(name: str) -> None:
    """As those of a very wide cache laid out by tokens do. Of the memory only the pages that are met are there."""
    q, k, v = tensors(35, torch.bfloat16)
    step = 2**26 + 16
    room = torch.from_numpy(np.empty(35 * step, np.int16)).view(torch.bfloat16)
    far = [room.as_strided((1, 1, 35, x.shape[-1]), (1, 1, step, 1), at).copy_(x) for x, at in ((k, 0), (v, 8))]
    wide, seen = [x.double() for x in (q, k, v)], seen_by(q, k)
    with forced(keys=64):
        if name == "linear":
            near([linear_decode(q, *far)], [local_linear(*wide, seen, 0.1, 1.0)], LOOSE[torch.bfloat16])
        else:
            found = decode_attention(q, *far, RULES[name].text, scale=1.0)
            near([found], [attend(*wide, seen, RULES[name], 1.0)], TOLERANCE[torch.bfloat16])


def linear_decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Local linear attention with the tensors as they lie."""
    visible = Visibility(queries=1, keys=k.shape[2], causal=True, offset=k.shape[2] - 1)
    return local_linear_decode.decode(q, k, v, 1.0, 0.1, None, visible)


def test_no_token_changes_an_earlier_row() -> None:
    """Rows that share a tile share no number: the earlier query is the same to the last bit."""
    q, k, v = tensors(40, torch.bfloat16, queries=2)
    other = [x.clone() for x in (q, k, v)]
    other[0][:, :, 1] *= 3
    other[1][:, :, -1], other[2][:, :, -1] = 5.0, -1.0
    for name in ("softmax", "adaptive 2", "anchored 1", "fixed 1"):
        a, b = (decode_attention(*x, RULES[name].text, is_causal=True) for x in ((q, k, v), other))
        assert torch.equal(a[:, :, 0], b[:, :, 0]), name
        assert not torch.equal(a[:, :, 1], b[:, :, 1])


# Balls ----------------------------------------------------------------------------------------------------------


def clustered(dtype: torch.dtype = torch.float32, heads: int = 1, queries: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """9 blocks of 16 keys that are near to each other, the last not full, and queries near block 2."""
    g = torch.Generator().manual_seed(2)
    k = torch.randn(1, heads, 9, 1, 8, generator=g) * 3 + 0.1 * torch.randn(1, heads, 9, 16, 8, generator=g)
    k = k.flatten(2, 3)[:, :, :139].contiguous()
    q = k[:, :, 40:41].repeat_interleave(2, 1) + 0.1 * torch.randn(1, 2 * heads, queries, 8, generator=g)
    return q.to(dtype), k.to(dtype), torch.randn(1, heads, 139, 5, generator=g).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param("adaptive 1", torch.float32, marks=pytest.mark.slow),
        ("fixed 3", torch.float32),
        ("adaptive 2", torch.bfloat16),
        ("anchored 1", torch.bfloat16),
        pytest.param("fixed 1", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_blocks_that_cannot_count_are_not_read(name: str, dtype: torch.dtype) -> None:
    """Those without a weight in any row may hold NaN once their balls are known; the output is that of the formula."""
    q, k, v = clustered(dtype, heads=1 if dtype == torch.float32 else 2)
    rule, seen = RULES[name], seen_by(q, k)
    expected = attend(q.double(), k.double(), v.double(), seen, rule, 1.0)
    weights = rule.weights(scores(q.double(), k.double(), 1.0), seen).unflatten(1, (-1, 2)).sum((2, 3))
    plain = decode_attention(q, k, v, rule.text, scale=1.0)
    bounds = KeyBounds.of(k, 16)
    z = scores(q.double(), k.double(), 1.0).unflatten(1, (-1, 2))
    spread = torch.nn.functional.pad(z, (0, 5), value=-torch.inf).unflatten(-1, (9, 16)).amax((2, 3, 5))
    # out of reach of every rule here, [1, heads, 9]
    far = (spread < spread.amax(-1, keepdim=True) - 8) & (spread < -8)
    lost = far.repeat_interleave(16, -1)[..., :139, None]
    assert far.sum(-1).amin() >= 2
    assert weights[lost[..., 0]].abs().max() == 0
    k, v = torch.where(lost, torch.nan, k), torch.where(lost, torch.nan, v)
    found, read = decode_attention(q, k, v, rule.text, scale=1.0, key_bounds=bounds, return_visited=True)
    near([found], [expected], TOLERANCE[dtype], name)
    assert torch.equal(found, plain)
    assert (read.keys <= 9 - far.sum(-1)).all()
    assert (read.values <= read.keys).all()
    assert (read.total == 9).all()


def test_bounds_with_a_mask_a_window_and_larger_blocks() -> None:
    """The block that promises most may be hidden, and blocks of bounds may hold several tiles."""
    q, k, v = clustered(torch.bfloat16, queries=2)
    mask = torch.ones(1, 1, 1, 139, dtype=torch.bool)
    mask[..., 32:48] = False
    options = {"attn_mask": mask, "is_causal": True, "window": 120}
    for name, block in (("adaptive 2", 16), ("anchored 1", 64)):
        expected = attend(*(x.double() for x in (q, k, v)), seen_by(q, k, **options), RULES[name], 1.0)
        bounds = KeyBounds.of(k, block)
        found = decode_attention(q, k, v, RULES[name].text, scale=1.0, key_bounds=bounds, **options)
        near([found], [expected], TOLERANCE[torch.bfloat16], (name, block))


def test_softmax_reads_everything() -> None:
    q, k, v = clustered(torch.bfloat16)
    bounds = KeyBounds.of(k, 16)
    found, read = decode_attention(q, k, v, key_bounds=bounds, return_visited=True)
    assert torch.equal(found, decode_attention(q, k, v))
    assert (read.keys == 9).all()
    assert read.size == 16


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("keys", [1, 31, 70])
def test_balls_hold_their_keys(dtype: torch.dtype, keys: int) -> None:
    k = tensors(keys, dtype, batch=2, heads=4, kv_heads=2, dim=7)[1] + 2
    bounds = KeyBounds.of(k, 32)
    assert bounds.centre.shape == (2, 2, -(-keys // 32), 7)
    for n in range(bounds.blocks):
        part = k[:, :, 32 * n : 32 * n + 32].double()
        distance = (part - bounds.centre[:, :, n : n + 1].double()).norm(dim=-1).amax(-1)
        torch.testing.assert_close(bounds.radius[:, :, n].double(), distance, rtol=1e-5, atol=1e-6)
        assert ratio(bounds.centre[:, :, n], part.mean(2)) < TOLERANCE[dtype]


def test_a_block_with_a_key_that_is_not_finite_is_always_read() -> None:
    q, k, v = clustered(torch.bfloat16)
    k[:, :, 3] = torch.nan
    bounds = KeyBounds.of(k, 16)
    assert bounds.radius[:, :, 0].isnan().all()
    assert bounds.radius[:, :, 1:].isfinite().all()
    mask = torch.ones(1, 1, 1, 139, dtype=torch.bool)
    mask[..., 3] = False
    found, read = decode_attention(q, k, v, "relumax", attn_mask=mask, key_bounds=bounds, return_visited=True)
    k[:, :, 3] = 0.0
    expected = attend(*(x.double() for x in (q, k, v)), seen_by(q, k, attn_mask=mask), RULES["anchored 1"])
    near([found], [expected], TOLERANCE[torch.bfloat16])
    assert (read.keys >= 2).all()


def test_a_cache_that_grows() -> None:
    """Full blocks are not looked at again, the last one is; every ball holds its keys at every length."""
    k = tensors(70, dim=6)[1]
    bounds = KeyBounds.of(k[:, :, :20], 16)
    for length in (21, 32, 70):
        shown = k[:, :, :length].clone()
        shown[:, :, : bounds.length // 16 * 16] = torch.nan
        bounds = bounds.extended(shown)
        assert bounds.length == length
        fresh = KeyBounds.of(k[:, :, :length], 16)
        assert torch.equal(bounds.centre, fresh.centre)
        assert torch.equal(bounds.radius, fresh.radius)


def test_two_continuations_and_a_crop_do_not_meet() -> None:
    k = tensors(50, dim=6)[1]
    first = KeyBounds.of(k[:, :, :20], 16)
    one, two = k[:, :, :40].clone(), k[:, :, :40].clone()
    two[:, :, 20:] += 50
    a, b = first.extended(one), first.extended(two)
    for found, keys in ((a, one), (b, two), (b.extended(two[:, :, :5]), two[:, :, :5])):
        assert torch.equal(found.centre, KeyBounds.of(keys, 16).centre)
        assert torch.equal(found.radius, KeyBounds.of(keys, 16).radius)
    distance = (k[:, :, 16:20] - first.centre[:, :, 1:2]).norm(dim=-1).amax(-1)
    assert (first.radius[:, :, 1] >= distance - 1e-5).all()


# Local linear attention -----------------------------------------------------------------------------------------


def linear(q: Tensor, k: Tensor, v: Tensor, spec: str, **options: Any) -> Tensor:
    found: Tensor = regard.attention(q, k, v, spec, impl="triton", enable_gqa=True, **options)
    assert found.dtype == q.dtype
    return found


@pytest.mark.parametrize("keys", [1, 2, 17, SLOW_100, 257])
def test_local_linear_lengths(keys: int) -> None:
    q, k, v = tensors(keys)
    found = linear(q, k, v, "local-linear")
    near([found], [local_linear(*(x.double() for x in (q, k, v)), seen_by(q, k), 0.1)], LOOSE[torch.float32])


@pytest.mark.parametrize(("how", "limit"), [(2, 0), (3, 1)])
def test_local_linear_by_elimination(how: int, limit: int) -> None:
    """From the start, or after a step of conjugate gradients that did not get there."""
    q, k, v = tensors(40)
    visible = Visibility(queries=1, keys=40, causal=True, offset=39)
    found = local_linear_decode.decode(q, k, v, 0.5, 0.01, None, visible, how=how, limit=limit)
    expected = local_linear(*(x.double() for x in (q, k, v)), seen_by(q, k), 0.01, 0.5)
    near([found], [expected], LOOSE[torch.float32])


@pytest.mark.parametrize("dtype", LOOSE)
def test_local_linear_far_keys_window_mask_and_ridges(dtype: torch.dtype) -> None:
    """Keys twelve standard deviations from 0, whose mean must cost nothing; a ridge for every coordinate."""
    q, k, v = tensors(100, dtype, batch=2)
    q, k = q + 12, k + 12
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(2, 1, 1, 100, generator=g) < 0.7
    ridge = torch.rand(2, 2, 1, 8, generator=g) + 0.05
    options = {"is_causal": True, "window": 70, "attn_mask": mask, "query_offset": torch.tensor([99, 60])}
    found = linear(q, k, v, "gaussian*fixed*linear(ridge=0.1,solver=cg)", params={"ridge": ridge}, scale=0.3, **options)
    wide = (x.double() for x in (q, k, v))
    expected = local_linear(*wide, seen_by(q, k, **options), ridge.double(), 0.3)
    near([found], [expected], LOOSE[dtype])


def test_local_linear_a_wide_coordinate_and_a_small_ridge() -> None:
    q, k, v = tensors(60, heads=1)
    k[..., 0] *= 30
    q[..., 0] *= 30
    found = linear(q, k, v, "gaussian*fixed*linear(ridge=1e-3)", scale=1e-3)
    expected = local_linear(*(x.double() for x in (q, k, v)), seen_by(q, k), 1e-3, 1e-3)
    near([found], [expected], LOOSE[torch.float32])


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("keys", [1, 100])
def test_parallax(dtype: torch.dtype, keys: int) -> None:
    q, k, v = tensors(keys, dtype, batch=2)
    k = k + 12
    probe = torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(5))
    options = {"is_causal": True, "query_offset": torch.tensor([keys - 1, keys // 2])}
    found = linear(q, k, v, "gaussian*fixed*linear(solver=learned)", params={"probe": probe}, scale=0.3, **options)
    wide = (x.double() for x in (q, k, v))
    expected = with_probe(*wide, seen_by(q, k, **options), probe.double(), 0.3)
    near([found], [expected], LOOSE[dtype])


@pytest.mark.parametrize("spec", ["local-linear", "gaussian*fixed*linear(solver=learned)"])
def test_local_linear_rows_that_see_nothing_are_zero(spec: str) -> None:
    q, k, v = tensors(20, torch.bfloat16, batch=2)
    k[0], v[0] = torch.nan, torch.nan
    params = {"probe": q.float()} if "learned" in spec else None
    found = linear(q, k, v, spec, is_causal=True, query_offset=torch.tensor([-7, 19]), params=params)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[1].abs().amin() > 0


# Arguments ------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    q, k, v = tensors(20, batch=2)
    bounds = KeyBounds.of(k, 16)
    for message, spec, options in (
        ("forward only", "softmax", {"query": q.clone().requires_grad_()}),
        ("20 keys", "biweight", {"key": k[:, :, :19], "value": v[:, :, :19], "key_bounds": bounds}),
        ("KeyBounds.of", "biweight", {"key_bounds": bounds.centre}),
        ("float64", "softmax", {"query": q.double(), "key": k.double(), "value": v.double()}),
        ("degree 0", "local-linear", {}),
        ("dot product", "rbf", {}),
        ("64 rows", "softmax", {"query": q.expand(2, 2, 33, 8)}),
        ("topk", "topk-softmax", {}),
        ("r = 1.42857", "biweight", {"params": {"alpha": 1.7}}),
        ("unknown parameter", "softmax", {"params": {"alpha": 1.7}}),
    ):
        with pytest.raises(ArgumentError, match=message):
            decode_attention(**{"query": q, "key": k, "value": v, "spec": spec, **options})
    for message, key, block in (("block is 20", k, 20), ("float32 or bfloat16", k.half(), 16)):
        with pytest.raises(ArgumentError, match=message):
            KeyBounds.of(key, block)
    with pytest.raises(ArgumentError, match="unlike"):
        bounds.extended(k[:1])
