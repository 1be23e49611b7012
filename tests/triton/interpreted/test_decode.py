"""Decoding with split keys, against dense formulas in float64: every rule, and local linear attention. Tiles of 16
keys, so that short caches have many, and several splits."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_calls import draw
from dense_oracles import RULES, attend, local_linear, near, ratio, scores, seen_by, with_probe
from torch import Tensor

import regard
from regard.pairwise.visibility import Visibility
from regard.precision import full_precision
from regard.triton.compact.rules import rule_of
from regard.triton.decode import compact as compact_decode
from regard.triton.decode import local_linear as local_linear_decode
from regard.triton.runtime.tiles import forced

pytestmark = pytest.mark.usefixtures("small_tiles")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
"""Of relative root mean squares; in bfloat16 the output is rounded to 2^-9."""
LOOSE = {torch.float32: 1e-4, torch.bfloat16: 8e-3}
"""Of local linear attention, whose systems multiply rounding by their condition."""
LINEAR = {"linear": "local-linear", "learned": "gaussian*fixed*linear(solver=learned)"}
LENGTHS = [1, 2, 17, pytest.param(100, marks=pytest.mark.slow), 257]


def tensors(
    keys: int, dtype: torch.dtype = torch.float32, queries: int = 1, dim: int = 8, value_dim: int = 5, **more: int
) -> list[Tensor]:
    """Draw queries of two heads, and keys and values that they share."""
    return draw(queries, keys, dim, value_dim, dtype=dtype, grad=False, spread=1.0, **{"batch": 1, **more})


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


def decode(
    q: Tensor, k: Tensor, v: Tensor, text: str, scale: float | Tensor | None = None,
    params: dict[str, Tensor] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Call the kernels alone, for one query or several; `regard.attention` decodes one."""
    scale, numbers = regard.Spec.parse(text).resolve(q.shape[3], scale, params or {})
    rule = rule_of(regard.Spec.parse(text), numbers)
    assert not isinstance(rule, str)
    mask, strict = options.get("attn_mask"), options.get("exclude_self", False)
    mask = None if mask is None else mask.expand(-1, -1, 1, k.shape[2])
    order = options.get("is_causal", False) or strict, strict, options.get("window")
    offset = options.get("query_offset", k.shape[2] - q.shape[2])
    number = numbers.get(rule.row)
    number = number if isinstance(number, Tensor) else None
    with full_precision("cpu"):
        visible = Visibility(q.shape[2], k.shape[2], *order, offset, mask)
        return compact_decode.decode(q, k, v, scale, rule, number, visible)


def check(rule: str, q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, hidden: float = 0.0, **options: Any) -> None:
    """`decode` against the dense formula; what nobody sees is `hidden` for the kernels."""
    seen = seen_by(q, k, **options)
    expected = attend(*wide(q, k, v), seen, rule, scale)
    lost = ~seen.unflatten(1, (k.shape[1], -1)).any((2, 3))[..., None]
    k, v = torch.where(lost, hidden, k), torch.where(lost, hidden, v)
    found = decode(q, k, v, rule, scale=scale, **options)
    assert found.dtype == q.dtype
    near([found], [expected], TOLERANCE[q.dtype], rule)


# Every rule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_rules_with_a_mask_and_offsets_of_their_own(name: str) -> None:
    q, k, v = tensors(40, batch=2)
    mask = torch.rand(2, 1, 1, 40, generator=torch.Generator().manual_seed(1)) < 0.8
    options = {"is_causal": True, "query_offset": torch.tensor([39, 20]), "attn_mask": mask}
    check(RULES[name], q, k, v, hidden=torch.nan, **options)


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("name", ["softmax", "adaptive 1"])
def test_lengths(name: str, keys: int) -> None:
    check(RULES[name], *tensors(keys, torch.bfloat16), is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "fixed 1"])
def test_several_splits_in_float32(name: str) -> None:
    check(RULES[name], *tensors(140, heads=1), is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "anchored 1", "fixed 3"])
def test_rows_of_a_tile_in_bfloat16(name: str) -> None:
    """Three queries of each of two query heads meet the keys together, each within a window of its own."""
    q, k, v = tensors(60, torch.bfloat16, heads=4, kv=2, queries=3)
    check(RULES[name], q, k, v, hidden=torch.nan, window=37, is_causal=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 3", "fixed 1"])
def test_one_head_a_key_head_in_bfloat16_and_a_wide_value(name: str) -> None:
    check(RULES[name], *tensors(50, torch.bfloat16, kv=2, dim=5, value_dim=20), exclude_self=True)


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "fixed 2", "linear", "learned"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_that_see_nothing_are_zero(name: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(20, dtype, batch=2, queries=1 if name in LINEAR else 2)
    k[0], v[0] = torch.nan, torch.nan
    how = {"is_causal": True, "query_offset": torch.tensor([-7, 19]), "scale": 1.0}
    params = {"probe": q.float()} if name == "learned" else None
    if name in LINEAR:
        found = regard.attention(q, k, v, LINEAR[name], impl="triton", enable_gqa=True, params=params, **how)
    else:
        found = decode(q, k, v, RULES[name], **how)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert found[1].abs().amin() > 0


@pytest.mark.parametrize("empty", ["uniform", "zero", "nearest"])
def test_rows_without_a_key_inside(empty: str) -> None:
    q, k, v = tensors(40, batch=2)
    rule = f"biweight*fixed(bias=-40,empty={empty})"
    assert not ((scores(q, k, 1.0) - 40) > 0).any()
    mask = torch.ones(2, 2, 1, 40, dtype=torch.bool)
    mask[0, 1, :, ::3] = mask[1, :, :, 20:] = False
    if empty == "zero":
        assert torch.equal(decode(q, k, v, rule, scale=1.0), torch.zeros(2, 2, 1, 5))
    else:
        check(rule, q, k, v, attn_mask=mask)


def test_the_first_of_keys_that_tie() -> None:
    q, k, v = tensors(40, heads=1)
    k[:, :, 33] = k[:, :, 7] = q[:, :, 0] * 9
    k[:, :, 21] = k[:, :, 7]
    found = decode(q, k, v, "biweight*fixed(bias=-1e4,empty=nearest)", scale=1.0)
    assert torch.equal(found, v[:, :, [7]])


@pytest.mark.parametrize(("name", "label"), [("anchored 2", "margin"), ("fixed 2", "bias")])
def test_numbers_of_rows(name: str, label: str) -> None:
    """Scales, margins and biases that differ from row to row."""
    q, k, v = tensors(30)
    g = torch.Generator().manual_seed(4)
    scale, number = torch.rand(1, 2, 1, generator=g) + 0.5, torch.rand(1, 2, 1, generator=g) + 0.2
    found = decode(q, k, v, RULES[name], scale=scale, params={label: number})
    near([found], [attend(*wide(q, k, v), seen_by(q, k), RULES[name], *wide(scale, number))], 2e-5, name)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_flat_rows_of_many_keys_are_shared_out_equally(power: int) -> None:
    """The longest search: every key is inside until the very end."""
    q, k, v = tensors(257, heads=1)
    found = decode(q, torch.zeros_like(k), v, RULES[f"adaptive {power}"])
    assert ratio(found, v.double().mean(2, keepdim=True)) < 1e-5


@pytest.mark.parametrize("name", ["adaptive 2", "anchored 1"])
def test_scores_far_from_zero_lose_nothing(name: str) -> None:
    """Every score is raised by 4096 exactly, and the steps between float32 numbers are then 2^-11."""
    q, k, v = tensors(60, heads=1, dim=2)
    q[...] = torch.tensor([1.0, 4096.0])
    k[..., 0], k[..., 1] = (k[..., 0] * 64).round() / 64, 1.0
    expected = attend(*wide(q, k, v), seen_by(q, k), RULES[name], 1.0)
    assert ratio(decode(q, k, v, RULES[name], scale=1.0), expected) < 1e-5


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "linear"])
def test_keys_of_a_tile_may_lie_more_than_2_31_numbers_apart(name: str) -> None:
    """As those of a very wide cache laid out by tokens do. Of the memory only the pages that are met are there."""
    q, k, v = tensors(35, torch.bfloat16, heads=4, kv=2)
    step = 2**26 + 16
    room = torch.from_numpy(np.empty(35 * step, np.int16)).view(torch.bfloat16)
    far = [room.as_strided((1, 2, 35, x.shape[-1]), (1, 13, step, 1), at).copy_(x) for x, at in ((k, 0), (v, 8))]
    seen = seen_by(q, k)
    with forced(keys=64):
        if name == "linear":
            near([decode_linear(q, *far)], [local_linear(*wide(q, k, v), seen, 0.1, 1.0)], LOOSE[torch.bfloat16])
        else:
            found = decode(q, *far, RULES[name], scale=1.0)
            near([found], [attend(*wide(q, k, v), seen, RULES[name], 1.0)], TOLERANCE[torch.bfloat16])


def decode_linear(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, ridge: float = 0.1, **how: Any) -> Tensor:
    """Local linear attention with the tensors as they lie."""
    visible = Visibility(queries=1, keys=k.shape[2], causal=True, offset=k.shape[2] - 1)
    return local_linear_decode.decode(q, k, v, scale, ridge, None, visible, **how)


def test_no_token_changes_an_earlier_row() -> None:
    """Rows that share a tile share no number: the earlier query is the same to the last bit."""
    q, k, v = tensors(40, torch.bfloat16, queries=2)
    other = [x.clone() for x in (q, k, v)]
    other[0][:, :, 1] *= 3
    other[1][:, :, -1], other[2][:, :, -1] = 5.0, -1.0
    for name in ("softmax", "adaptive 2", "anchored 1", "fixed 1"):
        a, b = (decode(*x, RULES[name], is_causal=True) for x in ((q, k, v), other))
        assert torch.equal(a[:, :, 0], b[:, :, 0]), name
        assert not torch.equal(a[:, :, 1], b[:, :, 1])


# Local linear attention -----------------------------------------------------------------------------------------


def check_linear(
    q: Tensor, k: Tensor, v: Tensor, ridge: float | Tensor = 0.1, scale: float | None = None, solver: str = "auto",
    **options: Any,
) -> None:  # fmt: skip
    """Local linear attention, its ridge given as a parameter, against the dense fit."""
    exact = ridge.double() if isinstance(ridge, Tensor) else ridge
    how = {"params": {"ridge": ridge}, "impl": "triton", "enable_gqa": True, "scale": scale, **options}
    found = regard.attention(q, k, v, f"gaussian*fixed*linear(ridge=0.1,solver={solver})", **how)
    assert found.dtype == q.dtype
    near([found], [local_linear(*wide(q, k, v), seen_by(q, k, **options), exact, scale)], LOOSE[q.dtype])


@pytest.mark.parametrize("keys", LENGTHS)
def test_local_linear_lengths(keys: int) -> None:
    check_linear(*tensors(keys))


@pytest.mark.parametrize(("how", "limit"), [(2, 0), (3, 1)])
def test_local_linear_by_elimination(how: int, limit: int) -> None:
    """From the start, or after a step of conjugate gradients that did not get there."""
    q, k, v = tensors(40)
    found = decode_linear(q, k, v, 0.5, 0.01, how=how, limit=limit)
    near([found], [local_linear(*wide(q, k, v), seen_by(q, k), 0.01, 0.5)], LOOSE[torch.float32])


@pytest.mark.parametrize("dtype", LOOSE)
def test_local_linear_far_keys_window_mask_and_ridges(dtype: torch.dtype) -> None:
    """Keys twelve standard deviations from 0, whose mean must cost nothing; a ridge for every coordinate."""
    q, k, v = tensors(100, dtype, batch=2)
    g = torch.Generator().manual_seed(3)
    options = {"is_causal": True, "window": 70, "query_offset": torch.tensor([99, 60])}
    options["attn_mask"] = torch.rand(2, 1, 1, 100, generator=g) < 0.7
    check_linear(q + 12, k + 12, v, torch.rand(2, 2, 1, 8, generator=g) + 0.05, 0.3, "cg", **options)


def test_local_linear_a_wide_coordinate_and_a_small_ridge() -> None:
    q, k, v = tensors(60, heads=1)
    k[..., 0] *= 30
    q[..., 0] *= 30
    check_linear(q, k, v, 1e-3, 1e-3)


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("keys", [1, 100])
def test_parallax(dtype: torch.dtype, keys: int) -> None:
    q, k, v = tensors(keys, dtype, batch=2)
    k = k + 12
    probe = torch.randn(2, 2, 1, 8, generator=torch.Generator().manual_seed(5))
    options = {"is_causal": True, "query_offset": torch.tensor([keys - 1, keys // 2])}
    how = {"params": {"probe": probe}, "scale": 0.3, "impl": "triton", "enable_gqa": True}
    found = regard.attention(q, k, v, LINEAR["learned"], **how, **options)
    assert found.dtype == dtype
    near([found], [with_probe(*wide(q, k, v), seen_by(q, k, **options), probe.double(), 0.3)], LOOSE[dtype])
