"""Local linear attention and Parallax at degree 1 as torch custom operators.

The forward pass is three launches, and one more for rows with few keys: moments of every row's weights, the systems,
the output. The backward pass solves its own right sides with the same kernels. Formulas: local linear attention
(arXiv 2510.01450, equations 6-8, in covariance form); Parallax (arXiv 2605.29157), with a given t.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ...grammar import RowStats
from ...grammar.bandwidths.fixed import Fixed
from ...grammar.kernels import Gaussian
from ...grammar.solvers import Auto, ConjugateGradient, Learned
from ...grammar.weighting import Ratio
from ...one_node import differentiable
from ...pairwise.diagnostics import Diagnostics, diagnose
from ...pairwise.dispatch import Cost, Inputs, Problem
from ..runtime.call import Call, Numbers
from ..runtime.operators import FARTHEST, empty_gradients, later, operator, rows_together, tensor_or_number
from ..runtime.span import SEEN, Span

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Relative residual if the solver has none: below the rounding error of the output."""
CARRIED = 2e-4
"""Below this tolerance true residuals are computed for bfloat16 keys: those that steps carry along are too inexact."""
STEPS = 10  # assumed steps of conjugate gradients, for cost estimates


def supports(problem: Problem) -> str | None:
    """Return None if the kernels support the call, else the reason."""
    spec = problem.spec
    if not (type(spec.weighting) is Ratio and type(spec.kernel) is Gaussian and type(spec.bandwidth) is Fixed):
        return f"weighs local linear models by softmax (gaussian*fixed), not by {spec}"
    if spec.similarity.name != "dot":
        return f"takes the dot product as the similarity of a local linear model, not {spec.similarity.name}"
    if type(spec.solver) is Learned:
        return None
    if spec.ridge_mode != "relative":
        return f"takes a ridge relative to the total kernel weight, not an {spec.ridge_mode} one"
    if type(spec.solver) not in (Auto, ConjugateGradient):
        return f"solves by 'auto' or 'cg', or takes t from the caller ('learned'); this is {spec.solver.name!r}"
    if getattr(spec.solver, "precondition", False):
        return "does not precondition"
    if dict(problem.numbers).get("ridge", spec.ridge) == 0 and "ridge" not in problem.params:
        return "needs a ridge above 0"
    return None


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass and its memory."""
    rows = problem.batch * problem.heads * problem.queries
    pairs, share = rows * problem.keys, 2 if problem.causal and problem.queries == problem.keys else 1
    terms = 2 if problem.dtype == torch.bfloat16 else 1
    steps = 0 if problem.spec.solver.name == "learned" else STEPS * (2 + terms)
    products = problem.dim * (2 * (1 + terms) + steps) + 2 * problem.value_dim
    return Cost(2 * pairs * products // share, 4 * rows * (9 * problem.dim + problem.value_dim + 14))


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values, and diagnostics if asked for."""
    assert inputs.x is not None
    assert inputs.y is not None
    x, y, v = (rows_together(z, FARTHEST) for z in (inputs.x, inputs.y, inputs.v))
    span = Span.of(inputs.visible, x)
    factor, scale = tensor_or_number(inputs.factor)
    given = type(inputs.spec.solver) is Learned
    ridge, number = (None, 1.0) if given else tensor_or_number(inputs.ridge)
    probe = rows_together(inputs.probe.to(torch.float32), FARTHEST) if given and inputs.probe is not None else None
    tol, limit = getattr(inputs.spec.solver, "tol", None), getattr(inputs.spec.solver, "max_iter", None)
    tol, limit = TOLERANCE[x.dtype] if tol is None else tol, 4 * x.shape[-1] if limit is None else limit
    direct, verify = type(inputs.spec.solver) is Auto, x.dtype == torch.float32 or tol < CARRIED
    numbers = Numbers(scale, number, tol, limit, direct, verify, given, inputs.diagnostics)
    out, *kept = forward(x, y, v, factor, ridge, probe, *span, *numbers)
    return out, _diagnose(inputs, kept) if inputs.diagnostics else None


def _diagnose(inputs: Inputs, kept: list[Tensor]) -> Diagnostics:
    _, lse, _, _, statistics, status, counts = kept
    top, support, ess, negative = counts.split(1, -1)
    lse, blank = lse[..., None], torch.zeros_like(top)
    empty = lse == math.inf
    mass = torch.where(empty, 0, (lse * math.log(2) - top).exp())
    given = {"top": torch.where(empty, 0, top), "theta": blank - math.inf, "reach": blank + 1, "mass": mass}
    stats = RowStats(**given, empty=empty, fallback=torch.zeros_like(empty), status=blank.int(), index=None)
    steps, residual = statistics.unbind(-1)
    solver = {"status": status, "iterations": steps, "residual": residual, "jitter": torch.zeros_like(residual)}
    return diagnose(inputs, stats, support, ess, solver=solver, negative=negative[..., 0])


def _forward(
    x: Tensor, y: Tensor, v: Tensor, factor: Tensor | None, ridge: Tensor | None, probe: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Return everything that a call computes: out [B, H, Tq, Dv]; t [B, H, Tq, D]; lse [B, H, Tq]; means of keys [B, H,
    Tq, D] and of values [B, H, Tq, Dv]; steps and residual [B, H, Tq, 2]; `SolveStatus` [B, H, Tq]; counts of weights
    [B, H, Tq, 4]. `factor` [B, H, Tq] and `ridge` [B, H, Tq, 1 or D] replace numbers; with `given`, t = -probe."""
    from .forward import moments, output
    from .solve import solve

    numbers = Numbers(*rest[5:])
    scale = numbers.factor if factor is None else factor
    call = Call(x, y, v, scale, Span(*rest[:5]), fine=y.dtype == torch.bfloat16)
    lse, mean, vmean, right = computed = moments(call, not numbers.given)
    if numbers.given:
        assert probe is not None
        t = probe
        statistics, status = lse.new_zeros(*lse.shape, 2), torch.zeros_like(lse, dtype=torch.int32)
    else:
        penalty = numbers.ridge if ridge is None else ridge
        t, statistics, status = solve(right, call, penalty, lse, mean, numbers)
    out, counts = output(t, call, computed, not numbers.given, numbers.counted)
    return out, lse.new_empty(0) if numbers.given else t, lse, mean, vmean, statistics, status, counts


_NUMBERS = "float scale, float number, float tol, SymInt limit, bool direct, bool verify, bool given"


def _fake(x, y, v, *rest):
    numbers, (*rows, dim), values = Numbers(*rest[8:]), x.shape, v.shape[-1]
    slopes, counts = (0,) if numbers.given else (*rows, dim), (*rows, 4) if numbers.counted else (0,)
    shapes = slopes, rows, (*rows, dim), (*rows, values), (*rows, 2), counts
    *kept, counted = (x.new_empty(shape, dtype=torch.float32) for shape in shapes)
    return v.new_empty(*rows, values), *kept, x.new_empty(rows, dtype=torch.int32), counted


forward = operator(
    "local_linear_forward", _forward,
    f"(Tensor x, Tensor y, Tensor v, Tensor? factor, Tensor? ridge, Tensor? probe, {SEEN}, {_NUMBERS}, "
    "bool counted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)  # fmt: skip


backward = operator(
    "local_linear_backward", later(__package__),
    "(Tensor grad, Tensor x, Tensor y, Tensor v, Tensor? factor, Tensor? ridge, Tensor? probe, "
    f"{SEEN}, Tensor t, Tensor lse, Tensor mean, Tensor vmean, {_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda _, *given: empty_gradients(given[:3], given[3:6]),
)  # fmt: skip
differentiable(forward, backward, backward, lambda inputs, output: ((*inputs[:11], *output[1:5]), inputs[11:18]))
