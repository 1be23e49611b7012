"""Local linear attention against the weighted ridge regression that it is, and against what follows from that."""

import warnings

import pytest
import torch
from contracts import oracle
from contracts.oracle import Choices, close, dense
from regression import draw, fit, lower, ratio, softmax
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.grammar.solvers import BlockDiagonal, ConjugateGradient
from regard.pairwise.blocked.blocks import Work

IMPLS = ("reference", "blocked")


def local(q: Tensor, k: Tensor, v: Tensor, **call) -> Tensor:
    return regard.local_linear_attention(q, k, v, **{"is_causal": True, **call})


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


# The regression ----------------------------------------------------------------------------------------------


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
                close(
                    regard.attention(q, k, v, f"gaussian*fixed(h={h})*euclidean*{degree}", impl=impl), expected, 1e-12
                )


def test_the_reference_refuses_what_it_cannot_hold() -> None:
    q, k = torch.zeros(1, 1, 4100, 64), torch.zeros(1, 1, 1024, 64)
    with pytest.raises(ArgumentError, match=r"of 268,697,600 numbers .*; give fewer queries"):
        regard.attention(q, k, k, "local-linear", impl="reference")


@pytest.mark.parametrize("other", [torch.float16, torch.float32, torch.float64])
def test_a_ridge_of_another_precision(other: torch.dtype) -> None:
    """The output has the dtype of the queries, and the gradient of the ridge its own."""
    q, k, v = draw(1, 2, 3, 4, keys=7, seed=20, dtype=torch.float32)
    ridge = torch.tensor(0.25, dtype=other, requires_grad=True)
    out = regard.attention(q, k, v, "local-linear", params={"ridge": ridge})
    assert out.dtype == torch.float32
    close(out, dense(q, k, v, torch.ones(3, 7, dtype=torch.bool), 0.25), 1e-5)
    out.sum().backward()
    assert ridge.grad.dtype == other


# Sizes -------------------------------------------------------------------------------------------------------


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


# Invariants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "solver", ["cholesky", BlockDiagonal(), BlockDiagonal(2), *(ConjugateGradient(max_iter=n) for n in (0, 1, 2, 5))]
)
@pytest.mark.filterwarnings("ignore:local linear attention")
def test_effective_weights_sum_to_one_at_any_budget(impl: str, solver) -> None:
    """Read off as the output for values that are the identity; of an unconverged solution too. A slope is lost to
    rounding by eps |k| |t|, with |t| up to |q - kbar| over the ridge."""
    for dtype, ridge, tolerance in (
        (torch.float32, 1.0, 2e-6),
        (torch.float32, 0.1, 1e-5),
        (torch.float64, 0.1, 1e-13),
    ):
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


# Windows and segments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["softmax", "local-linear"])
def test_the_cost_is_in_the_pairs_of_windows_and_segments(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs that the blocks of both passes work on grow as T W. 16 segments of 128 cost a sixteenth of one of 2048,
    without causal order."""
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


# Shared heads, other solvers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [0, 1, 2, 3, 4, 6, 12])
def test_block_diagonal_is_the_masked_covariance(blocks: int) -> None:
    """For every number of blocks that divides D, in closed form or by factors; gradients by autograd of the dense
    form. One block is local linear attention itself."""
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 40, 12, value_dim=3, seed=16))
    choices = Choices("gaussian", "fixed", degree=1, ridge=0.4, solver="block-diagonal", blocks=blocks)
    expected, _ = oracle.attention(choices, q, k, v, lower(40).expand(1, 2, 40, 40))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    if blocks == 1:
        close(expected, dense(q, k, v, lower(40), 0.4), 1e-9)
    for impl in IMPLS:
        out = local(q, k, v, ridge=0.4, solver=BlockDiagonal(blocks), impl=impl)
        close(out, expected, 1e-10, impl)
        for grad, want in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, strict=True):
            close(grad, want, 1e-9, impl)
