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

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import launch
from ..runtime.span import Span, batch_stride
from ..runtime.tiles import Tiles, TileTable

if TYPE_CHECKING:
    from .solve import Rule

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


MOST_ROWS = 256
"""Most rows of a tile."""


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


class _Call:
    """One backward pass as kernels read it: matrices with their steps, and the form of all kernels."""

    def __init__(
        self,
        grad: Tensor,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        factor: float | Tensor,
        ridge: float | Tensor | None,
        span: Span,
        kept: Kept,
    ) -> None:
        from .backward_kernels import Form
        from .math import block_width, number_or_rows

        self.x, self.y, self.v, self.kept, self.span = x, y, v, kept, span
        self.matrices = tuple(_matrix(z) for z in (grad.to(v.dtype), x, y, v))
        self.factor = number_or_rows(factor, kept.lse)
        self.mask = span.pointers[2]
        self.heads, self.queries, self.keys = x.shape[1], x.shape[2], y.shape[2]
        self.sizes = (self.heads, self.heads // y.shape[1], self.queries, self.keys)
        wide, value_wide = block_width(x.shape[-1]), block_width(v.shape[-1])
        self.width = max(wide, value_wide)
        self.form = Form(
            dim=x.shape[-1],
            value_dim=v.shape[-1],
            wide=wide,
            value_wide=value_wide,
            own=0,
            tile=0,
            factors=isinstance(factor, Tensor),
            masked=0 if span.mask is None else 1 if span.mask.shape[1] == 1 or self.sizes[1] == 1 else 2,
            ridge=0,
            solved=ridge is not None,
            operands=2 if x.dtype == torch.float32 else 3 if ridge is None else 4,
            precision="ieee",
        )

    def new(self, *shape: int) -> Tensor:
        """Return an uninitialised float32 [B, H, Tq, ...]."""
        return self.kept.lse.new_empty(*self.x.shape[:3], *shape)

    def by_rows(self) -> tuple[Any, ...]:
        """Return what both kernels by rows take of the call."""
        span = self.span.low, self.span.high
        return self.factor, span, self.mask, *self.span.steps, *self.sizes

    def row_blocks(self, tiles: Tiles) -> tuple[int]:
        return (self.x.shape[0] * self.heads * -(-self.queries // tiles.rows),)


def _matrix(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a [B, H, T, width] with contiguous rows, and its steps. Rows that lie very far apart are copied, since
    offsets within a tile are int32."""
    together = x.stride(-1) == 1 or x.shape[-1] == 1
    x = x if together and x.stride(-2) * MOST_ROWS < 2**31 else x.contiguous()
    return x, *x.stride()[:3]


def backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    v: Tensor,
    factor: float | Tensor,
    ridge: float | Tensor | None,
    span: Span,
    kept: Kept,
    rule: Rule | None,
) -> Gradients:
    """Compute the gradients of one call, with deterministic kernels.

    Args:
        grad: dL/do [B, H, Tq, Dv].
        factor: z = factor * x . y, a number or float32 [B, H, Tq].
        ridge: relative to the kernel weight, a number or float32 [B, H, Tq, 1 or D]; None where t was given.
        rule: how systems are solved, None where t was given.

    Cost: 3 products a pair of D each for the right sides, those of the solve, 5 for dx and 8 for dy and dv; of bfloat16
    4, 5 and 10.
    """
    if not kept.lse.numel():
        optional = (z if isinstance(z, Tensor) else None for z in (factor, ridge, kept.t if ridge is None else None))
        return Gradients(*(None if z is None else z.new_zeros(z.shape) for z in (x, y, v, *optional)))
    call = _Call(grad, x, y, v, factor, ridge, span, kept)
    u = means = None
    if ridge is not None:
        from .solve import solve

        assert rule is not None
        right, means = _right_sides(call)
        u = solve(right, x, y, factor, ridge, kept.lse, kept.kbar, span, rule)[0]
    read, dridge = _operands(call, ridge, u, means)
    dx, dfactor, dprobe = _by_rows(call, read, u)
    dy, dv = _by_keys(call, read)
    return Gradients(dx, dy, dv, dfactor, dridge, dprobe)


def _right_sides(call: _Call) -> tuple[Tensor, Tensor]:
    """Return (sum_j p_ij (gamma_ij - gammabar_i) y_j [B, H, Tq, D], gammabar [B, H, Tq])."""
    from .backward_kernels import local_linear_right_kernel

    outs = call.new(call.x.shape[-1]), call.new()

    def run(tiles: Tiles) -> None:
        form = call.form._replace(own=tiles.rows, tile=tiles.keys)
        args = (outs, call.matrices, call.kept[1:], *call.by_rows())
        launch(local_linear_right_kernel, call.row_blocks(tiles), *args, tiles=tiles, FORM=form)

    run(RIGHT.pick(call.width, call.x.dtype, run))
    return outs


class _Read(NamedTuple):
    """What the kernels read of rows: t, -u and their rests as multiplied [B, H, Tq, 2 to 4, D], and numbers [B, H, Tq,
    8]."""

    operands: Tensor
    table: Tensor


def _operands(
    call: _Call, ridge: float | Tensor | None, u: Tensor | None, means: Tensor | None
) -> tuple[_Read, Tensor | None]:
    """Return (what is read of rows, dridge)."""
    from .backward_kernels import local_linear_operands_kernel
    from .math import number_or_rows

    lse, width = call.kept.lse, ridge.shape[-1] if isinstance(ridge, Tensor) else 0
    dridge = call.new(width) if width else None
    operands = call.x.new_empty(*call.x.shape[:3], call.form.operands, call.x.shape[-1])
    read = _Read(operands, call.new(8))
    slopes, means = (call.kept.t, lse if u is None else u), lse if means is None else means
    number = number_or_rows(0.0 if ridge is None else ridge, lse)
    tiles = OPERANDS.pick(call.width, torch.float32)
    args = (call.matrices[0], call.kept[1:], slopes, means, number, lse if dridge is None else dridge, call.factor)
    form = call.form._replace(own=tiles.rows, ridge=width)
    sizes = call.heads, call.queries
    launch(local_linear_operands_kernel, call.row_blocks(tiles), *args, *read, *sizes, tiles=tiles, FORM=form)
    return read, dridge


def _by_rows(call: _Call, read: _Read, u: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (dx, dfactor, dprobe)."""
    from .backward_kernels import local_linear_query_kernel

    lse = call.kept.lse
    dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    dfactor = call.new() if call.form.factors else None
    dprobe = None if call.form.solved else call.new(call.x.shape[-1])
    outs = tuple(lse if z is None else z for z in (dx, dfactor, dprobe))

    def run(tiles: Tiles) -> None:
        form = call.form._replace(own=tiles.rows, tile=tiles.keys)
        args = (outs, call.matrices, call.kept[1:], lse if u is None else u, *read, *call.by_rows())
        launch(local_linear_query_kernel, call.row_blocks(tiles), *args, tiles=tiles, FORM=form)

    run(BY_ROWS.pick(call.width, call.x.dtype, run, (call.form.solved,)))
    return dx, dfactor, dprobe


def _by_keys(call: _Call, read: _Read) -> tuple[Tensor, Tensor]:
    from .backward_kernels import local_linear_key_kernel

    dy, dv = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (call.y, call.v))
    span = call.span.first, call.span.last

    def run(tiles: Tiles) -> None:
        form = call.form._replace(own=tiles.keys, tile=tiles.rows)
        grid = (dy.shape[0] * dy.shape[1] * -(-call.keys // tiles.keys),)
        steps = batch_stride(call.span.first), *call.span.mask_steps
        args = ((dy, dv), call.matrices, *read, call.factor[1], span, call.mask, *steps, *call.sizes)
        launch(local_linear_key_kernel, grid, *args, tiles=tiles, FORM=form)

    run(BY_KEYS.pick(call.width, call.x.dtype, run, (call.form.solved,)))
    return dy, dv
