"""Local linear attention and Parallax at degree 1: what the kernels are asked for, as torch custom operators.

Forward is three launches, and one more for rows with few keys: moments of every row's weights, the systems, the output;
backward has its own right sides solved by the same kernels. The formulas are those of `ops.local_linear` (Local Linear
Attention, arXiv 2510.01450, equations 6-8, in the covariance form; Parallax, arXiv 2605.29157, with a t that is given).

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...grammar import RowStats, Spec
from ...grammar.bandwidths.fixed import Fixed
from ...grammar.kernels import Gaussian
from ...grammar.solvers import Auto, ConjugateGradient, Learned
from ...grammar.weighting import Ratio
from ...pairwise.blocked.block_rows import refuse
from ...pairwise.diagnostics import Diagnostics, diagnose
from ...pairwise.dispatch import Cost, Inputs, Problem
from ..runtime.span import Span

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3}
"""Relative residual where the solver names none: below what the dtype leaves of the output."""
CARRIED = 2e-4
"""Below this the residuals that steps carry along are not trusted with keys in bfloat16, and true ones looked at."""
FARTHEST = 2**31 // 256
"""Numbers from one row to the next beyond which rows are copied: 256 rows of a tile then have 32-bit offsets."""
STEPS = 10
"""Of conjugate gradients, assumed where a cost is asked for."""


def supports(problem: Problem) -> str | None:
    """None where the kernels do it, else why not."""
    spec = problem.spec
    if not (type(spec.weighting) is Ratio and type(spec.kernel) is Gaussian and type(spec.bandwidth) is Fixed):
        return f"weighs local linear models by softmax (gaussian*fixed), not by {spec}"
    if spec.similarity.name != "dot":
        return f"takes the dot product as the similarity of a local linear model, not {spec.similarity.name}"
    if type(spec.solver) is Learned:
        return None
    if spec.ridge_mode != "relative":
        return f"takes a ridge relative to the total kernel weight, not an {spec.ridge_mode} one"
    return _unsolved(spec, "ridge" in problem.params, dict(problem.numbers).get("ridge", spec.ridge))


def _unsolved(spec: Spec, tensor: bool, ridge: float | None) -> str | None:
    """What is not solved here, with this ridge where it is not a `tensor`."""
    if type(spec.solver) not in (Auto, ConjugateGradient):
        return f"solves by 'auto' or 'cg', or takes t from the caller ('learned'); this is {spec.solver.name!r}"
    if getattr(spec.solver, "precondition", False):
        return "does not precondition"
    if ridge == 0 and not tensor:
        return "needs a ridge above 0"
    return None


def cost(problem: Problem) -> Cost:
    """Operations of the forward pass, and its memory."""
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    share = 2 if problem.causal and problem.queries == problem.keys else 1
    terms = 2 if problem.dtype == torch.bfloat16 else 1
    steps = 0 if problem.spec.solver.name == "learned" else STEPS * (2 + terms)
    products = problem.dim * (2 * (1 + terms) + steps) + 2 * problem.value_dim
    rows = problem.batch * problem.heads * problem.queries
    return Cost(2 * pairs * products // share, 4 * rows * (9 * problem.dim + problem.value_dim + 14))


class _Numbers(NamedTuple):
    """What of a call is no tensor: the factor and the ridge where these are numbers, how systems are solved (`Rule` of
    `local_linear_solve`), whether t is given, and whether weights are counted."""

    factor: float
    ridge: float
    tol: float
    limit: int
    direct: bool
    verify: bool
    given: bool
    counted: bool


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Output [B, H, Tq, Dv] in the dtype of the values, and diagnostics where they are asked for."""
    assert inputs.x is not None
    assert inputs.y is not None
    x, y, v = (_rows_together(z) for z in (inputs.x, inputs.y, inputs.v))
    span = Span.of(inputs.visible, x.device)
    factor, scale = _tensor_or_number(inputs.factor)
    given = type(inputs.spec.solver) is Learned
    ridge, number = (None, 1.0) if given else _tensor_or_number(inputs.ridge)
    probe = None if inputs.probe is None else _rows_together(inputs.probe.to(torch.float32))
    leaves = (x, y, v, factor, ridge, probe)
    numbers = _Numbers(scale, number, *_rule(inputs.spec, x), given, inputs.diagnostics)
    out, *kept = forward(*leaves, *span, *numbers)
    return out, _diagnose(inputs, kept) if inputs.diagnostics else None


def _rule(spec: Spec, x: Tensor) -> tuple[float, int, bool, bool]:
    """`Rule` of `local_linear_solve` of a sentence."""
    tol, limit = getattr(spec.solver, "tol", None), getattr(spec.solver, "max_iter", None)
    tol = TOLERANCE[x.dtype] if tol is None else tol
    verify = x.dtype == torch.float32 or tol < CARRIED
    return tol, 4 * x.shape[-1] if limit is None else limit, type(spec.solver) is Auto, verify


def _diagnose(inputs: Inputs, kept: list[Tensor]) -> Diagnostics:
    _, lse, _, _, statistics, status, counts = kept
    top, support, ess, negative = counts.unbind(-1)
    empty = (lse == math.inf)[..., None]
    column = lambda z: z[..., None]  # noqa: E731
    blank = torch.zeros_like(column(top))
    stats = RowStats(
        top=torch.where(empty, 0, column(top)),
        theta=blank - math.inf,
        reach=blank + 1,
        mass=torch.where(empty, 0, ((column(lse) * math.log(2) - column(top)).exp())),
        empty=empty,
        fallback=torch.zeros_like(empty),
        status=blank.int(),
        index=None,
    )
    steps, residual = statistics.unbind(-1)
    solver = {"status": status, "iterations": steps, "residual": residual, "jitter": torch.zeros_like(residual)}
    seen = (column(support), column(ess), inputs.scale, inputs.row_params(), inputs.visible)
    return diagnose(inputs.spec, stats, *seen, solver=solver, negative=negative)


def _rows_together(x: Tensor) -> Tensor:
    """x with its features side by side, and rows so near each other that offsets within a tile are short."""
    together = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if together and x.stride(-2) < FARTHEST else x.contiguous()


def _tensor_or_number(x: float | Tensor) -> tuple[Tensor | None, float]:
    """Numbers of rows, float32 and contiguous, or None and the number of all."""
    return (x.to(torch.float32).contiguous(), 1.0) if isinstance(x, Tensor) else (None, float(x))


@torch.library.custom_op("regard::triton_local_linear_forward", mutates_args=())
def forward(
    x: Tensor,
    y: Tensor,
    v: Tensor,
    factor: Tensor | None,
    ridge: Tensor | None,
    probe: Tensor | None,
    low: Tensor,
    high: Tensor,
    first: Tensor,
    last: Tensor,
    mask: Tensor | None,
    scale: float,
    number: float,
    tol: float,
    limit: int,
    direct: bool,
    verify: bool,
    given: bool,
    counted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [B, H, Tq, Dv], t [B, H, Tq, D], lse [B, H, Tq], means of keys [B, H, Tq, D] and of values [B, H, Tq, Dv],
    steps and residual [B, H, Tq, 2], `SolveStatus` [B, H, Tq], counts of weights [B, H, Tq, 4]).

    `factor` [B, H, Tq] and `ridge` [B, H, Tq, 1 or D] stand in place of `scale` and `number`; `given`: t = -probe.
    """
    from .forward import moments, output
    from .solve import Rule, solve

    span, own = Span(low, high, first, last, mask), scale if factor is None else factor
    found = moments(x, y, v, own, span, not given)
    lse, mean, vmean, right = found
    if given:
        assert probe is not None
        t = probe
        statistics, status = lse.new_zeros(*lse.shape, 2), torch.zeros_like(lse, dtype=torch.int32)
    else:
        rule = Rule(tol, limit, direct, verify)
        t, statistics, status = solve(right, x, y, own, number if ridge is None else ridge, lse, mean, span, rule)
    out, counts = output(t, x, y, v, own, found, span, negated=given, counted=counted)
    return out, lse.new_empty(0) if given else t, lse, mean, vmean, statistics, status, counts


@forward.register_fake
def _(x, y, v, factor, ridge, probe, low, high, first, last, mask, *numbers):
    own = _Numbers(*numbers)
    rows, features, values = x.shape[:3], x.shape[-1], v.shape[-1]
    new = lambda *shape: x.new_empty(shape, dtype=torch.float32)  # noqa: E731
    return (
        v.new_empty(*rows, values),
        new(0) if own.given else new(*rows, features),
        new(*rows),
        new(*rows, features),
        new(*rows, values),
        new(*rows, 2),
        x.new_empty(rows, dtype=torch.int32),
        new(*rows, 4) if own.counted else new(0),
    )


@torch.library.custom_op("regard::triton_local_linear_backward", mutates_args=())
def backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    factor: Tensor | None,
    ridge: Tensor | None,
    probe: Tensor | None,
    low: Tensor,
    high: Tensor,
    first: Tensor,
    last: Tensor,
    mask: Tensor | None,
    t: Tensor,
    lse: Tensor,
    mean: Tensor,
    vmean: Tensor,
    scale: float,
    number: float,
    tol: float,
    limit: int,
    direct: bool,
    verify: bool,
    given: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, y, v, and of factor, ridge and probe where these were tensors."""
    from .backward import Kept
    from .backward import backward as differentiate
    from .solve import Rule

    if given:
        assert probe is not None
        t = -probe.contiguous()
    own = scale if factor is None else factor
    penalty = None if given else number if ridge is None else ridge
    rule = None if given else Rule(tol, limit, direct, verify)
    span, kept = Span(low, high, first, last, mask), Kept(t, lse, mean, vmean)
    dx, dy, dv, *rest = differentiate(grad, x, y, v, own, penalty, span, kept, rule)
    return dx, dy, dv, *(lse.new_empty(0) if z is None else z for z in rest)


@backward.register_fake
def _(grad, x, y, v, factor, ridge, probe, *rest):
    new = lambda z: x.new_empty((0,) if z is None else z.shape, dtype=torch.float32)  # noqa: E731
    same = [z.new_empty(z.shape) for z in (x, y, v)]
    return *same, new(factor), new(ridge), new(probe)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:11], *output[1:5])
    ctx.numbers = inputs[11:18]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 19
    saved = ctx.saved_tensors
    *found, dfactor, dridge, dprobe = backward(grad, *saved, *ctx.numbers)
    optional = [None if z is None else dz for z, dz in zip(saved[3:6], (dfactor, dridge, dprobe), strict=True)]
    return *found, *optional, *(None,) * 13


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse)
