"""The softmax-like functions on plain scores: accuracy, degenerate rows, axes and masks, in both implementations."""

import math

import numpy as np
import oracles
import pytest
import torch
from contracts import oracle
from contracts.oracle import close
from normalisers import ALPHAS, HOW, IMPLS, PAIRS, Call, function, normal
from torch import Tensor

import regard

INF, NAN = float("inf"), float("nan")
SPREADS = (0.05, 1.0, 4.0)
FORMULAS = [(name, impl) for name, impl in PAIRS if name in HOW]
NORMALISED = [(name, impl) for name, impl in PAIRS if name != "normrelu-zero"]
BY_INDEX = ("normrelu-nearest", "topk_softmax", "topk_uniform", "topk_uniform-straight-through")
"""Functions that break ties by index."""


def excess(p: Tensor) -> float:
    """The largest |sum - 1|, summed exactly."""
    return max(abs(math.fsum(row) - 1) for row in p.double().tolist())


# Accuracy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.001, *ALPHAS])
@pytest.mark.parametrize("n", [1, 2, 17, 512, 8192])
def test_entmax_equals_bisection(alpha: float, n: int) -> None:
    """In float64 and float32, with alpha as a number and as a tensor. Above alpha = 2 the power 1/(alpha - 1) < 1 turns
    rounding at the threshold into its square root."""
    for spread in SPREADS if n < 8192 else (1.0,):
        z = normal(2 if n < 8192 else 1, n, spread=spread)
        exact = oracles.entmax_rows(z.numpy(), alpha)
        rounded = oracles.entmax_rows(z.float().double().numpy(), alpha, np.float64)
        for impl in IMPLS:
            for given in (alpha, torch.tensor(alpha, dtype=torch.float64)):
                p = regard.entmax(z, given, impl=impl)
                assert np.abs(p.numpy() - exact).max() <= 1e-12
                assert excess(p) <= 2e-14
            for given in (alpha, torch.tensor(alpha)):
                p = regard.entmax(z.float(), given, impl=impl)
                assert np.abs(p.double().numpy() - rounded).max() <= (5e-7 if alpha <= 2 else 5e-4)
                assert excess(p) <= 2e-6


@pytest.mark.parametrize(("name", "impl"), NORMALISED)
def test_rows_of_8192_sum_to_one(name: str, impl: str) -> None:
    flat = torch.full((3, 8192), 0.25)
    flat[1, ::2] += 1e-6
    flat[2, 4000] = 0.3
    for z in (*(normal(8, 8192, spread=s, dtype=torch.float32) for s in SPREADS), flat):
        assert excess(function(name, impl)(z)) <= 2e-6
        assert excess(function(name, impl)(z.double())) <= 2e-14


@pytest.mark.parametrize(("name", "impl"), NORMALISED)
@pytest.mark.parametrize(("dtype", "shift"), [(torch.bfloat16, 1e4), (torch.float16, 6e4)])
def test_half_precision(name: str, impl: str, dtype: torch.dtype, shift: float) -> None:
    """The weights are those of the rounded scores in float32, rounded once."""
    z = normal(2, 8192)
    for scores in (z, z + shift, z - shift, z * 0.05):
        scores = scores.to(dtype).requires_grad_()
        p = function(name, impl)(scores)
        assert p.dtype == dtype
        slack = 8192 * 3e-8 if dtype == torch.float16 else 0.0  # half a step of float16's subnormals a key
        assert float((p.detach().double().sum(-1) - 1).abs().max()) <= 4e-3 + slack
        assert torch.equal(p.detach(), function(name, impl)(scores.detach().float()).to(dtype))
        if p.requires_grad:
            (p.float() * z.float()).sum().backward()
            assert scores.grad.dtype == dtype
            assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize(("name", "impl"), [(n, i) for n, i in PAIRS if not n.startswith("normrelu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shift_changes_nothing(name: str, impl: str, dtype: torch.dtype) -> None:
    """Exactly, where differences of scores are exact."""
    z = torch.randint(-64, 64, (8, 700), generator=torch.Generator().manual_seed(3)).to(dtype) / 16
    g = normal(8, 700, dtype=dtype)
    plain = z.clone().requires_grad_()
    p = function(name, impl)(plain)
    for shift in (1e4, -1e4):
        moved = (z + shift).requires_grad_()
        again = function(name, impl)(moved)
        assert torch.equal(again, p)
        if p.requires_grad:
            one, two = (torch.autograd.grad(x, y, g, retain_graph=True)[0] for x, y in ((p, plain), (again, moved)))
            assert torch.equal(one, two)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(5, 1), (4, 2), (6, 33), (2, 3, 257)])
def test_the_entmax_package_agrees(shape: tuple[int, ...], impl: str) -> None:
    """Weights, and gradients of the scores and of an alpha that rows share."""
    peer = pytest.importorskip("entmax")
    z, g = normal(*shape, spread=2.0).requires_grad_(), normal(*shape, seed=1)
    alpha = torch.tensor([1.3, 1.6, 1.9, 1.1, 1.05, 1.95][: shape[0]], dtype=torch.float64)
    alpha = alpha.view(-1, *[1] * (len(shape) - 1)).requires_grad_()
    shared = alpha.expand(*shape[:-1], 1)
    for found, expected in (
        (regard.sparsemax(z, impl=impl), peer.sparsemax(z, dim=-1)),
        (regard.entmax(z, impl=impl), peer.entmax15(z, dim=-1)),
        (regard.entmax(z, 4 / 3, impl=impl), peer.entmax_bisect(z, alpha=4 / 3, n_iter=100)),
        (regard.entmax(z, alpha, impl=impl), peer.entmax_bisect(z, shared, n_iter=100)),
    ):
        close(found, expected, 1e-10)
        one, two = (torch.autograd.grad(x, (z, alpha), g, allow_unused=True) for x in (found, expected))
        close(one[0], two[0], 1e-10)
        if one[1] is not None:
            close(one[1], two[1], 1e-8)


# Degenerate rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "impl"), NORMALISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_key_and_equal_keys(name: str, impl: str, dtype: torch.dtype) -> None:
    for value in (-1e30, -1e4, -0.1, 0.0, 1e-40, 0.25, 1e4, 1e30):
        for n in (1, 5, 40, 600):
            alone = torch.full((n,), -INF, dtype=dtype)
            alone[n // 3] = value
            close(function(name, impl)(alone), (alone > -INF).to(dtype), 2e-7)
            if name not in BY_INDEX:
                equal = function(name, impl)(torch.full((n,), value, dtype=dtype))
                close(equal, torch.full((n,), 1 / n, dtype=dtype), 3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "impl"), FORMULAS)
def test_subnormal_and_huge_scores(name: str, impl: str, dtype: torch.dtype) -> None:
    """Against the formula, scores from the least to nearly the largest numbers."""
    tiny = torch.finfo(dtype).smallest_normal / 64
    for row in (
        [tiny, 2 * tiny, 0.0, -tiny, 3 * tiny],
        [1e30, -1e30, 0.0, 3.0, 9.9e29],
        [-1e30, -1e30, -INF, -9.9e29, -1.1e30],
        [1e30, 0.5e30, 1e-30, -1e-30, -0.5e30],
    ):
        z = torch.tensor([row], dtype=dtype).requires_grad_()
        p = function(name, impl)(z)
        exact = z.detach().double()
        if HOW[name]["rule"] in ("adaptive", "anchored"):  # scores near the threshold lose nothing by the shift
            exact = exact - exact.amax(-1, keepdim=True)
        close(p, oracle.of_scores(exact, **HOW[name]), 1e-4 if name == "entmax-3" else 3e-7, f"{row}")
        if p.requires_grad:
            g = torch.arange(1.0, 6.0, dtype=dtype)[None]
            assert bool(torch.autograd.grad(p, z, g)[0].isfinite().all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_thresholds_a_subnormal_number_below_the_best_score(dtype: torch.dtype, impl: str) -> None:
    least = torch.finfo(dtype).smallest_normal / 64
    assert regard.relumax(torch.tensor([1.0, 0.5, 1.0], dtype=dtype), least, impl=impl).tolist() == [0.5, 0.0, 0.5]
    # So little counts as no support: a quotient by it would overflow.
    p = regard.normrelu(torch.tensor([2 * least, least, -1.0], dtype=dtype), impl=impl)
    close(p, torch.full((3,), 1 / 3), 1e-6)
    least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    p = regard.normrelu(torch.tensor([2 * least, least, -1.0], dtype=dtype), impl=impl)
    close(p, torch.tensor([2 / 3, 1 / 3, 0]), 1e-6)


@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_a_score_that_is_not_finite_affects_its_row_alone(name: str, impl: str) -> None:
    """NaN of either sign and any payload, and +inf, at the first, a middle and the last place of a row."""
    payload = torch.tensor([0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(payload.isnan().all())
    assert bool(torch.signbit(payload[1:]).all())
    for n in (1, 5, 33, 700):
        clean = normal(3, n, dtype=torch.float32)
        good = function(name, impl)(clean)
        for bad in (INF, NAN, -NAN, *payload):
            for at in {0, n // 2, n - 1}:
                z = clean.clone()
                z[1, at] = bad
                z = z.requires_grad_()
                p = function(name, impl)(z)
                assert bool(p[1].isnan().all())
                assert torch.equal(p[::2], good[::2])
                if p.requires_grad:
                    (p[::2] * torch.arange(n)).sum().backward()
                    assert bool(z.grad[::2].isfinite().all())


@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_rows_without_a_score_are_zero_with_zero_gradient(name: str, impl: str) -> None:
    z = normal(4, 70)
    z[1] = -INF
    mask = torch.ones(4, 70, dtype=torch.bool)
    mask[2] = False
    z = z.requires_grad_()
    p = function(name, impl)(z, mask=mask)
    assert not bool(p[1:3].any())
    close(p[::3].sum(-1), torch.ones(2), 1e-14)
    if p.requires_grad:
        (grad,) = torch.autograd.grad(p, z, normal(4, 70, seed=1))
        assert not bool(grad[1:3].any())
        assert bool(grad.isfinite().all())
    for shape, dim in (((3, 0), -1), ((0, 4), -1), ((0,), 0), ((2, 0, 3), 1), ((2, 0, 3), -1)):
        z = torch.zeros(shape, requires_grad=True)
        p = function(name, impl)(z, dim=dim)
        assert p.shape == z.shape
        p.sum().backward()
        assert z.grad is None or z.grad.shape == z.shape


@pytest.mark.parametrize(("name", "impl"), FORMULAS)
def test_any_axis_and_layout(name: str, impl: str) -> None:
    """Rows along any axis of tensors that are transposed, strided or expanded, values and gradients."""
    call, z, g = function(name, impl), normal(5, 40, 6), normal(5, 40, 6, seed=1)
    plain = z.movedim(1, -1).contiguous().requires_grad_()
    rows = oracle.of_scores(plain, **HOW[name]).movedim(-1, 1)
    slopes = torch.autograd.grad(rows, plain, g)[0].movedim(-1, 1) if rows.requires_grad else None
    for dim in range(-3, 3):
        close(call(z.movedim(1, dim), dim=dim).movedim(dim, 1), rows, 1e-13)
    for view in (z, z.movedim(0, 2).contiguous().movedim(2, 0), torch.stack([z, z + 1], -1)[..., 0]):
        leaf = view.detach().requires_grad_()
        p = call(leaf, dim=1)
        close(p, rows, 1e-13)
        if p.requires_grad and slopes is not None:
            close(torch.autograd.grad(p, leaf, g)[0], slopes, 1e-9 if name == "entmax-3" else 1e-12)
    close(call(z[:1, :, :1].expand(5, 40, 6), dim=1), rows[:1, :, :1].expand(5, 40, 6), 1e-13)


@pytest.mark.parametrize(("name", "impl"), PAIRS)
def test_masks_broadcast_and_hide_any_content(name: str, impl: str) -> None:
    call, z = function(name, impl), normal(3, 4, 50)
    for shape in ((4, 50), (50,), (1, 4, 1), (3, 1, 50)):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
        hidden = call(torch.where(mask, z, -INF))
        for junk in (0.0, 1e30, INF, NAN):
            assert torch.equal(call(torch.where(mask, z, junk), mask=mask), hidden)
        assert not bool(hidden[~mask.expand(3, 4, 50)].any())
        if name in HOW:
            close(hidden, oracle.of_scores(torch.where(mask, z, -INF), **HOW[name]), 1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_for_the_last_place_go_by_index_and_for_the_best_share(impl: str) -> None:
    z = torch.tensor([0.5, 1.0, 0.5, 0.5, -3.0] + [-9.0] * 60, dtype=torch.float64)
    assert regard.topk_uniform(z, 3, impl=impl).nonzero().flatten().tolist() == [0, 1, 2]
    p = regard.topk_softmax(z, 3, impl=impl)
    e = math.exp(0.5)
    close(p[:5], torch.tensor([1, e, 1, 0, 0], dtype=torch.float64) / (2 + e), 1e-15)
    assert regard.normrelu(torch.full((5,), -0.5), empty="nearest", impl=impl).tolist() == [1, 0, 0, 0, 0]
    # w = (1, 1, .5), W = 2.5 and L = p_3: dL/dw = (-.08, -.08, .32), dL/dm = -.16, a half for each of the tied.
    tied = torch.tensor([1.0, 1.0, 0.5] + [-9.0] * 60, dtype=torch.float64, requires_grad=True)
    regard.relumax(tied, impl=impl)[2].backward()
    close(tied.grad[:3], torch.tensor([-0.16, -0.16, 0.32]), 1e-7)


@pytest.mark.parametrize("impl", IMPLS)
def test_fallbacks_of_normrelu(impl: str) -> None:
    z = torch.tensor([-0.5, -0.1, -INF, -0.3], dtype=torch.float64, requires_grad=True)
    third = torch.tensor([1 / 3, 1 / 3, 0, 1 / 3])
    for empty, expected in (("uniform", third), ("zero", 0 * third), ("nearest", torch.tensor([0, 1.0, 0, 0]))):
        p = regard.normrelu(z, empty=empty, impl=impl)
        close(p, expected, 1e-7)
        grad = torch.autograd.grad((p * torch.arange(4.0)).sum(), z, allow_unused=True)[0]
        assert grad is None or not bool(grad.any())
    close(regard.normrelu(z.detach(), bias=0.1, impl=impl), third, 1e-7)  # a score at the threshold has no weight
    assert regard.normrelu(z.detach(), bias=0.2, impl=impl).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        (regard.entmax, 1.5, (NAN, 0.99, 0.5)),
        (regard.relumax, 1.0, (NAN, 0.0, -1.0, INF)),
        (regard.normrelu, 0.3, (NAN, INF)),
    ],
)
def test_a_parameter_out_of_range_affects_its_row_alone(
    call: Call, good: float, bad: tuple[float, ...], impl: str
) -> None:
    """Its row is NaN; at an infinite margin or bias NaN, or the limit."""
    z = normal(3, 50)
    expected = call(z, good, impl=impl)
    for number in bad:
        p = call(z, torch.tensor([[good], [number], [good]], dtype=torch.float64), impl=impl)
        close(p[::2], expected[::2], 1e-14)
        uniform = number == INF and bool((p[1] - 1 / 50).abs().max() < 1e-15)
        assert uniform or bool(p[1].isnan().all()), number
