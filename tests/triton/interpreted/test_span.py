"""Ranges of visible keys and rows that see bad keys, as kernels compute them, against `Visibility`."""

import itertools

import pytest
import torch

from regard.pairwise.visibility import Visibility, runs_of
from regard.triton.runtime.span import Span, seen_rows

CPU = torch.device("cpu")
ORDERS = [(False, False), (True, False), (True, True)]
IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 3, 3, 5]])


@pytest.mark.parametrize("window", [None, 1, 4, 2**48])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 9), (9, 5), (300, 520), (7, 0)])
def test_ranges(queries: int, keys: int, window: int | None) -> None:
    offsets = (0, -3, keys - queries, keys + 4, -(2**48), 2**48, torch.tensor([2, -1, keys]))
    for (causal, strict), offset in itertools.product(ORDERS, offsets):
        check(Visibility(queries, keys, causal, strict, window, offset))


@pytest.mark.parametrize("batch", [1, 2])
def test_ranges_in_packed_sequences(batch: int) -> None:
    for (causal, strict), window, offset in itertools.product(ORDERS, (None, 2), (0, 3)):
        runs = runs_of(IDS[:batch])
        check(Visibility(9 - offset, 9, causal, strict, window, offset, runs=runs))


def check(visible: Visibility) -> None:
    low, high = visible.bounds(0, visible.queries, CPU)
    found = Span.of(visible, torch.zeros(1))
    assert torch.equal(found.low, low.int())
    assert torch.equal(found.high, high.int())
    at = torch.arange(visible.keys)
    for b in range(len(low)):  # how many queries have a range that ends, or begins, at the key or before
        ended, begun = ((x[b] <= at[:, None]).sum(1) for x in (high, low))
        assert torch.equal(found.first[b], ended.int())
        assert torch.equal(found.last[b], torch.maximum(ended, begun).int())


@pytest.mark.parametrize("keys", [9, 1100])
@pytest.mark.parametrize("mask", [None, (1, 1), (2, 1), (1, 4), (2, 4)])
def test_rows_that_see_bad_keys(mask: tuple[int, int] | None, keys: int) -> None:
    g = torch.Generator().manual_seed(0)
    some = lambda *shape, share=0.1: torch.rand(shape, generator=g) < share  # noqa: E731
    query_bad, key_bad, value_bad = some(2, 4, 7), some(2, 2, keys, share=1 / keys), some(2, 2, keys, share=1 / keys)
    shown = None if mask is None else some(*mask, 1, keys, share=0.3)
    for (causal, strict), window in itertools.product(ORDERS, (None, 3)):
        visible = Visibility(7, keys, causal, strict, window, 2, shown)
        found = seen_rows(visible, query_bad, key_bad, value_bad)
        bad = (key_bad | value_bad).repeat_interleave(2, 1)
        block = visible.block(0, 7, 0, keys, CPU)
        pairs = (torch.ones(1, dtype=torch.bool) if block is None else block).expand(2, 4, 7, keys)
        assert torch.equal(found, (pairs & bad[:, :, None]).any(-1) | query_bad & pairs.any(-1))


def test_no_rows_no_keys() -> None:
    for queries, keys in ((0, 5), (5, 0)):
        bad = [torch.ones(shape, dtype=torch.bool) for shape in ((2, 4, queries), (2, 2, keys), (2, 2, keys))]
        assert not seen_rows(Visibility(queries, keys, causal=True), *bad).any()


def test_operators_pass_opcheck() -> None:
    g = torch.Generator().manual_seed(0)
    bad = [torch.rand(shape, generator=g) < 0.2 for shape in ((2, 4, 7), (2, 2, 9), (2, 2, 9))]
    like, offset = torch.zeros(1), torch.tensor([2, 0])
    low, high, *_ = torch.ops.regard.triton_spans(like, None, offset, 0, 7, 9, 3, True, False, True)
    torch.library.opcheck(torch.ops.regard.triton_spans, (like, None, offset, 0, 7, 9, 3, True, False, True))
    torch.library.opcheck(torch.ops.regard.triton_spans, (like, runs_of(IDS), None, 0, 9, 9, 0, True, True, False))
    torch.library.opcheck(torch.ops.regard.triton_seen, (*bad, low, high, None))
