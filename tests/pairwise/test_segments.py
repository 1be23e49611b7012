"""Packed sequences: `segment_ids` of `regard.attention` against a loop over the sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from regression import draw, fit, ratio, softmax
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.pairwise.blocked.blocks import Work

IDS = torch.tensor([3] * 17 + [0] * 40 + [7] + [1] * 30 + [0] * 12)
"""Ids are names, in no order; 0 comes back and is another sequence then."""
RUNS = [(0, 17), (17, 57), (57, 58), (58, 88), (88, 100)]

SPECS = ("softmax", "biweight", "topk-softmax", "shift-cosine", "local-linear", "local-linear[biweight]")
CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"is_causal": True},
    "strict": {"exclude_self": True},
    "window": {"is_causal": True, "window": 6},
    "both sides": {"window": 6},
}


def inputs(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in draw(2, 2, 100, 6, kv_heads=kv_heads, value_dim=4, seed=1, dtype=dtype))


def loop(spec: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Each sequence in a call of its own, without segments."""
    parts = [regard.attention(*(x[:, :, a:b] for x in (q, k, v)), spec, **call) for a, b in RUNS]
    return torch.cat(parts, 2)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("how", CALLS)
def test_packed_is_a_loop(spec: str, how: str) -> None:
    """Output and gradients, float32 to 1e-6 and float64 to 1e-9, in every implementation that takes it."""
    call = {**CALLS[how], "enable_gqa": True}
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6 if "linear" not in spec else 1e-5)):
        leaves = inputs(dtype, 1)
        expected = loop(spec, *leaves, **call)
        wanted = torch.autograd.grad(expected.square().sum(), leaves)
        for impl in ("auto", "reference", "blocked"):
            out = regard.attention(*leaves, spec, segment_ids=IDS[None], impl=impl, **call)
            assert ratio(out, expected) <= tolerance, impl
            for grad, want in zip(torch.autograd.grad(out.square().sum(), leaves), wanted, strict=True):
                assert ratio(grad, want) <= 10 * tolerance, impl


@pytest.mark.parametrize("spec", ["softmax", "biweight", "local-linear"])
def test_packed_is_the_formula(spec: str) -> None:
    """Against weights of the keys of one's own run, dense, with another packing in every batch element."""
    q, k, v = (x.detach() for x in inputs())
    own = torch.stack([IDS, torch.arange(100) // 9])
    run = (own[:, 1:] != own[:, :-1]).cumsum(-1)
    run = torch.cat([torch.zeros_like(run[:, :1]), run], -1)
    seen = ((run[:, :, None] == run[:, None, :]) & torch.ones(100, 100, dtype=torch.bool).tril())[:, None]
    z = q @ k.transpose(-1, -2) * 6**-0.5
    if spec == "biweight":
        from entmax import entmax15

        expected = entmax15(torch.where(seen, z, -torch.inf), dim=-1) @ v
    else:
        p = softmax(z, seen)
        expected = p @ v if spec == "softmax" else fit(p, q, k, v, 0.1)
    for impl in ("auto", "reference", "blocked"):
        out = regard.attention(q, k, v, spec, segment_ids=own, is_causal=True, impl=impl)
        assert ratio(out, expected) <= 1e-9, impl


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("impl", ["auto", "reference", "blocked"])
def test_another_segment_changes_no_bit(spec: str, impl: str) -> None:
    """Whatever the keys, values and queries of one segment become, NaN included: no bit of another's output or
    gradient changes."""
    a, b = RUNS[1]
    other = torch.ones(100, dtype=torch.bool)
    other[a:b] = False
    results = []
    for fill in (None, 3.0, 1e4, torch.nan):
        leaves = [x.detach().clone() for x in inputs(torch.float32)]
        for x in leaves:
            if fill is not None:
                x[:, :, a:b] = fill if fill != 3.0 else -2 * x[:, :, a:b]
            x.requires_grad_()
        out = regard.attention(*leaves, spec, segment_ids=IDS[None], is_causal=True, impl=impl)[:, :, other]
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert all(bool((g[:, :, a:b] == 0).all()) for g in grads), fill
        results.append([out, *(g[:, :, other] for g in grads)])
    for changed in results[1:]:
        for one, two in zip(results[0], changed, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_with_a_mask_and_queries_at_the_end(spec: str) -> None:
    """Padding inside segments; the last queries alone, aligned to the end or placed by an offset."""
    q, k, v = (x.detach() for x in inputs())
    mask = torch.rand(2, 1, 1, 100, generator=torch.Generator().manual_seed(2)) < 0.7
    call: dict[str, Any] = {"segment_ids": IDS[None], "is_causal": True}
    whole = regard.attention(q, k, v, spec, attn_mask=mask, **call)
    parts = [
        regard.attention(*(x[:, :, a:b] for x in (q, k, v)), spec, attn_mask=mask[..., a:b], is_causal=True)
        for a, b in RUNS
    ]
    assert ratio(whole, torch.cat(parts, 2)) <= 1e-9
    for impl in ("auto", "reference", "blocked"):
        end = regard.attention(q[:, :, 85:], k, v, spec, attn_mask=mask, impl=impl, **call)
        assert ratio(end, whole[:, :, 85:]) <= 1e-9
        middle = regard.attention(q[:, :, 20:60], k, v, spec, attn_mask=mask, impl=impl, query_offset=20, **call)
        assert ratio(middle, whole[:, :, 20:60]) <= 1e-9


@pytest.mark.parametrize("spec", ["softmax", "local-linear"])
def test_the_cost_is_in_the_pairs_of_the_segments(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks leave out what lies in other segments: 16 segments of 128 cost a sixteenth of one of 2048, without causal
    order."""
    counted = []
    blocks = Work.blocks

    def spy(self: Work, *options: Any) -> Any:
        for block in blocks(self, *options):
            counted.append(block.heads * (block.last - block.first) * (block.high - block.low))
            yield block

    monkeypatch.setattr(Work, "blocks", spy)
    q, k, v = draw(1, 1, 2048, 4, seed=3, dtype=torch.float32)
    regard.attention(q, k, v, spec, segment_ids=(torch.arange(2048) // 128)[None], impl="blocked")
    assert sum(counted) <= 2048 * 128


def test_diagnostics_count_the_keys_of_the_segment() -> None:
    q, k, v = (x.detach() for x in inputs())
    for impl in ("reference", "blocked"):
        _, found = regard.attention(q, k, v, segment_ids=IDS[None], impl=impl, return_diagnostics=True)
        lengths = torch.cat([torch.full((b - a,), float(b - a)) for a, b in RUNS])
        assert torch.equal(found.support.float(), lengths.expand(2, 2, 100))


# Mistakes ----------------------------------------------------------------------------------------------------


def message(queries: int = 100, **call: Any) -> str:
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(ArgumentError) as caught:
        regard.attention(q[:, :, -queries:], k, v, **call)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_ids_that_are_none() -> None:
    for ids in (IDS.tolist(), IDS[None].float(), IDS[None] > 0, IDS, IDS[None, None], 3):
        assert "segment_ids " in message(segment_ids=ids)
        assert ", expected " in message(segment_ids=ids)
    for shape in ((1, 99), (3, 100), (100, 1), (2, 101)):
        assert "segment_ids has shape" in message(segment_ids=torch.zeros(shape, dtype=torch.int64))
    assert "on meta" in message(segment_ids=torch.zeros(1, 100, dtype=torch.int64, device="meta"))
    for ids in (IDS[None].int(), IDS[None].to(torch.uint8), IDS.expand(2, 100)):
        q, k, v = (x.detach() for x in inputs())
        assert torch.equal(regard.attention(q, k, v, segment_ids=ids), regard.attention(q, k, v, segment_ids=IDS[None]))


def test_queries_that_stand_at_no_key() -> None:
    for offset in (-1, 1, 100, torch.tensor([0, 0])):
        assert "query must be that of one of the 100 keys" in message(segment_ids=IDS[None], query_offset=offset)
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(ArgumentError, match="query must be that of one of the 90 keys"):
        regard.attention(q, k[:, :, :90], v[:, :, :90], segment_ids=IDS[None, :90])


def test_an_implementation_that_has_no_segments_says_so() -> None:
    for spec, impl, queries in (("softmax", "sdpa", 100), ("linear", "linear", 5)):
        text = message(spec=spec, segment_ids=IDS[None], impl=impl, queries=queries)
        assert "Those that can:" in text
        assert "segment" in text
