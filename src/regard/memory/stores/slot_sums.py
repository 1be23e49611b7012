"""Weighted sums of rows of a learned table, without a tensor of all gathered rows.

`embedding_bag` also gives such sums, but in torch 2.13 it has no second derivative, needs weights in the table's dtype,
and on some devices has no gradient for weights. Gathering rows and multiplying keeps K Dv numbers per token. The three
functions here are each other's derivatives (w weights, G and H of the shape of the sums):

    sums      s_r = sum_j w_rj V[i_rj]            dw = products(V, G), dV = spread(w, G)
    products  p_rj = V[i_rj] . G_r                dV = spread(u, G),   dG = sums(V, u)
    spread    A_i = sum over i_rj = i of w_rj G_r    dw = products(U, G), dG = sums(U, w)

Shapes: R tokens, K rows per token, N rows of the table, Dv its width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, floating, on_device, require, shape
from ...precision import full_precision, transformed
from .row_pieces import TILE, Groups, tiles, weighted_sums


def slot_sums(values: Tensor, slots: Tensor, weights: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """Return the sum over j of weights[..., j] values[slots[..., j]].

    Args:
        values: [N, Dv].
        slots: int64 [..., K], from 0 to N - 1.
        weights: [..., K].
        sparse_grad: the gradient of `values` is a sparse tensor of the rows in `slots` (for
            `torch.optim.SparseAdam`), which has no second derivative.

    Returns:
        [..., Dv], float32 at least, also under autocast.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.

    Cost: O(R K Dv) time forward, twice that and a sort of R K numbers backward; memory O(R (K + Dv)), and the gradient
    of the table. Derivatives: any order for dense gradients.
    """
    call = "slot_sums"
    floating(call, "values", values)
    floating(call, "weights", weights)
    on_device(call, "slots", slots, values.device)
    on_device(call, "weights", weights, values.device)
    require(slots.dtype == torch.int64, call, f"slots has dtype {slots.dtype}, expected torch.int64.")
    if values.dim() != 2 or slots.shape != weights.shape or slots.dim() < 1:
        given = f"values {shape(values)}, slots {shape(slots)}, weights {shape(weights)}"
        raise ArgumentError(f"{call}: {given}, expected [N, Dv], [..., K] and [..., K].")
    unable = "sparse_grad=True has no forward mode and no torch.func transforms; use sparse_grad=False."
    require(not (sparse_grad and transformed()), call, unable)
    wide = torch.promote_types(torch.promote_types(values.dtype, weights.dtype), torch.float32)
    with full_precision(values.device.type):
        if (torch.compiler.is_compiling() or transformed()) and not sparse_grad:
            # the compiler fuses this; neither it nor a torch.func transform knows the number of distinct rows below
            return (weights.to(wide)[..., None] * values[slots].to(wide)).sum(-2)
        flat = slots.reshape(-1, slots.shape[-1])
        out = _Sums.apply(values, flat, weights.to(wide).reshape(flat.shape), sparse_grad)
    return out.view(*slots.shape[:-1], values.shape[1])


def _pieces(values: Tensor, slots: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (rows [r, K, Dv] in the dtype of `other`, `other`) of a few tokens at a time."""
    step = max(1, TILE // (slots.shape[1] * values.shape[1]))
    for at, piece in zip(slots.split(step), other.split(step), strict=True):
        yield values[at].to(piece.dtype), piece


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, weights: Tensor, sparse: bool) -> Tensor:
        ctx.save_for_backward(values, slots, weights)
        ctx.sparse = sparse
        if values.dtype != weights.dtype:  # one call cannot convert rows
            return torch.cat([torch.bmm(w[:, None], rows)[:, 0] for rows, w in _pieces(values, slots, weights)])
        offsets = torch.arange(0, slots.numel(), slots.shape[1], device=slots.device)
        return weighted_sums(values, slots.flatten(), weights.flatten(), offsets)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, slots, weights = ctx.saved_tensors
        by_weights = table = None
        if ctx.needs_input_grad[2]:
            by_weights = _Products.apply(values, slots, upstream)
        if ctx.needs_input_grad[0]:
            spread = _sparse_spread if ctx.sparse else _Spread.apply
            table = spread(weights, slots, upstream, len(values), values.dtype)
        return table, None, by_weights, None


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(values, slots, other)
        return torch.cat([torch.bmm(rows, g[..., None])[..., 0] for rows, g in _pieces(values, slots, other)])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        values, slots, other = ctx.saved_tensors
        table = by_other = None
        if ctx.needs_input_grad[0]:
            table = _Spread.apply(upstream, slots, other, len(values), values.dtype)
        if ctx.needs_input_grad[2]:
            by_other = _Sums.apply(values, slots, upstream, False)
        return table, None, by_other


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, slots: Tensor, source: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weights, slots, source)
        out = torch.zeros(rows, source.shape[1], dtype=dtype, device=source.device)
        for at, part in _by_row(weights, slots, source):
            out.index_copy_(0, at, part.to(dtype))
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        weights, slots, source = ctx.saved_tensors
        by_weights = _Products.apply(upstream, slots, source) if ctx.needs_input_grad[0] else None
        moved = _Sums.apply(upstream, slots, weights, False) if ctx.needs_input_grad[2] else None
        return by_weights, None, moved, None, None


def _sparse_spread(weights: Tensor, slots: Tensor, source: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return the result of `_Spread` as a sparse tensor."""
    parts_by_row = [(at, part.to(dtype)) for at, part in _by_row(weights.detach(), slots, source.detach())]
    none = (slots.new_zeros(0), source.new_zeros(0, source.shape[1], dtype=dtype))
    at, parts = (torch.cat(x) for x in zip(none, *parts_by_row, strict=True))
    return torch.sparse_coo_tensor(at[None], parts, (rows, source.shape[1]), is_coalesced=True, check_invariants=False)


def _by_row(weights: Tensor, slots: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (distinct rows, ascending; their sums of weights times source), a few at a time."""
    groups = Groups.of(slots.flatten())
    owner, weight = groups.order // slots.shape[1], weights.flatten()[groups.order]
    for rows, entries, offsets in tiles(groups.counts, source.shape[1]):
        yield groups.unique[rows], weighted_sums(source, owner[entries], weight[entries], offsets)
