"""Attention by blocks of queries as torch custom operators, one node of a compiled graph each.

The forward pass keeps the statistics of the rows, from which the backward pass computes the weights again without a
second search for thresholds.

Legend: as in `block_rows`; x, y coordinates of a local linear model, None at degree 0.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...precision import full_precision
from . import local_linear
from .block_rows import DESCRIBED, FLAGS, FLOATS, Rows, flat, placed, refuse, rows_of, work_from
from .blocks import Work, new_marks
from .local_linear import SLOPE, Tensors, flattened

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? x, Tensor? y, Tensor? ridge, Tensor? probe, Tensor? given, float number"
)
"""The ridge is a tensor or the number."""
COUNT = 8
"""Tensors among these."""
Outputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op(
    "regard::blocked_forward",
    mutates_args=(),
    schema=f"({TENSORS}, bool counted, {DESCRIBED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> Outputs:
    """Return (output [B, H, Tq, Dv], floats [B, H, Tq, FLOATS], flags int32 [B, H, Tq, FLAGS], index int64
    [B, H, Tq, n], marks bool [B, H, ceil(Tq / ROWS), ceil(Tk / COLUMNS)]). At degree 1 floats and flags also hold what
    `local_linear.effective` writes, and there are no marks."""
    return run(work_from(*arguments[:2], *arguments[COUNT + 2 :]), *arguments[: COUNT + 2])


@torch.no_grad()  # weightings check whether gradients are enabled
def run(work: Work, *arguments: Any) -> Outputs:
    """Compute `forward` for a call given as `Work`."""
    *given, counted = arguments
    rows, found, tensors, failed = work.rows, _outputs(work.rows, *given[:4]), flattened(*given), False
    out, floats, flags, index, active = map(flat, found)
    statistics = (floats[..., :FLOATS], flags[..., :FLAGS], index) if work.spec.degree else (floats, flags, index)
    flags[..., 0] = 1  # rows of blocks that see no key are skipped
    for block in work.blocks():
        marks = torch.zeros(block.heads, active.shape[2], dtype=torch.bool, device=out.device)
        p, kept = rows.weigh(block, block.scores(tensors.q, tensors.k), block.params(tensors.given), counted, marks)
        for whole, part in zip(statistics, kept, strict=True):
            block.rows(whole).copy_(part)
        if work.spec.degree:
            p, unconverged = local_linear.effective(block, tensors, p, kept, counted, floats, flags)
            failed = failed or unconverged
        elif rows.marks:
            block.marks(active).logical_or_(marks)
            block.add_weighted(block.rows(out), p, block.columns(tensors.v), marks)
            continue
        block.rows(out).copy_(p @ block.columns(tensors.v))
    if failed:
        local_linear.warn("forward", work.spec)
    return found


def _outputs(rows: Rows, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None) -> Outputs:
    shape, linear = q.shape[:3], x is not None
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(*shape, SLOPE + x.shape[-1] if x is not None else FLOATS),
        q.new_zeros(*shape, FLAGS + linear, dtype=torch.int32),
        q.new_zeros(*shape, rows.indices, dtype=torch.int64),
        new_marks(q, k) if rows.marks and not linear else q.new_zeros(*shape[:2], 0, 0, dtype=torch.bool),
    )


@forward.register_fake
def _(q, k, v, x, y, ridge, probe, given, number, counted, mask, moved, runs, solver, spec, *_):  # type: ignore[no-untyped-def]
    return _outputs(rows_of(solver, spec), q, k, v, x)


@torch.library.custom_op(
    "regard::blocked_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {TENSORS}, Tensor floats, Tensor flags, Tensor index, Tensor active, {DESCRIBED}) "
    f"-> ({', '.join(['Tensor'] * COUNT)})",
)
def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, x, y, ridge, probe and given, empty for those that are None."""
    q, k, v, x, y, *rest = arguments[:COUNT]
    statistics, call = arguments[COUNT + 1 : COUNT + 5], arguments[COUNT + 5 :]
    new = lambda z: None if z is None else z.new_zeros(z.shape)  # noqa: E731
    turned = [None if z is None else z.new_zeros(z.transpose(-1, -2).shape) for z in (k, v, y)]
    dk, dv, dy = turned
    found: list[Any] = [new(q), dk, dv, new(x), dy, *map(new, rest)]
    with torch.no_grad(), full_precision(grad.device.type):  # backward() may run under autocast
        tensors, d = flattened(*arguments[: COUNT + 1]), flattened(*found)
        _backward_blocks(work_from(q, k, *call), tensors, d, flat(grad), *map(flat, statistics))
    found[1], found[2], found[4] = (None if z is None else z.transpose(-1, -2).contiguous() for z in turned)
    return tuple(q.new_zeros(0) if z is None else z for z in found)


def _backward_blocks(
    work: Work, tensors: Tensors, d: Tensors, grad: Tensor, floats: Tensor, flags: Tensor, index: Tensor,
    active: Tensor,
) -> None:  # fmt: skip
    rows, linear, failed = work.rows, work.spec.degree == 1, False
    kept = floats[..., :FLOATS], flags[..., :FLAGS], index
    for block in work.blocks():
        if rows.marks and not linear and not rows.exact(block.params(tensors.given)):
            block = block.narrowed(block.marks(active))
        own = tuple(block.rows(x) for x in kept)
        g, z, params = block.rows(grad), block.scores(tensors.q, tensors.k), block.params(tensors.given)
        share = p = None
        if linear:
            p, slope = rows.again(block, z, own, params), block.rows(floats)[..., SLOPE:]
            dp, share, unconverged = local_linear.weight_gradient(block, tensors, d, p, own, g, slope)
            failed = failed or unconverged
        else:
            dp = g @ block.columns(tensors.v).transpose(-1, -2)
        p, dz, dparams = rows.derive(block, z, dp, placed(block, own), params, share, p)
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    ctx.number, (mask, moved, runs, *ctx.call) = inputs[COUNT], inputs[COUNT + 2 :]
    ctx.save_for_backward(mask, moved, runs, *inputs[:COUNT], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    others = (None,) * (5 + len(ctx.call))
    if grad is None:
        return *(None,) * COUNT, *others
    mask, moved, runs, *saved = ctx.saved_tensors
    found = backward(grad.contiguous(), *saved[:COUNT], ctx.number, *saved[COUNT:], mask, moved, runs, *ctx.call)
    return *(d if x is not None else None for x, d in zip(saved, found, strict=False)), *others


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse)
