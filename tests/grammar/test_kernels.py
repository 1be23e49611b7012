"""Kernels against numbers worked out by hand: Table 1 of the kernel-selection paper at default parameters, the
functions and their slopes, and the guard of signed sums."""

from __future__ import annotations

import math
from math import exp, sqrt

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.grammar import Spec, Status
from regard.grammar import kernels as registry

# One query and three keys in four dimensions, with D = 4 and so scale 1/sqrt(D) = 1/2:
#   q  = (1, 2, 0, -2)   |q|^2  = 9
#   k1 = (2, 0, 1,  2)   |k1|^2 = 9    q.k1 = 2 - 4 = -2       |q - k1|^2 = 9 + 9 + 4 = 22
#   k2 = q               |k2|^2 = 9    q.k2 = 9                |q - k2|^2 = 0
#   k3 = (0, 4, 3,  0)   |k3|^2 = 25   q.k3 = 8                |q - k3|^2 = 9 + 25 - 16 = 18
QUERY = (1.0, 2, 0, -2)
KEYS = ((2.0, 0, 1, 2), QUERY, (0, 4, 3, 0))

# Cosine with alpha = 1e-3: q.k / sqrt((9 + .001)(|k|^2 + .001)).
COSINE = (-2 / 9.001, 9 / 9.001, 8 / sqrt(9.001 * 25.001))

TABLE = {
    # exp(q.k / 2)
    "exponential": (exp(-1), exp(4.5), exp(4)),
    # q.k / 2
    "linear": (-1, 4.5, 4),
    # 1 / (1 - cosine): 9.001/11.001, 9.001/.001, and the third as it stands
    "geometric": (9.001 / 11.001, 9001, 1 / (1 - 8 / sqrt(225.034001))),
    "cosine": COSINE,
    "shift-cosine": tuple(1 + c for c in COSINE),
    # exp(-|q - k|^2 / g) with g = 2/scale = 4
    "rbf": (exp(-5.5), 1, exp(-4.5)),
    # 1 / (1 + eps - q.k/M), M = 300, eps = 1e-4, times 300/300: the dot product itself, without a scale
    "clipped-geometric": (300 / 302.03, 300 / 291.03, 300 / 292.03),
    # relu(q) = (1, 2, 0, 0); relu(k) = (2, 0, 1, 2), (1, 2, 0, 0), (0, 4, 3, 0); eps = 1e-4
    "relu": (2.0001, 5.0001, 8.0001),
    # squares: (1, 4, 0, 0); (4, 0, 1, 4), (1, 4, 0, 0), (0, 16, 9, 0)
    "relu2": (4.0001, 17.0001, 64.0001),
    # elu + 1: (2, 3, 1, e^-2); (3, 1, 2, 3), (2, 3, 1, e^-2), (1, 5, 4, 1)
    "elu": (11 + 3 * exp(-2), 14 + exp(-4), 21 + exp(-2)),
}
UNNORMALISED_BY_DEFAULT = ("linear", "cosine")
# 1/(1 - z) at z = 9/9.001 multiplies the rounding of z by 9001.
RTOL = dict.fromkeys(TABLE, 1e-13) | {"geometric": 1e-11}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys, and values that read the weights out: the identity."""
    q = torch.tensor(QUERY, dtype=torch.float64).view(1, 1, 1, 4)
    k = torch.tensor(KEYS, dtype=torch.float64).view(1, 1, 3, 4)
    return q, k, torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)


def test_the_table_is_complete() -> None:
    assert len(TABLE) == 10
    assert set(TABLE) <= set(regard.presets())


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("impl", ["auto", "reference", "blocked"])
def test_table_1(name: str, impl: str) -> None:
    preset = regard.presets()[name]
    w = np.array(TABLE[name])
    assert preset.normalise == (name not in UNNORMALISED_BY_DEFAULT)
    for normalise, expected in ((True, w / w.sum()), (False, w)):
        spec = Spec(preset.kernel, preset.bandwidth, similarity=preset.similarity, normalise=normalise)
        assert (spec == preset) == (normalise == preset.normalise)
        out = regard.attention(*tensors(), spec, impl=impl)
        np.testing.assert_allclose(out.flatten().numpy(), expected, rtol=RTOL[name])
    np.testing.assert_allclose(
        regard.attention(*tensors(), name, impl=impl).flatten().numpy(),
        w / (w.sum() if preset.normalise else 1),
        rtol=RTOL[name],
    )


def test_clipped_geometric_is_flat_above_its_limit() -> None:
    """z = 400 > M = 300 weighs 1/eps = 1e4, and so does 500; neither has a gradient to its score."""
    q = torch.full((1, 1, 1, 1), 10.0, dtype=torch.float64)
    k = torch.tensor([40.0, 50.0, 0.0], dtype=torch.float64).view(1, 1, 3, 1).requires_grad_()
    eye = torch.eye(3, dtype=torch.float64)[None, None]
    out = regard.attention(q, k, eye, Spec("clipped-geometric", normalise=False)).flatten()
    np.testing.assert_allclose(out.detach().numpy(), [1e4, 1e4, 1 / 1.0001], rtol=1e-10)
    # The slope at 0 is value^2 / M, times q = 10.
    grad = torch.autograd.grad(out.sum(), k)[0].flatten().tolist()
    assert grad[:2] == [0, 0]
    assert math.isclose(grad[2], 10 / 1.0001**2 / 300, rel_tol=1e-12)


def test_exact_cosine_of_a_zero_vector_is_zero() -> None:
    q, k, v = tensors()
    k = k.clone()
    k[..., 0, :] = 0
    out = regard.attention(q, k, v, Spec.parse("linear*fixed*cosine(eps=0)")).flatten()
    np.testing.assert_allclose(out.numpy(), [0, 1, 8 / 15], rtol=1e-14)


def test_the_constants_can_be_changed() -> None:
    q, k, v = tensors()
    for text, expected in (
        ("clipped-geometric(limit=10,eps=0.5)*fixed*unnormalised", (1 / 1.7, 1 / 0.6, 1 / 0.7)),
        ("linear*fixed(bias=2)*unnormalised", (1, 6.5, 6)),
        ("linear*fixed*cosine(eps=7)", (-2 / 16, 9 / 16, 8 / sqrt(16 * 32))),
        ("polynomial(r=0.5)*fixed(bias=2)*unnormalised", (1, sqrt(6.5), sqrt(6))),
        ("triweight*fixed(bias=-4)*unnormalised", (0, 0.125, 0)),
        ("uniform*fixed(bias=-4)*unnormalised", (0, 1, 0)),
        ("gaussian*fixed(bias=1)*unnormalised", (1, exp(5.5), exp(5))),
    ):
        for impl in ("reference", "blocked"):
            out = regard.attention(q, k, v, text, impl=impl).flatten()
            np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12, err_msg=text)


# The functions themselves -----------------------------------------------------------------------------------

A = np.array([-2.5, -1.0, -1e-3, 0.0, 1e-3, 0.3, 0.99, 1.7, 6.0])


def rectified(r: float) -> tuple[np.ndarray, np.ndarray]:
    inside = np.where(A > 0, A, 1)
    return np.where(A > 0, inside**r, 0), np.where(A > 0, r * inside ** (r - 1), 0)


FUNCTIONS = {
    "gaussian": (np.exp(A), np.exp(A)),
    "epanechnikov": rectified(1),
    "biweight": rectified(2),
    "triweight": rectified(3),
    "polynomial(r=0.5)": rectified(0.5),
    "polynomial(r=7.5)": rectified(7.5),
    "polynomial": rectified(1),
    "uniform": (np.where(A > 0, 1.0, 0), np.zeros(len(A))),
    "linear": (A, np.ones(len(A))),
    # From 1 on, where only rounding takes a cosine, it is flat at 1 / eps.
    "geometric": (
        np.where(A < 1, 1 / np.where(A < 1, 1 - A, 1), 2.0**52),
        np.where(A < 1, 1 / np.where(A < 1, 1 - A, 1) ** 2, 0),
    ),
    "clipped-geometric": (1 / (1.0001 - A / 300), 1 / (1.0001 - A / 300) ** 2 / 300),
}


def test_every_kernel_has_an_expected_function() -> None:
    assert {name.split("(")[0] for name in FUNCTIONS} == set(registry.names())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_slope(name: str) -> None:
    kernel = Spec.parse(name + ("*fixed*cosine" if name == "geometric" else "*fixed")).kernel
    a = torch.from_numpy(A)
    value, slope = FUNCTIONS[name]
    np.testing.assert_allclose(kernel.value(a, {}).numpy(), value, rtol=1e-13)
    np.testing.assert_allclose(kernel.slope(a, {}).numpy(), slope, rtol=1e-13)


@pytest.mark.parametrize("r", [0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 7.5, 40.0])
@pytest.mark.parametrize("gradient", [False, True])
def test_relative_view_of_the_polynomial(r: float, gradient: bool) -> None:
    """[1 - d/reach]^r and its slope by -d, whichever way the power is computed."""
    kernel = Spec("polynomial").kernel.__class__(r)
    d = np.array([0, 0.1, 0.7, 1.3, 1.999, 2.0, 5.0, np.inf])
    u = np.maximum(1 - d / 2, 0)
    with torch.set_grad_enabled(gradient):
        x, reach = torch.from_numpy(d), torch.tensor([2.0], dtype=torch.float64)
        value, slope = kernel.relative(x, reach, {}), kernel.relative_slope(x, reach, {})
    np.testing.assert_allclose(value.numpy(), np.where(u > 0, u**r, 0), rtol=1e-12)
    expected = np.where(u > 0, r / 2 * np.where(u > 0, u, 1) ** (r - 1), 0)
    np.testing.assert_allclose(slope.numpy(), expected, rtol=1e-12)
    log = np.where(u > 0, np.log(np.where(u > 0, u, 1)), 0)
    np.testing.assert_allclose(kernel.log_relative(x, reach).numpy(), log, rtol=1e-12)


# Signed sums ------------------------------------------------------------------------------------------------


def signed(z: list[float], spec: str, impl: str) -> tuple[Tensor, Tensor, regard.Diagnostics]:
    """(scores as a leaf, weights, diagnostics) of one row of scores."""
    leaf = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    eye = torch.eye(len(z), dtype=torch.float64)[None, None]
    scale = 1.0 if "cosine" not in spec else None
    out, found = regard.attention(
        one, leaf.view(1, 1, -1, 1), eye, spec, scale=scale, impl=impl, return_diagnostics=True
    )
    return leaf, out.flatten(), found


HELD = 1e-3 * np.sqrt(2 * (1 + 0.999**2))  # more than the sum, 0.001
HELD_OF_THREE = 1e-3 * np.sqrt(3 * (1 + 0.9**2 + 0.0978**2))  # more than the sum, 0.0022; 1e-3 sum |w| is less


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize(
    ("z", "weights", "status"),
    [
        ([3.0, -1.0], [1.5, -0.5], Status.OK),
        ([-3.0, 1.0], [1.5, -0.5], Status.NEGATIVE),  # the sum is -2: signs change
        ([1.0, -1.0], [500.0, -500.0], Status.NEAR_ZERO),  # held at 1e-3 sqrt(2 (1 + 1))
        ([1.0, -0.999], [1 / HELD, -0.999 / HELD], Status.NEAR_ZERO),
        ([0.999, -1.0], [-0.999 / HELD, 1 / HELD], Status.NEAR_ZERO),  # held with its sign
        ([1.0, -0.9, -0.0978], list(np.array([1, -0.9, -0.0978]) / HELD_OF_THREE), Status.NEAR_ZERO),
        ([1.0, -0.9], [10.0, -9.0], Status.OK),
        ([0.0, 0.0], [0.0, 0.0], Status.OK),  # nothing to weigh, nothing to divide
    ],
)
def test_guard_of_normalised_signed_sums(z: list, weights: list, status: Status, impl: str) -> None:
    _, p, found = signed(z, "linear*fixed*normalised", impl)
    np.testing.assert_allclose(p.detach().numpy(), weights, rtol=1e-9)
    assert found.status.flatten().tolist() == [int(status)]


GUARDED = [[3.0, -1.0, 0.5], [-3.0, 1.0, 0.2], [1.0, -1.2, 0.2003], [1.0, -1.2, 0.1997], [1.0, -0.9, -0.0978]]


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("z", GUARDED)
def test_gradients_through_the_guard(z: list, impl: str) -> None:
    """p_i = a_i / D with a = z + bias and D = sum a, or +-1e-3 sqrt(n sum a^2) where that is larger in size."""
    g = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    leaf = (torch.tensor(z, dtype=torch.float64) - 0.25).requires_grad_()
    bias = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    one, how = torch.ones(1, 1, 1, 1, dtype=torch.float64), {"params": {"bias": bias}, "impl": impl, "scale": 1.0}
    out = regard.attention(one, leaf.view(1, 1, 3, 1), g.view(1, 1, 3, 1), "linear*fixed*normalised", **how).sum()
    a = leaf + bias
    total, size = a.sum(), (3 * a.square().sum()).sqrt()
    held = 1e-3 * size * (1 if total.item() >= 0 else -1)
    plain = (a / (held if abs(total.item()) < 1e-3 * size.item() else total) * g).sum()
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=0)
    for found, expected in zip(*(torch.autograd.grad(x, (leaf, bias)) for x in (out, plain)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_cosine_normalised_reports_its_signs(impl: str) -> None:
    _, p, found = signed([1.0, -1.0], "linear*fixed*cosine*normalised", impl)
    assert found.status.flatten().tolist() == [int(Status.NEAR_ZERO)]
    np.testing.assert_allclose(p.detach().numpy(), [500, -500], rtol=1e-9)
    _, p, found = signed([-1.0, -2.0], "linear*fixed*cosine*normalised", impl)
    assert found.status.flatten().tolist() == [int(Status.NEGATIVE)]
    assert abs(float(p.detach().sum()) - 1) <= 1e-14
