"""Search and reading of fast-weight product-key memory in Triton's interpreter, against every slot's score written out
and sums over all entries in float64."""

from __future__ import annotations

import math

import pytest
import torch
from memory_calls import drawn, gap
from torch import Tensor

from regard.triton.memory.read import join, mixed_rows, picked_rows, pulled_rows
from regard.triton.memory.search import best_halves
from regard.triton.runtime.tiles import forced

pytestmark = pytest.mark.usefixtures("poisoned")
EPS = 1e-3


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
    scores, halves = best_halves(query, keys, k, EPS, distance=distance)
    assert torch.equal(halves, best.indices[..., :k])
    wanted = best.values[..., :k].double()
    assert gap(scores, -torch.log(EPS + wanted) if distance else -wanted) < 3e-7
    again, _ = best_halves(query, keys, k, EPS, distance=distance)
    assert torch.equal(again, scores)


def test_a_query_on_a_key_is_at_distance_zero() -> None:
    keys = 30 * drawn(1, 1, 2, 40, 9)
    query = torch.cat([keys[:, 0, 0, [3, 17]], keys[:, 0, 1, [39, 0]]], -1)[:, :, None]
    scores, halves = best_halves(query, keys, 2, EPS, distance=True)
    assert halves[0, :, 0, :, 0].tolist() == [[3, 39], [17, 0]]
    assert (scores[..., 0] + math.log(EPS)).abs().max() < 1e-6


# Reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "k", "n"), [(1, 3, 6), (2, 5, 7), (3, 1, 4)])
def test_slots_are_the_best_of_all_pairs(heads: int, k: int, n: int) -> None:
    every = drawn(2, 3, heads, 2, n)
    every[0, 1] = every[0, 1].round()  # equals among the sums, of which the lowest slot is first
    best = every.sort(dim=-1, descending=True, stable=True)
    slots, weights = join(best.values[..., :k].contiguous(), best.indices[..., :k].contiguous(), n)
    total = (every[..., 0, :, None] + every[..., 1, None, :]).flatten(-2)
    wanted = total.sort(dim=-1, descending=True, stable=True)
    ties = (total[0, 1, 0].unique().numel() < n * n) or n == 4
    assert ties
    plain = torch.tensor([[True] * 3, [True] * 3])
    plain[0, 1] = False  # pairs of equal sums outside the k best halves are not to be found
    assert torch.equal(slots[plain], wanted.indices[..., :k][plain])
    assert torch.equal(total.gather(-1, slots), wanted.values[..., :k])
    own = wanted.values[..., :k].double().flatten(-2).softmax(-1).view(weights.shape)
    assert gap(weights, own) < 3e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("k", "width"), [(3, 5), (11, 17), (1, 1)])
def test_sums_and_products_of_picked_rows(k: int, width: int, dtype: torch.dtype) -> None:
    table, other, weights = drawn(2, 30, width).to(dtype), drawn(2, 5, width, seed=1), drawn(2, 5, k, seed=2)
    slots = torch.randint(0, 30, (2, 5, k), generator=torch.Generator().manual_seed(3))
    good = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    table[0, 29], other[0, 2], weights[0, 2], slots[0, 2] = math.nan, math.nan, math.nan, 29
    slots[slots == 29] = 28
    slots[0, 2] = 29
    rows = torch.stack([table[m].double()[slots[m]] for m in range(2)])
    sums = torch.where(good[..., None], (weights.double()[..., None] * rows).sum(-2), 0)
    dots = torch.where(good[..., None], (rows * other.double()[..., None, :]).sum(-1), 0)
    both = picked_rows(table, slots, weights, other, good)
    alone = picked_rows(table, slots, weights, None, good)[0], picked_rows(table, slots, None, other, good)[1]
    for found in (both, alone):
        assert gap(found[0], sums) < 1e-6
        assert gap(found[1], dots) < 1e-6


@pytest.mark.parametrize(
    ("gated", "marked", "memories", "dtype"),
    [
        (True, True, 2, torch.float32),
        (True, False, 1, torch.bfloat16),
        (False, True, 1, torch.float32),
        (False, False, 2, torch.bfloat16),
    ],
)
def test_mixes_of_sums_and_their_gradients(gated: bool, marked: bool, memories: int, dtype: torch.dtype) -> None:
    """Against autograd of the formula; rows of several tiles, tensors that are parts of others, tokens that are not
    there."""
    table, weights, by_sum = drawn(memories, 30, 19).to(dtype), drawn(2, 4, 9, seed=2), drawn(2, 4, 19, seed=7)
    slots = torch.randint(0, 30, (2, 4, 9), generator=torch.Generator().manual_seed(3))
    value, by_mix, gate = drawn(2, 9, 19, seed=4)[:, 2:6], drawn(2, 9, 19, seed=5)[:, 3:7], drawn(2, 9, seed=6)[:, 1:5]
    there = torch.tensor([[True, True, False, True], [False, True, True, True]]) | (not marked)
    leaves = [x.double().requires_grad_() for x in (weights, value, gate)]
    g, rest = (leaves[2][..., None], 1 - leaves[2][..., None]) if gated else (torch.ones(()), 1)
    rows = table.double().expand(2, -1, -1)[torch.arange(2)[:, None, None], slots]
    exact = (leaves[0][..., None] * rows).sum(-2) * there[..., None]
    mix = (g * exact + rest * leaves[1]) * there[..., None]
    pull = ((by_sum.double() + g * by_mix) * there[..., None]).detach()
    loss = (mix * by_mix).sum() + (exact * by_sum).sum()
    wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
    for x in (weights, value, by_sum, by_mix, gate):
        x[~there] = math.nan
    slots, weights, by_sum, flags = (x.reshape(memories, -1, *x.shape[2:]) for x in (slots, weights, by_sum, there))
    good, share = flags if marked else None, gate if gated else None
    with forced(rows=8, keys=16):
        sums, mixed = mixed_rows(table, slots, weights, good, value, share)
        dots, whole, *own = pulled_rows(table, slots, good, by_sum, by_mix, sums, value, share)
        _, part, *_ = pulled_rows(table, slots, good, None, by_mix, sums, value, share)
    assert gap(sums.view(2, 4, 19), exact.detach()) < 1e-6
    assert gap(mixed, mix.detach()) < 1e-6
    assert gap(whole.view(2, 4, 19), pull) < 1e-6
    assert gap(part.view(2, 4, 19), (g * by_mix.double().nan_to_num() * there[..., None]).detach()) < 1e-6
    for found, exact_one in zip((dots.view(2, 4, 9), *own[: 1 + gated]), wanted, strict=False):
        assert gap(found, exact_one) < 1e-6
