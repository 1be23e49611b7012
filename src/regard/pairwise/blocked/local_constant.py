"""Degree 0 by blocks of queries. The forward pass keeps the row statistics, from which the backward pass computes the
weights again without a second search for thresholds. Both are torch custom operators, one node of a compiled graph.

Legend: as in `block_rows`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...precision import full_precision
from . import block_rows
from .block_rows import DESCRIBED, Rows, flat, flat_params, placed, register_derivative, rows_of, work_from
from .blocks import Work, new_marks


@torch.library.custom_op(
    "regard::local_constant_forward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? given, bool counted, {DESCRIBED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(
    q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, counted: bool, *call: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (output [B, H, Tq, Dv], floats [B, H, Tq, FLOATS], flags int32 [B, H, Tq, FLAGS], index int64
    [B, H, Tq, n], marks bool [B, H, ceil(Tq / ROWS), ceil(Tk / COLUMNS)])."""
    return run(work_from(q, k, *call), q, k, v, given, counted)


@torch.no_grad()  # weightings check whether gradients are enabled
def run(
    work: Work, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, counted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `forward` for a call given as `Work`."""
    rows = work.rows
    found = _outputs(q, k, v, rows)
    out, *statistics, active = map(flat, found)
    statistics[1][..., 0] = 1  # rows of blocks that see no key are skipped
    q, k, v, given = flat(q), flat(k), flat(v), flat_params(given)
    for block in work.blocks():
        marks = torch.zeros(block.heads, active.shape[2], dtype=torch.bool, device=q.device)
        p, kept = rows.weigh(block, block.scores(q, k), block.params(given), counted, marks)
        for whole, part in zip(statistics, kept, strict=True):
            block.rows(whole).copy_(part)
        if rows.marks:
            block.marks(active).logical_or_(marks)
            block.add_weighted(block.rows(out), p, block.columns(v), marks)
        else:
            block.rows(out).copy_(p @ block.columns(v))
    return found


def _outputs(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(*shape, block_rows.FLOATS),
        q.new_zeros(*shape, block_rows.FLAGS, dtype=torch.int32),
        q.new_zeros(*shape, rows.indices, dtype=torch.int64),
        new_marks(q, k) if rows.marks else q.new_zeros(*shape[:2], 0, 0, dtype=torch.bool),
    )


@forward.register_fake
def _(q, k, v, given, counted, mask, moved, runs, solver, spec, *_):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, rows_of(solver, spec))


@torch.library.custom_op(
    "regard::local_constant_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? given, Tensor floats, Tensor flags, Tensor index, "
    f"Tensor active, {DESCRIBED}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and of the row parameters [P, B, H, Tq]."""
    with torch.no_grad(), full_precision(grad.device.type):  # backward() may run under autocast
        return _backward_blocks(work_from(*arguments[:2], *arguments[8:]), grad, *arguments[:8])


def _backward_blocks(
    work: Work, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, *statistics: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = work.rows
    *kept, active = map(flat, statistics)
    turned = (x.new_zeros(x.transpose(-1, -2).shape) for x in (k, v))
    found = q.new_zeros(q.shape), *turned, q.new_zeros(len(work.names), *q.shape[:3])
    dq, dk, dv = map(flat, found[:3])
    dgiven = found[3].flatten(1, 2)
    q, k, v, grad, given = flat(q), flat(k), flat(v), flat(grad), flat_params(given)
    for block in work.blocks():
        if rows.marks and not rows.exact(block.params(given)):
            block = block.narrowed(block.marks(active))
        own = tuple(block.rows(x) for x in kept)
        g = block.rows(grad) @ block.columns(v).transpose(-1, -2)
        z, params = block.scores(q, k), block.params(given)
        p, dz, dparams = rows.derive(block, z, g, placed(block, own), params, None, None)
        del z, g
        block.add_columns(dv, block.rows(grad), p)
        for row, part in zip(dgiven, dparams, strict=True):
            block.rows(row).copy_(part)
        block.rows(dq).copy_(dz @ block.columns(k))
        block.add_columns(dk, block.rows(q), dz)
    return found[0], *(x.transpose(-1, -2).contiguous() for x in found[1:3]), found[3]


@backward.register_fake
def _(grad, q, k, v, given, *_):  # type: ignore[no-untyped-def]
    count = 0 if given is None else given.shape[0]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty(count, *q.shape[:3])


register_derivative(forward, backward, 4, lambda output: output[1:])
