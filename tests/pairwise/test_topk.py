"""Nearest: exactly k keys, ties by index, and the three gradient modes against autograd of the plain formula."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.grammar import Spec

INF = float("inf")
KERNELS = ("epanechnikov", "biweight", "triweight", "polynomial(r=0.5)")


def through(z: Tensor, spec: Spec | str, **how) -> regard.Diagnostics:
    """Diagnostics of plain scores: one query of dimension 1 and keys that are the scores."""
    key = z[None, :, None, :].transpose(-1, -2) if z.dim() == 2 else z[None, None, :, None]
    one = torch.ones(1, key.shape[1], 1, 1, dtype=z.dtype)
    return regard.attention(one, key, key, spec, scale=1.0, impl="reference", return_diagnostics=True, **how)[1]


def weigh(z: np.ndarray, k: int, power: float) -> np.ndarray:
    """The rule in words: theta is the (k+1)-th best score; with fewer visible, the lowest less one; equal
    weights where all kept keys tie with theta. Never more than k keys."""
    best = oracles.order(z)
    p = np.zeros(len(z))
    if len(best) == 0:
        return p
    theta = z[best[k]] if len(best) > k else z[best[-1]] - 1
    kept = best[:k]
    w = np.where(z[kept] > theta, np.maximum(z[kept] - theta, 1e-300) ** power, 0)
    p[kept] = w / w.sum() if w.sum() > 0 else 1 / len(kept)
    return p


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    z=st.lists(st.integers(-3, 3) | st.just(None), min_size=1, max_size=12),
    k=st.integers(1, 14),
)
def test_keeps_exactly_the_best_lowest_index_first(z: list, k: int) -> None:
    row = np.array([-INF if x is None else x / 2 for x in z])
    kept = oracles.order(row)[:k]
    scores = torch.from_numpy(row)
    soft, uniform = np.zeros(len(row)), np.zeros(len(row))
    if len(kept):
        soft[kept], uniform[kept] = oracles.softmax(row[kept]), 1 / len(kept)
    for gradient in ("hard", "straight-through"):
        p = regard.topk_softmax(scores, k, gradient=gradient).numpy()
        np.testing.assert_allclose(p, soft, rtol=0, atol=1e-15)
        assert np.count_nonzero(p) == min(k, len(oracles.order(row)))
        np.testing.assert_allclose(
            regard.topk_uniform(scores, k, gradient=gradient).numpy(), uniform, rtol=0, atol=1e-16
        )


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    z=st.lists(st.integers(-3, 3) | st.just(None), min_size=1, max_size=12),
    k=st.integers(1, 14),
    power=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)
def test_compact_kernels_reach_to_the_next_key(z: list, k: int, power: float) -> None:
    row = np.array([-INF if x is None else x / 2 for x in z])
    finite = torch.from_numpy(np.where(np.isinf(row), 0, row))
    mask = torch.from_numpy(row > -INF)[None, None, None]
    found = through(finite, f"polynomial(r={power})*nearest(k={k})", attn_mask=mask)
    expected = weigh(row, k, power)
    np.testing.assert_allclose(found.weights[0, 0, 0].numpy(), expected, rtol=0, atol=1e-14)
    assert int(found.support) == np.count_nonzero(expected) <= min(k, int(mask.sum()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_compact_kernels_on_distinct_scores_use_k_keys(kernel: str) -> None:
    z = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in (1, 5, 29, 30, 31):
        assert int(through(z, f"{kernel}*nearest(k={k})").support) == min(k, 30)


def test_k_larger_than_the_row() -> None:
    z = torch.tensor([0.4, -1.0, 0.7], dtype=torch.float64)
    np.testing.assert_allclose(regard.topk_softmax(z, 50).numpy(), oracles.softmax(z.numpy()).astype(float), atol=1e-16)
    np.testing.assert_allclose(regard.topk_uniform(z, 50).numpy(), [1 / 3] * 3, atol=1e-16)


# Gradient modes ---------------------------------------------------------------------------------------------


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def gradient_of(p: Tensor, z: Tensor) -> Tensor:
    weight = torch.linspace(-1, 2, p.shape[-1], dtype=p.dtype)
    return torch.autograd.grad((p * weight).sum(), z)[0]


def chosen(z: Tensor, k: int) -> Tensor:
    kept = torch.zeros_like(z, dtype=torch.bool)
    for i, row in enumerate(z.detach().numpy()):
        kept[i, oracles.order(row)[:k].copy()] = True
    return kept


def plain_softmax(z: Tensor, kept: Tensor) -> Tensor:
    w = torch.where(kept, torch.exp(z), 0.0)
    return w / w.sum(-1, keepdim=True)


def plain_soft(z: Tensor, k: int, temperature: float, uniform: bool) -> Tensor:
    """K_j sigmoid((z_j - c)/temperature), normalised; c halfway between the k-th and the next score."""
    ranked = torch.sort(z, dim=-1, descending=True).values
    gate = torch.ones_like(z) + 0 * z
    if z.shape[-1] > k:
        gate = torch.sigmoid((z - (ranked[:, k - 1 : k] + ranked[:, k : k + 1]) / 2) / temperature)
    w = gate if uniform else torch.exp(z) * gate
    return w / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("k", [1, 3, 8, 9])
def test_hard(k: int) -> None:
    z = scores(4, 8).requires_grad_()
    ours, plain = regard.topk_softmax(z, k), plain_softmax(z, chosen(z, k))
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient_of(ours, z), gradient_of(plain, z), rtol=0, atol=1e-14)
    assert not regard.topk_uniform(z, k).requires_grad  # documented: nothing to differentiate


@pytest.mark.parametrize("k", [1, 3, 8, 9])
@pytest.mark.parametrize("call", [regard.topk_softmax, regard.topk_uniform])
def test_straight_through(call, k: int) -> None:
    """Values of the hard choice, derivative of softmax over every visible score."""
    z = scores(4, 8).requires_grad_()
    ours = call(z, k, gradient="straight-through")
    kept = chosen(z, k)
    value = plain_softmax(z, kept) if call is regard.topk_softmax else kept.double() / kept.sum(-1, keepdim=True)
    torch.testing.assert_close(ours.detach(), value.detach(), rtol=0, atol=1e-15)
    surrogate = plain_softmax(z, torch.ones_like(z, dtype=torch.bool))
    torch.testing.assert_close(gradient_of(ours, z), gradient_of(surrogate, z), rtol=0, atol=1e-14)


@pytest.mark.parametrize("k", [1, 3, 7, 8, 9])
@pytest.mark.parametrize("call", [regard.topk_softmax, regard.topk_uniform])
def test_soft(call, k: int) -> None:
    z = scores(4, 8).requires_grad_()
    ours = call(z, k, gradient="soft")
    plain = plain_soft(z, k, 1.0, uniform=call is regard.topk_uniform)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-15)
    torch.testing.assert_close(gradient_of(ours, z), gradient_of(plain, z), rtol=0, atol=1e-14)


def test_soft_temperature() -> None:
    z = scores(1, 8)
    for temperature in (0.01, 0.3, 5.0):
        spec = Spec.parse(f"uniform*nearest(k=3,gradient=soft,temperature={temperature})")
        expected = plain_soft(z, 3, temperature, uniform=True)
        torch.testing.assert_close(through(z[0], spec).weights[0, 0], expected, rtol=0, atol=1e-15)
    # Cold gates are the hard choice.
    spec = Spec.parse("uniform*nearest(k=3,gradient=soft,temperature=1e-4)")
    thirds = chosen(z, 3).double() / 3
    torch.testing.assert_close(through(z[0], spec).weights[0, 0], thirds, rtol=0, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("kernel", ["gaussian", *KERNELS])
def test_compact_hard_gradient_moves_the_next_key(kernel: str, impl: str) -> None:
    """The (k+1)-th key is the threshold: it has no weight and yet a gradient, under kernels that vanish."""
    z = torch.tensor([0.9, -0.4, 0.35, 0.1, -1.0], dtype=torch.float64)
    key = z[None, None, :, None].clone().requires_grad_()
    value = torch.tensor([1.0, -2.0, 3.0, 0.5, 4.0], dtype=torch.float64)[None, None, :, None]
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    out = regard.attention(one, key, value, f"{kernel}*nearest(k=2)", scale=1.0, impl=impl)
    out.sum().backward()
    leaf = z.clone().requires_grad_()
    power = {"epanechnikov": 1, "biweight": 2, "triweight": 3, "polynomial(r=0.5)": 0.5}
    w = torch.exp(leaf[[0, 2]]) if kernel == "gaussian" else (leaf[[0, 2]] - leaf[3]) ** power[kernel]
    expected = (w / w.sum()) @ torch.tensor([1.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(out.flatten()[0], expected, rtol=0, atol=1e-14)
    grad = torch.autograd.grad(expected, leaf)[0]
    torch.testing.assert_close(key.grad.flatten(), grad, rtol=0, atol=1e-13)
    assert (float(grad[3]) == 0) == (kernel == "gaussian")


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_uniform_nearest_trains_its_keys(impl: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, generator=torch.Generator().manual_seed(n)) for n in (5, 9, 9))
    for mode in ("hard", "straight-through", "soft"):
        query, key = q.clone().requires_grad_(), k.clone().requires_grad_()
        out = regard.attention(
            query, key, v.clone().requires_grad_(), f"uniform*nearest(k=3,gradient={mode})", impl=impl
        )
        out.square().sum().backward()
        for grad in (query.grad, key.grad):
            if mode == "hard":
                assert grad is None or not bool(grad.any())
            else:
                assert float(grad.abs().max()) > 1e-3
