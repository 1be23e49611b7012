"""Local linear attention against the weighted ridge regression that it is, and against what follows from that; with
specs, solvers and probes as arguments, and compiled. Derivatives against finite differences and autograd of the dense
regression in float64."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contracts import oracle
from contracts.oracle import Choices, close, dense
from mistakes import refuses
from operators import check_operators
from regression import draw, fit, lower, ratio, softmax, textbook
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck

import regard
from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient, Learned
from regard.pairwise.blocked.blocks import Work

IMPLS = ("reference", "blocked")


def local(q: Tensor, k: Tensor, v: Tensor, **call) -> Tensor:
    return regard.local_linear_attention(q, k, v, **{"is_causal": True, **call})


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def test_ridge_of_every_shape() -> None:
    """A number for a head, a token, both, and one for every coordinate."""
    q, k, v = draw(2, 3, 40, 4, seed=4)
    z, seen = scores(q, k), lower(40)
    make = torch.Generator().manual_seed(5)
    for shape in ((1,), (3, 1), (40,), (2, 1, 1), (2, 3, 40), (1, 1, 1, 4), (1, 3, 1, 4), (2, 3, 40, 4), (2, 3, 40, 1)):
        ridge = torch.rand(shape, generator=make, dtype=torch.float64) + 0.05
        whole = ridge.expand(2, 3, 40, 4) if len(shape) == 4 else ridge.expand(2, 3, 40)
        expected = fit(softmax(z, seen), q, k, v, whole)
        for impl in IMPLS:
            close(local(q, k, v, ridge=ridge, impl=impl), expected, 1e-9, (shape, impl))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("h", [0.3, 0.8, 2.0])
def test_gaussian_equals_statsmodels(dim: int, h: float) -> None:
    """KernelReg weighs by prod_d exp(-(x_d - q_d)^2 / (2 h^2)): 'lc' is degree 0, 'll' degree 1 without ridge."""
    from statsmodels.nonparametric.kernel_regression import KernelReg

    q, k, v = draw(1, 1, 9, dim, keys=60, value_dim=1, seed=19)
    q, h = q * 0.5, h * dim**0.5  # inside the cloud of keys, where every local system is well conditioned
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, degree in (("lc", "constant"), ("ll", "linear(ridge=0)")):
            model = KernelReg(v[0, 0, :, 0].numpy(), k[0, 0].numpy(), "c" * dim, kind, [h] * dim)
            expected = torch.from_numpy(model.fit(q[0, 0].numpy())[0]).view(1, 1, 9, 1)
            for impl in IMPLS:
                found = regard.attention(q, k, v, f"gaussian*fixed(h={h})*euclidean*{degree}", impl=impl)
                close(found, expected, 1e-12)


def test_the_reference_refuses_what_it_cannot_hold() -> None:
    q, k = torch.zeros(1, 1, 4100, 64), torch.zeros(1, 1, 1024, 64)
    words = r"of 268,697,600 numbers .*; give fewer queries"
    refuses(words, regard.attention, q, k, k, "local-linear", impl="reference")


@pytest.fixture
def poisoned():
    """torch.empty comes filled with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("length", "dim"),
    [(1, 8), (5, 128), (63, 16), (65, 48), (100, 60), (127, 64), (129, 100), (129, 64), (1000, 64)]
    + [pytest.param(1000, dim, marks=pytest.mark.slow) for dim in (8, 16, 48, 60, 100, 128)],
)
def test_sizes_that_are_no_multiples(length: int, dim: int) -> None:
    """Values and gradients in float32; nothing that was never written is read."""
    q, k, v = (x.requires_grad_() for x in draw(1, 1, length, dim, seed=dim, dtype=torch.float32))
    out = local(q, k, v, ridge=0.1)
    assert ratio(out, dense(q.detach(), k.detach(), v.detach(), lower(length), 0.1)) <= 3e-6
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in found)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "solver", ["cholesky", BlockDiagonal(), BlockDiagonal(2), *(ConjugateGradient(max_iter=n) for n in (0, 1, 2, 5))]
)
@pytest.mark.filterwarnings("ignore:local linear attention")
def test_effective_weights_sum_to_one_at_any_budget(impl: str, solver) -> None:
    """Read off as the output for values that are the identity; of an unconverged solution too. A slope is lost to
    rounding by eps |k| |t|, with |t| up to |q - kbar| over the ridge."""
    single, double = torch.float32, torch.float64
    for dtype, ridge, tolerance in ((single, 1.0, 2e-6), (single, 0.1, 1e-5), (double, 0.1, 1e-13)):
        q, k, _ = draw(1, 2, 50, 6, seed=7, dtype=dtype)
        v = torch.eye(50, dtype=dtype).expand(1, 2, 50, 50)
        weights = local(q, k, v, ridge=ridge, solver=solver, impl=impl)
        assert float((weights.sum(-1) - 1).abs().max()) <= tolerance
        assert bool((weights[..., ~lower(50)] == 0).all())
        assert bool((weights < 0).any()) == (solver != ConjugateGradient(max_iter=0))


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax"])
def test_no_steps_and_a_large_ridge_are_attention(spec: str) -> None:
    q, k, v = draw(2, 2, 60, 8, seed=8, dtype=torch.float32)
    seen = lower(60).expand(2, 2, 60, 60)
    expected, _ = oracle.attention(oracle.PRESETS[spec], q.double(), k.double(), v.double(), seen)
    for impl in IMPLS:
        assert ratio(local(q, k, v, spec=spec, max_iter=0, impl=impl), expected) <= 1e-6
        assert ratio(local(q, k, v, spec=spec, ridge=1e6, impl=impl), expected) <= 1e-4
        assert ratio(local(q, k, v, spec=spec, ridge=0.01, impl=impl), expected) > 0.1


@pytest.mark.parametrize("impl", ["reference", "blocked", "cpu"])
def test_the_first_row_is_its_value(impl: str) -> None:
    """o_1 = v_1 and dq_1 = 0, exactly: there is nothing to compare."""
    q, k, v = (x.requires_grad_() for x in draw(2, 2, 40, 8, seed=11, dtype=torch.float32))
    for ridge in (1.0, 1e-3):
        out = local(q, k, v, spec="biweight" if impl == "cpu" else "softmax", ridge=ridge, impl=impl)
        assert torch.equal(out[:, :, 0], v[:, :, 0])
        (dq,) = torch.autograd.grad(out.square().sum(), q)
        assert bool((dq[:, :, 0] == 0).all())
        assert bool((dq[:, :, 1:] != 0).any())


@pytest.mark.parametrize("spec", ["softmax", "local-linear"])
def test_the_cost_is_in_the_pairs_of_windows_and_segments(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of blocks grow as T W. 16 segments of 128 cost a sixteenth of one of 2048, without causal order."""
    counted, blocks = [0], Work.blocks

    def spy(self):
        for block in blocks(self):
            counted[-1] += block.heads * (block.last - block.first) * (block.high - block.low)
            yield block

    def passes(length: int, **how) -> int:
        counted[-1] = 0
        q, k, v = (x.requires_grad_() for x in draw(1, 1, length, 8, seed=13, dtype=torch.float32))
        regard.attention(q, k, v, spec, impl="blocked", **how).sum().backward()
        return counted[-1]

    monkeypatch.setattr(Work, "blocks", spy)
    pairs = [passes(length, window=32, is_causal=True) for length in (512, 1024, 2048)]
    for length, count in zip((512, 1024, 2048), pairs, strict=True):
        assert 2 * length * 32 * 0.9 <= count <= 2 * length * (32 + 128)  # blocks of at most 128 queries
    assert pairs[2] <= 2.1 * pairs[1]
    assert passes(2048, segment_ids=(torch.arange(2048) // 128)[None]) <= 2 * 2048 * 128


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 4, 6, 12])
def test_block_diagonal_is_the_masked_covariance(blocks: int) -> None:
    """For every divisor of D, in closed form or by factors. One block is local linear attention itself."""
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 40, 12, value_dim=3, seed=16))
    choices = Choices("gaussian", "fixed", degree=1, ridge=0.4, solver="block-diagonal", blocks=blocks)
    expected, _ = oracle.attention(choices, q, k, v, lower(40).expand(1, 2, 40, 40))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    if blocks == 1:
        close(expected, dense(q, k, v, lower(40), 0.4), 1e-9)
    for impl in IMPLS:
        out = local(q, k, v, ridge=0.4, solver=BlockDiagonal(blocks), impl=impl)
        close(out, expected, 1e-10, impl)
        close(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, 1e-9, impl)


@pytest.mark.parametrize("case", ["per dimension", "probe", "segments"])
def test_operators_are_as_torch_wants_them(case: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 6, 4, seed=5, dtype=torch.float32))
    how: dict[str, Any] = {
        "per dimension": {"ridge": torch.full((1, 2, 1, 4), 0.2, requires_grad=True), "ridge_mode": "absolute"},
        "probe": {"solver": "learned", "probe": torch.ones(1, 2, 6, 4, requires_grad=True)},
        "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1]]), "solver": "cg"},
    }[case]
    check_operators(lambda: local(q, k, v, impl="blocked", **how), "blocked")


@pytest.mark.usefixtures("fresh_dynamo")
def test_numbers_do_not_make_new_graphs() -> None:
    """Another ridge is another number in the same graph; another solver makes another."""
    counter = CompileCounterWithBackend("eager")

    compiled = torch.compile(local, backend=counter, fullgraph=True, dynamic=True)
    q, k, v = draw(1, 2, 20, 4, seed=5)
    for solver, graphs in (("cholesky", 1), ("cg", 2)):
        for ridge in (0.1, 0.2, 0.7):
            assert ratio(compiled(q, k, v, ridge=ridge, solver=solver), dense(q, k, v, lower(20), ridge)) <= 1e-9
            assert counter.frame_count == graphs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_probe_matters_only_in_rows_that_see_a_key(impl: str, bad: float) -> None:
    q, k, v, probe = torch.randn(4, 1, 1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    run = lambda r: regard.local_linear_attention(q, k, v, solver="learned", probe=r, attn_mask=mask, impl=impl)  # noqa: E731
    unseen, seen = probe.clone(), probe.clone()
    unseen[0, 0, 2], seen[0, 0, 1] = bad, bad
    assert torch.equal(run(unseen), run(probe))
    assert run(seen)[0, 0].isnan().any(-1).tolist() == [False, True, False, False]


def test_a_spec_may_be_a_sentence_of_either_degree() -> None:
    """One of degree 1 gives its weights alone; what this call says of the model holds."""
    q, k, v = draw(1, 2, 20, 4, seed=9)
    for spec in ("biweight", "local-linear[biweight]", regard.Spec.parse("biweight*linear(ridge=7.0,solver=cholesky)")):
        assert ratio(local(q, k, v, spec=spec, ridge=0.2), dense(q, k, v, lower(20), 0.2, "biweight")) <= 1e-9
    for solver in (Auto(), Cholesky(), ConjugateGradient(tol=1e-13)):
        assert ratio(local(q, k, v, solver=solver), dense(q, k, v, lower(20), 0.1)) <= 1e-9
    zero = torch.zeros(1, 2, 20, 4, dtype=torch.float64)
    mean = softmax(q @ k.transpose(-1, -2) / 2, lower(20)) @ v
    assert ratio(local(q, k, v, solver=Learned(), probe=zero), mean) <= 1e-12


def test_numbers_of_the_weights_are_given_beside_the_ridge() -> None:
    q, k, v = draw(1, 2, 20, 4, seed=10)
    wide = local(q, k, v, spec="relumax", ridge=0.2, params={"margin": 2.0})
    z = q @ k.transpose(-1, -2) / 2
    z = torch.where(lower(20), z, -torch.inf)
    w = (z - z.amax(-1, keepdim=True) + 2).clamp(min=0)
    assert ratio(wide, fit(w / w.sum(-1, keepdim=True), q, k, v, 0.2)) <= 1e-9


SHAPES = {"scalar": (), "head": (2, 1), "token": (2, 5), "dimension": (1, 2, 5, 3), "one for all": (1, 1, 1, 3)}
SOLVERS = ("cholesky", "auto", ConjugateGradient(tol=1e-14), BlockDiagonal(), BlockDiagonal(1))


def small(length: int = 5, keys: int | None = None, dim: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in draw(1, 2, length, dim, keys=keys, value_dim=2, seed=seed))


def numbers(shape: tuple[int, ...], low: float, seed: int = 1) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=make, dtype=torch.float64) * 0.5 + low).requires_grad_()


def check(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    assert gradcheck(run, inputs, eps=1e-6, atol=1e-6, rtol=1e-5)


CASES = dict.fromkeys([
    *(("auto", "relative", shape, impl) for shape in SHAPES for impl in ("reference", "blocked", "cpu")),
    *((solver, mode, shape, impl) for solver in SOLVERS for impl in ("reference", "blocked")
      for mode, shape in (("relative", "token"), ("absolute", "dimension"))),
])  # fmt: skip


@pytest.mark.parametrize(("solver", "mode", "shape", "impl"), CASES, ids=str)
def test_finite_differences(solver, mode: str, shape: str, impl: str) -> None:
    """q, k, v, the ridge, and the scale where there is one of its own for every row."""

    def run(q: Tensor, k: Tensor, v: Tensor, ridge: Tensor, scale: Tensor) -> Tensor:
        how = {"solver": solver, "ridge_mode": mode, "impl": impl, "spec": "biweight" if impl == "cpu" else "softmax"}
        return regard.local_linear_attention(q, k, v, ridge=ridge, scale=scale, exclude_self=True, **how)

    check(run, (*small(5, 7, seed=2), numbers(SHAPES[shape], 0.2, seed=3), numbers((2, 5), 0.4)))


def test_a_learned_power_beside_an_absolute_ridge_is_for_the_reference() -> None:
    """Its derivative by finite differences; the fast form says that it has none."""

    def run(q: Tensor, k: Tensor, v: Tensor, power: Tensor, impl: str = "reference") -> Tensor:
        spec = "biweight*anchored(margin=1.5)*linear(ridge=0.4,ridge_mode=absolute)"
        return regard.attention(q, k, v, spec, params={"r": power}, is_causal=True, impl=impl)

    inputs = (*small(seed=15), numbers((2, 5), 1.8, seed=16))
    check(run, inputs)
    refuses("learned power", run, *inputs, impl="blocked")


def gradients(out: Tensor, inputs: tuple[Tensor, ...], seed: int = 20) -> tuple[Tensor, ...]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad(out, inputs, weight.to(out.dtype), retain_graph=True)


@pytest.mark.parametrize("ridge", [1.0, 0.1, 0.01])
@pytest.mark.parametrize(("spec", "solver"), [("softmax", "auto"), ("softmax", "cholesky"), ("biweight", "auto")])
def test_float32_blocks_against_float64(ridge: float, spec: str, solver: str) -> None:
    """Outputs to 1e-5 of their size and gradients to 1e-4 is what is asked for, and exceeded. Rows with many keys of
    which few have weight lose slopes by rounding over the ridge."""
    tolerance = 1.5e-6 / ridge if spec == "biweight" else 3e-6
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 400, 32, seed=9, dtype=torch.float32))
    exact = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    out = regard.local_linear_attention(q, k, v, ridge=ridge, spec=spec, solver=solver, is_causal=True)
    expected = dense(*exact, lower(400), ridge, spec)
    assert ratio(out, expected) <= tolerance
    for grad, want in zip(gradients(out, (q, k, v)), gradients(expected, exact), strict=True):
        assert grad.dtype == torch.float32
        assert ratio(grad, want) <= max(2e-5, 2 * tolerance)


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_a_constant_added_to_a_row_of_scores(mode: str) -> None:
    """Erratum C3: a coordinate that is c in every query and one in every key adds c to all scores of a row, and nothing
    to a regression, as the keys do not differ in it. A relative ridge must not notice: its gradient by c is 0. An
    absolute ridge is then one of ridge exp(-c)."""
    q, k, v = draw(1, 1, 30, 4, seed=11)
    c = torch.zeros(1, 1, 30, 1, dtype=torch.float64, requires_grad=True)
    wide = lambda x, last: torch.cat([x, last], -1)  # noqa: E731
    weight = torch.randn(v.shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    call = {"is_causal": True, "scale": 1.0, "ridge": 0.1, "ridge_mode": mode}
    for impl in ("reference", "blocked"):
        out = regard.local_linear_attention(wide(q, c), wide(k, torch.ones_like(k[..., :1])), v, impl=impl, **call)
        (found,) = torch.autograd.grad((out * weight).sum(), c)
        if mode == "relative":
            assert float(found.abs().max()) <= 1e-12
            continue
        w = torch.where(lower(30), (q @ k.transpose(-1, -2)).exp(), 0)
        shift = torch.zeros(1, 1, 30, 1, dtype=torch.float64, requires_grad=True)
        (wanted,) = torch.autograd.grad((textbook(w * shift.exp(), q, k, v, 0.1) * weight).sum(), shift)
        assert float((found - wanted).abs().max()) <= 1e-10
        assert float(wanted.abs().max()) > 1e-3


def test_gradients_of_an_iteration_are_those_of_the_solution() -> None:
    """Conjugate gradients to 1e-3 give gradients near those of the exact solution, as the tolerance promises."""
    q, k, v = (x.requires_grad_() for x in draw(1, 1, 200, 24, seed=13))
    expected = gradients(dense(q, k, v, lower(200), 0.1), (q, k, v))
    errors = []
    for tol in (1e-2, 1e-3, 1e-5):
        out = regard.local_linear_attention(q, k, v, solver="cg", tol=tol, is_causal=True, impl="blocked")
        errors.append(max(ratio(g, w) for g, w in zip(gradients(out, (q, k, v)), expected, strict=True)))
    assert all(error <= 5 * tol for error, tol in zip(errors, (1e-2, 1e-3, 1e-5), strict=True))
    assert errors[2] < errors[1] < errors[0]
