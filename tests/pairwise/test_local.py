"""Local constant and local linear regression against statsmodels and dense weighted least squares."""

from __future__ import annotations

import warnings

import numpy as np
import oracles
import pytest
import torch
from numpy.typing import NDArray

import regard
from regard.checks import ArgumentError

Array = NDArray[np.float64]


def data(seed: int, n: int = 60, queries: int = 9, dim: int = 3, width: int = 2) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(queries, dim)), rng.normal(size=(n, dim)), rng.normal(size=(n, width))


def attend(q: Array, k: Array, v: Array, spec: str, **how) -> Array:
    tensors = (torch.from_numpy(np.ascontiguousarray(x))[None, None] for x in (q, k, v))
    return regard.attention(*tensors, spec, **how)[0, 0].numpy()


# statsmodels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("h", [0.3, 0.8, 2.0])
def test_gaussian_equals_statsmodels(dim: int, h: float) -> None:
    """KernelReg weighs by prod_d exp(-(x_d - q_d)^2 / (2 h^2)): 'lc' is degree 0, 'll' degree 1 without ridge."""
    from statsmodels.nonparametric.kernel_regression import KernelReg

    q, k, v = data(0, dim=dim, width=1)
    q = q * 0.5  # inside the cloud of keys, where every local system is well conditioned
    h = h * dim**0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = {
            kind: KernelReg(v[:, 0], k, var_type="c" * dim, reg_type=kind, bw=[h] * dim).fit(q)[0]
            for kind in ("lc", "ll")
        }
    for impl in ("reference", "blocked"):
        out = attend(q, k, v, f"gaussian*fixed(h={h})*euclidean", impl=impl)
        np.testing.assert_allclose(out[:, 0], model["lc"], rtol=0, atol=1e-12)
    out = attend(q, k, v, f"gaussian*fixed(h={h})*euclidean*linear(ridge=0)")
    np.testing.assert_allclose(out[:, 0], model["ll"], rtol=0, atol=1e-12)


# Weighted least squares -------------------------------------------------------------------------------------


def weights(name: str, q: Array, k: Array) -> Array:
    """Rows of weights that sum to one, from the definitions; scale 1/sqrt(D) on the dot product."""
    z = q @ k.T / np.sqrt(k.shape[1])
    top = z.max(-1, keepdims=True)
    if name == "softmax":
        return oracles.softmax(z).astype(float)
    if name in ("sparsemax", "biweight", "triweight"):
        return oracles.entmax_rows(z, {"sparsemax": 2.0, "biweight": 1.5, "triweight": 4 / 3}[name]).astype(float)
    if name == "relumax":
        return oracles.rectified(z, top - 1, 1).astype(float)
    if name == "triweight*anchored(margin=2)":
        return oracles.rectified(z, top - 2, 3).astype(float)
    if name == "epanechnikov*nearest(k=12)":
        return oracles.rectified(z, np.sort(z, -1)[:, -13:-12], 1).astype(float)
    if name == "uniform*nearest(k=12)":
        return (z >= np.sort(z, -1)[:, -12:-11]) / 12
    if name == "gaussian*nearest(k=12)":
        return oracles.shares(np.where(z >= np.sort(z, -1)[:, -12:-11], np.exp(z), 0))
    assert name == "rbf"
    d2 = ((q[:, None] - k) ** 2).sum(-1)
    return oracles.shares(np.exp(-d2 / (2 * np.sqrt(k.shape[1]))))


def least_squares(w: Array, q: Array, k: Array, v: Array, ridge: float) -> Array:
    """argmin over (a, B) of sum_j w_j |v_j - a - B'(k_j - q)|^2 + ridge sum_j w_j |B|^2, at the query: a.

    As a stacked system for lstsq: sqrt(w) [1, k - q] on top of sqrt(ridge sum w) [0, I]. Without ridge the keys
    are centred instead, so that of all minimisers the one with the least |B| is found, whatever a."""
    n, dim = k.shape
    out = np.zeros((len(q), v.shape[1]))
    for i, row in enumerate(w):
        root = np.sqrt(row)[:, None]
        if ridge == 0:
            mean, centre = row @ v / row.sum(), row @ k / row.sum()
            slope = np.linalg.lstsq(root * (k - centre), root * (v - mean), rcond=1e-12)[0]
            out[i] = mean + (q[i] - centre) @ slope
            continue
        design = np.concatenate([np.ones((n, 1)), k - q[i]], 1) * root
        penalty = np.sqrt(ridge * row.sum()) * np.concatenate([np.zeros((dim, 1)), np.eye(dim)], 1)
        target = np.concatenate([v * root, np.zeros((dim, v.shape[1]))])
        out[i] = np.linalg.lstsq(np.concatenate([design, penalty]), target, rcond=1e-14)[0][0]
    return out


WEIGHTINGS = (
    "softmax",
    "sparsemax",
    "biweight",
    "triweight",
    "relumax",
    "rbf",
    "triweight*anchored(margin=2)",
    "epanechnikov*nearest(k=12)",
    "uniform*nearest(k=12)",
    "gaussian*nearest(k=12)",
)


def sentence(name: str, ridge: float) -> str:
    parts = "*".join(regard.Spec.parse(name).parts())
    return f"{parts}*linear(ridge={ridge!r})"


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("ridge", [0.01, 0.1, 3.0])
def test_degree_1_is_weighted_ridge_regression(name: str, ridge: float) -> None:
    q, k, v = data(1)
    expected = least_squares(weights(name, q, k), q, k, v, ridge)
    for impl in ("reference", "blocked", "auto"):
        out = attend(q, k, v, sentence(name, ridge), impl=impl)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "biweight", "uniform*nearest(k=12)", "rbf"])
def test_degree_1_without_ridge_is_weighted_regression(name: str) -> None:
    q, k, v = data(2)
    expected = least_squares(weights(name, q, k), q, k, v, 0.0)
    for impl in ("reference", "blocked"):
        out = attend(q, k, v, sentence(name, 0.0), impl=impl)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_degree_0_is_the_weighted_mean(name: str) -> None:
    q, k, v = data(3)
    for impl in ("reference", "blocked"):
        np.testing.assert_allclose(attend(q, k, v, name, impl=impl), weights(name, q, k) @ v, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["softmax", "triweight", "rbf", "triweight*anchored(margin=2)"])
def test_affine_data_is_reproduced_as_the_ridge_vanishes(name: str) -> None:
    q, k, _ = data(4)
    slope, offset = np.random.default_rng(5).normal(size=(3, 2)), np.array([2.0, -1.0])
    v, exact = k @ slope + offset, q @ slope + offset
    errors = [np.abs(attend(q, k, v, sentence(name, ridge)) - exact).max() for ridge in (1e-2, 1e-4, 1e-6, 0.0)]
    assert errors[1] < errors[0] / 10
    assert errors[2] < errors[1] / 10
    assert errors[3] < 1e-9
    constant = np.abs(attend(q, k, v, name) - exact).max()
    assert constant > 0.1  # degree 0 does not reproduce it


@pytest.mark.parametrize("name", ["softmax", "triweight", "rbf", "uniform*nearest(k=12)"])
def test_a_large_ridge_leaves_degree_0(name: str) -> None:
    q, k, v = data(6)
    mean = weights(name, q, k) @ v
    for ridge in (1e6, 1e12):
        np.testing.assert_allclose(attend(q, k, v, sentence(name, ridge)), mean, rtol=0, atol=20 / ridge)


def test_minimum_norm_where_keys_do_not_span() -> None:
    """Two keys in three dimensions, ridge 0: the least-norm slope passes through both values."""
    q, k, v = np.array([[0.2, 0.1, -0.3]]), np.array([[1.0, 0, 0], [0, 1.0, 0]]), np.array([[1.0], [3.0]])
    w = oracles.softmax(q @ k.T / np.sqrt(3)).astype(float)
    mean, centre = w @ v, w @ k
    away = k - centre
    # The line through the two keys: slope (3 - 1) along k2 - k1, divided by |k2 - k1|^2 = 2.
    slope = (v[1] - v[0]) * (k[1] - k[0]) / 2
    np.testing.assert_allclose(away @ slope, (v - mean)[:, 0], atol=1e-15)
    out = attend(q, k, v, "local-linear", params={"ridge": 0.0})
    np.testing.assert_allclose(out, mean + (q - centre) @ slope[:, None], rtol=0, atol=1e-12)


def test_ridge_as_a_tensor_with_its_gradient() -> None:
    q, k, v = data(7, queries=4)
    ridges = np.array([0.02, 0.1, 1.0, 5.0])
    ridge = torch.tensor(ridges, requires_grad=True)
    tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
    out = regard.attention(*tensors, "local-linear[biweight]", params={"ridge": ridge})[0, 0]
    w = weights("biweight", q, k)

    def expected(amounts: Array) -> Array:
        return np.stack([least_squares(w[i : i + 1], q[i : i + 1], k, v, amounts[i])[0] for i in range(len(q))])

    np.testing.assert_allclose(out.detach().numpy(), expected(ridges), rtol=0, atol=1e-12)
    grad = torch.autograd.grad(out.sum(), ridge)[0].numpy()
    step = 1e-6
    difference = (expected(ridges + step) - expected(ridges - step)).sum(-1) / (2 * step)
    np.testing.assert_allclose(grad, difference, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["softmax", "biweight", "relumax", "uniform*nearest(k=2,gradient=soft)"])
def test_degree_1_differentiates_twice(name: str) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 2, generator=g, dtype=torch.float64) for n in (2, 5, 5))
    inputs = tuple(t.requires_grad_() for t in (q, k, v))

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        return regard.attention(*tensors, sentence(name, 0.1), impl="reference")

    assert torch.autograd.gradcheck(call, inputs, atol=1e-6)
    assert torch.autograd.gradgradcheck(call, inputs, atol=1e-5)


def test_solver_statistics_and_weights_are_reported() -> None:
    q, k, v = data(8)
    tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
    _, found = regard.attention(*tensors, "local-linear[triweight]", return_diagnostics=True, impl="reference")
    np.testing.assert_allclose(found.weights[0, 0].numpy(), weights("triweight", q, k), rtol=0, atol=1e-13)
    assert found.solver["status"].flatten().tolist() == [0] * len(q)


def test_the_reference_refuses_what_it_cannot_hold() -> None:
    q, k = torch.zeros(1, 1, 4100, 64), torch.zeros(1, 1, 1024, 64)
    with pytest.raises(ArgumentError, match=r"of 268,697,600 numbers .*; give fewer queries"):
        regard.attention(q, k, k, "local-linear", impl="reference")


# The textbook form -------------------------------------------------------------------------------------------


def textbook(w: Array, q: Array, k: Array, v: Array, ridge: Array | float) -> tuple[Array, Array, Array]:
    """Local Linear Attention, equations 6 to 8, a query at a time: z_j = k_j - q, omega = sum w, mu = sum w z,
    Sigma = sum w z z' + ridge I, rho = Sigma^-1 mu, delta = omega - mu . rho, s_j = w_j (1 - z_j . rho) / delta,
    o = sum s_j v_j. Returns (o, s, delta / omega)."""
    out, weights, shrink = [], [], []
    for row, query in zip(w, q, strict=True):
        z = k - query
        omega, mu = row.sum(), row @ z
        sigma = (z * row[:, None]).T @ z + ridge * np.eye(k.shape[1])
        rho = np.linalg.solve(sigma, mu)
        delta = omega - mu @ rho
        s = row * (1 - z @ rho) / delta
        out.append(s @ v)
        weights.append(s)
        shrink.append(delta / omega)
    return np.array(out), np.array(weights), np.array(shrink)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("ridge", [0.05, 1.0, 20.0])
def test_equations_6_to_8(ridge: float, impl: str) -> None:
    """An absolute ridge against w = exp(q . k / sqrt D) to the letter; a relative one against weights of sum one; both
    as joint least squares, so that the textbook form is checked by the way."""
    q, k, v = data(10, n=40)
    w = np.exp(q @ k.T / np.sqrt(3))
    for mode, kernel in (("absolute", w), ("relative", w / w.sum(-1, keepdims=True))):
        expected, s, shrink = textbook(kernel, q, k, v, ridge)
        joint = np.stack(
            [least_squares(r[None], x[None], k, v, ridge / r.sum())[0] for r, x in zip(kernel, q, strict=True)]
        )
        np.testing.assert_allclose(expected, joint, rtol=0, atol=1e-11)
        out = attend(q, k, v, f"gaussian*fixed*linear(ridge={ridge},ridge_mode={mode})", impl=impl)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-11)
        identity = attend(q, k, np.eye(40), f"gaussian*fixed*linear(ridge={ridge},ridge_mode={mode})", impl=impl)
        np.testing.assert_allclose(identity, s, rtol=0, atol=1e-11)
        assert ((shrink > 0) & (shrink <= 1)).all()


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_relative_ridge_is_an_absolute_one_times_the_kernel_weight(impl: str) -> None:
    """Erratum E2: the weights of equation 7 may not be scaled while its ridge stays. Scores moved by c leave a relative
    ridge alone, and change an absolute one by exp(-c)."""
    q, k, v = data(11, n=30)
    w = np.exp(q @ k.T / np.sqrt(3))
    relative = np.stack([textbook(r[None], x[None], k, v, 0.3 * r.sum())[0][0] for r, x in zip(w, q, strict=True)])
    np.testing.assert_allclose(
        attend(q, k, v, "gaussian*fixed*linear(ridge=0.3)", impl=impl), relative, rtol=0, atol=1e-11
    )
    absolute = textbook(w, q, k, v, 0.3)[0]
    scaled = textbook(7 * w, q, k, v, 0.3)[0]
    assert np.abs(absolute - scaled).max() > 1e-2
    np.testing.assert_allclose(textbook(7 * w, q, k, v, 7 * 0.3)[0], absolute, rtol=0, atol=1e-12)
    tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
    ridge = torch.from_numpy(0.3 * w.sum(-1))
    found = regard.local_linear_attention(*tensors, ridge=ridge, ridge_mode="absolute", impl=impl)[0, 0].numpy()
    np.testing.assert_allclose(found, relative, rtol=0, atol=1e-11)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_wide_kernel_is_ridge_regression_with_a_free_intercept(impl: str) -> None:
    """And not without one, which is another function."""
    q, k, v = data(12)
    k, v = k + 1.0, v + 2.0
    n, ridge = len(k), 0.2
    centre, mean = k.mean(0), v.mean(0)
    slope = np.linalg.solve((k - centre).T @ (k - centre) / n + ridge * np.eye(3), (k - centre).T @ (v - mean) / n)
    out = attend(q, k, v, f"gaussian*fixed*linear(ridge={ridge})", scale=1e-9, impl=impl)
    np.testing.assert_allclose(out, mean + (q - centre) @ slope, rtol=0, atol=1e-7)
    bare = q @ np.linalg.solve(k.T @ k / n + ridge * np.eye(3), k.T @ v / n)
    assert np.abs(out - bare).max() > 0.1


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_ridge_for_every_coordinate(impl: str) -> None:
    """sum_d ridge_d |B_d|^2: coordinates with a very large one drop out of the regression."""
    q, k, v = data(13, n=30)
    w = oracles.softmax(q @ k.T / np.sqrt(3)).astype(float)
    tensors = [torch.from_numpy(x)[None, None] for x in (q, k, v)]
    ridge = torch.tensor([0.2, 1e9, 0.7], dtype=torch.float64).view(1, 1, 1, 3)
    out = regard.local_linear_attention(*tensors, ridge=ridge, impl=impl)[0, 0].numpy()
    expected = textbook(w, q, k, v, np.array([0.2, 1e9, 0.7]))[0]
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-9)
    without = textbook(w, q[:, [0, 2]], k[:, [0, 2]], v, np.array([0.2, 0.7]))[0]
    np.testing.assert_allclose(out, without, rtol=0, atol=1e-6)
