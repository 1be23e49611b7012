"""Calls of local linear attention: from a cache, compiled, with NaN where nobody looks."""

from typing import Any

import pytest
import torch
from contracts.oracle import dense
from operators import check_operators
from regression import draw, fit, lower, ratio, softmax
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import regard
from regard.grammar.solvers import Auto, Cholesky, ConjugateGradient, Learned

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
    check_operators(lambda: local(q, k, v, impl="blocked", is_causal=True, **how), "blocked")


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


# What is given -----------------------------------------------------------------------------------------------


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
