"""impl="reference": local regression at the query in plain PyTorch, with autograd, against which fast forms are tested.

Degree 0 (Nadaraya-Watson; softmax attention is its Gaussian case):

    o_i = sum_j p_ij v_j

Degree 1 (Local Linear Attention, equations 6-8) in the equivalent covariance form, which does not divide by a number
that can be 0: with C_i = sum_j p_ij (k_j - kbar_i)(k_j - kbar_i)^T and kbar_i = sum_j p_ij k_j,

    t_i = (C_i + ridge_i)^-1 (q_i - kbar_i),   e_ij = (k_j - kbar_i) . t_i,   o_i = sum_j p_ij (1 + e_ij) v_j

(in the paper's terms rho = -t delta / omega). The ridge is relative to the total kernel weight; an absolute one, as in
equation 7, is divided by that weight first.

Legend: q [B, H, Tq, F] and k [B, H, Tk, F] features whose dot product is the score; v [B, H, Tk, Dv]; x [B, H, Tq, D]
and y [B, H, Tk, D] the coordinates in which degree 1 is linear; p [B, H, Tq, Tk]; ridge a number, [B, H, Tq, 1] or, one
for every coordinate, [B, H, Tq, D].
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..grammar import Dense, RowStats, Solved
from ..grammar.systems import lost, power_of_two_above, relative, rounded, unreadable
from ..grammar.threshold import widest
from .diagnostics import Diagnostics, counts, diagnose
from .dispatch import Cost, Implementation, Inputs, Problem, register_impl
from .layout import repeat_heads

LIMIT = 2**28
"""Maximum number of elements of a tensor that a local linear model may build."""


@register_impl("reference", priority=0)
class Reference(Implementation):
    """Compute all pairs at once. Twice differentiable; its diagnostics have the weights."""

    def supports(self, problem: Problem) -> str | None:
        if problem.spec.degree:
            size = problem.batch * problem.heads * problem.queries * problem.keys * problem.dim
            if size > LIMIT:
                return (
                    f"builds a [B, H, Tq, Tk, D] tensor for the local linear model, of {size:,} numbers here (limit "
                    f"{LIMIT:,}); give fewer queries, heads or sequences at a time"
                )
            if problem.transformed and not problem.spec.solver.exact:
                return "iterates until residuals are small, which transforms do not support; use solver=cholesky"
        return None

    def cost(self, problem: Problem) -> Cost:
        pairs = problem.batch * problem.heads * problem.queries * problem.keys
        width = problem.dim if problem.spec.degree else 1
        return Cost(2 * pairs * (problem.dim + problem.value_dim) * width, 12 * pairs * width)

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        keys = inputs.k.shape[2]
        if keys == 0:
            inputs = _with_hidden_key(inputs)
        spec, heads, visible = inputs.spec, inputs.q.shape[1], inputs.visible
        q, k, v = inputs.q, repeat_heads(inputs.k, heads), repeat_heads(inputs.v, heads)
        alpha = inputs.params.get("alpha")
        if spec.degree == 0 and isinstance(alpha, Tensor) and alpha.requires_grad:
            # dL/dalpha is r^2 times a difference that cancels in float32
            q, k, v = widest(q), widest(k), widest(v)
            inputs = replace(inputs, params={**inputs.params, "alpha": widest(alpha)})
        z = q @ k.transpose(-1, -2)
        seen = visible.block(0, visible.queries, 0, visible.keys, z.device)
        z = z if seen is None else torch.where(seen, z, -torch.inf)  # after the product: masked content has no effect
        stats, p = spec.weighting.fit_weights(z, inputs.row_params())
        signed, solver = (p, None) if spec.degree == 0 else _linear(inputs, p, stats, seen)
        if not inputs.diagnostics:
            return signed @ v, None
        shown = (p, signed if spec.degree else None)
        weights, effective = shown if keys else (None if x is None else x[..., :0] for x in shown)
        stats = replace(stats, theta=stats.theta.detach())
        report = diagnose(inputs, stats, *counts(p.detach()), weights=weights, solver=solver, effective=effective)
        return signed @ v, report


def _linear(inputs: Inputs, p: Tensor, stats: RowStats, seen: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weights p (1 + e) of the values at degree 1, which can be negative, and statistics of the solver.
    Rows that float32 would round too much are computed in float64, and all if that cannot be read."""
    spec, ridge, y = inputs.spec, inputs.ridge, repeat_heads(inputs.y, inputs.q.shape[1])
    if spec.ridge_mode == "absolute":
        ridge = relative(ridge, spec.weighting.log_mass(stats, inputs.row_params()))  # type: ignore[attr-defined]
    given: Any = inputs.x, y, ridge, inputs.probe

    def exact() -> tuple[Tensor, dict[str, Tensor]]:
        weights = widest(p)
        total = weights.sum(-1, keepdim=True)  # not quite 1, which would move the mean out of the span of the keys
        weights = weights / torch.where(total > 0, total, 1)
        wide, found = _fitted(spec.solver, seen, weights, *(widest(z) if isinstance(z, Tensor) else z for z in given))
        return wide.to(p.dtype), {n: z if n == "status" else z.to(p.dtype) for n, z in found.items()}

    if unreadable(p):
        return exact()
    signed, solver = _fitted(spec.solver, seen, p, *given)
    again = lost(solver["status"])
    if widest(p).dtype == p.dtype or inputs.probe is not None or not bool(again.any()):
        return signed, solver
    # Once more with zeros in these rows, which gives t = 0: gradients that are not used could be NaN.
    x, weights = (z.masked_fill(again[..., None], 0) for z in (inputs.x, p))
    signed, solver = _fitted(spec.solver, seen, weights, x, *given[1:])
    wide, found = exact()
    return torch.where(again[..., None], wide, signed), {n: torch.where(again, found[n], z) for n, z in solver.items()}


def _fitted(
    solver: Any, seen: Tensor | None, p: Tensor, x: Tensor, y: Tensor, ridge: float | Tensor, probe: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of `_linear` for a ridge relative to the kernel weight, in the precision of p."""
    mean = p @ y
    away = y[..., None, :, :] - mean[..., :, None, :]  # [B, H, Tq, Tk, D]
    if seen is not None:  # a large masked key can have infinite derivatives, and infinity times a weight of 0 is NaN
        away = torch.where(seen[..., None], away, 0)
    spread = (p[..., None] * away).transpose(-1, -2) @ away
    solved = solve(solver, spread, ridge, x - mean, probe)
    slope = (away @ solved.value[..., None])[..., 0]
    squares = (p @ y.square().sum(-1, keepdim=True)).detach()[..., 0]  # the mean is rounded in proportion to |y|
    status = solved.status if probe is not None else rounded(solved.status, solved.value.detach(), squares)
    return p * (1 + slope), {"status": status, **solved.statistics}


def _with_hidden_key(inputs: Inputs) -> Inputs:
    """Add one masked key to inputs without keys, so that no other code needs this case."""
    one = lambda x: None if x is None else pad(x, (0, 0, 0, 1))  # noqa: E731
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=inputs.q.device)
    visible = replace(inputs.visible, keys=1, mask=hidden)
    return replace(inputs, k=one(inputs.k), v=one(inputs.v), y=one(inputs.y), visible=visible)


def solve(solver: Any, spread: Tensor, ridge: float | Tensor, right: Tensor, probe: Tensor | None = None) -> Solved:
    """Solve (spread + ridge) t = right. Gradients are those of the exact solution for every solver."""
    eye = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
    matrix = spread + (ridge[..., None] if isinstance(ridge, Tensor) else ridge) * eye
    if solver.exact:
        solved: Solved = solver.solve(Dense(matrix, ridge, probe), right)
        return solved
    with torch.no_grad():
        size = power_of_two_above(right)
        solved = solver.solve(Dense(matrix, ridge, probe), right / size)
        value = solved.value * size
    return solved._replace(value=_Implicit.apply(matrix, right, solver, value))


class _Implicit(torch.autograd.Function):
    """The solution of A t = b from a solver, with dL/db = A^-1 g and dL/dA = -(A^-1 g) t^T."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor, solver: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, right, value)
        ctx.solver = solver
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        matrix, right, value = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: the solution as a function of A and b
            value = _Implicit.apply(matrix, right, ctx.solver, value)
        with torch.no_grad():
            size = power_of_two_above(grad)
            solution = ctx.solver.solve(Dense(matrix), grad / size).value * size
        back = _Implicit.apply(matrix, grad, ctx.solver, solution) if torch.is_grad_enabled() else solution
        return -back[..., :, None] * value[..., None, :], back, None, None
