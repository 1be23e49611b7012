"""The backward pass of local linear attention and of Parallax on the GPU.

With the saved t and means m of a row, g = dL/do, gamma_ij = g_i . v_j and its mean gammabar_i:

    A_i u_i = sum_j p_ij (gamma_ij - gammabar_i) y_j,   a_ij = 1 + (y_j - m_i) . t_i,
    b_ij = gamma_ij - gammabar_i - (y_j - m_i) . u_i,   dz_ij = p_ij (a_ij b_ij - c_i),   c_i = sum_j p_ij a_ij b_ij
    dx_i = u_i + factor_i sum_j dz_ij y_j,   dy_j = sum_i factor_i dz_ij x_i + p_ij (b_ij t_i - a_ij u_i),
    dv_j = sum_i p_ij a_ij g_i,   dridge_i = -t_i u_i,   dfactor_i = x_i . sum_j dz_ij y_j

Three kernels and one solve compute them: the right sides by rows; u; dx by rows; dy and dv by keys, with all query
heads of a key head in one program. If t is given, u is 0, and one kernel by rows gives dx and -dL/dt. All but p is
saved or made in Theta(n d) memory. In bfloat16 the kernel by keys multiplies in two terms what b and a are made of: the
weights of the right sides and u, since b may be small beside rounding errors of gamma, and t, since a long t would
carry a away from the forward pass's.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys; x [B, H, Tq, D], y [B, Hkv, Tk, D],
v [B, Hkv, Tk, Dv].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.call import Call, matrix_of, number_or_rows
from ..runtime.launch import launch
from ..runtime.operators import FARTHEST, rows_together
from ..runtime.span import Span, batch_stride
from ..runtime.tiles import Tiles, TileTable
from .backward_kernels import (
    NUMBERS,
    local_linear_key_kernel,
    local_linear_operands_kernel,
    local_linear_query_kernel,
    local_linear_right_kernel,
)
from .math import ridge_width
from .solve import Rule, solve

RIGHT = TileTable.by_width(
    "local_linear_backward_right",
    [(64, 32, 4, 3), (64, 16, 4, 2), (32, 32, 8, 1)],
    [(32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)],
    [(64, 64, 4, 3), (128, 64, 8, 2)],
)
OPERANDS = TileTable("local_linear_backward_operands", {(64, 4): Tiles(32, 16, 4, 1), (256, 4): Tiles(16, 16, 4, 1)})
BY_ROWS = TileTable.by_width(
    "local_linear_backward_rows",
    [(64, 32, 4, 3), (64, 32, 8, 2), (32, 32, 8, 1)],
    [(32, 16, 8, 2), (16, 16, 8, 1), (16, 16, 8, 1)],
    [(64, 64, 4, 3), (128, 64, 8, 2)],
)
BY_KEYS = TileTable.by_width(
    "local_linear_backward_keys",
    [(32, 128, 8, 3), (32, 128, 8, 2), (16, 32, 8, 1)],
    3 * [(16, 16, 8, 1)],
    [(64, 128, 8, 3), (64, 64, 4, 2), (16, 64, 4, 2)],
)
"""wgmma needs 64 rows a warp group on the program's own axis: 4 warps for 64, 8 for 128. With 64 features and two
accumulators, registers hold 32 streamed rows, and 16 in float32."""


class Kept(NamedTuple):
    """What the forward pass saves, float32 and contiguous: t [B, H, Tq, D], lse [B, H, Tq], and the means of
    coordinates [B, H, Tq, D] and of values [B, H, Tq, Dv]. p_ij = 2^(log2(e) z_ij - lse_i). In a row without a key lse
    is +inf and all else 0."""

    t: Tensor
    lse: Tensor
    kbar: Tensor
    vbar: Tensor


class Gradients(NamedTuple):
    """dx, dy, dv, contiguous in the dtypes of x, y, v; float32 gradients of factor [B, H, Tq], ridge [B, H, Tq, 1 or D]
    and probe [B, H, Tq, D], each None if it is a number or absent."""

    dx: Tensor
    dy: Tensor
    dv: Tensor
    dfactor: Tensor | None
    dridge: Tensor | None
    dprobe: Tensor | None


class _Call(Call):
    """One backward pass as kernels read it."""

    def __init__(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, factor: float | Tensor, solved: bool, span: Span,
        kept: Kept,
    ) -> None:  # fmt: skip
        super().__init__(x, y, v, factor, span)
        self.kept, self.matrices = kept, (matrix_of(rows_together(grad.to(v.dtype), FARTHEST)), *self.matrices)
        masked = 0 if span.mask is None else 1 if span.mask.shape[1] == 1 or self.sizes[1] == 1 else 2
        operands = 2 if x.dtype == torch.float32 else 4 if solved else 3
        self.form = self.form._replace(masked=masked, solved=solved, operands=operands)

    def by_rows(self) -> tuple[Any, ...]:
        """Return what both kernels by rows take of the call."""
        return self.factor, self.span.pointers[:2], self.span.pointers[2], *self.span.steps, *self.sizes

    def row_blocks(self, tiles: Tiles) -> tuple[int]:
        blocks, heads = self.grid(tiles.rows)
        return (blocks * heads,)


def backward(
    grad: Tensor, x: Tensor, y: Tensor, v: Tensor, factor: float | Tensor, ridge: float | Tensor | None, span: Span,
    kept: Kept, rule: Rule | None,
) -> Gradients:  # fmt: skip
    """Compute the gradients of one call from dL/do [B, H, Tq, Dv], with deterministic kernels. Scores are factor * x .
    y with a number or float32 [B, H, Tq]. The ridge, a number or float32 [B, H, Tq, 1 or D] relative to the kernel
    weight, and the rule of the solver are None if t was given.

    Cost: 3 products a pair of D each for the right sides, those of the solve, 5 for dx and 8 for dy and dv; in bfloat16
    4, 5 and 10."""
    if not kept.lse.numel():
        optional = (z if isinstance(z, Tensor) else None for z in (factor, ridge, kept.t if ridge is None else None))
        return Gradients(*(None if z is None else z.new_zeros(z.shape) for z in (x, y, v, *optional)))
    call = _Call(grad, x, y, v, factor, ridge is not None, span, kept)
    u = means = None
    if ridge is not None:
        assert rule is not None
        right, means = _right_sides(call)
        rows = Call(x, y, v, factor, span, fine=y.dtype == torch.bfloat16)
        u, *_ = solve(right, rows, ridge, kept.lse, kept.kbar, rule)
    read, dridge = _operands(call, ridge, u, means)
    dx, dfactor, dprobe = _by_rows(call, read, u)
    dy, dv = _by_keys(call, read)
    return Gradients(dx, dy, dv, dfactor, dridge, dprobe)


def _right_sides(call: _Call) -> tuple[Tensor, Tensor]:
    """Return (sum_j p_ij (gamma_ij - gammabar_i) y_j [B, H, Tq, D], gammabar [B, H, Tq])."""
    outs = call.new(call.form.dim), call.new()

    def run(tiles: Tiles) -> None:
        args = (outs, call.matrices, call.kept[1:], *call.by_rows())
        launch(local_linear_right_kernel, call.row_blocks(tiles), *args, tiles=tiles, FORM=call.fitted(tiles))

    run(RIGHT.pick(call.width, call.dtype, run))
    return outs


def _operands(
    call: _Call, ridge: float | Tensor | None, u: Tensor | None, means: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Return (operands [B, H, Tq, 2 to 4, D] and numbers [B, H, Tq, 8] of rows, dridge)."""
    lse, width = call.kept.lse, ridge_width(ridge)
    dridge = call.new(width) if width else None
    read = call.q.new_empty(*call.shape, call.form.operands, call.form.dim), call.new(NUMBERS.value)
    slopes, means = (call.kept.t, lse if u is None else u), lse if means is None else means
    number = number_or_rows(0.0 if ridge is None else ridge, lse)
    tiles = OPERANDS.pick(call.width, torch.float32)
    launch(
        local_linear_operands_kernel, call.row_blocks(tiles), call.matrices[0], call.kept[1:], slopes, means, number,
        lse if dridge is None else dridge, call.factor, *read, call.sizes[0], call.sizes[2],
        tiles=tiles, FORM=call.form._replace(own=tiles.rows, ridge=width),
    )  # fmt: skip
    return read, dridge


def _by_rows(call: _Call, read: tuple[Tensor, Tensor], u: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (dx, dfactor, dprobe)."""
    lse = call.kept.lse
    dx = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    dfactor = call.new() if call.form.factors else None
    dprobe = None if call.form.solved else call.new(call.form.dim)
    outs = tuple(lse if z is None else z for z in (dx, dfactor, dprobe))

    def run(tiles: Tiles) -> None:
        args = (outs, call.matrices, call.kept[1:], lse if u is None else u, *read, *call.by_rows())
        launch(local_linear_query_kernel, call.row_blocks(tiles), *args, tiles=tiles, FORM=call.fitted(tiles))

    run(BY_ROWS.pick(call.width, call.dtype, run, (call.form.solved,)))
    return dx, dfactor, dprobe


def _by_keys(call: _Call, read: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    dy, dv = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (call.k, call.v))
    span = call.span

    def run(tiles: Tiles) -> None:
        grid = (dy.shape[0] * dy.shape[1] * -(-call.sizes[3] // tiles.keys),)
        launch(
            local_linear_key_kernel, grid, (dy, dv), call.matrices, *read, call.factor[1], (span.first, span.last),
            call.span.pointers[2], batch_stride(span.first), *span.mask_steps, *call.sizes,
            tiles=tiles, FORM=call.form._replace(own=tiles.keys, tile=tiles.rows),
        )  # fmt: skip

    run(BY_KEYS.pick(call.width, call.dtype, run, (call.form.solved,)))
    return dy, dv
