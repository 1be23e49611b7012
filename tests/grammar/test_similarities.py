"""Similarities by their formulas, and bandwidths in units of distance by the distances themselves."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from contracts import oracle
from mistakes import refuses

import regard
from regard.grammar import Spec, similarities
from regard.grammar.similarities.base import Similarity

RNG = np.random.default_rng(0)
Q, K = RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5))


def cosine(q: np.ndarray, k: np.ndarray, eps: float) -> float:
    return float(q @ k / math.sqrt((eps + q @ q) * (eps + k @ k)))


def batched(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x)[None, None]


def test_cosine_stays_inside_its_range() -> None:
    x = np.array([[1e3, 1e3], [1e-9, 0], [0, 0], [-1e3, -1e3]])
    similarity = similarities.get("cosine")()
    phi, psi = similarity.features(batched(x), batched(x))
    s = (phi @ psi.transpose(-1, -2)).numpy()
    assert np.all(np.abs(s) < 1)
    exact = similarities.get("cosine")(eps=0.0)
    phi, psi = exact.features(batched(x), batched(x))
    s = (phi @ psi.transpose(-1, -2))[0, 0].numpy()
    np.testing.assert_allclose(np.diag(s), [1, 1, 0, 1], atol=1e-15)
    refuses("eps is -1", similarities.get("cosine"), eps=-1.0)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("kernel", ["epanechnikov", "biweight", "polynomial(r=0.5)", "uniform", "gaussian"])
@pytest.mark.parametrize("similarity", ["cosine(eps=0)", "euclidean"])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_bandwidth_in_units_of_distance(kernel: str, similarity: str, impl: str) -> None:
    q, k, eye = batched(Q), batched(K), torch.eye(7, dtype=torch.float64)[None, None]
    seen = torch.ones(1, 1, 3, 7, dtype=torch.bool)
    for h in (0.4, 1.0, 1.7, 3.5):
        spec = Spec.parse(f"{kernel}*fixed(h={h})*{similarity}")
        out, found = regard.attention(q, k, eye, spec, impl=impl, return_diagnostics=True)
        oracle.close(out, oracle.attention(oracle.read(spec), q, k, eye, seen)[0], 1e-12)
        np.testing.assert_allclose(found.bandwidth.numpy(), h, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elu_keeps_the_digits_of_small_features(dtype: torch.dtype) -> None:
    """exp(x) below zero, in value and both derivatives, for inputs of every dtype; as elu(x) + 1 they are 0 in float32
    from -17 on."""
    narrow = torch.tensor([-80.0, -30.0, -17.5, -3.0, -0.25, 0.0, 0.5, 40.0], dtype=dtype)
    x = narrow.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    feature = similarities.get("elu")().features(x[None], x[None])[0][0]
    slope = torch.autograd.grad(feature.sum(), x, create_graph=True)[0]
    bend = torch.autograd.grad(slope.sum(), x)[0]
    for j, number in enumerate(narrow.tolist()):
        below = number <= 0
        expected = [math.exp(number) if below else number + 1, math.exp(number) if below else 1.0]
        assert feature[j].item() == pytest.approx(expected[0], rel=1e-6)
        assert slope[j].item() == pytest.approx(expected[1], rel=1e-6)
        assert bend[j].item() == pytest.approx(math.exp(number) if below else 0.0, rel=1e-6)


@pytest.mark.parametrize("impl", ["reference", "blocked", "linear"])
@pytest.mark.parametrize("x", [-60.0, -80.0, -85.0])
def test_rows_whose_elu_features_are_tiny_still_sum_to_one(x: float, impl: str) -> None:
    """exp(-80) = 2e-35 is a factor of the whole row, which the normalisation takes out again."""
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 2)
    query = torch.full((1, 1, 4, 3), x, requires_grad=True)
    keys = k.double().numpy()
    weight = np.where(keys > 0, keys + 1, np.exp(keys)).sum(-1)
    expected = weight @ v.double().numpy()[0] / weight.sum()
    out = regard.attention(query, k, v, "elu", impl=impl)
    np.testing.assert_allclose(out.detach()[0, 0], np.broadcast_to(expected[0], (4, 2)), rtol=2e-6)
    out.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-22, 1e18])
def test_the_exact_cosine_of_vectors_of_any_length(size: float) -> None:
    """With eps = 0, also where the squares of the entries leave the range of float32."""
    q, k = (torch.tensor(x, dtype=torch.float32)[None, None] for x in (Q, K))
    similarity = similarities.get("cosine")(eps=0.0)
    q = (q * size).requires_grad_()
    phi, psi = similarity.features(q, k * size)
    expected = np.array([[cosine(a, b, 0.0) for b in K] for a in Q])
    np.testing.assert_allclose((phi @ psi.mT).detach()[0, 0], expected, atol=1e-6)
    phi.sum().backward()
    unit = Q / np.linalg.norm(Q, axis=-1, keepdims=True)
    slope = (1 - unit * unit.sum(-1, keepdims=True)) / np.linalg.norm(Q, axis=-1, keepdims=True)
    np.testing.assert_allclose(q.grad.double()[0, 0] * size, slope, atol=2e-6)


def test_the_clipped_geometric_kernel_keeps_its_eps_in_float32() -> None:
    """1 / (1 + eps - z / limit) is 1 / eps at the limit: 1 + eps would round eps to 3.7 digits."""
    kernel = Spec.parse("clipped-geometric").kernel
    z = torch.tensor([299.99, 300.0, 400.0, 1.0, -50.0])
    wide = z.double()
    exact = 1 / (kernel.eps + (kernel.limit - wide.clamp(max=kernel.limit)) / kernel.limit)
    np.testing.assert_allclose(kernel.value(z, {}).numpy(), exact.numpy(), rtol=2e-6)
    np.testing.assert_allclose(kernel.slope(z, {})[3:].numpy(), (exact.square() / kernel.limit)[3:].numpy(), rtol=2e-6)


@dataclass(frozen=True)
class Cube(Similarity):
    """s = q^3 . k^3, which says nothing about the size of its features."""

    name = "cube"

    def features(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return query**3, key**3


def test_features_that_overflow_make_the_rows_that_see_them_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(similarities._objects, "cube", Cube)
    q, k, v = torch.randn(3, 1, 1, 4, 3, generator=torch.Generator().manual_seed(0))
    k[0, 0, 1, 0] = 1e15  # finite, but its cube is not
    for impl in ("reference", "blocked"):
        out = regard.attention(q, k, v, Spec("gaussian", similarity=Cube()), is_causal=True, impl=impl)
        assert out[0, 0].isnan().all(-1).tolist() == [False, True, True, True]
