"""entmax and its kin with impl="cpu": accuracy and degenerate rows as promised. Expected values are bisection in
extended precision, closed forms and dense float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import dense
import numpy as np
import oracles
import pytest
import torch
from dense import close
from torch import Tensor

import regard

pytest.importorskip("numba")


INF, NAN = float("inf"), float("nan")
ALPHAS = (1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)
SPREADS = (0.05, 1.0, 4.0)
Call = Callable[..., Tensor]

CALLS: dict[str, Call] = {
    **{f"entmax-{a:.3g}": (lambda z, a=a, **how: regard.entmax(z, a, **how)) for a in ALPHAS},
    "entmax-tensor": lambda z, **how: regard.entmax(z, torch.tensor(1.3, dtype=torch.float64), **how),
    "sparsemax": regard.sparsemax,
    "relumax": lambda z, **how: regard.relumax(z, 0.9, **how),
    "normrelu": lambda z, **how: regard.normrelu(z, 0.3, **how),
    "normrelu-zero": lambda z, **how: regard.normrelu(z, 0.3, empty="zero", **how),
    "normrelu-nearest": lambda z, **how: regard.normrelu(z, 0.3, empty="nearest", **how),
    "topk_softmax": lambda z, **how: regard.topk_softmax(z, 3, **how),
    "topk_uniform": lambda z, **how: regard.topk_uniform(z, 3, **how),
}


def ours(name: str) -> Call:
    return lambda z, **how: CALLS[name](z, impl="cpu", **how)


def normal(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=make, dtype=torch.float64) * spread).to(dtype)


def excess(p: Tensor) -> float:
    """The largest |sum - 1|, summed exactly."""
    return max(abs(math.fsum(row) - 1) for row in p.double().tolist())


# Accuracy ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [1, 2, 17, 512, 8192])
def test_entmax_equals_bisection(alpha: float, n: int) -> None:
    for spread in SPREADS:
        z = normal(2 if n < 8192 else 1, n, spread=spread)
        p = regard.entmax(z, alpha, impl="cpu")
        exact = oracles.entmax_rows(z.numpy(), alpha)
        assert np.abs(p.numpy() - exact).max() <= 1e-12
        assert excess(p) <= 2e-14
        p = regard.entmax(z.float(), alpha, impl="cpu")
        exact = oracles.entmax_rows(z.float().double().numpy(), alpha, np.float64)
        assert np.abs(p.double().numpy() - exact).max() <= (5e-7 if alpha <= 2 else 5e-4)
        assert excess(p) <= 2e-6


NORMALISED = [name for name in CALLS if name != "normrelu-zero"]


@pytest.mark.parametrize("name", NORMALISED)
def test_rows_of_8192_sum_to_one(name: str) -> None:
    flat = torch.full((3, 8192), 0.25)
    flat[1, ::2] += 1e-6
    flat[2, 4000] = 0.3
    for z in (*(normal(8, 8192, spread=s, dtype=torch.float32) for s in SPREADS), flat):
        assert excess(ours(name)(z)) <= 2e-6
        assert excess(ours(name)(z.double())) <= 2e-14


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize(("dtype", "shift"), [(torch.bfloat16, 1e4), (torch.float16, 6e4)])
def test_half_precision(name: str, dtype: torch.dtype, shift: float) -> None:
    """float32 inside: the weights are those of the rounded scores, rounded once."""
    z = normal(2, 8192)
    for scores in (z, z + shift, z - shift, z * 0.05):
        scores = scores.to(dtype).requires_grad_()
        p = ours(name)(scores)
        assert p.dtype == dtype
        slack = 8192 * 3e-8 if dtype == torch.float16 else 0.0  # half a step of float16's subnormals a key
        assert float((p.detach().double().sum(-1) - 1).abs().max()) <= 4e-3 + slack
        whole = ours(name)(scores.detach().float())
        assert torch.equal(p.detach(), whole.to(dtype))
        if p.requires_grad:
            (p.float() * z.float()).sum().backward()
            assert scores.grad.dtype == dtype
            assert bool(scores.grad.isfinite().all())


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("normrelu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shift_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Exactly, where differences of scores are exact."""
    z = torch.randint(-64, 64, (8, 700), generator=torch.Generator().manual_seed(3)).to(dtype) / 16
    g = normal(8, 700, dtype=dtype)
    plain = z.clone().requires_grad_()
    p = ours(name)(plain)
    for shift in (1e4, -1e4):
        moved = (z + shift).requires_grad_()
        again = ours(name)(moved)
        assert torch.equal(again, p)
        if p.requires_grad:
            one, two = (torch.autograd.grad(x, y, g, retain_graph=True)[0] for x, y in ((p, plain), (again, moved)))
            assert torch.equal(one, two)


def test_hand_computed_weights() -> None:
    """z = (1, .5, -1). sparsemax: tau = .25; biweight: a1 - a2 = .25, a1^2 + a2^2 = 1; the rest by division."""
    z = torch.tensor([1.0, 0.5, -1.0], dtype=torch.float64)
    a2 = (-0.25 + math.sqrt(2 - 0.25**2)) / 2
    for p, expected in (
        (regard.sparsemax(z, impl="cpu"), [0.75, 0.25, 0]),
        (regard.entmax(z, impl="cpu"), [(a2 + 0.25) ** 2, a2**2, 0]),
        (regard.relumax(z, impl="cpu"), [2 / 3, 1 / 3, 0]),
        (regard.relumax(z, 0.5, impl="cpu"), [1, 0, 0]),  # at the margin is outside it
        (regard.relumax(z, 3.0, impl="cpu"), [3 / 6.5, 2.5 / 6.5, 1 / 6.5]),
        (regard.normrelu(z, 1.0, impl="cpu"), [2 / 3.5, 1.5 / 3.5, 0]),
        (regard.topk_softmax(z, 2, impl="cpu"), [1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(0.5)), 0]),
        (regard.topk_uniform(z, 2, impl="cpu"), [0.5, 0.5, 0]),
    ):
        close(p, torch.tensor(expected, dtype=torch.float64), 1e-15)


@pytest.mark.parametrize("r", [0.5, 1.0, 2.0, 3.0, 7.5])
def test_entmax_is_a_kernel_regression(r: float) -> None:
    """The theorem: with cosines s and z = s/gamma, the weights are those of [1 - u^2/h^2]_+^r at distances u,
    h^2 = 2 - 2 r gamma tau, and h exceeds the distance to the nearest key."""
    s = torch.rand(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1
    square = 2 - 2 * s.numpy()
    for gamma in (0.05, 0.3, 1.0, 10.0):
        _, tau = oracles.entmax_row((s / gamma).numpy(), 1 + 1 / r)
        h2 = float(2 - 2 * r * gamma * tau)
        assert h2 > square.min()
        w = np.maximum(1 - square / h2, 0) ** r
        p = regard.entmax(s / gamma, 1 + 1 / r, impl="cpu")
        np.testing.assert_allclose(p.numpy(), w / w.sum(), rtol=0, atol=1e-13 if r >= 1 else 1e-11)
        w = np.maximum(1 - square / (2 * (1 - float(s.max())) + 2 * 0.8 * gamma), 0)  # relumax of margin .8
        np.testing.assert_allclose(regard.relumax(s / gamma, 0.8, impl="cpu").numpy(), w / w.sum(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_entmax_tends_to_softmax(n: int) -> None:
    z = normal(20, 16)
    p = regard.entmax(z, 1 + 1 / n, impl="cpu").numpy()
    assert np.abs(p - oracles.softmax(z.numpy())).sum(-1).max() < 3 / n


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_the_entmax_package_agrees(name: str) -> None:
    package = pytest.importorskip("entmax")
    z, g = normal(6, 700).requires_grad_(), normal(6, 700, seed=5)
    p = regard.entmax(z, 2.0 if name == "sparsemax" else 1.5, impl="cpu")
    expected = getattr(package, name)(z, dim=-1)
    close(p, expected, 1e-12)
    one, two = (torch.autograd.grad(x, z, g)[0] for x in (p, expected))
    close(one, two, 1e-12)


# Degenerate rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NORMALISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_key_and_equal_keys(name: str, dtype: torch.dtype) -> None:
    for value in (-1e30, -1e4, -0.1, 0.0, 1e-40, 0.25, 1e4, 1e30):
        for n in (1, 5, 40, 600):
            alone = torch.full((n,), -INF, dtype=dtype)
            alone[n // 3] = value
            expected = (alone > -INF).to(dtype)
            close(ours(name)(alone), expected, 2e-7)
            if name in ("normrelu-nearest", "topk_softmax", "topk_uniform"):
                continue  # these break ties by index
            close(ours(name)(torch.full((n,), value, dtype=dtype)), torch.full((n,), 1 / n, dtype=dtype), 3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CALLS)
def test_subnormal_and_huge_scores(name: str, dtype: torch.dtype) -> None:
    """Against the formula, scores from the least to nearly the largest numbers."""
    tiny = torch.finfo(dtype).smallest_normal / 64
    how = {
        "relumax": {"rule": "anchored", "number": 0.9},
        "normrelu": {"rule": "fixed", "number": 0.3},
        "normrelu-zero": {"rule": "fixed", "number": 0.3, "empty": "zero"},
        "normrelu-nearest": {"rule": "fixed", "number": 0.3, "empty": "nearest"},
        "topk_softmax": {"rule": "nearest", "kernel": "gaussian", "k": 3},
        "topk_uniform": {"rule": "nearest", "kernel": "uniform", "k": 3},
        "sparsemax": {"rule": "adaptive"},
        "entmax-tensor": {"rule": "adaptive", "r": 1 / 0.3},
    }
    alpha = next((a for a in ALPHAS if name == f"entmax-{a:.3g}"), 2.0)
    for row in (
        [tiny, 2 * tiny, 0.0, -tiny, 3 * tiny],
        [1e30, -1e30, 0.0, 3.0, 9.9e29],
        [-1e30, -1e30, -INF, -9.9e29, -1.1e30],
        [1e30, 0.5e30, 1e-30, -1e-30, -0.5e30],
    ):
        z = torch.tensor([row], dtype=dtype).requires_grad_()
        p = ours(name)(z)
        exact, rule = z.detach().double(), how.get(name, {"rule": "adaptive", "r": 1 / (alpha - 1)})
        if rule["rule"] in ("adaptive", "anchored"):  # what is in reach loses nothing by the shift
            exact = exact - exact.amax(-1, keepdim=True)
        expected = dense.weights(exact, **rule)
        close(p, expected, 3e-7 if alpha <= 2 else 1e-4, f"{row}")
        if p.requires_grad:
            g = torch.arange(1.0, 6.0, dtype=dtype)[None]
            assert bool(torch.autograd.grad(p, z, g)[0].isfinite().all())


def test_the_least_reach_there_is() -> None:
    """Thresholds that lie a subnormal number below the best score."""
    for dtype in (torch.float32, torch.float64):
        least = torch.finfo(dtype).smallest_normal / 64
        z = torch.tensor([1.0, 0.5, 1.0], dtype=dtype)
        assert regard.relumax(z, least, impl="cpu").tolist() == [0.5, 0.0, 0.5]
        for impl in ("cpu", "reference"):  # so little counts as no support: a quotient by it would overflow
            p = regard.normrelu(torch.tensor([2 * least, least, -1.0], dtype=dtype), impl=impl)
            close(p, torch.full((3,), 1 / 3), 1e-6)
        least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps
        p = regard.normrelu(torch.tensor([2 * least, least, -1.0], dtype=dtype), impl="cpu")
        close(p, torch.tensor([2 / 3, 1 / 3, 0]), 1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_number_stays_in_its_row(name: str) -> None:
    """NaN of either sign and any payload, and +inf; at the first, a middle and the last place of rows."""
    payload = torch.tensor([0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(payload.isnan().all())
    assert bool(torch.signbit(payload[1:]).all())
    for n in (1, 5, 33, 700):
        clean = normal(3, n, dtype=torch.float32)
        good = ours(name)(clean)
        for bad in (INF, NAN, -NAN, *payload):
            for at in {0, n // 2, n - 1}:
                z = clean.clone()
                z[1, at] = bad
                z = z.requires_grad_()
                p = ours(name)(z)
                assert bool(p[1].isnan().all())
                assert torch.equal(p[::2], good[::2])
                if p.requires_grad:
                    (p[::2] * torch.arange(n)).sum().backward()
                    assert bool(z.grad[::2].isfinite().all())


@pytest.mark.parametrize("name", CALLS)
def test_rows_without_a_score(name: str) -> None:
    z = normal(4, 70)
    z[1] = -INF
    mask = torch.ones(4, 70, dtype=torch.bool)
    mask[2] = False
    z = z.requires_grad_()
    p = ours(name)(z, mask=mask)
    assert not bool(p[1:3].any())
    close(p[::3].sum(-1), torch.ones(2), 1e-14)
    if p.requires_grad:
        (grad,) = torch.autograd.grad(p, z, normal(4, 70, seed=1))
        assert not bool(grad[1:3].any())
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("name", CALLS)
def test_zero_lengths(name: str) -> None:
    for shape, dim in (((3, 0), -1), ((0, 4), -1), ((0,), 0), ((2, 0, 3), 1), ((2, 0, 3), -1)):
        z = torch.zeros(shape, requires_grad=True)
        p = ours(name)(z, dim=dim)
        assert p.shape == z.shape
        p.sum().backward()
        assert z.grad is None or z.grad.shape == z.shape


@pytest.mark.parametrize("name", CALLS)
def test_any_axis_and_layout(name: str) -> None:
    """Rows along any axis of tensors that are transposed, strided, reversed in time or expanded."""
    z = normal(5, 40, 6)
    g = normal(5, 40, 6, seed=1)
    rows = ours(name)(z.movedim(1, -1).reshape(-1, 40)).reshape(5, 6, 40).movedim(-1, 1)
    for view in (z, z.movedim(0, 2).movedim(2, 0), z.transpose(0, 2).contiguous().transpose(0, 2), z.flip(0).flip(0)):
        leaf = view.detach().requires_grad_()
        p = ours(name)(leaf, dim=1)
        assert torch.equal(p, rows)
        if p.requires_grad:
            (grad,) = torch.autograd.grad(p, leaf, g)
            plain = z.movedim(1, -1).reshape(-1, 40).clone().requires_grad_()
            (flat,) = torch.autograd.grad(ours(name)(plain), plain, g.movedim(1, -1).reshape(-1, 40))
            assert torch.equal(grad, flat.reshape(5, 6, 40).movedim(-1, 1))
    expanded = z[:1, :, :1].expand(5, 40, 6)
    assert torch.equal(ours(name)(expanded, dim=1), rows[:1, :, :1].expand(5, 40, 6))
    strided = torch.stack([z, z + 1], -1)[..., 0]
    assert torch.equal(ours(name)(strided, dim=1), rows)


@pytest.mark.parametrize("name", CALLS)
def test_masks_hide_whatever_is_there(name: str) -> None:
    z, mask = normal(3, 4, 50), torch.rand(4, 50, generator=torch.Generator().manual_seed(2)) < 0.6
    hidden = ours(name)(torch.where(mask, z, -INF))
    for junk in (0.0, 1e30, INF, NAN):
        assert torch.equal(ours(name)(torch.where(mask, z, junk), mask=mask), hidden)
    assert not bool(hidden[~mask.expand(3, 4, 50)].any())


def test_more_keys_wanted_than_there_are() -> None:
    """However many are wanted, the memory is that of the row."""
    z = normal(3, 5)
    exp = (z - z.amax(-1, keepdim=True)).exp()
    for k in (5, 6, 1000, 2**40):
        close(regard.topk_softmax(z, k, impl="cpu"), exp / exp.sum(-1, keepdim=True), 1e-15)
        close(regard.topk_uniform(z, k, impl="cpu"), torch.full_like(z, 0.2), 1e-16)


def test_ties_for_the_last_place_go_by_index_and_for_the_best_share() -> None:
    z = torch.tensor([0.5, 1.0, 0.5, 0.5, -3.0] + [-9.0] * 60, dtype=torch.float64)
    assert regard.topk_uniform(z, 3, impl="cpu").nonzero().flatten().tolist() == [0, 1, 2]
    p = regard.topk_softmax(z, 3, impl="cpu")
    e = math.exp(0.5)
    close(p[:5], torch.tensor([1, e, 1, 0, 0], dtype=torch.float64) / (2 + e), 1e-15)
    # w = (1, 1, .5), W = 2.5 and L = p_3: dL/dw = (-.08, -.08, .32), dL/dm = -.16, a half for each of the tied.
    tied = torch.tensor([1.0, 1.0, 0.5] + [-9.0] * 60, dtype=torch.float64, requires_grad=True)
    regard.relumax(tied, impl="cpu")[2].backward()
    close(tied.grad[:3], torch.tensor([-0.16, -0.16, 0.32]), 1e-7)


# A number that has gone wrong shows --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        (regard.entmax, 1.5, (NAN, 0.99, 0.5)),
        (regard.relumax, 1.0, (NAN, 0.0, -1.0)),
        (regard.normrelu, 0.3, (NAN,)),
    ],
)
def test_a_row_parameter_out_of_its_range_spoils_its_row_alone(call: Call, good: float, bad: tuple[float, ...]) -> None:
    z = normal(3, 50)
    expected = call(z, good, impl="cpu")
    for number in bad:
        p = call(z, torch.tensor([[good], [number], [good]], dtype=torch.float64), impl="cpu")
        close(p[::2], expected[::2], 1e-14)
        assert bool(p[1].isnan().all()), number


def test_an_infinite_bias_or_margin_keeps_to_its_row() -> None:
    z = normal(2, 50)
    for call, good in ((regard.normrelu, 0.3), (regard.relumax, 1.0)):
        p = call(z, torch.tensor([[good], [INF]], dtype=torch.float64), impl="cpu")
        close(p[0], call(z[0], good, impl="cpu"), 1e-14)
        assert bool(p[1].isnan().all()) or bool((p[1] - 1 / 50).abs().max() < 1e-15)  # no number, or the limit
