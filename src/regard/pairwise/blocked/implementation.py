"""impl="blocked": any weighting in Theta(n d) memory on any device, with its own backward pass.

Scores, weights and their derivatives exist for one block of queries at a time. The two passes are torch custom
operators, one node of a compiled graph each. The forward pass keeps the statistics of the rows, from which the backward
pass computes the weights again without a second search for thresholds.

Legend: as in `block_rows`; x, y coordinates of a local linear model, None at degree 0.
"""

from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ...one_node import differentiable, operator
from ...precision import PLAIN, full_precision
from ..diagnostics import Diagnostics, diagnose
from ..dispatch import Cost, Implementation, Inputs, Problem, register_impl
from ..visibility import Visibility
from . import local_linear
from .block_rows import FLAGS, FLOATS, SOLVERS, Rows, flat, rows_of, unpack
from .blocks import ELEMENTS, Work, new_marks
from .local_linear import SLOPE, STATISTICS, Tensors, flattened

TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? x, Tensor? y, Tensor? ridge, Tensor? probe, Tensor? given"
COUNT = 8
ENCODED = (
    "Tensor? mask, Tensor? moved, Tensor? runs, float ridge_number, bool counted, str solver, str spec, str[] names, "
    "float[] numbers, bool causal, bool strict, SymInt? window, SymInt offset"
)
"""The result of `encoded` in the schema of an operator. The spec is JSON, so that a stored graph is self-contained;
`names` are those of the row parameters, then those of `numbers`."""


def work_of(solver: str, inputs: Inputs) -> tuple[Work, Tensor | None]:
    """Return the call without its tensors, and the row parameters [P, B, H, Tq] that are tensors, or None."""
    q, params = inputs.q, inputs.params
    given = {n: p.to(q.dtype).expand(q.shape[:3]) for n, p in params.items() if isinstance(p, Tensor)}
    numbers: Any = {n: p for n, p in params.items() if n not in given}
    ridge = 0.0 if isinstance(inputs.ridge, Tensor) else inputs.ridge
    rows, heads = SOLVERS[solver](inputs.spec), _heads(q, inputs.k)
    work = Work(inputs.spec, rows, list(given), numbers, inputs.visible, *heads, ridge, inputs.diagnostics)
    return work, torch.stack(list(given.values())) if given else None


def encoded(solver: str, work: Work) -> tuple[Any, ...]:
    """Return the call as arguments of an operator."""
    visible = work.visible
    offset, moved = (0, visible.offset) if isinstance(visible.offset, Tensor) else (visible.offset, None)
    return (
        visible.mask, moved, visible.runs, work.ridge, work.counted, solver, work.spec.to_json(),
        [*work.names, *work.numbers], [*work.numbers.values()], visible.causal, visible.strict, visible.window, offset,
    )  # fmt: skip


def decoded(
    q: Tensor, k: Tensor, mask: Any, moved: Any, runs: Any, ridge: float, counted: bool, solver: str, spec: str,
    names: list[str], numbers: list[float], causal: bool, strict: bool, window: int | None, offset: int,
) -> Work:  # fmt: skip
    """Return the call from the result of `encoded`, for queries q and keys k."""
    at = offset if moved is None else moved
    visible = Visibility(q.shape[2], k.shape[2], causal, strict, window, at, mask, runs)
    rows, count = rows_of(solver, spec), len(names) - len(numbers)
    named = dict(zip(names[count:], numbers, strict=True))
    return Work(rows.spec, rows, list(names[:count]), named, visible, *_heads(q, k), ridge, counted)


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Return H, Hkv and N."""
    return q.shape[1], k.shape[1], q.shape[0] * q.shape[1]


Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()  # weightings check whether gradients are enabled
def run(work: Work, *given: Any) -> Outputs:
    """Return (output [B, H, Tq, Dv], floats [B, H, Tq, FLOATS], flags int32 [B, H, Tq, FLAGS], index int64
    [B, H, Tq, n], marks bool [B, H, ceil(Tq / ROWS), ceil(Tk / COLUMNS)]). At degree 1 floats and flags also hold what
    `local_linear.effective` writes, and there are no marks."""
    rows, outputs, tensors, failed = work.rows, _outputs(work.rows, *given[:4]), flattened(work.ridge, *given), False
    out, floats, flags, index, active = map(flat, outputs)
    statistics = (floats[..., :FLOATS], flags[..., :FLAGS], index) if work.spec.degree else (floats, flags, index)
    flags[..., 0] = 1  # rows of blocks that see no key are skipped
    for block in work.blocks():
        marks, z = active.new_zeros(block.heads, active.shape[2]), block.scores(tensors.q, tensors.k)
        p, kept = rows.weigh(block, z, block.params(tensors.given), work.counted, marks)
        for whole, part in zip(statistics, kept, strict=True):
            block.rows(whole).copy_(part)
        if work.spec.degree:
            p, unsolved = local_linear.effective(block, tensors, p, kept, floats, flags)
            failed = failed or unsolved
        elif rows.marks:
            block.marks(active).logical_or_(marks)
            block.add_weighted(block.rows(out), p, block.columns(tensors.v), marks)
            continue
        block.rows(out).copy_(p @ block.columns(tensors.v))
    if failed:
        local_linear.warn("forward", work.spec)
    return outputs


def _outputs(rows: Rows, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> Outputs:
    shape, linear = q.shape[:3], x is not None
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(*shape, SLOPE + x.shape[-1] if x is not None else FLOATS),
        q.new_zeros(*shape, FLAGS + 2 * linear, dtype=torch.int32),
        q.new_zeros(*shape, rows.indices, dtype=torch.int64),
        new_marks(q, k) if rows.marks and not linear else q.new_zeros(*shape[:2], 0, 0, dtype=torch.bool),
    )


@operator("blocked_forward", f"({TENSORS}, {ENCODED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def forward(*arguments: Any) -> Outputs:
    """Call `run`."""
    return run(decoded(*arguments[:2], *arguments[COUNT:]), *arguments[:COUNT])


@forward.register_fake
def _(q, k, v, x, y, ridge, probe, given, mask, moved, runs, number, counted, solver, spec, *_):  # type: ignore[no-untyped-def]
    return _outputs(rows_of(solver, spec), q, k, v, x)


@operator(
    "blocked_backward",
    f"(Tensor grad, {TENSORS}, Tensor floats, Tensor flags, Tensor index, Tensor active, {ENCODED}) "
    f"-> ({', '.join(['Tensor'] * COUNT)})",
)
def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, x, y, ridge, probe and given, empty for those that are None."""
    (q, k, v, x, y, *rest), statistics = arguments[:COUNT], arguments[COUNT : COUNT + 4]
    work = decoded(q, k, *arguments[COUNT + 4 :])
    new = lambda z: None if z is None else z.new_zeros(z.shape)  # noqa: E731
    transposed = [None if z is None else z.new_zeros(z.transpose(-1, -2).shape) for z in (k, v, y)]
    dk, dv, dy = transposed
    grads: list[Any] = [new(q), dk, dv, new(x), dy, *map(new, rest)]
    with torch.no_grad(), full_precision(grad.device.type):  # backward() may run under autocast
        tensors, d = flattened(work.ridge, *arguments[:COUNT]), flattened(0.0, *grads)
        _backward_blocks(work, tensors, d, flat(grad.contiguous()), *map(flat, statistics))
    grads[1], grads[2], grads[4] = (None if z is None else z.transpose(-1, -2).contiguous() for z in transposed)
    return tuple(q.new_zeros(0) if z is None else z for z in grads)


def _backward_blocks(
    work: Work, tensors: Tensors, d: Tensors, grad: Tensor, floats: Tensor, flags: Tensor, index: Tensor,
    active: Tensor,
) -> None:  # fmt: skip
    rows, linear, failed = work.rows, work.spec.degree == 1, False
    kept = floats[..., :FLOATS], flags[..., :FLAGS], index
    for block in work.blocks():
        if rows.marks and not linear and not rows.exact(block.params(tensors.given)):
            block = block.narrowed(block.marks(active))
        kept_rows = tuple(block.rows(x) for x in kept)
        g, z, params = block.rows(grad), block.scores(tensors.q, tensors.k), block.params(tensors.given)
        share = p = None
        if linear:
            p, slope = rows.again(block, z, kept_rows, params), block.rows(floats)[..., SLOPE:]
            again = block.rows(flags)[..., FLAGS + 1 :] > 0
            dp, share, unsolved = local_linear.weight_gradient(block, tensors, d, p, kept_rows, g, slope, again)
            failed = failed or unsolved
        else:
            dp = g @ block.columns(tensors.v).transpose(-1, -2)
        p, dz, dparams = rows.derive(block, z, dp, (*kept_rows[:2], block.placed(kept_rows[2])), params, share, p)
        del z, dp
        if not linear:
            block.add_columns(d.v, g, p)
        for row, part in zip(() if d.given is None else d.given, dparams, strict=True):
            block.rows(row).copy_(part)
        block.rows(d.q).copy_(dz @ block.columns(tensors.k))
        block.add_columns(d.k, block.rows(tensors.q), dz)
    if failed:
        local_linear.warn("backward", work.spec)


@backward.register_fake
def _(grad, *arguments):  # type: ignore[no-untyped-def]
    q = arguments[0]
    return tuple(q.new_empty(0) if z is None else z.new_empty(z.shape) for z in arguments[:COUNT])


differentiable(
    forward, backward, backward,
    lambda inputs, output: ((*inputs[:COUNT], *output[1:], *inputs[COUNT : COUNT + 3]), inputs[COUNT + 3 :]),
)  # fmt: skip


def at_once(inputs: Inputs) -> bool:
    """Return whether the operator's function can be called directly, since no graph is recorded."""
    recorded = inputs.problem.gradient or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or inputs.q.is_meta or torch._C._len_torch_dispatch_stack():
        return False
    given = (inputs.q, inputs.k, inputs.v, inputs.visible.mask, inputs.ridge, inputs.probe, *inputs.params.values())
    return all(type(x) in PLAIN for x in given if isinstance(x, Tensor))


@register_impl("blocked", priority=10)
class Blocked(Implementation):
    """Compute blocks of queries in Theta(n d) memory; takes every kernel, thresholding rule and local model."""

    name: ClassVar[str] = "blocked"

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
        work, given = work_of(self.name, inputs)
        tensors = (inputs.q, inputs.k, inputs.v, inputs.x, inputs.y, ridge, inputs.probe, given)
        outputs = run(work, *tensors) if at_once(inputs) else forward(*tensors, *encoded(self.name, work))
        out, *kept, _ = outputs
        if not inputs.diagnostics:
            return out, None
        (floats, flags, _), solver, negative = kept, None, None
        if inputs.spec.degree:
            *columns, negative = floats[..., FLOATS:SLOPE].unbind(-1)
            solver = {"status": flags[..., FLAGS], **dict(zip(STATISTICS, columns, strict=True))}
        seen = floats[..., 4:5], floats[..., 5:6]
        return out, diagnose(inputs, unpack(*kept), *seen, solver=solver, negative=negative)


STEPS = 10
"""Assumed number of steps of conjugate gradients."""


def _solving(problem: Problem) -> int:
    if not problem.spec.degree:
        return 0
    solver, dim = problem.spec.solver.name, problem.dim
    direct = solver == "cholesky" or (solver == "auto" and dim <= problem.spec.solver.SMALL)
    if solver == "block-diagonal":
        return 4 * dim + 2 * dim * dim // (problem.spec.solver.blocks or dim)
    return 4 * dim + (dim * (dim + 1) if direct else 0 if solver == "learned" else 4 * dim * STEPS)
