"""Product-key search and reading against all n^2 slots, written out."""

import numpy as np
import pytest
import torch
from dense_fast_weights import all_scores, half_scores
from oracles import entmax_rows
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from regard.memory.product_key import product_key_read, product_key_search, slot_weights

SCORES = ("idw", "dot")
joint_or_not = pytest.mark.parametrize("joint", [True, False], ids=["joint", "by-head"])


def draw(
    n: int, heads: int = 2, half: int = 3, own: bool = False, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Queries [2, 5, heads, 2 half] and sub-keys [(2,) heads, 2, n, half]."""
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 5, heads, 2 * half, generator=make, dtype=dtype)
    return query, torch.randn(*((2,) if own else ()), heads, 2, n, half, generator=make, dtype=dtype)


def dense(query: Tensor, keys: Tensor, k: int, score: str = "idw") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, scores [B, T, H, k], halves and half scores [B, T, H, 2, k] by sorting all of them."""
    rows = keys if keys.dim() == 5 else keys.expand(len(query), *keys.shape)
    halves = torch.stack([half_scores(q.double(), own.double(), score) for q, own in zip(query, rows, strict=True)])
    every = all_scores(halves)
    pick = lambda x: x.sort(dim=-1, descending=True, stable=True)  # noqa: E731
    (totals, slots), (half, index) = pick(every), pick(halves)
    return slots[..., :k], totals[..., :k], index[..., :k], half[..., :k]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("own", [False, True], ids=["one-set", "sets-of-rows"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 2), (5, 1), (6, 4), (9, 9), (40, 8), (40, 16), (40, 32)])
def test_the_best_of_all_slots(n: int, k: int, own: bool, score: str) -> None:
    query, keys = draw(n, own=own)
    found = product_key_search(query, keys, k, score=score)
    slots, scores, halves, half = dense(query, keys, k, score)
    assert torch.equal(found.slots, slots)
    assert torch.equal(found.halves, halves)
    assert (found.scores - scores).abs().max() < 1e-12
    assert (found.half_scores - half).abs().max() < 1e-12


@pytest.mark.parametrize("score", SCORES)
def test_float32_finds_what_float64_does(score: str) -> None:
    query, keys = draw(40, half=16, dtype=torch.float32)
    found = product_key_search(query, keys, 8, score=score)
    slots, scores, _, _ = dense(query, keys, 8, score)
    assert found.scores.dtype == torch.float32
    assert torch.equal(found.slots, slots)
    assert (found.scores - scores).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", SCORES)
def test_the_lowest_index_first_among_equals(score: str, dtype: torch.dtype) -> None:
    """Small whole numbers, of which every score is exact, and sub-keys that are there several times."""
    make = torch.Generator().manual_seed(1)
    query = torch.randint(-2, 3, (2, 50, 2, 4), generator=make).to(dtype)
    keys = torch.randint(-1, 2, (2, 2, 12, 2), generator=make).to(dtype)
    found = product_key_search(query, keys, 7, score=score)
    halves, best = dense(query, keys, 7, score)[2], found.half_scores
    assert torch.equal(found.halves, halves)
    same = found.scores[..., 1:] == found.scores[..., :-1]
    assert same.any()
    assert (found.slots[..., 1:] > found.slots[..., :-1])[same].all()
    assert (best[..., 1:] == best[..., :-1]).any()


@pytest.mark.parametrize("score", SCORES)
def test_equal_keys_do_not_hang_on_how_many_tokens_come(score: str) -> None:
    make = torch.Generator().manual_seed(2)
    keys = torch.randn(8, 4, generator=make)[torch.randint(0, 8, (32,), generator=make)].expand(1, 2, 32, 4)
    query = torch.randn(1, 100, 1, 8, generator=make)
    whole = product_key_search(query, keys, 5, score=score)
    single = torch.cat([product_key_search(query[:, t : t + 1], keys, 5, score=score).slots for t in range(100)], 1)
    assert torch.equal(whole.slots, single)


@pytest.mark.parametrize("norm", [1.0, 10.0, 100.0])
def test_a_cluster_of_keys_is_searched_exactly(norm: float) -> None:
    """Many sub-keys close together far from the origin, where products cancel."""
    make = torch.Generator().manual_seed(3)
    centre = torch.randn(1, 16, generator=make)
    centre = norm * centre / centre.norm()
    keys = (centre + 1e-2 * torch.randn(64, 16, generator=make)).expand(1, 2, 64, 16)
    query = (centre + 1e-2 * torch.randn(30, 16, generator=make)).repeat(1, 2)[None, :, None]
    found = product_key_search(query, keys, 8)
    _, _, halves, half = dense(query, keys, 8)
    assert torch.equal(found.halves, halves)
    assert (found.half_scores - half).abs().max() < 1e-5


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_distances_near_a_key(setting: str) -> None:
    """Squared distances to 1e-3 of themselves, and to 1e-5 at a hit, whatever the products' precision and autocast."""
    make = torch.Generator().manual_seed(4)
    keys = torch.randn(1, 2, 30, 64, generator=make)
    near = keys[0, :, :20] + torch.logspace(-6, 0, 20)[:, None] * torch.randn(2, 20, 64, generator=make) / 8
    near[:, :4] = keys[0, :, :4]
    query = torch.cat([near[0], near[1]], -1)[None, :, None]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = product_key_search(query, keys, 3)
    finally:
        torch.set_float32_matmul_precision(before)
    squares = found.half_scores.double().neg().exp() - 1e-3
    _, _, halves, half = dense(query, keys, 3)
    true = half.neg().exp() - 1e-3
    assert torch.equal(found.halves, halves)
    assert (squares[:, :4, :, :, 0]).abs().max() < 1e-9
    assert ((squares - true).abs() < 1e-3 * true + 1e-9).all()


@joint_or_not
def test_weights_are_those_of_inverse_distances_or_any_spec(joint: bool) -> None:
    query, keys = draw(7)
    found = product_key_search(query, keys, 4)
    halves = 1 / (1e-3 + (query.view(2, 5, 2, 2, 1, 3) - keys).square().sum(-1))
    product = (halves[..., 0, :, None] * halves[..., 1, None, :]).flatten(-2).gather(-1, found.slots)
    total = product.sum((-1, -2), keepdim=True) if joint else product.sum(-1, keepdim=True)
    assert (slot_weights(found, joint=joint) - product / total).abs().max() < 1e-12
    weights = slot_weights(found, "sparsemax", joint=joint)
    rows = found.scores.reshape(-1, 8 if joint else 4)
    expected = entmax_rows(rows.numpy(), 2.0)
    assert np.abs(weights.reshape(rows.shape).numpy() - expected).max() < 1e-12
    assert (expected == 0).any()


@pytest.mark.parametrize("score", SCORES)
def test_reading_is_a_weighted_sum_over_all_heads(score: str) -> None:
    query, keys = draw(6)
    values = torch.randn(36, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out, found = product_key_read(query, keys, values, 5, score=score)
    slots, scores, _, _ = dense(query, keys, 5, score)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    expected = torch.einsum("bthk,bthkd->btd", weights, values[slots])
    assert torch.equal(found.slots, slots)
    assert (out - expected).abs().max() < 1e-12


@joint_or_not
@pytest.mark.parametrize("own", [False, True], ids=["one-set", "sets-of-rows"])
@pytest.mark.parametrize("score", SCORES)
def test_derivatives(score: str, own: bool, joint: bool) -> None:
    query, keys = (x.requires_grad_() for x in draw(4, own=own))
    values = torch.randn(16, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).requires_grad_()

    def read(*inputs: Tensor) -> Tensor:
        return product_key_read(*inputs, 3, score=score, joint=joint)[0]

    assert gradcheck(read, (query, keys, values))
    assert gradgradcheck(read, (query, keys, values))


def test_float32_gradients_near_a_key() -> None:
    """What steep scores hand on, beside the same in float64."""
    query, keys = draw(20, half=8)
    query[..., :8] = keys[None, None, :, 0, 3] + 0.02
    grads = []
    for dtype in (torch.float64, torch.float32):
        q, own = (x.to(dtype, copy=True).requires_grad_() for x in (query, keys))
        product_key_search(q, own, 4).scores.cos().sum().backward()
        grads.append((q.grad, own.grad))
    for exact, found in zip(*grads, strict=True):
        assert (found - exact).abs().max() < 2e-4 * exact.abs().max()


def test_a_query_that_is_not_finite_stays_alone() -> None:
    query, keys = draw(6)
    query[0, 2, 1, 4] = torch.nan
    query[1, 3, 0, 0] = torch.inf
    clean = query.nan_to_num(0, 0, 0)
    q, own = query.clone().requires_grad_(), keys.clone().requires_grad_()
    found = product_key_search(q, own, 4)
    corrupted = torch.zeros(2, 5, 2, dtype=torch.bool)
    corrupted[0, 2, 1] = corrupted[1, 3, 0] = True
    assert torch.equal(found.scores.isnan(), corrupted[..., None].expand(2, 5, 2, 4))
    expected = dense(clean, keys, 4)[1]
    assert (found.scores - expected)[~corrupted].abs().max() < 1e-12
    found.scores.nansum().backward()
    assert q.grad[corrupted].abs().max() == 0
    assert own.grad.isfinite().all()
    assert own.grad.abs().max() > 0


def test_no_tokens() -> None:
    query, keys = draw(6)
    found = product_key_search(query[:, :0], keys, 4)
    assert found.slots.shape == (2, 0, 2, 4)
    assert found.half_scores.shape == (2, 0, 2, 2, 4)


def test_long_calls_are_cut_into_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys = draw(6)
    for dtype in (torch.float32, torch.float64):
        q, own = query.to(dtype), keys.to(dtype)
        whole = product_key_search(q, own, 4)
        with monkeypatch.context() as patch:
            patch.setattr("regard.memory.product_key.TILE", 3 * own.numel())
            tiles = product_key_search(q, own, 4)
        assert torch.equal(whole.slots, tiles.slots)
        assert torch.equal(whole.scores, tiles.scores)
