"""Decoding with split keys, against dense formulas in float64: every rule, and local linear attention. Rows that see a
number that is not finite are NaN, the others never know of it, and keys and values are neither copied nor read for it
alone. Tiles of 16 keys, so that short caches have many, and several splits."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from attention_calls import draw
from dense_oracles import LINEAR, RULES, attend, near, ratio, scores, seen_by
from own_kernel import EVERY
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import regard
from regard.pairwise.visibility import Visibility
from regard.precision import full_precision
from regard.triton.compact.rules import rule_of
from regard.triton.decode import compact as compact_decode
from regard.triton.decode import local_linear as local_linear_decode
from regard.triton.runtime.launch import watched
from regard.triton.runtime.tiles import forced

pytestmark = pytest.mark.usefixtures("small_tiles")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
"""Of relative root mean squares; in bfloat16 the output is rounded to 2^-9."""
LOOSE = {torch.float32: 1e-4, torch.bfloat16: 8e-3}
"""Of local linear attention, whose systems multiply rounding by their condition."""
LARGEST = 2.0**56
"""Of the numbers that count as finite."""
SPECS = {**RULES, **LINEAR}


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


def call(spec: str, q: Tensor, k: Tensor, v: Tensor, params: dict[str, Any] | None = None, **options: Any) -> Tensor:
    """Call `regard.attention`, with a fixed probe if the spec takes one and none is given."""
    with torch.no_grad():
        params = numbers_of(spec, q) if params is None else params
        found: Tensor = regard.attention(q, k, v, spec, params=params, impl="triton", enable_gqa=True, **options)
    assert found.dtype == q.dtype
    return found


def numbers_of(spec: str, q: Tensor) -> dict[str, Any]:
    return {"probe": torch.randn(q.shape, generator=torch.Generator().manual_seed(5))} if "learned" in spec else {}


def attended(
    spec: str, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, params: dict[str, Any] | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Compare a call with the dense form; rows that see a number that is not finite are NaN. Return these, [B, H]."""
    seen = seen_by(q, k, **options)
    query, key, value = (~(x.double().abs() <= LARGEST).all(-1) for x in (q, k, v))
    met = (key | value).repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None] | query[..., None]
    lost = (seen & met).any(-1)
    params = numbers_of(spec, q) if params is None else params
    found = call(spec, q, k, v, params, scale=scale, **options)
    whole = [torch.where(bad[..., None], 0, x).double() for bad, x in ((query, q), (key, k), (value, v))]
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in params.items()}
    expected = attend(*whole, seen, spec, scale, **exact)
    assert bool(found[lost].isnan().all())
    most = TOLERANCE[q.dtype] if spec in RULES.values() and q.dtype == torch.float32 else LOOSE[q.dtype]
    near([found[~lost]], [expected[~lost]], most, spec)
    return lost[..., 0]


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


SHORT, CAUSAL = {"dtype": torch.bfloat16}, {"is_causal": True}
MASK = torch.rand(2, 1, 1, 40, generator=torch.Generator().manual_seed(1)) < 0.8
CALLS: dict[str, tuple[Iterable[str], dict[str, Any], dict[str, Any]]] = {
    "a mask and offsets": (
        EVERY, {"keys": 40, "batch": 2}, {"query_offset": torch.tensor([39, 20]), "attn_mask": MASK, **CAUSAL},
    ),
    **{f"{n} keys in bfloat16": (("softmax", "adaptive 1"), {"keys": n, **SHORT}, CAUSAL) for n in (1, 2, 17, 257)},
    "several splits in float32": (("softmax", "fixed 1"), {"keys": 140, "heads": 1}, CAUSAL),
    # three queries of each of two query heads meet the keys together, each within a window of its own
    "rows of a tile": (
        ("softmax", "adaptive 2", "anchored 1", "fixed 3"), {"keys": 60, "heads": 4, "kv": 2, "queries": 3, **SHORT},
        {"window": 37, **CAUSAL},
    ),
    "one head for a key head, and a wide value": (
        ("softmax", "adaptive 3", "fixed 1"), {"keys": 50, "kv": 2, "dim": 5, "value_dim": 20, **SHORT},
        {"exclude_self": True},
    ),
}  # fmt: skip
"""(rules, arguments of `tensors`, arguments of the call)."""


@pytest.mark.parametrize(("call", "rule"), [(call, rule) for call, (rules, *_) in CALLS.items() for rule in rules])
def test_every_rule(call: str, rule: str) -> None:
    _, sizes, options = CALLS[call]
    check(EVERY[rule], *tensors(**sizes), hidden=torch.nan, **options)


QUICK = {
    torch.float32: ("softmax", "linear"),
    torch.bfloat16: ("softmax", "adaptive 1", "anchored 2", "fixed 3", "linear", "learned"),
}
NOT_FINITE = [
    pytest.param(name, dtype, marks=() if name in QUICK[dtype] else pytest.mark.slow)
    for dtype in QUICK
    for name in SPECS
]


@pytest.mark.parametrize(("name", "dtype"), NOT_FINITE)
def test_rows_that_see_what_is_not_finite(name: str, dtype: torch.dtype) -> None:
    """One of two heads that share keys sees what the other does not; and what lies before the window, or is hidden from
    all, is nobody's."""
    q, k, v = tensors(34, dtype, batch=3, heads=4, kv=2)
    mask = torch.rand(3, 4, 1, 34, generator=torch.Generator().manual_seed(1)) < 0.8
    k[0, 0, 30, 3], mask[0, 0, :, 30], mask[0, 1, :, 30] = torch.nan, True, False
    v[0, 1, 20, 0], mask[0, 2, :, 20], mask[0, 3, :, 20] = torch.inf, False, True
    k[1, :, 2], v[1, :, 3], k[1, :, 25], v[1, :, 26] = torch.nan, -torch.inf, 3e17, torch.nan
    q[1, 1, 0, 7], q[1, 2], mask[1, :, :, 25:27], mask[1, 2] = 3e17, torch.nan, False, False
    v[2, 0, 17, 4], mask[2, 0, :, 17], mask[2, 1, :, 17] = -3e17, True, False
    k[2, 1], v[2, 1], mask[2, 2:] = torch.inf, torch.nan, False
    lost = attended(SPECS[name], q, k, v, attn_mask=mask, is_causal=True, window=30)
    assert lost.long().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]


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
    expected = attend(*wide(q, k, v), seen_by(q, k), RULES[name], scale.double(), **{label: number.double()})
    near([found], [expected], 2e-5, name)


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


@pytest.mark.parametrize("keys", [1, 2, 17, 257])
def test_local_linear_lengths(keys: int) -> None:
    attended("local-linear", *tensors(keys))


@pytest.mark.parametrize(("how", "limit"), [(2, 0), (3, 1)])
def test_local_linear_by_elimination(how: int, limit: int) -> None:
    """From the start, or after a step of conjugate gradients that did not get there."""
    q, k, v = tensors(40)
    found = decode_linear(q, k, v, 0.5, 0.01, how=how, limit=limit)
    near([found], [attend(*wide(q, k, v), seen_by(q, k), "local-linear", 0.5, ridge=0.01)], LOOSE[torch.float32])


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 1, 8), (2, 2, 1, 40)])
def test_local_linear_far_keys_window_mask_and_ridges(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Keys twelve standard deviations from 0, whose mean must cost nothing; a ridge for a row or every coordinate."""
    q, k, v = tensors(100, dtype, batch=2, dim=shape[-1] if len(shape) == 4 else 8)
    g = torch.Generator().manual_seed(3)
    options = {"is_causal": True, "window": 70, "query_offset": torch.tensor([99, 60])}
    options["attn_mask"] = torch.rand(2, 1, 1, 100, generator=g) < 0.7
    params = {"ridge": torch.rand(shape, generator=g) + 0.05}
    attended("gaussian*fixed*linear(solver=cg)", q + 12, k + 12, v, scale=0.3, params=params, **options)


def test_local_linear_a_wide_coordinate_and_a_small_ridge() -> None:
    q, k, v = tensors(60, heads=1)
    k[..., 0] *= 30
    q[..., 0] *= 30
    attended("local-linear", q, k, v, scale=1e-3, params={"ridge": 1e-3})


@pytest.mark.parametrize("dtype", LOOSE)
@pytest.mark.parametrize("keys", [1, 100])
def test_parallax(dtype: torch.dtype, keys: int) -> None:
    q, k, v = tensors(keys, dtype, batch=2)
    options = {"is_causal": True, "query_offset": torch.tensor([keys - 1, keys // 2])}
    attended(LINEAR["learned"], q, k + 12, v, scale=0.3, **options)


# What is not finite ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", pytest.param("linear", marks=pytest.mark.slow), "learned"])
def test_rows_of_a_tile_that_see_the_same_keys(name: str) -> None:
    """Shared out among programs, of which one meets what is not finite."""
    q, k, v = tensors(130, torch.bfloat16, batch=3, heads=3, kv=1)
    mask = torch.ones(3, 1, 1, 130, dtype=torch.bool)
    mask[..., 70] = False
    k[:, :, 70], v[:, :, 70] = torch.nan, torch.inf
    k[0, 0, 129, 2], v[1, 0, 5, 0], q[2, 1, 0, 0] = torch.nan, torch.inf, torch.nan
    assert attended(SPECS[name], q, k, v, attn_mask=mask).long().tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize("dtype", QUICK)
@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "linear"])
def test_the_largest_number_that_counts_as_finite(name: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(20, dtype, kv=4, heads=4)
    v[:, :, 7] = LARGEST
    v[0, 0, 7, 3], v[0, 1, 7, 0] = LARGEST * (1 + torch.finfo(dtype).eps), -LARGEST * (1 + torch.finfo(dtype).eps)
    assert attended(SPECS[name], q, k, v).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("name", ["softmax", "adaptive 2"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_what_is_finite_is_as_without_the_promise(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit."""
    q, k, v = tensors(40, dtype, heads=4, kv=2)
    promised, own = call(SPECS[name], q, k, v), compact_decode.decode
    monkeypatch.setattr(compact_decode, "decode", lambda *tensors, raw: own(*tensors, raw=not raw))
    assert torch.equal(promised, call(SPECS[name], q, k, v))


@pytest.mark.slow
def test_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(40, torch.bfloat16, heads=4, kv=2)
    k[0, 0, 3] = torch.nan
    drawn = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name in ("softmax", "linear"):
        found = drawn(SPECS[name], q, k, v)
        assert bool(found[:, :2].isnan().all())
        assert torch.equal(found[:, 2:], call(SPECS[name], q, k, v)[:, 2:])


# Memory ---------------------------------------------------------------------------------------------------------


def traffic(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, list[str]]:
    """(bytes of the largest tensor that a call makes, what its kernels are given of keys and values)."""
    given: list[str] = []

    def launched(kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        places = [x.data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)]
        met = [word for word, x in (("keys", k), ("values", v)) if x.data_ptr() in places]
        given.extend([f"{kernel.fn.__name__}: {' '.join(met)}"] if met else [])

    with watched(launched), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        regard.attention(q, k, v, SPECS[name], impl="triton", enable_gqa=True, is_causal=True)
    return max(event.self_cpu_memory_usage for event in seen.events()), given


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "fixed 3", "linear"])
@pytest.mark.parametrize("dtype", QUICK)
def test_the_cache_is_not_copied(name: str, dtype: torch.dtype) -> None:
    """Nor read more often than the numbers are needed: by compact rules, values once to look at them and those with
    weight again."""
    q, k, v = tensors(4096, dtype, heads=2, kv=2, dim=64, value_dim=64)
    with forced(keys=64):
        largest, given = traffic(name, q, k, v)
        assert 0 < largest < k.nbytes / 4
        assert given == {
            "softmax": ["online_kernel: keys values"],
            "linear": ["means_kernel: keys", "moments_kernel: keys", "corrected_kernel: keys values"],
        }.get(name, ["scores_kernel: keys values", "output_kernel: values"])
        copied, _ = traffic(name, q.requires_grad_(), k, v)
    assert copied >= k.nbytes
