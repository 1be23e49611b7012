"""Kernels of fast-weight product-key memory: writing rows in place, and the exact search for the best sub-keys."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from memory_calls import draw, drawn, gap, written_by_hand
from mistakes import refuses
from torch import Tensor

import regard
from regard import WriteRule
from regard.memory.fast_weight_rules import Written
from regard.triton.memory import prepare as memory_prepare
from regard.triton.memory import write as memory_write
from regard.triton.memory.search import best_halves, through_weights
from regard.triton.memory.targets import through_errors
from regard.triton.memory.values import TableValues

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3


# Writing ------------------------------------------------------------------------------------------------------


def a_write(tokens: int, k: int, rows: int, width: int) -> tuple[Tensor, ...]:
    """slots, of which one is met by all tokens, shares, errors, counted; nothing that does not count is finite."""
    slots = torch.randint(0, rows, (2, tokens, k), generator=torch.Generator().manual_seed(5))
    slots[:, :, 0] = 3
    counted = torch.rand(2, tokens, generator=torch.Generator().manual_seed(6)) > 0.3
    shares, errors = drawn(2, tokens, k, seed=7), drawn(2, tokens, width, seed=8)
    shares[:, ::3] = 0
    shares[~counted] = errors[~counted] = math.nan
    return slots, shares, errors, counted


@pytest.mark.parametrize("sort", [False, True], ids=["counted", "sorted"])
@pytest.mark.parametrize(("tokens", "k", "rows", "width"), [(9, 3, 12, 5), (1, 2, 5, 17), (13, 1, 40, 1)])
def test_writing_rows(tokens: int, k: int, rows: int, width: int, sort: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place, with a log that takes it back and does it again, to the bit."""
    monkeypatch.setattr(memory_prepare, "COUNTED", 0 if sort else 1 << 20)
    slots, shares, errors, counted = a_write(tokens, k, rows, width)
    before = drawn(2, rows, width)
    ordered, entries = memory_prepare.order_of(slots, counted, rows)
    table, log, number = before.clone(), torch.empty(2, tokens * k, width), torch.ones(slots.shape, dtype=torch.int32)
    memory_write.written(table, ordered, entries, shares, errors, log, number)
    after = table.clone()
    same = (slots.flatten(1)[:, :, None] == slots.flatten(1)[:, None]) & counted.repeat_interleave(k, 1)[:, None]
    assert torch.equal(number, torch.where(counted[..., None], same.sum(-1).view(slots.shape), 1))
    assert gap(table, written_by_hand(before, slots, shares, errors, counted)) < 1e-6
    memory_write.swapped(table, ordered, log)
    assert torch.equal(table, before)
    memory_write.swapped(table, ordered, log)
    assert torch.equal(table, after)
    again = before.clone()
    memory_write.written(again, ordered, entries, shares, errors)
    assert torch.equal(again, after)
    hit = torch.zeros(2, rows, dtype=torch.bool)
    for m in range(2):
        hit[m, slots[m][counted[m]].flatten()] = True
    assert torch.equal(after[~hit], before[~hit])


def test_rows_in_bfloat16_are_rounded_once() -> None:
    slots, shares, errors, counted = a_write(9, 3, 12, 5)
    table = drawn(2, 12, 5).bfloat16()
    wanted = written_by_hand(table, slots, shares, errors, counted)
    ordered, entries = memory_prepare.order_of(slots, counted, 12)
    memory_write.written(table, ordered, entries, shares, errors)
    assert ((table.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()


def test_both_ways_of_ordering_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of entries of several blocks, of one more than a block, and of the last slots of a table of 2^31 - 2."""
    for tokens, k, rows in ((11, 3, 9), (260, 2, 9), (17, 1, 9), (11, 3, 2**31 - 2)):
        slots, _, _, counted = a_write(tokens, k, 9, 1)
        slots += rows - 9
        found = {}
        for most in (0, 1 << 20):
            monkeypatch.setattr(memory_prepare, "COUNTED", most)
            found[most] = [x for flags in (counted, None) for x in memory_prepare.order_of(slots, flags, rows)]
        for a, b in zip(*found.values(), strict=True):
            assert a.dtype == b.dtype == torch.int32
            assert torch.equal(a, b)


# Search -------------------------------------------------------------------------------------------------------


def half_measures(query: Tensor, keys: Tensor, distance: bool) -> Tensor:
    """Squared distances, or minus products, rounded to float32 once: [B, T, H, 2, n]."""
    q, own = query.double().unflatten(-1, (2, -1))[..., None, :], keys.double()[:, None]
    return ((q - own).square().sum(-1) if distance else -(q * own).sum(-1)).float()


SEARCHES = [
    ("plain", 2, 2, 2, 41, 5, 3, 2),
    ("plain", 2, 3, 1, 300, 17, 8, 1),
    ("plain", 1, 3, 1, 7, 3, 7, 1),
    ("close", 1, 3, 1, 53, 6, 5, 1),
    ("twice", 1, 5, 1, 44, 5, 4, 1),
    ("lanes", 1, 2, 1, 330, 3, 6, 1),
]


@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "heads", "n", "d", "k", "memories", "distance"),
    [
        pytest.param(*case, distance, marks=() if (i + distance) % 2 == 0 else pytest.mark.slow)
        for i, case in enumerate(SEARCHES)
        for distance in (True, False)
    ],
)
def test_search_is_exact(
    kind: str, batch: int, tokens: int, heads: int, n: int, d: int, k: int, memories: int, distance: bool
) -> None:
    """Also among keys that stand there twice (the lower number first), lie closer together than products in float32
    can tell, or whose best all come from one place of the first pass."""
    query, keys = drawn(batch, tokens, heads, 2 * d), drawn(memories, heads, 2, n, d, seed=1)
    if kind == "twice":
        keys[..., n // 2 :, :] = keys[..., : n // 2, :]
        query[0, 0, 0] = torch.cat([keys[0, 0, 0, 30], keys[0, 0, 1, 11]])
    elif kind == "close":
        keys = 100 + 1e-4 * keys
    elif kind == "lanes":
        keys[..., 5::64, :] *= 0.01
        query *= 0.01
    measures = half_measures(query, keys, distance)
    best = measures.sort(dim=-1, stable=True)
    scores, halves = best_halves(query, keys, k, EPS, distance=distance)[:2]
    assert torch.equal(halves, best.indices[..., :k])
    wanted = best.values[..., :k].double()
    assert gap(scores, -torch.log(EPS + wanted) if distance else -wanted) < 3e-7
    again = best_halves(query, keys, k, EPS, distance=distance)[0]
    assert torch.equal(again, scores)


@pytest.mark.parametrize("distance", [True, False])
def test_sub_keys_that_are_not_numbers_come_last(distance: bool) -> None:
    """Few and many; products are negative, which a place without a key must not reach."""
    make = torch.Generator().manual_seed(0)
    query, whole = torch.randn(1, 2, 1, 32, generator=make), torch.randn(1, 1, 2, 64, 16, generator=make)
    if not distance:
        query, whole = -query.abs(), whole.abs()
    halves = query.view(1, 2, 1, 2, 1, 16)
    for bad in (5, 7, 34):
        keys = whole.clone()
        keys[:, :, :, 10 : 10 + bad] = float("nan")
        far = (halves - keys).square().sum(-1) if distance else -(halves * keys).sum(-1)
        wanted = far.nan_to_num(float("inf")).argsort(dim=-1, stable=True)[..., :8]
        assert torch.equal(best_halves(query, keys, 8, 1e-3, distance=distance, joined=True)[1], wanted), bad


def test_a_query_on_a_key_is_at_distance_zero() -> None:
    keys = 30 * drawn(1, 1, 2, 40, 9)
    query = torch.cat([keys[:, 0, 0, [3, 17]], keys[:, 0, 1, [39, 0]]], -1)[:, :, None]
    scores, halves = best_halves(query, keys, 2, EPS, distance=True)[:2]
    assert halves[0, :, 0, :, 0].tolist() == [[3, 39], [17, 0]]
    assert (scores[..., 0] + math.log(EPS)).abs().max() < 1e-6


# What is refused ----------------------------------------------------------------------------------------------


HOW: dict[str, Any] = {"rule": WriteRule(address_weight=0.3), "chunk_size": 3, "top_k": 2}


def test_what_kernels_do_not_do_is_said() -> None:
    given, call = draw(2, 7, n=5, half=2, width=3, grad=False), partial(regard.fast_weight_memory, impl="triton", **HOW)
    refuses("impl='triton' stores values in float32 and bfloat16; .*float64", call, *(x.double() for x in given))
    refuses("stores values in float32 and bfloat16; .*float16", call, *given, storage=torch.float16)
    wide = torch.zeros(1, 2, 4097, 2), torch.zeros(1, 1).expand(4097**2, 3)
    refuses("at most 4096 sub-keys of a half; these are 4097", call, *given[:3], *wide)
    many = drawn(1, 2, 66, 2), drawn(66**2, 3)
    refuses("joins at most 8192 pairs of a token; top_k=65", call, *given[:3], *many, top_k=65)
    leaf = given[1].clone().requires_grad_()
    read, _ = call(given[0], leaf, *given[2:])
    refuses("create_graph", torch.autograd.grad, read.sum(), leaf, create_graph=True)
    _, state = regard.fast_weight_memory(*given, **HOW)
    assert not isinstance(state.values, TableValues)  # "auto" on a CPU


@pytest.mark.parametrize("step", ["normalized", "paper", "reference"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("memories", [1, 2])
def test_gradients_of_errors_and_shares(step: str, gated: bool, memories: int) -> None:
    """Against autograd through `WriteRule.steps`, with slots that several heads select; at any default dtype."""
    batch, length, heads, k, width = 2, 5, 3, 4, 6
    weights, upstream, by_shares = torch.rand(batch, length, heads, k), *map(torch.randn, ((2, 5, 6), (2, 5, 3, 4)))
    weights[0, 1] = 0
    gate = torch.rand(batch, length) if gated else None
    slots = torch.stack([torch.randperm(6)[:k] for _ in range(batch * length * heads)]).view_as(weights)
    good = torch.rand(batch, length) > 0.2
    target_at = torch.arange(1, length + 1).expand(batch, -1)
    written = good & (target_at < length)
    rule = WriteRule(step, 0.7, key_update="none")
    torch.set_default_dtype(torch.float64)
    try:
        found = through_errors(
            upstream, by_shares, weights, gate, slots, good, written, target_at.contiguous(), memories, rule
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in found if x is not None] == [torch.float32] * (4 if gated else 3)

    leaves = [x.double().requires_grad_() for x in (weights, gate) if x is not None]
    one, *gates = (x.reshape(memories, -1, *x.shape[2:]) for x in leaves)
    slot, counted, wrote = (x.reshape(memories, -1, *x.shape[2:]) for x in (slots, good, written))
    tokens = Written(slot, one, errors=one, gate=gates[0] if gates else None, counted=counted, written=wrote)
    shares = (rule.steps(tokens)[..., None, None] * one).view_as(weights)
    expected = torch.autograd.grad(shares, leaves, by_shares.double())
    for mine, exact in zip([x for x in found[2:] if x is not None], expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)
    sent = torch.where(written[..., None], upstream, 0)
    assert found[0].equal(sent)
    assert found[1].equal(-torch.cat([torch.zeros(batch, 1, width), sent], 1))


@pytest.mark.parametrize("distance", [False, True])
def test_gradients_of_scores_through_weights(distance: bool) -> None:
    """Against autograd through the softmax of the sums of two halves' scores."""
    batch, length, heads, k, n = 2, 3, 2, 3, 5
    halves = torch.stack([torch.randperm(n)[:k] for _ in range(batch * length * heads * 2)])
    halves = halves.view(batch, length, heads, 2, k)
    products = torch.rand(halves.shape, dtype=torch.float64).add(0.1).requires_grad_()
    scores = -products.log() if distance else products
    pairs = scores[..., 0, :, None] + scores[..., 1, None, :]
    slots = halves[..., 0, :, None] * n + halves[..., 1, None, :]
    best = pairs.flatten(-2).topk(k)
    weights = best.values.flatten(-2).softmax(-1).view_as(best.values)
    upstream = torch.randn(weights.shape)
    expected = torch.autograd.grad(weights, products, upstream.double())[0]
    chosen = slots.flatten(-2).gather(-1, best.indices)
    given = weights.detach().float(), chosen, halves, scores.detach().float()
    found = through_weights(upstream, *given, n, distance)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)
