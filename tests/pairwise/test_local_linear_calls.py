"""Calls of local linear attention: from a cache, compiled, with mistakes, with NaN where nobody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operators import check_operators
from regression import dense, draw, fit, lower, ratio, softmax
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import regard
from regard.checks import ArgumentError
from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient, Learned
from regard.grammar.systems import SolveStatus

local = regard.local_linear_attention


# Compiled ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["per dimension", "probe", "segments"])
def test_operators_are_as_torch_wants_them(case: str) -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 6, 4, seed=5, dtype=torch.float32))
    how: dict[str, Any] = {
        "per dimension": {"ridge": torch.full((1, 2, 1, 4), 0.2, requires_grad=True), "ridge_mode": "absolute"},
        "probe": {"solver": "learned", "probe": torch.ones(1, 2, 6, 4, requires_grad=True)},
        "segments": {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1]]), "solver": "cg"},
    }[case]
    check_operators(lambda: local(q, k, v, impl="blocked", is_causal=True, **how), "local_linear")


def test_numbers_do_not_make_new_graphs() -> None:
    """Another ridge is another number in the same graph; another solver makes another."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def run(q: Tensor, k: Tensor, v: Tensor, ridge: float, solver: str) -> Tensor:
        return local(q, k, v, ridge=ridge, solver=solver)

    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    q, k, v = draw(1, 2, 20, 4, seed=5)
    everything = torch.ones(20, 20, dtype=torch.bool)
    for solver, graphs in (("cholesky", 1), ("cg", 2)):
        for ridge in (0.1, 0.2, 0.7):
            assert ratio(compiled(q, k, v, ridge, solver), dense(q, k, v, everything, ridge)) <= 1e-9
            assert counter.frame_count == graphs
    torch._dynamo.reset()


# Diagnostics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_weights_of_the_values_and_what_of_them_is_negative(impl: str) -> None:
    q, k, v = draw(1, 2, 30, 4, seed=6)
    identity = torch.eye(30, dtype=torch.float64).expand(1, 2, 30, 30)
    _, found = local(q, k, v, ridge=0.05, is_causal=True, impl=impl, return_diagnostics=True)
    p = softmax(q @ k.transpose(-1, -2) / 2, lower(30))
    weights = fit(p, q, k, identity, 0.05)
    assert ratio(found.negative_mass, weights.clamp(max=0).neg().sum(-1)) <= 1e-9
    if impl == "reference":
        assert ratio(found.effective_weights, weights) <= 1e-9
        assert ratio(found.weights, p) <= 1e-12
    assert set(found.solver) == {"status", "iterations", "residual", "jitter"}
    for name, value in found.solver.items():
        assert value.shape == (1, 2, 30), name
    assert found.solver["status"].dtype == torch.int32


# Mistakes ----------------------------------------------------------------------------------------------------


def message(**call: Any) -> str:
    q, k, v = draw(2, 2, 5, 4, seed=7, dtype=torch.float32)
    with pytest.raises(ArgumentError) as caught:
        local(q, k, v, **call)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_a_ridge_that_is_none() -> None:
    for ridge in (-0.1, -1, float("nan"), float("inf"), "0.1", None, True, [0.1]):
        assert "ridge" in message(ridge=ridge)
    assert "ridge >= 0" in message(ridge=-0.1)
    with regard.checks.debug():
        assert "expected params['ridge'] >= 0" in message(ridge=torch.tensor([-0.1, 0.2]).view(2, 1))
        assert "NaN or infinite" in message(ridge=torch.tensor(torch.nan))
        assert "ridge" in message(ridge=torch.zeros(5), solver="cg")  # 0 has no solution that CG finds


@pytest.mark.parametrize("shape", [(3,), (4, 1), (2, 2, 6), (2, 2, 5, 3), (2, 3, 1, 4), (1, 1, 1, 1, 1)])
def test_a_ridge_of_the_wrong_shape(shape: tuple[int, ...]) -> None:
    text = message(ridge=torch.ones(shape))
    assert "ridge" in text
    assert "which does not broadcast to" in text


def test_a_ridge_that_is_no_floating_tensor() -> None:
    assert "dtype torch.int64" in message(ridge=torch.ones(5, dtype=torch.int64))
    assert "on meta" in message(ridge=torch.ones(5, device="meta"))


def test_ridge_zero_by_solver() -> None:
    assert "the solver cg needs ridge > 0" in message(ridge=0, solver="cg")
    assert "the solver cg needs ridge > 0" in message(ridge=0, max_iter=5)
    q, k, v = draw(1, 1, 5, 4, seed=8)
    for solver in ("cholesky", "auto", "block-diagonal"):
        out, found = local(q, k, v, ridge=0, solver=solver, is_causal=True, return_diagnostics=True)
        assert bool(out.isfinite().all())
        assert int(found.solver["status"][0, 0, 0]) == int(SolveStatus.MINIMUM_NORM)


def test_solvers_and_their_numbers() -> None:
    assert "Did you mean 'cholesky'" in message(solver="colesky")
    for solver in ("cholesky", "block-diagonal", "learned", Cholesky()):
        assert "max_iter and tol belong to conjugate gradients" in message(solver=solver, max_iter=3)
    assert "max_iter and tol belong to conjugate gradients" in message(solver="cholesky", tol=1e-3)
    for max_iter in (-1, 2.5, True):
        assert "max_iter is" in message(solver="cg", max_iter=max_iter)
    for tol in (0.0, -1e-3, float("nan")):
        assert "tol is" in message(solver="cg", tol=tol)
    assert "4 coordinates do not divide into 3 blocks" in message(solver=BlockDiagonal(3))
    with pytest.raises(ArgumentError, match="blocks is -1"):
        BlockDiagonal(-1)
    assert "solver" in message(solver=3)
    assert "ridge_mode is 'both'" in message(ridge_mode="both")
    assert "an absolute ridge is weighed" in message(spec="biweight", ridge_mode="absolute")
    assert "non-negative weights that sum to one" in message(spec="linear")


@pytest.mark.parametrize("impl", ["reference", "blocked"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_probe_matters_only_in_rows_that_see_a_key(impl: str, bad: float) -> None:
    q, k, v, probe = torch.randn(4, 1, 1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    run = lambda r: regard.local_linear_attention(q, k, v, solver="learned", probe=r, attn_mask=mask, impl=impl)  # noqa: E731
    unseen, seen = probe.clone(), probe.clone()
    unseen[0, 0, 2], seen[0, 0, 1] = bad, bad
    assert torch.equal(run(unseen), run(probe))
    rows = run(seen)[0, 0].isnan().any(-1)
    assert rows.tolist() == [False, True, False, False]


def test_a_probe_and_the_solver_that_takes_it() -> None:
    probe = torch.zeros(2, 2, 5, 4)
    for solver in ("auto", "cg", "cholesky"):
        assert "a probe was given, which only solver='learned' takes" in message(solver=solver, probe=probe)
    assert "give params={'probe': r}" in message(solver="learned")
    for shape in ((2, 2, 5, 3), (2, 2, 5, 1), (2, 2, 4, 4), (4,), (5, 4)):
        assert "probe" in message(solver="learned", probe=torch.zeros(shape))
    assert "probe" in message(solver="learned", probe=0.1)
    assert "unknown parameter 'probe'" in message(solver="cg", params={"probe": probe})
    with regard.checks.debug():
        assert "NaN or infinite" in message(solver="learned", probe=probe / 0)


def test_a_spec_may_be_a_sentence_of_either_degree() -> None:
    """One of degree 1 gives its weights alone; what this call says of the model holds."""
    q, k, v = draw(1, 2, 20, 4, seed=9)
    for spec in ("biweight", "local-linear[biweight]", regard.Spec.parse("biweight*linear(ridge=7.0,solver=cholesky)")):
        found = local(q, k, v, spec=spec, ridge=0.2, is_causal=True)
        assert ratio(found, dense(q, k, v, lower(20), 0.2, "biweight")) <= 1e-9
    for solver in (Auto(), Cholesky(), ConjugateGradient(tol=1e-13)):
        assert ratio(local(q, k, v, solver=solver, is_causal=True), dense(q, k, v, lower(20), 0.1)) <= 1e-9
    zero = torch.zeros(1, 2, 20, 4, dtype=torch.float64)
    mean = softmax(q @ k.transpose(-1, -2) / 2, lower(20)) @ v
    assert ratio(local(q, k, v, solver=Learned(), probe=zero, is_causal=True), mean) <= 1e-12


def test_numbers_of_the_weights_are_given_beside_the_ridge() -> None:
    q, k, v = draw(1, 2, 20, 4, seed=10)
    wide = local(q, k, v, spec="relumax", ridge=0.2, params={"margin": 2.0}, is_causal=True)
    z = q @ k.transpose(-1, -2) / 2
    z = torch.where(lower(20), z, -torch.inf)
    w = (z - z.amax(-1, keepdim=True) + 2).clamp(min=0)
    assert ratio(wide, fit(w / w.sum(-1, keepdim=True), q, k, v, 0.2)) <= 1e-9
