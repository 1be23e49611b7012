"""What `regard.attention` promises of numbers that are not finite, where one query decodes: rows that see one are NaN,
the others never know of it; and that keys and values are neither copied nor read for it alone."""

from typing import Any

import pytest
import torch
from attention_calls import draw
from dense_oracles import RULES, attend, local_linear, near, seen_pairs, with_probe
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import regard
from regard.triton.decode import compact
from regard.triton.runtime.launch import watched
from regard.triton.runtime.tiles import forced

pytestmark = pytest.mark.usefixtures("small_tiles")

LINEAR = {"linear": "local-linear", "learned": "gaussian*fixed*linear(solver=learned)"}
NAMES = (*RULES, *LINEAR)
QUICK = {
    torch.float32: ("softmax", "linear"),
    torch.bfloat16: ("softmax", "adaptive 1", "anchored 2", "fixed 3", "linear", "learned"),
}
EVERY = [
    pytest.param(name, dtype, marks=() if name in QUICK[dtype] else pytest.mark.slow, id=f"{name}, {dtype}"[:-2])
    for dtype in QUICK
    for name in NAMES
]
LARGEST = 2.0**56
"""Of the numbers that count as finite."""


def tensors(keys: int, dtype: torch.dtype, dim: int = 8, value_dim: int = 5, **more: int) -> list[Tensor]:
    sizes = {"batch": 1, "heads": 4, "kv": 2, **more}
    return draw(1, keys, dim, value_dim, dtype=dtype, grad=False, spread=1.0, **sizes)


def call(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if name == "learned":
        options["params"] = {"probe": probe_of(q)}
    spec = LINEAR[name] if name in LINEAR else RULES[name]
    with torch.no_grad():
        found: Tensor = regard.attention(q, k, v, spec, impl="triton", enable_gqa=True, **options)
    assert found.dtype == q.dtype
    return found


def probe_of(q: Tensor) -> Tensor:
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(5))


def dense(name: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    wide = (q.double(), k.double(), v.double(), seen)
    if name == "linear":
        return local_linear(*wide, 0.1)
    return with_probe(*wide, probe_of(q).double()) if name == "learned" else attend(*wide, RULES[name])


def check(name: str, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output of the call: NaN in the rows that see such a number, the dense formula's in the others. Returns which
    rows are NaN, [B, H]."""
    seen = seen_pairs(*q.shape[:3], k.shape[2], **options)
    query, key, value = (~(x.double().abs() <= LARGEST).all(-1) for x in (q, k, v))
    met = (key | value).repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, None] | query[..., None]
    lost = (seen & met).any(-1)
    whole = [torch.where(bad[..., None], 0, x) for bad, x in ((query, q), (key, k), (value, v))]
    found, expected = call(name, q, k, v, **options), dense(name, *whole, seen)
    assert bool(found[lost].isnan().all())
    most = (1e-4 if name in LINEAR else 2e-5) if q.dtype == torch.float32 else 8e-3
    near([found[~lost]], [expected[~lost]], most, name)
    return lost[..., 0]


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_rows_that_see_what_is_not_finite(name: str, dtype: torch.dtype) -> None:
    """One of two heads that share keys sees what the other does not; and what lies before the window, or is hidden from
    all, is nobody's."""
    q, k, v = tensors(34, dtype, batch=3)
    mask = torch.rand(3, 4, 1, 34, generator=torch.Generator().manual_seed(1)) < 0.8
    k[0, 0, 30, 3], mask[0, 0, :, 30], mask[0, 1, :, 30] = torch.nan, True, False
    v[0, 1, 20, 0], mask[0, 2, :, 20], mask[0, 3, :, 20] = torch.inf, False, True
    k[1, :, 2], v[1, :, 3], k[1, :, 25], v[1, :, 26] = torch.nan, -torch.inf, 3e17, torch.nan
    q[1, 1, 0, 7], q[1, 2], mask[1, :, :, 25:27], mask[1, 2] = 3e17, torch.nan, False, False
    v[2, 0, 17, 4], mask[2, 0, :, 17], mask[2, 1, :, 17] = -3e17, True, False
    k[2, 1], v[2, 1], mask[2, 2:] = torch.inf, torch.nan, False
    lost = check(name, q, k, v, attn_mask=mask, is_causal=True, window=30)
    assert lost.long().tolist() == [[1, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["softmax", "adaptive 2", pytest.param("linear", marks=pytest.mark.slow), "learned"])
def test_rows_of_a_tile_that_see_the_same_keys(name: str) -> None:
    """Shared out among programs, of which one meets what is not finite."""
    q, k, v = tensors(130, torch.bfloat16, batch=3, heads=3, kv=1)
    mask = torch.ones(3, 1, 1, 130, dtype=torch.bool)
    mask[..., 70] = False
    k[:, :, 70], v[:, :, 70] = torch.nan, torch.inf
    k[0, 0, 129, 2], v[1, 0, 5, 0], q[2, 1, 0, 0] = torch.nan, torch.inf, torch.nan
    assert check(name, q, k, v, attn_mask=mask).long().tolist() == [[1, 1, 1], [1, 1, 1], [0, 1, 0]]


@pytest.mark.parametrize("dtype", QUICK)
@pytest.mark.parametrize("name", ["softmax", "adaptive 2", "linear"])
def test_the_largest_number_that_counts_as_finite(name: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(20, dtype, kv=4)
    v[:, :, 7] = LARGEST
    v[0, 0, 7, 3], v[0, 1, 7, 0] = LARGEST * (1 + torch.finfo(dtype).eps), -LARGEST * (1 + torch.finfo(dtype).eps)
    assert check(name, q, k, v).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("name", ["softmax", "adaptive 2"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_what_is_finite_is_as_without_the_promise(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit."""
    q, k, v = tensors(40, dtype)
    promised, own = call(name, q, k, v), compact.decode
    monkeypatch.setattr(compact, "decode", lambda *tensors, raw: own(*tensors, raw=not raw))
    assert torch.equal(promised, call(name, q, k, v))


@pytest.mark.slow
def test_one_graph() -> None:
    torch._dynamo.reset()
    q, k, v = tensors(40, torch.bfloat16)
    k[0, 0, 3] = torch.nan
    drawn = torch.compile(call, fullgraph=True, backend="aot_eager")
    for name in ("softmax", "linear"):
        found = drawn(name, q, k, v)
        assert bool(found[:, :2].isnan().all())
        assert torch.equal(found[:, 2:], call(name, q, k, v)[:, 2:])


# Memory ---------------------------------------------------------------------------------------------------------


def traffic(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, list[str]]:
    """(bytes of the largest tensor that a call makes, what its kernels are given of keys and values)."""
    given: list[str] = []

    def launched(kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        places = [x.data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)]
        met = [word for word, x in (("keys", k), ("values", v)) if x.data_ptr() in places]
        given.extend([f"{kernel.fn.__name__}: {' '.join(met)}"] if met else [])

    with watched(launched), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        regard.attention(q, k, v, LINEAR.get(name) or RULES[name], impl="triton", enable_gqa=True, is_causal=True)
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
