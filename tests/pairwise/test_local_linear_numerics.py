"""Local linear attention where numbers are hard: coarse inputs, shifted, degenerate and huge keys, budgets of steps."""

import warnings
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from contracts.oracle import dense
from regression import FLOOR, brute_force, draw, family, lower, ratio, softmax, systems
from torch import Tensor

import regard
from regard.grammar.solvers import ConjugateGradient
from regard.grammar.systems import SolveStatus
from regard.pairwise.blocked.weighted_rows import WeightedRows

OK, UNCONVERGED, JITTER = int(SolveStatus.OK), int(SolveStatus.UNCONVERGED), int(SolveStatus.JITTER)
INACCURATE = int(SolveStatus.INACCURATE)


def run(q: Tensor, k: Tensor, v: Tensor, **call):
    """(output, the solver's statistics)."""
    call = {"is_causal": True, "return_diagnostics": True, **call}
    out, found = regard.local_linear_attention(q, k, v, **call)
    return out, found.solver


# bfloat16 inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ridge"), FLOOR)
def test_bfloat16_inputs(name: str, ridge: float) -> None:
    """Within 1.5 times the floor at ridge .1 and twice at .01; in fact, at the rounding of the output."""
    q, k, v = family(name)
    scale = 8.0 if name == "unit" else None
    expected = dense(q, k, v, lower(1024), ridge, scale=scale)
    out, found = run(q, k, v, ridge=ridge, scale=scale)
    assert out.dtype == torch.bfloat16
    error = ratio(out, expected)
    assert error <= (1.5 if ridge == 0.1 else 2.0) * FLOOR[name, ridge]
    assert error <= 2.5e-3
    assert bool((found["status"] == OK).all())


def test_bfloat16_gradients() -> None:
    """Within the rounding of their own dtype, on the hardest of the families."""
    leaves = tuple(x.requires_grad_() for x in family("anisotropic", 300, 32))
    exact = tuple(x.detach().double().requires_grad_() for x in leaves)
    out = regard.local_linear_attention(*leaves, ridge=0.1, is_causal=True)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    found = torch.autograd.grad(out, leaves, weight)
    wanted = torch.autograd.grad(dense(*exact, lower(300), 0.1), exact, weight.double())
    for grad, want in zip(found, wanted, strict=True):
        assert grad.dtype == torch.bfloat16
        assert ratio(grad, want) <= 5e-3


# Shifted and degenerate keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cholesky", "cg", "auto"])
def test_keys_far_from_the_origin(solver: str) -> None:
    """Coordinates of queries and keys about a point 100 away in every direction: float32 keeps 1e-4. A small scale
    leaves the scores free of rounding, so that the regression alone is looked at."""
    q, k, v = draw(1, 2, 200, 8, seed=1, dtype=torch.float32)
    shift = 100 * torch.randn(8, generator=torch.Generator().manual_seed(2))
    q, k = q + shift, k + shift
    expected = dense(q, k, v, lower(200), 0.1, scale=1e-6)
    out, _ = run(q, k, v, scale=1e-6, solver=solver)
    assert ratio(out, expected) <= 1e-4


def leaves(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in (q, k, v))


@pytest.mark.parametrize("impl", ["reference", "blocked", "cpu"])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand(impl: str, sign: int) -> None:
    """Whole numbers, so that scores up to 1e4 are exact: the right answer and finite gradients."""
    q, k, v = draw(1, 2, 40, 4, seed=3)
    q, k = (q * 10).round() * 20 * sign, (k * 10).round()
    for dtype in (torch.float64, torch.float32):
        inputs = leaves(*(x.to(dtype) for x in (q, k, v)))
        spec = "biweight" if impl == "cpu" else "softmax"
        out, found = run(*inputs, scale=1.0, spec=spec, ridge=0.1, impl=impl)
        assert float((q @ k.transpose(-1, -2)).abs().max()) > 1e4
        tolerance = 1e-9 if dtype == torch.float64 else 1e-3
        assert ratio(out, dense(q, k, inputs[2].detach(), lower(40), 0.1, spec, scale=1.0)) <= tolerance
        assert bool((found["status"] == OK).all())
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.square().sum(), inputs))


def degenerate(name: str, k: Tensor) -> Tensor:
    make = torch.Generator().manual_seed(5)
    if name == "zero":
        return torch.zeros_like(k)
    if name == "equal":
        return k[:, :, :1].expand_as(k).clone()
    if name == "two":  # duplicated: two keys, over and over
        return k[:, :, torch.arange(k.shape[2]) % 2]
    if name == "collinear":
        return k[..., :1] * torch.randn(k.shape[-1], generator=make, dtype=torch.float64).to(k.dtype)
    return k * {"large": 1e3, "huge": 1e6, "tiny": 1e-12, "plain": 1.0}[name]


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("name", ["zero", "equal", "two", "collinear", "large", "huge", "tiny", "plain"])
@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", "block-diagonal"])
@pytest.mark.filterwarnings("ignore:local linear attention")
def test_degenerate_keys(impl: str, name: str, solver: str) -> None:
    """float64: the regression's answer down to a ridge of 1e-6. float32: finite, with finite gradients, and a status
    that says how; the right answer where the ridge is not lost beside the keys."""
    q, k, v = draw(1, 1, 40, 6, seed=4)
    k = degenerate(name, k)
    scale = 1e-3 / max(1.0, float(k.abs().max()))  # weights that hardly differ
    for ridge in (0.1, 1e-6):
        if solver != "block-diagonal":
            out, found = run(q, k, v, ridge=ridge, solver=solver, impl=impl, scale=scale)
            expected = brute_force(softmax(scale * q @ k.transpose(-1, -2), lower(40)), q, k, v, ridge)
            # With huge keys a ridge is lost beside |k|^2 in rows that see fewer keys than coordinates.
            rows = slice(12 if name in ("large", "huge") else 0, None)
            assert ratio(out[:, :, rows], expected[:, :, rows]) <= (1e-7 if ridge == 0.1 else 1e-3)
            assert bool((found["status"] != int(SolveStatus.NOT_FINITE)).all())
        inputs = leaves(q.float(), k.float(), v.float())
        out, found = run(*inputs, ridge=ridge, solver=solver, impl=impl, scale=scale)
        assert bool(out.isfinite().all())
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.square().sum(), inputs))
        assert set(found) == {"status", "iterations", "residual", "jitter"}
        known = {OK, JITTER, UNCONVERGED, INACCURATE, int(SolveStatus.MINIMUM_NORM)}
        assert set(found["status"].flatten().tolist()) <= known
        if name in ("zero", "tiny") or (name == "equal" and ridge == 0.1):  # nothing to regress on: attention
            mean = (lower(40) / lower(40).sum(-1, keepdim=True)).double() @ v
            assert ratio(out, mean) <= 1e-4


@pytest.mark.parametrize(
    ("weights", "impl"),
    [(w, i) for w in ("biweight", "relumax") for i in ("blocked", "cpu")] + [("softmax", "blocked")],
)
@pytest.mark.parametrize(("length", "ridge"), [(1.0, 1e-3), (10.0, 0.1), (1e3, 0.1)])
def test_gradients_of_values_are_as_accurate_as_the_output(
    weights: str, impl: str, length: float, ridge: float
) -> None:
    """With few keys or sparse weights the slope outside the span of a row's keys is as long as 1 / ridge. Its rounding
    error must not reach the gradients: it multiplied those of the values by up to 70."""
    if impl == "cpu":
        pytest.importorskip("numba")
    for tokens, causal in ((64, True), (300, False))[: 1 if weights == "softmax" else 2]:
        q, k, v = draw(1, 2, tokens, 32)
        exact = [x.double().requires_grad_() for x in (q, k * length, v)]
        leaves = [x.detach().float().requires_grad_() for x in exact]
        call = {"spec": weights, "ridge": ridge, "is_causal": causal}
        out = regard.local_linear_attention(*leaves, impl=impl, **call)
        wanted = regard.local_linear_attention(*exact, impl="reference", **call)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        found = torch.autograd.grad(out, leaves[2], weight)[0]
        grad = torch.autograd.grad(wanted, exact[2], weight.double())[0]
        assert ratio(found, grad) <= 2 * ratio(out, wanted) + 1e-6, (tokens, length)


FORMS = [("softmax", "reference"), ("softmax", "blocked"), ("biweight", "blocked"), ("biweight", "cpu")]


@pytest.mark.parametrize(("weights", "impl"), FORMS)
@pytest.mark.parametrize("length", [10.0, 1e3])
@pytest.mark.parametrize("flat", [False, True])
def test_long_keys_keep_their_digits(weights: str, impl: str, length: float, flat: bool) -> None:
    """float32 keys for which |k|^2 / ridge times the rounding error is 0.004 and 40: output and gradients as in float64
    within the rounding errors of the weights, where they were wrong by up to 5000 times their size, with status OK.
    `flat`: scores as of short keys."""
    if impl == "cpu":
        pytest.importorskip("numba")
    q, k, v = draw(1, 1, 150, 32, dtype=torch.float32)
    k *= length
    scale = 0.2 / length if flat else 0.2
    exact, rounded = leaves(q.double(), k.double(), v.double()), leaves(q, k, v)
    out, found = run(*rounded, spec=weights, impl=impl, scale=scale)
    wanted = dense(*exact, lower(150), 0.1, weights, scale=scale)
    assert ratio(out, wanted) <= 1e-3
    assert bool((found["status"] == OK).all())
    if not flat and length > 100:
        return  # gradients are those of weights that are 0 or 1
    grads = (torch.autograd.grad(o.square().sum(), x) for o, x in ((out, rounded), (wanted, exact)))
    assert all(ratio(one, other) <= 1e-2 for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize(("weights", "impl"), FORMS)
def test_no_alarm_on_normal_keys(weights: str, impl: str) -> None:
    if impl == "cpu":
        pytest.importorskip("numba")
    q, k, v = draw(1, 2, 150, 64, seed=3, dtype=torch.float32)
    for ridge in (1e-3, 0.1):
        for causal in (True, False):
            _, found = run(q, k, v, spec=weights, impl=impl, ridge=ridge, is_causal=causal)
            assert bool((found["status"] == OK).all())


def in_fractions(p: Tensor, q: Tensor, k: Tensor, v: Tensor, ridge: float) -> Tensor:
    """The output of one query for weights p [n], q [D], k [n, D] and v [n, C], without any rounding error."""
    w, x, y = (np.array([Fraction(z) for z in t.flatten().tolist()]).reshape(t.shape) for t in (p, q, k))
    w = w / w.sum()
    away = y - w @ y
    matrix = (w[:, None] * away).T @ away + Fraction(ridge) * np.eye(len(x), dtype=int)
    system = np.concatenate([matrix, (x - w @ y)[:, None]], axis=1)
    for i in range(len(x)):
        system[i] = system[i] / system[i, i]
        for j in range(len(x)):
            system[j] = system[j] - system[j, i] * system[i] if j != i else system[j]
    signed = w * (1 + away @ system[:, -1])
    return torch.tensor(signed.astype(float)) @ v.double()


@pytest.mark.parametrize("impl", ["reference", "blocked", "cpu"])
def test_an_error_of_a_tenth_is_reported(impl: str) -> None:
    """For keys so long that float64 loses the ridge, too."""
    if impl == "cpu":
        pytest.importorskip("numba")
    wrong = 0
    for length in (1e3, 1e5, 1e6, 1e7, 1e9):
        q, k, v = draw(1, 1, 10, 6, seed=7, dtype=torch.float32)
        k *= length
        call = {"spec": "biweight", "ridge": 0.1, "scale": 0.1 / length}
        how = {"is_causal": True, "return_diagnostics": True, **call}
        weights = regard.local_linear_attention(q, k, v, impl="reference", **how)[1].weights
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out, found = run(q, k, v, impl=impl, **call)
        warned = any("are inaccurate in the forward pass" in str(x.message) for x in said)
        assert impl == "reference" or warned == bool((found["status"] >= UNCONVERGED).any())
        for i in range(10):
            exact = in_fractions(weights[0, 0, i], q[0, 0, i], k[0, 0], v[0, 0], 0.1)
            error = float((out[0, 0, i].double() - exact).norm() / exact.norm())
            wrong += error > 0.1
            assert error <= 0.1 or int(found["status"][0, 0, i]) in (JITTER, INACCURATE), (length, i)
            assert error <= 1e-3 or length > 1e4, (length, i)
    assert wrong


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_gradients_of_keys_that_no_precision_holds(impl: str) -> None:
    """Rows that see one key, and others, of 1e12 and of 2^56, the longest: finite gradients. With one key also for a
    ridge of 1e-6, where products with t overflow in float32."""
    for length, (tokens, ridge) in product((1e12, 2.0**56), ((1, 0.1), (1, 1e-6), (3, 0.1))):
        q, k, v = draw(1, 1, tokens, 8, seed=8, dtype=torch.float32)
        inputs = leaves(q, k.clamp(-1, 1) * length, v)
        for spec in ("softmax", "biweight"):
            out, _ = run(*inputs, spec=spec, impl=impl, ridge=ridge)
            assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.square().sum(), inputs))


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_a_jitter_is_reported(impl: str) -> None:
    """float32 keys of 1e5 with a ridge of 1e-6 on a plane: no factor without help, and the help is told."""
    q, k, v = draw(1, 1, 60, 6, seed=6, dtype=torch.float32)
    k[..., 3:] = k[..., :3]
    out, found = run(q, 1e5 * k, v, ridge=1e-6, solver="cholesky", scale=1e-8, impl=impl)
    raised = found["status"] == JITTER
    assert bool(raised.any())
    assert bool((found["jitter"][raised] > 0).all())
    assert bool((found["jitter"][~raised] == 0).all())
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("solver", ["auto", "cholesky", "cg", ConjugateGradient(precondition=True), "block-diagonal"])
@pytest.mark.parametrize("power", [-40, -12, 12, 40])
def test_units_do_not_matter(solver, power: int) -> None:
    """Queries and keys in other units, the ridge in their square and the scale in its inverse, are the same regression:
    float32 keeps it at sizes whose squares it cannot hold."""
    unit = 2.0**power
    results = []
    for size in (1.0, unit):
        q, k, v = draw(1, 2, 100, 24, seed=13, dtype=torch.float32)
        inputs = leaves(size * q, size * k, v)
        how = {"ridge": 0.1 * size * size, "scale": 0.2 / size / size, "solver": solver}
        out, found = run(*inputs, **how)
        dq, dk, dv = torch.autograd.grad(out.square().sum(), inputs)
        assert bool((found["status"] == OK).all())
        results.append((out, dq * size, dk * size, dv))
    assert all(ratio(other, one) <= 2e-5 for one, other in zip(*results, strict=True))


# Iterations --------------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_is_told() -> None:
    """A warning in each pass, a status and the true residual of every row; more steps, less residual."""
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 150, 16, seed=8))
    before = torch.inf
    for max_iter in (1, 3, 6):
        with pytest.warns(RuntimeWarning, match="did not converge or are inaccurate in the forward pass"):
            out, found = run(q, k, v, solver="cg", max_iter=max_iter, ridge=0.01)
        with pytest.warns(RuntimeWarning, match="did not converge or are inaccurate in the backward pass"):
            out.sum().backward()
        assert bool((found["iterations"] <= max_iter).all())
        assert float((found["status"] == UNCONVERGED).double().mean()) > 0.9
        assert float(found["residual"].mean()) < before
        before = float(found["residual"].mean())
        assert bool(out.isfinite().all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, found = run(q, k, v, solver="cg", ridge=0.01)
        run(q, k, v, solver="auto", ridge=0.01)
    assert bool((found["status"] == OK).all())


def test_the_residual_is_the_true_one_and_bounds_the_error() -> None:
    """Every residual within tol; of the output the root mean square error within tol, the worst row within 5 tol."""
    for name, dim in (("normal", 32), ("unit", 32), ("anisotropic", 32), ("recall", 32)):
        q, k, v = (x.double() for x in family(name, 300, dim, seed=9))
        expected = dense(q, k, v, lower(300), 0.1)
        size = float(expected.square().sum(-1).mean().sqrt())
        for tol in (1e-2, 1e-3, 1e-4):
            out, found = run(q, k, v, solver="cg", tol=tol)
            assert float(found["residual"].max()) <= tol
            assert ratio(out, expected) <= tol, name
            worst = (out - expected).square().sum(-1).sqrt().max() / size
            assert float(worst) <= 5 * tol, name


def conjugate_steps(matrix: Tensor, right: Tensor, tol: float) -> int:
    """How many steps plain conjugate gradients take."""
    x, r, d = torch.zeros_like(right), right, right
    for step in range(200):
        if float(r.norm()) <= tol * float(right.norm()):
            return step
        image = matrix @ d
        length = (r @ r) / (d @ image)
        x, new = x + length * d, r - length * image
        d = new + (new @ new) / (r @ r) * d
        r = new
    return 200


def test_the_steps_are_those_it_takes() -> None:
    """A row's count is that of the textbook iteration on its own matrix, so that nothing is done twice."""
    q, k, v = draw(1, 1, 120, 24, seed=10)
    _, found = run(q, k, v, solver=ConjugateGradient(tol=1e-3))
    matrix, right, _ = systems(q, k, softmax(q @ k.mT * 24**-0.5, lower(120)), 0.1)
    for i in (0, 1, 5, 30, 64, 119):
        assert abs(float(found["iterations"][0, 0, i]) - conjugate_steps(matrix[0, 0, i], right[0, 0, i], 1e-3)) <= 1


def test_a_block_stops_when_its_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs worked on by the iteration, against 1.1 times those of the slowest row of each tile of 64, and the look at
    the true residual. Rows that see fewer than 2 D keys never take more than D steps or are solved directly."""
    q, k, v = draw(1, 1, 1024, 64, seed=11, dtype=torch.float32)
    worked = []
    apply = WeightedRows.apply
    monkeypatch.setattr(WeightedRows, "apply", lambda self, x: worked.append(self.p.numel()) or apply(self, x))
    _, found = run(q, k, v, solver=ConjugateGradient(tol=1e-3))
    steps = found["iterations"][0, 0]
    tiles = steps.unflatten(0, (-1, 64)).amax(-1)
    keys = torch.arange(1, 17) * 64.0
    causal_mean = float((tiles * keys).sum() / keys.sum())
    assert causal_mean <= 1.1 * 10.6  # the tile-weighted mean found in the note's prototype
    pairs = float((keys * 64).sum())
    assert sum(worked) / pairs <= 1.1 * (causal_mean + 1) + 1
    _, found = run(q, k, v)  # auto
    assert float(found["iterations"][..., :128].max()) <= 64


def test_auto_iterates_where_that_pays() -> None:
    """Which rows took steps tells what was chosen: late rows of many coordinates, and neither rows of fewer keys than
    coordinates, nor small systems, few queries, a ridge of 0, or the reference."""
    q, k, v = draw(1, 1, 300, 24, seed=14)
    _, found = run(q, k, v)
    steps = found["iterations"][0, 0]
    assert bool((steps[150:] > 0).all())
    assert bool((steps[:24] == 0).all())
    for call in ({"ridge": 0.0}, {"impl": "reference"}, {"q": q[..., -5:, :]}, {"q": q[..., :16], "k": k[..., :16]}):
        _, found = run(**{"q": q, "k": k, "v": v, **call})
        assert not bool(found["iterations"].any()), tuple(call)


def test_auto_does_not_leave_a_row_unconverged() -> None:
    """Keys on which the iteration alone gives up: auto answers with the direct solution. Some rows are INACCURATE."""
    q, k, v = draw(1, 1, 300, 24, seed=15)
    k = k * torch.logspace(0, -6, 24, dtype=torch.float64)
    how = {"ridge": 1e-13, "scale": 0.2}
    with pytest.warns(RuntimeWarning, match="did not converge"):
        _, alone = run(q, k, v, solver="cg", **how)
    with pytest.warns(RuntimeWarning, match="are inaccurate"):
        out, found = run(q, k, v, solver="auto", **how)
    failed = alone["status"] == UNCONVERGED
    assert bool(failed.any())
    assert not bool((found["status"] == UNCONVERGED).any())
    assert bool((found["residual"][failed] < alone["residual"][failed]).all())
    direct, _ = run(q, k, v, solver="cholesky", **how)
    assert ratio(out[failed], direct[failed]) <= 1e-3


# Bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "dim", "heads", "spec", "ridge", "solver", "at", "size", "seed"),
    [
        (640, 8, 3, "softmax", 0.05, "auto", 399, 3.0, 0),
        (640, 24, 1, "biweight", 1.0, "auto", 578, 1.0, 7),
        (257, 64, 3, "rbf", 1.0, "auto", 68, 0.3, 0),
        (130, 17, 2, "biweight", 0.05, "cg", 108, 1.0, 15),
        (640, 17, 1, "rbf", 0.001, "auto", 202, 3.0, 0),
    ],
)
def test_later_tokens_change_no_bit_whatever_they_do_to_the_solver(
    length: int, dim: int, heads: int, spec: str, ridge: float, solver: str, at: int, size: float, seed: int
) -> None:
    """Sizes at which later rows decide how many rows are solved in which way, and with how many keys."""
    q, k, v = draw(1, heads, length, dim, seed=seed, dtype=torch.float32)
    q, k = size * q, size * k
    results = []
    for other in (None, 5.0, 1e4):
        changed = (torch.cat([x[:, :, :at], (other or 1.0) * x[:, :, at:].flip(2)], 2) for x in (q, k, v))
        inputs = leaves(q, k, v) if other is None else leaves(*changed)
        out = regard.local_linear_attention(*inputs, spec=spec, solver=solver, is_causal=True, ridge=ridge)
        found = torch.autograd.grad(out[:, :, :at].square().sum(), inputs)
        results.append([out[:, :, :at].detach(), *(g[:, :, :at] for g in found)])
    for changed in results[1:]:
        for name, one, two in zip("oqkv", results[0], changed, strict=True):
            assert torch.equal(one, two), (name, float((one - two).abs().max()))
