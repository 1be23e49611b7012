"""impl="blocked": any weighting in Theta(n d) memory on any device, with its own backward pass.

Scores, weights and their derivatives exist for one block of queries at a time.
"""

from typing import ClassVar

from torch import Tensor

from ..diagnostics import Diagnostics, diagnose
from ..dispatch import Cost, Inputs, Problem, register_impl
from . import operators
from .block_rows import FLAGS, FLOATS, at_once, described, given_of, unpack, work_of
from .blocks import ELEMENTS
from .local_linear import SLOPE, STATISTICS


@register_impl("blocked", priority=10)
class Blocked:
    """Compute blocks of queries in Theta(n d) memory; takes every kernel, thresholding rule and local model."""

    name: ClassVar[str] = "blocked"

    def available(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if problem.transformed:
            return "is differentiable once, backward: no forward mode, no torch.func transforms"
        if problem.spec.ridge_mode == "absolute" and {"r", "alpha"} & set(problem.params):
            return "does not differentiate an absolute ridge by a learned power of the kernel"
        return None

    def cost(self, problem: Problem) -> Cost:
        pairs = problem.batch * problem.heads * problem.queries * problem.keys
        share = 2 if problem.causal and problem.queries == problem.keys else 1
        rows = problem.batch * problem.heads * problem.queries
        flops = pairs * (2 * (problem.dim + problem.value_dim) + _solving(problem)) // share
        return Cost(flops, 4 * (rows * (problem.value_dim + 11) + 8 * max(ELEMENTS, 16 * problem.keys)))

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        ridge = inputs.ridge if isinstance(inputs.ridge, Tensor) else None
        tensors = (inputs.q, inputs.k, inputs.v, inputs.x, inputs.y, ridge, inputs.probe, given_of(inputs))
        if at_once(inputs):
            out, *kept, _ = operators.run(work_of(self.name, inputs), *tensors)
        else:
            out, *kept, _ = operators.forward(*tensors, *described(self.name, inputs))
        if not inputs.diagnostics:
            return out, None
        (floats, flags, _), solver, negative = kept, None, None
        if inputs.spec.degree:
            *columns, negative = floats[..., FLOATS:SLOPE].unbind(-1)
            solver = {"status": flags[..., FLAGS], **dict(zip(STATISTICS, columns, strict=True))}
        seen = (floats[..., 4:5], floats[..., 5:6], inputs.scale, inputs.row_params(), inputs.visible)
        return out, diagnose(inputs.spec, unpack(*kept), *seen, solver=solver, negative=negative)


STEPS = 10
"""Assumed number of steps of conjugate gradients."""


def _solving(problem: Problem) -> int:
    """Return the operations per pair of the local linear model."""
    if not problem.spec.degree:
        return 0
    solver, dim = problem.spec.solver.name, problem.dim
    direct = solver == "cholesky" or (solver == "auto" and dim <= problem.spec.solver.SMALL)
    if solver == "block-diagonal":
        return 4 * dim + 2 * dim * dim // (problem.spec.solver.blocks or dim)
    return 4 * dim + (dim * (dim + 1) if direct else 0 if solver == "learned" else 4 * dim * STEPS)
