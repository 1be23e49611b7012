"""Scales, numbers, heads, precision and order in `regard.attention`, by their definitions."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError

IMPLS = ("reference", "blocked")


def tensors(*lengths: int, heads: int = 3, dim: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    g = torch.Generator().manual_seed(sum(lengths))
    return [torch.randn(2, heads, n, dim, generator=g, dtype=dtype) for n in lengths]


def expected_softmax(q: Tensor, k: Tensor, v: Tensor, scale: np.ndarray | float) -> np.ndarray:
    z = np.einsum("bhid,bhjd->bhij", q.numpy(), k.numpy()) * scale
    return np.einsum("bhij,bhjd->bhid", oracles.softmax(z).astype(float), v.numpy())


@pytest.mark.parametrize("impl", ["auto", "sdpa", *IMPLS])
def test_scale_as_number_and_tensor(impl: str) -> None:
    q, k, v = tensors(5, 7, 7)
    np.testing.assert_allclose(
        regard.attention(q, k, v, impl=impl).numpy(), expected_softmax(q, k, v, 4**-0.5), rtol=0, atol=1e-14
    )
    shapes = ((), (5,), (3, 1), (2, 3, 5))
    random = [torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    for scale in (0.3, 2, *(r + 0.1 for r in random)):
        factor = np.broadcast_to(np.asarray(scale), (2, 3, 5))[..., None]
        out = regard.attention(q, k, v, scale=scale, impl=impl)
        np.testing.assert_allclose(out.numpy(), expected_softmax(q, k, v, factor), rtol=0, atol=1e-14)


@pytest.mark.parametrize("impl", ["sdpa", *IMPLS])
def test_gradient_of_the_scale(impl: str) -> None:
    q, k, v = tensors(5, 7, 7)
    scale = torch.tensor([0.3, 0.9, 1.4], dtype=torch.float64)[:, None].requires_grad_()
    regard.attention(q, k, v, scale=scale, impl=impl).square().sum().backward()

    def loss(factor: np.ndarray) -> float:
        return float((expected_softmax(q, k, v, factor[None, :, :, None]) ** 2).sum())

    at = scale.detach().numpy()
    for head in range(3):
        step = np.zeros_like(at)
        step[head] = 1e-6
        difference = (loss(at + step) - loss(at - step)) / 2e-6
        assert math.isclose(float(scale.grad[head]), difference, rel_tol=1e-7)


def share(w: Tensor) -> Tensor:
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total == 0, 1, total)


PLAIN = {
    "softmax": lambda z: share(torch.exp(z)),
    "relumax": lambda z: share(torch.relu(z - z.amax(-1, keepdim=True) + 1)),
    "normrelu": lambda z: torch.where((z > 0).any(-1, keepdim=True), share(torch.relu(z)), 1 / z.shape[-1]),
    "linear": lambda z: z,
}


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
@pytest.mark.parametrize("spec", PLAIN)
def test_grouped_heads(spec: str, impl: str) -> None:
    """Query heads 0..2 read key head 0, heads 3..5 key head 1; gradients of a group add up."""
    q, k, v = tensors(5, 7, 7, heads=6)
    k, v = k[:, :2].clone(), v[:, :2].clone()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grouped = regard.attention(*leaves, spec, enable_gqa=True, impl=impl)
    grads = torch.autograd.grad(grouped.square().sum(), leaves)
    served = [0, 0, 0, 1, 1, 1]
    expected = PLAIN[spec](torch.einsum("bhid,bhjd->bhij", q, k[:, served]) / 2) @ v[:, served]
    torch.testing.assert_close(grouped, expected, rtol=0, atol=1e-13)
    for found, plain in zip(grads, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("empty", ["uniform", "zero", "nearest"])
@pytest.mark.parametrize("bias", [-3.0, -0.98, -0.5, 0.0, 0.3, 0.5, 0.7, 0.98, 5.0])
@pytest.mark.parametrize("kernel", ["epanechnikov", "biweight", "polynomial(r=0.5)"])
def test_no_future_leak_whatever_the_bias(kernel: str, bias: float, empty: str, impl: str) -> None:
    """A hidden key must not count even where the bias alone would give it weight."""
    q, k, v = tensors(8, 8, 8)
    spec = f"{kernel}*fixed(bias={bias},empty={empty})"
    for order in ({"is_causal": True}, {"exclude_self": True}):
        before = regard.attention(q, k, v, spec, impl=impl, **order)
        for t in (0, 3, 6):
            changed = [x.clone() for x in (k, v)]
            for x in changed:
                x[:, :, t + 1 :] = 7 - 9 * x[:, :, t + 1 :].flip(-1)
            after = regard.attention(q, *changed, spec, impl=impl, **order)
            assert torch.equal(after[:, :, : t + 1], before[:, :, : t + 1])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("beta", [0.3, 0.5, 0.7, 1.0, 5.0])
def test_no_future_leak_over_the_range_of_memory_mosaic_bandwidths(beta: float, impl: str) -> None:
    """Equation 11 with h = 1/beta on unit keys: bias 1 - 2 beta^2 is positive below 1/sqrt(2)."""
    x = torch.nn.functional.normalize(tensors(9)[0], dim=-1)
    spec = f"epanechnikov*fixed(h={1 / beta})*cosine(eps=0)"
    before = regard.attention(x, x, x, spec, exclude_self=True, impl=impl)
    assert not bool(before[:, :, 0].any())
    later = x.clone()
    later[:, :, 5:] = -later[:, :, 5:].flip(-1)
    after = regard.attention(x, later, later, spec, exclude_self=True, impl=impl)
    assert torch.equal(after[:, :, :6], before[:, :, :6])  # row 5 sees keys 0..4
    assert not torch.equal(after[:, :, 6:], before[:, :, 6:])


ROWS = {
    "softmax": oracles.softmax,
    "sparsemax": lambda z: oracles.entmax_rows(z, 2.0),
    "biweight": lambda z: oracles.entmax_rows(z, 1.5),
    "triweight": lambda z: oracles.entmax_rows(z, 4 / 3),
    "relumax": lambda z: oracles.rectified(z, z.max(-1, keepdims=True) - 1, 1),
    "normrelu": lambda z: oracles.rectified(z, 0, 1),
    "epanechnikov*nearest(k=5)": lambda z: oracles.rectified(z, np.sort(z, -1)[..., -6:-5], 1),
}


def defined(spec: str, q: Tensor, k: Tensor, v: Tensor) -> np.ndarray:
    """The output by its definition, from float64 scores."""
    q, k, v = (t.detach().double() for t in (q, k, v))
    z = np.einsum("bhid,bhjd->bhij", q.numpy(), k.numpy()) / np.sqrt(q.shape[-1])
    return np.einsum("bhij,bhjd->bhid", ROWS[spec](z).astype(float), v.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spec", ROWS)
def test_dtypes(spec: str, dtype: torch.dtype) -> None:
    """The output has the dtype of the query, computed in float32 at least from the rounded inputs."""
    q, k, v = tensors(6, 40, 40, dtype=torch.float32)
    rounded = [t.to(dtype) for t in (q, k, v)]
    for impl in ("auto", *IMPLS):
        out = regard.attention(*rounded, spec, impl=impl)
        assert out.dtype == dtype
        error = np.abs(out.double().numpy() - defined(spec, *rounded)).max()
        assert error <= {torch.float64: 1e-13, torch.float32: 3e-6}.get(dtype, 2 * torch.finfo(dtype).eps)


def test_values_may_be_wider_or_narrower_than_keys() -> None:
    q, k, _ = tensors(5, 7, 7)
    for width in (1, 3, 9):
        v = torch.cat(tensors(7, 7, 7), -1)[..., :width]
        for impl in ("auto", *IMPLS):
            out = regard.attention(q, k, v, impl=impl)
            np.testing.assert_allclose(out.numpy(), expected_softmax(q, k, v, 0.5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "normrelu", "topk-softmax", "shift-cosine"])
def test_second_derivatives_are_right_or_refused(spec: str) -> None:
    """By the reference they are right; no other implementation gives a wrong number in silence."""
    inputs = tuple(t[:1, :1].clone().requires_grad_() for t in tensors(2, 4, 4, dim=2))
    assert torch.autograd.gradgradcheck(lambda *x: regard.attention(*x, spec, impl="reference"), inputs, atol=1e-6)
    for impl in ("blocked", "auto"):
        out = regard.attention(*inputs, spec, impl=impl)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        with pytest.raises((ArgumentError, RuntimeError), match=r"impl='reference'|not implemented"):
            torch.autograd.grad(sum(g.square().sum() for g in first), inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64])
def test_numbers_of_another_precision(dtype: torch.dtype, other: torch.dtype, impl: str) -> None:
    """Parameters keep their own dtype: the output has the query's, gradients have theirs."""
    q, k, v = (t.to(dtype) for t in tensors(5, 7, 7))
    alpha = torch.tensor([1.5, 1.25, 2.0], dtype=other)[:, None].requires_grad_()
    scale = torch.full((5,), 0.5, dtype=other, requires_grad=True)
    out = regard.attention(q, k, v, "biweight", scale=scale, params={"alpha": alpha}, impl=impl)
    assert out.dtype == dtype
    z = np.einsum("bhid,bhjd->bhij", q.double().numpy(), k.double().numpy()) / 2
    for head, x in enumerate((1.5, 1.25, 2.0)):
        p = oracles.entmax_rows(z[:, head], x).astype(float)
        error = np.abs(out[:, head].detach().double().numpy() - p @ v[:, head].double().numpy()).max()
        assert error <= (1e-12 if dtype == torch.float64 else 4 * max(torch.finfo(dtype).eps, 1e-6))
    out.double().square().sum().backward()
    for number in (alpha, scale):
        assert number.grad.dtype == other
        assert number.grad.shape == number.shape
        assert bool(torch.isfinite(number.grad).all())


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
@pytest.mark.parametrize("spec", PLAIN)
def test_gradients_only_where_they_are_asked_for(spec: str, impl: str) -> None:
    inputs = tensors(5, 7, 7)
    leaves = [t.clone().requires_grad_() for t in inputs]
    expected = PLAIN[spec](torch.einsum("bhid,bhjd->bhij", *leaves[:2]) / 2) @ leaves[2]
    full = torch.autograd.grad(expected.square().sum(), leaves)
    for which in range(3):
        mixed = [t.clone().requires_grad_(i == which) for i, t in enumerate(inputs)]
        regard.attention(*mixed, spec, impl=impl).square().sum().backward()
        torch.testing.assert_close(mixed[which].grad, full[which], rtol=0, atol=1e-12)
        assert all(t.grad is None for i, t in enumerate(mixed) if i != which)


@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64])
def test_a_ridge_of_another_precision(other: torch.dtype) -> None:
    q, k, v = tensors(3, 7, 7, dtype=torch.float32)
    ridge = torch.tensor(0.25, dtype=other, requires_grad=True)
    out = regard.attention(q, k, v, "local-linear", params={"ridge": ridge})
    assert out.dtype == torch.float32
    x, y, z = (t.double() for t in (q, k, v))
    p = torch.softmax(x @ y.mT / 2, -1)
    away = y[..., None, :, :] - (p @ y)[..., :, None, :]  # [B, H, Tq, Tk, D]
    spread = torch.einsum("bhij,bhijd,bhije->bhide", p, away, away) + 0.25 * torch.eye(4)
    slope = torch.linalg.solve(spread, x - p @ y)
    expected = (p * (1 + torch.einsum("bhijd,bhid->bhij", away, slope))) @ z
    np.testing.assert_allclose(out.detach().numpy(), expected.numpy(), rtol=0, atol=1e-5)
    out.sum().backward()
    assert ridge.grad.dtype == other
