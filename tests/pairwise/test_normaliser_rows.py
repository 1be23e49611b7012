"""The contract of degenerate rows, axes and masks, for every normaliser."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

import regard

INF = float("inf")
Call = Callable[..., Tensor]

CALLS: dict[str, Call] = {
    "softmax": lambda z, **how: regard.entmax(z, 1.0, **how),
    "entmax-1.1": lambda z, **how: regard.entmax(z, 1.1, **how),
    "entmax-1.5": lambda z, **how: regard.entmax(z, 1.5, **how),
    "entmax-3": lambda z, **how: regard.entmax(z, 3.0, **how),
    "entmax-tensor": lambda z, **how: regard.entmax(z, torch.tensor(1.3, dtype=z.dtype), **how),
    "sparsemax": regard.sparsemax,
    "relumax": regard.relumax,
    "normrelu": regard.normrelu,
    "normrelu-nearest": lambda z, **how: regard.normrelu(z, empty="nearest", **how),
    "topk-softmax": lambda z, **how: regard.topk_softmax(z, 3, **how),
    "topk-uniform": lambda z, **how: regard.topk_uniform(z, 3, **how),
    "topk-softmax-soft": lambda z, **how: regard.topk_softmax(z, 3, gradient="soft", **how),
    "topk-uniform-soft": lambda z, **how: regard.topk_uniform(z, 3, gradient="soft", **how),
    "topk-uniform-straight-through": lambda z, **how: regard.topk_uniform(z, 3, gradient="straight-through", **how),
}


def top3(z: np.ndarray, uniform: bool) -> np.ndarray:
    kept = oracles.order(z)[:3]
    p = np.zeros(len(z))
    p[kept] = 1 / len(kept) if uniform else oracles.softmax(z[kept]) if len(kept) else 0
    return p


def relu_shares(z: np.ndarray) -> np.ndarray:
    w = np.maximum(z, 0)
    return w / w.sum() if w.sum() > 0 else (z > -INF) / (z > -INF).sum()


# One row [n] with at least one finite score -> its weights.
EXPECTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax": oracles.softmax,
    "entmax-1.1": lambda z: oracles.entmax_row(z, 1.1)[0],
    "entmax-1.5": lambda z: oracles.entmax_row(z, 1.5)[0],
    "entmax-3": lambda z: oracles.entmax_row(z, 3.0)[0],
    "entmax-tensor": lambda z: oracles.entmax_row(z, 1.3)[0],
    "sparsemax": lambda z: oracles.entmax_row(z, 2.0)[0],
    "relumax": lambda z: oracles.rectified(z, z.max() - 1, 1),
    "normrelu": relu_shares,
    "topk-softmax": lambda z: top3(z, False),
    "topk-uniform": lambda z: top3(z, True),
    "topk-uniform-straight-through": lambda z: top3(z, True),
}


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def leaf(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_axis(name: str, dim: int) -> None:
    z = scores(4, 5, 6)
    moved = np.moveaxis(z.numpy(), dim, -1)
    expected = np.moveaxis(np.apply_along_axis(EXPECTED[name], -1, moved), -1, dim).astype(float)
    p = CALLS[name](z, dim=dim)
    assert p.shape == z.shape
    np.testing.assert_allclose(p.numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", EXPECTED)
def test_minus_infinity_and_mask_hide_a_score(name: str) -> None:
    z = scores(6, 9)
    mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[0] = True
    expected = np.zeros((6, 9))
    for i, row in enumerate(z.numpy()):
        seen = mask[i].numpy()
        expected[i, seen] = EXPECTED[name](row[seen])
    hidden = torch.where(mask, z, -INF)
    for p in (CALLS[name](hidden), CALLS[name](z, mask=mask), CALLS[name](hidden, mask=mask)):
        np.testing.assert_allclose(p.numpy(), expected, rtol=0, atol=1e-13)
        assert bool((p[~mask] == 0).all())
    # What is hidden never matters, whatever it is.
    for junk in (1e30, INF, float("nan")):
        filled = CALLS[name](torch.where(mask, z, junk), mask=mask)
        assert torch.equal(filled, CALLS[name](z, mask=mask))


@pytest.mark.parametrize("name", CALLS)
def test_masks_broadcast(name: str) -> None:
    z = scores(2, 3, 7)
    for shape in ((7,), (3, 7), (1, 3, 1), (2, 1, 7)):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.7
        full = CALLS[name](z, mask=mask.expand(2, 3, 7).contiguous())
        assert torch.equal(CALLS[name](z, mask=mask), full)


@pytest.mark.parametrize("name", CALLS)
def test_rows_without_a_score_are_zero_with_zero_gradient(name: str) -> None:
    z = leaf([[-INF] * 5, [0.3, -INF, 1.2, -0.4, 0.1], [0.5, 0.2, -0.3, 0.1, 0.9]])
    mask = torch.tensor([[True] * 5, [True] * 5, [False] * 5])
    p = CALLS[name](z, mask=mask)
    assert bool((p[0] == 0).all())
    assert bool((p[2] == 0).all())
    assert abs(float(p[1].detach().sum()) - 1) <= 1e-14
    if name == "topk-uniform":  # documented: a choice of keys alone has no gradient at all
        assert not p.requires_grad
        return
    (p * torch.arange(1.0, 6.0)).sum().backward()
    assert bool((z.grad[0] == 0).all())
    assert bool((z.grad[2] == 0).all())
    assert float(z.grad[1, 1]) == 0
    assert bool(torch.isfinite(z.grad).all())


@pytest.mark.parametrize("name", CALLS)
def test_ties_share_and_a_single_score_takes_all(name: str) -> None:
    for value in (-1e30, -7.5, 0.0, 0.25, 1e4, 1e30):
        single = CALLS[name](torch.tensor([[value]], dtype=torch.float64))
        assert single.tolist() == [[1.0]]
        alone = CALLS[name](torch.tensor([-INF, value, -INF], dtype=torch.float64))
        assert alone.tolist() == [0.0, 1.0, 0.0]
        if name in ("normrelu-nearest", "topk-softmax", "topk-uniform", "topk-uniform-straight-through"):
            continue  # these break ties by index; see below and test_topk.py
        tied = CALLS[name](torch.full((4,), value, dtype=torch.float64))
        np.testing.assert_allclose(tied.numpy(), [0.25] * 4, rtol=0, atol=1e-15)


def test_ties_by_index() -> None:
    flat = torch.full((5,), -0.5, dtype=torch.float64)
    assert CALLS["normrelu-nearest"](flat).tolist() == [1, 0, 0, 0, 0]
    for name in ("topk-softmax", "topk-uniform", "topk-uniform-straight-through"):
        np.testing.assert_allclose(CALLS[name](flat).numpy(), [1 / 3, 1 / 3, 1 / 3, 0, 0], rtol=0, atol=1e-16)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_nan_stays_in_its_row(name: str, bad: float) -> None:
    z = scores(3, 5)
    clean = CALLS[name](z)
    z[1, 2] = bad
    z = z.requires_grad_()
    p = CALLS[name](z)
    assert bool(torch.isnan(p[1]).all()), "NaN or +inf among the scores gives NaN, not a number that looks right"
    assert torch.equal(p[[0, 2]], clean[[0, 2]])
    if p.requires_grad:
        (p[[0, 2]] * torch.arange(5.0)).sum().backward()
        assert bool(torch.isfinite(z.grad[[0, 2]]).all())


@pytest.mark.parametrize("name", CALLS)
def test_zero_lengths(name: str) -> None:
    for shape, dim in (((3, 0), -1), ((0, 4), -1), ((0,), 0), ((2, 0, 3), 1)):
        z = torch.zeros(shape, requires_grad=True)
        p = CALLS[name](z, dim=dim)
        assert p.shape == z.shape
        p.sum().backward()
        assert z.grad.shape == z.shape


@pytest.mark.parametrize("name", CALLS)
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    z = scores(7, 33)
    p = CALLS[name](z)
    for i in range(7):
        assert torch.equal(CALLS[name](z[i : i + 1])[0], p[i])


@pytest.mark.parametrize("name", CALLS)
def test_inputs_are_left_alone_and_layout_does_not_matter(name: str) -> None:
    z = scores(4, 6, 8)
    before = z.clone()
    p = CALLS[name](z)
    assert torch.equal(z, before)
    turned = z.transpose(0, 1)
    assert not turned.is_contiguous()
    torch.testing.assert_close(CALLS[name](turned), p.transpose(0, 1), rtol=0, atol=1e-15)


def test_fallbacks_of_normrelu() -> None:
    z = leaf([-0.5, -0.1, -INF, -0.3])
    for empty, expected in (
        ("uniform", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("zero", [0, 0, 0, 0]),
        ("nearest", [0, 1, 0, 0]),
    ):
        p = regard.normrelu(z, empty=empty)
        assert p.tolist() == expected
        grad = torch.autograd.grad((p * torch.arange(4.0)).sum(), z, allow_unused=True)[0]
        assert grad is None or not bool(grad.any())
    # A score exactly at the threshold has no weight: theta = -bias.
    np.testing.assert_allclose(regard.normrelu(z.detach(), bias=0.1).numpy(), [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-16)
    assert regard.normrelu(z.detach(), bias=0.2).tolist() == [0, 1, 0, 0]


def test_hand_computed_weights() -> None:
    """z = (1, .5, -1). sparsemax: support {1, .5}, tau = (1.5 - 1)/2 = .25. relumax: w = (1, .5, 0).
    normrelu with bias 1: w = (2, 1.5, 0). biweight: a_1 - a_2 = .25, a_1^2 + a_2^2 = 1."""
    z = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)
    a2 = (-0.25 + np.sqrt(2 - 0.25**2)) / 2
    for p, expected in (
        (regard.sparsemax(z), [0.75, 0.25, 0]),
        (regard.relumax(z), [2 / 3, 1 / 3, 0]),
        (regard.relumax(z, 0.5), [1, 0, 0]),
        (regard.relumax(z, 3.0), [3 / 6.5, 2.5 / 6.5, 1 / 6.5]),
        (regard.normrelu(z), [2 / 3, 1 / 3, 0]),
        (regard.normrelu(z, 1.0), [2 / 3.5, 1.5 / 3.5, 0]),
        (regard.entmax(z), [(a2 + 0.25) ** 2, a2**2, 0]),
        (regard.topk_softmax(z, 2), [1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5)), 0]),
        (regard.topk_uniform(z, 2), [0.5, 0.5, 0]),
    ):
        np.testing.assert_allclose(p.numpy(), expected, rtol=0, atol=1e-15)


def test_every_pair_of_dtype_and_normaliser_keeps_the_dtype() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, (name, call) in itertools.product(dtypes, CALLS.items()):
        assert call(scores(2, 4).to(dtype)).dtype == dtype, name
