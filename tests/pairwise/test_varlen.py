"""Packed sequences by their boundaries: `regard.segment_ids` and `regard.varlen_attention`."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from mistakes import error_of
from torch import Tensor

import regard

Q_ENDS, K_ENDS = [0, 4, 4, 9, 10], [0, 6, 8, 8, 15]
"""Four sequences: the second has no queries, the third no keys, and the first more keys than queries."""


def packed(queries: int, keys: int, kv_heads: int = 2) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    sizes = ((queries, 4, 3), (keys, kv_heads, 3), (keys, kv_heads, 5))
    return [torch.randn(size, generator=make, dtype=torch.float64).requires_grad_() for size in sizes]


def alone(q: Tensor, k: Tensor, v: Tensor, q_ends: list[int], k_ends: list[int], causal: bool, window: int) -> Tensor:
    """Softmax of every sequence by itself, written out; the last query stands at the last key."""
    rows = []
    for (a, b), (c, d) in zip(pairwise(q_ends), pairwise(k_ends), strict=True):
        repeat = q.shape[1] // k.shape[1]
        own = [x.repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q[a:b], 1), (k[c:d], repeat), (v[c:d], repeat))]
        z = own[0] @ own[1].mT / q.shape[2] ** 0.5
        gap = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        seen = (gap >= 0) & (gap < window) if causal else gap.abs() < window
        w = torch.where(seen, (z - z.detach().amax(-1, keepdim=True)).exp(), 0) if d > c else z
        total = w.sum(-1, keepdim=True)
        rows.append((w @ own[2] / torch.where(total == 0, 1, total)).transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("ends", "shared"),
    [((Q_ENDS, K_ENDS), False), ((Q_ENDS, Q_ENDS), False), ((Q_ENDS, Q_ENDS), True), ((K_ENDS, K_ENDS), True)],
)
def test_every_sequence_by_itself(
    ends: tuple[list[int], list[int]], shared: bool, causal: bool, window: int | None, kv_heads: int
) -> None:
    q, k, v = x = packed(ends[0][-1], ends[1][-1], kv_heads)
    edges = [torch.tensor(e, dtype=torch.int32) for e in ends]
    how: dict[str, Any] = {"is_causal": causal, "window": window, "enable_gqa": True}
    out = regard.varlen_attention(q, k, v, edges[0], None if shared else edges[1], **how)
    expected = alone(q, k, v, *ends, causal, 99 if window is None else window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(found.sin().sum(), x) for found in (out, expected)))


def test_lengths_that_are_given_are_not_read() -> None:
    q, k, v = packed(10, 15)
    edges = torch.tensor(Q_ENDS), torch.tensor(K_ENDS)
    out = regard.varlen_attention(q, k, v, *edges, enable_gqa=True)
    torch.testing.assert_close(regard.varlen_attention(q, k, v, *edges, 9, 7, enable_gqa=True), out)
    shapes = [x.to("meta") for x in (q, k, v, *edges)]
    assert regard.varlen_attention(*shapes, 5, 7, enable_gqa=True).shape == out.shape


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_any_spec(spec: str) -> None:
    q, k, v = packed(10, 10, kv_heads=4)
    edges = torch.tensor(Q_ENDS)
    out = regard.varlen_attention(q, k, v, edges, spec=spec, is_causal=True, scale=2.0)
    other = regard.varlen_attention(q, k, v, edges, edges.clone(), spec=spec, is_causal=True, scale=2.0)
    torch.testing.assert_close(out, other)
    first = regard.attention(*(x[None, :4].transpose(1, 2) for x in (q, k, v)), spec, is_causal=True, scale=2.0)
    torch.testing.assert_close(out[:4], first[0].transpose(0, 1))


def test_what_stands_in_another_sequence_does_not_matter() -> None:
    q, k, v = (x.detach().clone() for x in packed(10, 15))
    for x, at in ((q, 0), (k, 0), (v, 14)):
        x[at] = torch.nan
    q.requires_grad_()
    out = regard.varlen_attention(q, k, v, torch.tensor(Q_ENDS), torch.tensor(K_ENDS), enable_gqa=True)
    assert out[:4].isnan().all()
    assert out[4:9].abs().max() == 0
    assert out[9].isnan().all()
    assert torch.autograd.grad(out[4:9].sum(), q)[0].isfinite().all()


def test_segment_ids() -> None:
    ends = torch.tensor(Q_ENDS)
    assert regard.segment_ids(ends).tolist() == [[0] * 4 + [2] * 5 + [3]]
    assert torch.equal(regard.segment_ids(ends.int(), 10), regard.segment_ids(ends))
    assert regard.segment_ids(torch.tensor([0])).shape == (1, 0)
    assert regard.segment_ids(ends.to("meta"), 10).shape == (1, 10)


def test_ids_of_any_integer_dtype_for_one_row_or_all() -> None:
    q, k, v = (x.detach().transpose(0, 1).expand(2, -1, -1, -1) for x in packed(10, 10, kv_heads=4))
    ids = regard.segment_ids(torch.tensor(Q_ENDS))
    for other in (ids.int(), ids.to(torch.uint8), ids.expand(2, 10)):
        assert torch.equal(regard.attention(q, k, v, segment_ids=other), regard.attention(q, k, v, segment_ids=ids))


def test_mistakes() -> None:
    q, k, v = (x.detach() for x in packed(10, 15, 4))
    ends, others = torch.tensor(Q_ENDS), torch.tensor(K_ENDS)
    call = regard.varlen_attention
    assert "query has length 10, but cu_seqlens_q ends at 15" in error_of(call, q, k, v, others, ends)
    assert "cu_seqlens_q is [4, 6], expected" in error_of(call, q, k, v, torch.tensor([4, 6]), others)
    assert "segment_ids: cu_seqlens is [0, 5, 3]" in error_of(regard.segment_ids, torch.tensor([0, 5, 3]))
    assert "cu_seqlens is a torch.float32 tensor [2]" in error_of(regard.segment_ids, torch.zeros(2))
    assert "cu_seqlens is empty" in error_of(regard.segment_ids, ends[:0])
    assert "expected as many sequences" in error_of(call, q, k, v, ends, torch.tensor([0, 15]))
    assert "cu_seqlens_k is missing" in error_of(call, q, k, v, ends)
    assert "query has shape [1, 10, 4, 3], expected [Tq, H, D]" in error_of(call, q[None], k, v, ends)
    assert "max_seqlen_k is 6, but a sequence has 7" in error_of(call, q, k, v, ends, others, 5, 6)
    assert "does not take attn_mask" in error_of(call, q, k, v, ends, others, attn_mask=None)
    assert "varlen_attention: " in error_of(call, q, k[:, :2], v[:, :2], ends, others)
    assert "varlen_attention: unknown" in error_of(call, q, k, v, ends, others, impl="nonsense")
