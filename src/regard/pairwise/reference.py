"""impl="reference": the plain formulas of `local_regression`, with autograd."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..grammar.threshold import widest
from . import local_regression as local
from .diagnostics import Diagnostics, counts, diagnose
from .dispatch import Cost, Inputs, Problem, register_impl
from .local_regression import repeat_heads

LIMIT = 2**28
"""Most elements of a tensor that a local linear model may build."""


@register_impl("reference", priority=0)
class Reference:
    """Compute all pairs at once. Twice differentiable; its diagnostics have the weights."""

    def available(self) -> str | None:
        return None

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
        if inputs.k.shape[2] == 0:
            inputs = _with_hidden_key(inputs)
        spec, heads = inputs.spec, inputs.q.shape[1]
        q, k, v = inputs.q, repeat_heads(inputs.k, heads), repeat_heads(inputs.v, heads)
        rows = inputs.row_params()
        alpha = rows.get("alpha")
        if spec.degree == 0 and isinstance(alpha, Tensor) and alpha.requires_grad:
            # dL/dalpha is r^2 times a difference that cancels in float32
            q, k, v, rows = widest(q), widest(k), widest(v), {**rows, "alpha": widest(alpha)}
        args = (q, k, v, inputs.visible, spec.weighting, rows)
        if spec.degree == 0:
            found = local.constant(*args)
        else:
            assert inputs.x is not None
            assert inputs.y is not None
            y, absolute = repeat_heads(inputs.y, heads), spec.ridge_mode == "absolute"
            more = local.Local(inputs.x, y, inputs.ridge, absolute, spec.solver, inputs.probe)
            found = local.linear(*args, more)
        if not inputs.diagnostics:
            return found.output, None
        stats, p = found.stats.map(Tensor.detach), found.weights
        row = (*counts(p.detach()), inputs.scale, rows, inputs.visible)
        return found.output, diagnose(spec, stats, *row, weights=p, solver=found.solver, effective=found.effective)


def _with_hidden_key(inputs: Inputs) -> Inputs:
    """Add one masked key to inputs without keys, so that no other code needs this case."""
    one = lambda x: None if x is None else pad(x, (0, 0, 0, 1))  # noqa: E731
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=inputs.q.device)
    visible = replace(inputs.visible, keys=1, mask=hidden)
    return replace(inputs, k=one(inputs.k), v=one(inputs.v), y=one(inputs.y), visible=visible)
