"""A call of which nothing is recorded takes a shorter way to the same function, and finite inputs are seen at once."""

from typing import Any

import pytest
import torch
from mistakes import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard.pairwise import dispatch
from regard.pairwise.blocked import implementation as blocked
from regard.pairwise.plan import MOST
from regard.precision import all_clean, clean

CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window": 3, "is_causal": True},
    "offsets": {"is_causal": True, "query_offset": torch.tensor([1, 2])},
    "mask": {"attn_mask": torch.arange(12).view(1, 1, 1, 12) % 3 > 0},
    "segments": {"segment_ids": (torch.arange(12) // 5)[None], "query_offset": 3},
}
SPECS = ("biweight", "biweight*fixed(bias=0.3)", "topk-softmax", "local-linear[biweight]", "local-linear")


def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, n, 4, generator=generator).to(dtype) for n in (9, 12, 12)]


@pytest.mark.parametrize("impl", ["blocked", "cpu"])
@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("spec", SPECS)
def test_recorded_or_not_is_the_same_to_the_last_bit(spec: str, how: str, impl: str) -> None:
    if impl == "cpu" and spec == "local-linear":
        spec = "local-linear[sparsemax]"  # the row solvers leave exponentials of whole rows to torch
    q, k, v = draw()
    params = {"alpha": torch.full((2, 1, 1), 1.4)} if spec == "biweight" else {}
    call = {"spec": spec, "params": params, "impl": impl, **CALLS[how]}
    recorded = regard.attention(q.clone().requires_grad_(), k, v, **call)
    assert recorded.requires_grad
    assert torch.equal(regard.attention(q, k, v, **call), recorded)


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_nothing_recorded_calls_no_operator(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw()
    wanted = regard.attention(q, k, v, spec, impl="blocked")
    monkeypatch.delattr(blocked, "forward")
    assert torch.equal(regard.attention(q, k, v, spec, impl="blocked"), wanted)
    with pytest.raises(NameError):
        regard.attention(q.requires_grad_(), k, v, spec, impl="blocked")


@pytest.mark.parametrize("spec", ["biweight", "local-linear[biweight]"])
def test_tensors_without_numbers_go_by_the_operator(spec: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(2, 2, n, 4) for n in (9, 12, 12))
        assert regard.attention(q, k, v, spec).shape == (2, 2, 9, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
def test_what_is_clean(dtype: torch.dtype, turned: bool) -> None:
    """Entries up to the limit pass, however many there are; one beyond it, or one that is not finite, does not."""
    limit = 2.0**500 if dtype == torch.float64 else 2.0**56 if dtype == torch.float32 else 65504.0
    x = torch.full((3, 64), limit, dtype=dtype)
    x = x.t() if turned else x
    assert all_clean(x)
    assert clean(x)[1] is None
    worse = [float("nan"), float("inf"), -float("inf")] + ([] if dtype == torch.float16 else [-1.001 * limit])
    for bad in worse:
        y = x.clone()
        y[1, 2] = bad
        assert not all_clean(x, y)
        cleaned, rows = clean(y)
        assert rows is not None
        assert rows.nonzero().tolist() == [[1]]
        assert (cleaned[1] == 0).all()
    assert all_clean(x[:0])


def test_a_call_that_was_planned_before_is_checked_again() -> None:
    """Checks of a call are kept; equal arguments of another type, other tensors and other settings are another call."""
    q, k, v = draw()
    for keywords in ({"is_causal": True, "window": 2}, {"scale": 1.0}):
        first = regard.attention(q, k, v, "biweight", **keywords)
        assert torch.equal(regard.attention(q, k, v, "biweight", **keywords), first)
        assert not torch.equal(regard.attention(q, 2 * k, v, "biweight", **keywords), first)
    refuses("is_causal is 1", regard.attention, q, k, v, "biweight", is_causal=1, window=2)
    refuses(r"window is 2\.0", regard.attention, q, k, v, "biweight", is_causal=True, window=2.0)
    refuses("scale is True", regard.attention, q, k, v, "biweight", scale=True)
    refuses("key is torch.float64", regard.attention, q, k.double(), v, "biweight", scale=1.0)
    k[0, 0, 0, 0] = torch.nan
    out = regard.attention(q, k, v, "biweight", scale=1.0)
    assert out[0, 0].isnan().all()
    assert not out[1].isnan().any()
    assert regard.attention(q.requires_grad_(), k, v, "biweight", scale=1.0).requires_grad


def test_few_plans_are_kept() -> None:
    for length in range(1, 1030):
        x = torch.ones(1, 1, length, 1)
        regard.attention(x[:, :, :1], x, x)
    assert 0 < len(dispatch.plans) <= MOST
