"""The compact family as Nadaraya-Watson regression on the unit sphere (sparse-attention paper).

Unit keys k_i and queries q, s_i = k_i . q, scores z = s / gamma, so that |k_i - q|^2 = 2 - 2 s_i. Expected
weights are [1 - |k_i - q|^2 / H^2]_+^r, normalised, from distances in extended precision.
"""

import numpy as np
import oracles
import pytest
import torch

import regard
from regard.grammar import Spec

POWERS = (0.5, 1.0, 2.0, 3.0, 7.5)
GAMMAS = (0.05, 0.2, 1.0, 3.0, 10.0)
WIDE = oracles.WIDE


def unit(*shape: int, seed: int) -> np.ndarray:
    """Unit vectors in extended precision."""
    x = np.random.default_rng(seed).normal(size=shape).astype(WIDE)
    return x / np.sqrt((x * x).sum(-1, keepdims=True))


def smoothed(distance2: np.ndarray, h2: np.ndarray, r: float) -> np.ndarray:
    return oracles.shares(np.maximum(1 - distance2 / h2, 0) ** WIDE(r))


def observed(q: np.ndarray, k: np.ndarray, spec: Spec, **how) -> regard.Diagnostics:
    """Diagnostics of unit queries [n, D] on unit keys [m, D]."""
    query, key = (torch.from_numpy(x.astype(np.float64))[None, None] for x in (q, k))
    return regard.attention(query, key, key, spec, impl="reference", return_diagnostics=True, **how)[1]


@pytest.mark.parametrize("r", POWERS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_adaptive_weights_and_bandwidth_are_those_of_nadaraya_watson(r: float, gamma: float) -> None:
    keys, queries = unit(40, 6, seed=1), unit(12, 6, seed=2)
    spec = Spec.parse(f"polynomial(r={r})*adaptive*cosine(eps=0)")
    found = observed(queries, keys, spec, scale=1 / gamma)
    s = (queries @ keys.T).astype(WIDE)
    for i in range(len(queries)):
        _, tau = oracles.entmax_row(s[i] / WIDE(gamma), 1 + 1 / r)
        h = np.sqrt(2 - 2 * WIDE(r) * WIDE(gamma) * tau)
        np.testing.assert_allclose(float(found.tau[0, 0, i]), float(tau), rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(float(found.bandwidth[0, 0, i]), float(h), rtol=1e-11)
        distance2 = ((keys - queries[i]) ** 2).sum(-1)
        assert np.abs(found.weights[0, 0, i].numpy() - smoothed(distance2, h * h, r)).max() <= 1e-12
        assert float(found.bandwidth[0, 0, i]) > np.sqrt(distance2.min())  # the nearest key is always inside


@pytest.mark.parametrize("h2", [0.05, 0.2, 1.0, 4.0])
@pytest.mark.parametrize("b", [0.1, 1.0, 3.0])
def test_relumax_is_epanechnikov(h2: float, b: float) -> None:
    """[b + (s - m)/h^2]_+ has bandwidth H^2 = 2 (1 - m) + 2 b h^2 (equation 20)."""
    keys, queries = unit(40, 6, seed=3), unit(12, 6, seed=4)
    s = queries @ keys.T
    p = regard.relumax(torch.from_numpy((s / WIDE(h2)).astype(np.float64)), b).numpy()
    distance2 = ((queries[:, None] - keys) ** 2).sum(-1)
    wide2 = 2 * (1 - s.max(-1, keepdims=True)) + 2 * WIDE(b) * WIDE(h2)
    assert np.abs(p - smoothed(distance2, wide2, 1.0)).max() <= 1e-13
    found = observed(queries, keys, Spec.parse(f"epanechnikov*anchored(margin={b})*cosine(eps=0)"), scale=1 / h2)
    np.testing.assert_allclose(found.bandwidth[0, 0].numpy(), np.sqrt(wide2[:, 0]).astype(float), rtol=1e-12)
    assert np.all(wide2[:, 0] > distance2.min(-1))


@pytest.mark.parametrize("h", [0.5, 0.9, 1.3, 2.5])
def test_normrelu_is_equation_11(h: float) -> None:
    """relu(2 s/h^2 + 1 - 2/h^2) divided by its sum; rows without support are uniform over the keys."""
    keys, queries = unit(40, 6, seed=5), unit(12, 6, seed=6)
    s = queries @ keys.T
    w = np.maximum(2 * s / WIDE(h) ** 2 + (1 - 2 / WIDE(h) ** 2), 0)
    lone = w.sum(-1, keepdims=True) == 0
    expected = np.where(lone, WIDE(1) / 40, w / np.where(lone, 1, w.sum(-1, keepdims=True)))
    z = torch.from_numpy((2 * s / WIDE(h) ** 2).astype(np.float64))
    assert np.abs(regard.normrelu(z, 1 - 2 / h**2).numpy() - expected).max() <= 1e-13
    for r in (1, 2, 3):
        spec = Spec.parse(f"polynomial(r={r})*fixed(h={h})*cosine(eps=0)")
        found = observed(queries, keys, spec)
        distance2 = ((queries[:, None] - keys) ** 2).sum(-1)
        w = np.maximum(1 - distance2 / WIDE(h) ** 2, 0) ** r
        expected = np.where(lone, WIDE(1) / 40, w / np.where(lone, 1, w.sum(-1, keepdims=True)))
        assert np.abs(found.weights[0, 0].numpy() - expected).max() <= 1e-12
        np.testing.assert_array_equal(found.fallback[0, 0].numpy(), lone[:, 0])
        np.testing.assert_allclose(found.bandwidth[0, 0].numpy(), h, rtol=1e-14)
    if h in (0.5, 2.5):  # both kinds of rows are in the test
        assert lone.any() == (h == 0.5)
