"""Kernels, similarities and the threshold search where the contracts do not reach, and the protocol of estimators."""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import oracles
import pytest
import torch
from contracts.cases import SPECS
from mistakes import refuses
from torch import Tensor

import regard
from regard.grammar import Spec, Status, similarities, threshold
from regard.grammar.similarities.base import Similarity


def test_the_geometric_kernel_is_flat_from_one_on() -> None:
    """Only rounding takes a cosine there; the value is 1 / eps."""
    kernel, a = Spec.parse("geometric*fixed*cosine").kernel, torch.tensor([0.99, 1.0, 6.0], dtype=torch.float64)
    np.testing.assert_allclose(kernel.value(a, {}).numpy(), [100, 2.0**52, 2.0**52], rtol=1e-12)
    np.testing.assert_allclose(kernel.slope(a, {}).numpy(), [1e4, 0, 0], rtol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize(
    ("z", "status"),
    [
        ([3.0, -1.0, 0.5], Status.OK),
        ([1.0, -0.9], Status.OK),
        ([-3.0, 1.0, 0.2], Status.NEGATIVE),  # the weights change sign
        ([1.0, -1.0], Status.NEAR_ZERO),
        ([1.0, -0.999], Status.NEAR_ZERO),
        ([0.999, -1.0], Status.NEAR_ZERO),  # keeps its sign
        ([1.0, -0.9, -0.0978], Status.NEAR_ZERO),  # 1e-3 sum |a| is less than the sum
        ([1.0, -1.2, 0.2003], Status.NEAR_ZERO),
        ([1.0, -1.2, 0.1997], Status.NEAR_ZERO),
    ],
)
def test_guard_of_normalised_signed_sums(z: list, status: Status, impl: str) -> None:
    """p_i = a_i / D with a = z + bias and D = sum a, or +-1e-3 sqrt(n sum a^2) where that is larger in size."""
    n = len(z)
    leaf = (torch.tensor(z, dtype=torch.float64) - 0.25).requires_grad_()
    bias = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    one, eye = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.eye(n, dtype=torch.float64)[None, None]
    how = {"params": {"bias": bias}, "impl": impl, "scale": 1.0, "return_diagnostics": True}
    p, found = regard.attention(one, leaf.view(1, 1, n, 1), eye, "linear*fixed*normalised", **how)
    a = leaf + bias
    total, size = a.sum(), (n * a.square().sum()).sqrt()
    held = 1e-3 * size * (1 if total.item() >= 0 else -1)
    plain = a / (held if abs(total.item()) < 1e-3 * size.item() else total)
    torch.testing.assert_close(p.flatten(), plain, rtol=1e-9, atol=0)
    g = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)[:n]
    grads = [torch.autograd.grad((x.flatten() * g).sum(), (leaf, bias)) for x in (p, plain)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=0)
    assert found.status.flatten().tolist() == [int(status)]
    how = {"impl": impl, "scale": 1.0, "return_diagnostics": True}
    zeros, found = regard.attention(one, torch.zeros_like(eye[..., :1]), eye, "linear*fixed*normalised", **how)
    assert not zeros.any()  # nothing to weigh, nothing to divide
    assert not found.status.any()


RNG = np.random.default_rng(0)
Q, K = RNG.normal(size=(3, 5)), RNG.normal(size=(7, 5))


def test_cosine_stays_inside_its_range() -> None:
    x = torch.tensor([[1e3, 1e3], [1e-9, 0], [0, 0], [-1e3, -1e3]], dtype=torch.float64)[None, None]
    phi, psi = similarities.get("cosine")().features(x, x)
    assert ((phi @ psi.mT).abs() < 1).all()
    phi, psi = similarities.get("cosine")(eps=0.0).features(x, x)
    np.testing.assert_allclose((phi @ psi.mT)[0, 0].diag(), [1, 1, 0, 1], atol=1e-15)
    refuses("eps is -1", similarities.get("cosine"), eps=-1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elu_keeps_the_digits_of_small_features(dtype: torch.dtype) -> None:
    """exp(x) below zero, in value and both derivatives; elu(x) + 1 is 0 in float32 from -17 on."""
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


@pytest.mark.parametrize("impl", ["reference", "blocked", "linear"])
@pytest.mark.parametrize(
    ("spec", "x", "k", "scale"),
    [
        ("elu", -90.0, 0.0, None),
        ("elu", -102.0, 0.0, None),
        ("elu", -50.0, -47.0, None),
        ("linear*fixed*normalised", 1.0, 1.0, 1e-38),
    ],
)
def test_rows_with_a_tiny_sum_pass_no_gradient_to_their_scores(
    spec: str, x: float, k: float, scale: float | None, impl: str
) -> None:
    """Divided by such a sum, gradients overflow to infinity and NaN."""
    torch.manual_seed(0)
    leaves = [torch.rand(1, 1, 5, 3) + at for at in (x, k, 0)]
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    out = regard.attention(q, k, v, spec, impl=impl, is_causal=True, scale=scale)
    assert out.isfinite().all()
    assert all(grad.count_nonzero() == 0 for grad in torch.autograd.grad(1e3 * out.sum(), (q, k), retain_graph=True))
    assert torch.autograd.grad(out.sum(), v)[0].isfinite().all()


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_signed_weights_whose_squares_leave_the_range_have_finite_gradients(form: str) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 70, 4) for _ in range(3))
    leaves = [x.requires_grad_() for x in (q, k * 1e-20, v)]
    out, _ = regard.linear_attention(*leaves, "linear*fixed*normalised", form=form)
    assert torch.allclose(out, regard.linear_attention(q, k, v, "linear*fixed*normalised")[0], rtol=1e-3)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e-22, 1e18])
def test_the_exact_cosine_of_vectors_of_any_length(size: float) -> None:
    """With eps = 0, also where the squares of the entries leave the range of float32."""
    q, k = (torch.tensor(x, dtype=torch.float32)[None, None] for x in (Q, K))
    similarity = similarities.get("cosine")(eps=0.0)
    q = (q * size).requires_grad_()
    phi, psi = similarity.features(q, k * size)
    length = np.linalg.norm(Q, axis=-1, keepdims=True)
    unit = Q / length
    expected = unit @ (K / np.linalg.norm(K, axis=-1, keepdims=True)).T
    np.testing.assert_allclose((phi @ psi.mT).detach()[0, 0], expected, atol=1e-6)
    phi.sum().backward()
    slope = (1 - unit * unit.sum(-1, keepdims=True)) / length
    np.testing.assert_allclose(q.grad.double()[0, 0] * size, slope, atol=2e-6)


def test_the_clipped_geometric_kernel_keeps_its_eps_in_float32() -> None:
    """1 / (1 + eps - z / limit) is 1 / eps at the limit: 1 + eps would round eps to 3.7 digits. Flat above it."""
    kernel = Spec.parse("clipped-geometric").kernel
    z = torch.tensor([299.99, 300.0, 400.0, 1.0, -50.0])
    wide = z.double()
    exact = 1 / (kernel.eps + (kernel.limit - wide.clamp(max=kernel.limit)) / kernel.limit)
    np.testing.assert_allclose(kernel.value(z, {}).numpy(), exact.numpy(), rtol=2e-6)
    np.testing.assert_allclose(kernel.slope(z, {})[3:].numpy(), (exact.square() / kernel.limit)[3:].numpy(), rtol=2e-6)
    assert kernel.slope(z, {})[1:3].tolist() == [0, 0]


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


LENGTHS = (1, 2, 17, 512, 8192, 65536)
SPREADS = (0.02, 0.1, 1.0, 4.0)


def distances(length: int, spread: float) -> Tensor:
    """d = max z - z of normal scores [1, length]."""
    z = torch.randn(1, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64) * spread
    return z.max() - z


@cache
def peak(length: int, spread: float, r: float) -> float:
    """b with sum [b - d/r]_+^r = 1, by bisection in extended precision."""
    z = -distances(length, spread)[0].numpy()  # best score 0, so that tau = -b
    return -float(oracles.entmax_row(z, 1 + 1 / r, steps=90)[1])


@pytest.mark.parametrize(("r", "steps"), [(2.0, 8), (3.0, 8), (1.0, 16)])
@pytest.mark.parametrize("length", LENGTHS)
def test_newton_steps(monkeypatch: pytest.MonkeyPatch, r: float, steps: int, length: int) -> None:
    """1e-7 within 8 steps for r = 2 and 3, within 16 for r = 1, up to 65536 keys."""
    monkeypatch.setattr(threshold, "NEWTON_STEPS", steps)
    for spread in SPREADS if length < 65536 else (0.1, 1.0):
        d = distances(length, spread)
        b, _ = threshold.solve_peak(d, r)
        norm = float((np.maximum(float(b) - d.numpy() / r, 0) ** r).sum() ** (1 / r))
        assert abs(norm - 1) <= 1e-7
        assert abs(float(b) - peak(length, spread, r)) <= 1e-7


@pytest.mark.parametrize("r", [0.2, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0])
@pytest.mark.parametrize("fast", [False, True])
def test_the_search_converges_to_rounding(r: float, fast: bool) -> None:
    """By 16 steps of Newton's method, or by bisection for r < 1."""
    for length in (1, 2, 17, 512, 8192):
        for spread in SPREADS if length < 8192 else (0.1,):
            b, converged = threshold.solve_peak(distances(length, spread), r, fast=fast)
            assert bool(converged.all())
            assert abs(float(b) - peak(length, spread, r)) <= 4e-16 * (4 if r >= 1 else 1)


def test_a_tensor_of_powers() -> None:
    powers = [0.3, 0.8, 1.0, 2.0, 5.0, 40.0]
    d = distances(100, 1.0).expand(len(powers), 100)
    b, converged = threshold.solve_peak(d, torch.tensor(powers, dtype=torch.float64)[:, None])
    assert bool(converged.all())
    np.testing.assert_allclose(b[:, 0].numpy(), [peak(100, 1.0, r) for r in powers], rtol=0, atol=1e-15)


def staircase() -> np.ndarray:
    """Scores on which every Newton step for sparsemax drops one block of keys and no more.

    From a support of n keys with peak b_n, half as many keys again sit at distance b_n + e: with them the step
    lands at b_n + e/3, which drops just them, if the e of the block before is less than half of this one.
    """
    d = np.zeros(2)
    gap = 1e-7
    while gap < 0.45:
        b = (1 + d.sum()) / len(d)
        block = max(len(d) // 2, 1)
        d = np.concatenate([d, np.full(block, b + gap)])
        gap *= 2.05 * len(d) / (3 * block)
    return -d


def test_a_row_on_which_sixteen_steps_do_not_suffice() -> None:
    row = staircase()
    assert row.min() > -1  # every key is a candidate at first
    assert len(row) <= 65536
    z = torch.from_numpy(row)
    exact, tau = oracles.entmax_row(row, 2.0)
    np.testing.assert_allclose(exact[:2], 0.5, rtol=0, atol=1e-6)

    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    key = z[None, None, :, None]
    value = torch.ones_like(key)
    how = {"spec": "sparsemax", "scale": 1.0, "return_diagnostics": True}
    out, seen = regard.attention(one, key, value, impl="reference", **how)
    assert seen.status.flatten().tolist() == [int(Status.UNCONVERGED)]
    assert abs(float(out) - 1) <= 1e-14  # the weights still sum to one
    _, fast = regard.attention(one, key, value, impl="blocked", **how)  # goes on until it has converged
    assert fast.status.flatten().tolist() == [int(Status.OK)]
    np.testing.assert_allclose(float(fast.tau), float(tau), rtol=0, atol=1e-15)


def test_converged_rows_stay_as_they_are() -> None:
    """A row's answer does not depend on the rows solved with it, to the last bit."""
    rows = torch.cat([distances(300, s) for s in SPREADS])
    for r in (0.5, 1.0, 2.0, 3.0, 4.7):
        for fast in (False, True):
            together = threshold.solve_peak(rows, r, fast=fast)[0]
            apart = torch.cat([threshold.solve_peak(row[None], r, fast=fast)[0] for row in rows])
            assert torch.equal(together, apart)


@pytest.mark.parametrize("alpha", [1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0])
def test_no_false_alarms_in_float32(alpha: float) -> None:
    for length in (1, 2, 17, 512, 8192):
        for spread in SPREADS:
            d = distances(length, spread).float()
            for fast in (False, True):
                assert bool(threshold.solve_peak(d, 1 / (alpha - 1), fast=fast)[1].all())


@pytest.mark.parametrize("r", [1.0, 2.0, 3.0, 6.0])
def test_never_unconverged_in_silence(monkeypatch: pytest.MonkeyPatch, r: float) -> None:
    """However few steps there are, an answer that is off by more than rounding says so."""
    said = set()
    for length, spread in ((17, 1.0), (512, 0.1), (512, 4.0), (8192, 1.0)):
        d = distances(length, spread)
        for steps in range(1, 17):
            monkeypatch.setattr(threshold, "NEWTON_STEPS", steps)
            b, converged = threshold.solve_peak(d, r)
            off = abs(float(b) - peak(length, spread, r)) > 1e-12
            assert not (off and bool(converged))
            said.add(bool(converged))
    assert said == {True, False}
    monkeypatch.setattr(threshold, "BISECTIONS", 10)
    assert not bool(threshold.solve_peak(distances(512, 1.0), 0.5)[1])


TEXTS = sorted(
    {"*".join(s.parts()) for s in SPECS.values() if not s.degree and (s.similarity.name == "dot" or "geo" in str(s))}
    | {"gaussian*fixed*unnormalised", "polynomial(r=10)*adaptive", "uniform*nearest(k=3,gradient=soft,temperature=0.4)"}
)
"""The specs that the contracts run over and whose scores may be negative, written out in parts, and a few more."""
# Weights that change when every score of a row grows by the same amount.
MOVED_BY_A_SHIFT = ("fixed", "linear", "geometric")


def rows() -> Tensor:
    """Scores [2, 6, 9] below 1, with ties, hidden keys, rows without a key and rows with one."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 6, 9, generator=g, dtype=torch.float64).clamp(max=0.95) - 0.2
    z = torch.where(torch.rand(2, 6, 9, generator=g) < 0.2, -torch.inf, z)
    z[0, 0] = -torch.inf
    z[0, 1] = 0.25
    z[0, 2, 1:] = -torch.inf
    z[0, 2, 0] = -0.5
    z[0, 3, 4:] = z[0, 3, 3]
    z[1, 0] = torch.arange(9.0) / -10
    return z


@pytest.mark.parametrize("text", TEXTS)
@torch.no_grad()
def test_flags_say_what_the_weights_do(text: str) -> None:
    z = rows()
    weighting = Spec.parse(text).weighting
    stats = weighting.fit(z, {})
    p = weighting.weights(z, stats, {})
    assert not weighting.nonnegative or bool((p >= 0).all())
    total = p.sum(-1)
    seen = (z > -torch.inf).any(-1)
    if weighting.normalised and "empty=zero" not in text and weighting.nonnegative:
        torch.testing.assert_close(total, seen.double(), rtol=0, atol=1e-14)
    assert bool((p[z == -torch.inf] == 0).all())
    assert torch.equal(stats.empty[..., 0], ~seen)
    moved = z + 0.04  # stays below 1
    shifted = weighting.weights(moved, weighting.fit(moved, {}), {})
    same = torch.allclose(shifted, p, rtol=0, atol=1e-13)
    assert weighting.shift_invariant <= same
    ranked_without_edge = text in ("gaussian*fixed",)  # softmax is invariant though its rule is not
    assert same == (not any(word in text for word in MOVED_BY_A_SHIFT) or ranked_without_edge)
