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


# Gradient modes ---------------------------------------------------------------------------------------------


def scores(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def gradient_of(p: Tensor, z: Tensor) -> Tensor:
    weight = torch.linspace(-1, 2, p.shape[-1], dtype=p.dtype)
    return torch.autograd.grad((p * weight).sum(), z)[0]


def plain_soft(z: Tensor, k: int, temperature: float, uniform: bool) -> Tensor:
    """K_j sigmoid((z_j - c)/temperature), normalised; c halfway between the k-th and the next score."""
    ranked = torch.sort(z, dim=-1, descending=True).values
    gate = torch.ones_like(z) + 0 * z
    if z.shape[-1] > k:
        gate = torch.sigmoid((z - (ranked[:, k - 1 : k] + ranked[:, k : k + 1]) / 2) / temperature)
    w = gate if uniform else torch.exp(z) * gate
    return w / w.sum(-1, keepdim=True)


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
    third = torch.zeros_like(z).scatter(-1, z.topk(3).indices, 1 / 3)
    torch.testing.assert_close(through(z[0], spec).weights[0, 0], third, rtol=0, atol=1e-6)
