"""The backward pass of local linear attention and of Parallax on the GPU.

With the saved t and means m of a row, g = dL/do, gamma_ij = g_i . v_j and its mean gammabar_i:

    A_i u_i = sum_j p_ij (gamma_ij - gammabar_i) y_j,   a_ij = 1 + (y_j - m_i) . t_i,
    b_ij = gamma_ij - gammabar_i - (y_j - m_i) . u_i,   dz_ij = p_ij (a_ij b_ij - c_i),   c_i = sum_j p_ij a_ij b_ij
    dx_i = u_i + factor_i sum_j dz_ij y_j,   dy_j = sum_i factor_i dz_ij x_i + p_ij (b_ij t_i - a_ij u_i),
    dv_j = sum_i p_ij a_ij g_i,   dridge_i = -t_i u_i,   dfactor_i = x_i . sum_j dz_ij y_j

by three kernels and one solve: the right sides by rows; u; dx by rows; dy and dv by keys, all query heads of a key head
in one program. Where t is given, u is 0, and one kernel by rows gives dx and -dL/dt. All but p is saved or made in
Theta(n d). Products with x, y: 3 and 4 by rows, 4 and 4 by keys; t is split in two bfloat16 terms for a, which its
length would otherwise carry away from the forward pass's.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys; x [B, H, Tq, D], y [B, Hkv, Tk, D],
v [B, Hkv, Tk, Dv].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .launch import launch
from .span import Span, batch_stride
from .tiles import Tiles, TileTable

if TYPE_CHECKING:
    from .local_linear_solve import Rule

BY_ROWS = TileTable(
    "local_linear_backward_rows",
    {
        (64, 2): Tiles(64, 64, 4, 3),
        (128, 2): Tiles(64, 64, 8, 2),
        (256, 2): Tiles(64, 32, 8, 1),
        (256, 4): Tiles(32, 32, 4, 1),
    },
    (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(64, 64, 8, 3)),
)
BY_KEYS = TileTable(
    "local_linear_backward_keys",
    {
        (64, 2): Tiles(64, 64, 8, 2),
        (128, 2): Tiles(32, 64, 8, 2),
        (256, 2): Tiles(32, 32, 8, 1),
        (256, 4): Tiles(32, 32, 4, 1),
    },
    (Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 128, 8, 2)),
)


class Kept(NamedTuple):
    """What the forward pass saves: t [B, H, Tq, D], lse [B, H, Tq], and the means of coordinates [B, H, Tq, D] and of
    values [B, H, Tq, Dv], all float32 and contiguous. lse is in base 2: p_ij = 2^(log2(e) z_ij - lse_i); it is +inf,
    and all else 0, in a row without a key."""

    t: Tensor
    lse: Tensor
    kbar: Tensor
    vbar: Tensor


class Gradients(NamedTuple):
    """dx, dy, dv contiguous in the dtypes of x, y, v; the rest float32: factor [B, H, Tq], ridge [B, H, Tq, 1 or D] and
    probe [B, H, Tq, D], each None where it is a number or absent."""

    dx: Tensor
    dy: Tensor
    dv: Tensor
    dfactor: Tensor | None
    dridge: Tensor | None
    dprobe: Tensor | None


class _Call:
    """One backward pass: its tensors with their strides, and the constants of all its kernels."""

    def __init__(
        self, grad: Tensor, x: Tensor, y: Tensor, v: Tensor, factor: float | Tensor, span: Span, kept: Kept
    ) -> None:
        self.grad, self.x, self.y, self.v = (_rows(z) for z in (grad.to(v.dtype), x, y, v))
        self.span, self.kept = span, kept
        self.per_row = isinstance(factor, Tensor)
        self.factor = factor.float().contiguous() if isinstance(factor, Tensor) else x.new_empty(0, dtype=torch.float32)
        self.number = 1.0 if isinstance(factor, Tensor) else factor
        self.batch, self.heads, self.queries, dim = x.shape
        self.kv_heads, self.keys = y.shape[1:3]
        width, vwidth = _block(dim), _block(v.shape[-1])
        self.width = max(width, vwidth)
        self.mask = x.new_empty(0, dtype=torch.uint8) if span.mask is None else span.mask
        self.constants: dict[str, Any] = {
            "D": dim,
            "DV": v.shape[-1],
            "WIDTH": width,
            "VWIDTH": vwidth,
            "FACTOR": self.per_row,
            "MASK": span.mask is not None,
            "PRECISION": "ieee",
        }

    def new(self, *shape: int) -> Tensor:
        """[B, H, Tq, ...] float32, to be written by a kernel."""
        return self.x.new_empty(self.batch, self.heads, self.queries, *shape, dtype=torch.float32)

    @property
    def strides(self) -> tuple[int, ...]:
        mask = () if self.span.mask is None else (_step(self.mask, 0), _step(self.mask, 1))
        tensors = (z.stride()[:3] for z in (self.grad, self.x, self.y, self.v))
        return *(s for three in tensors for s in three), batch_stride(self.span.low), *(mask or (0, 0))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, G, Tq, Tk."""
        return self.heads, self.heads // self.kv_heads, self.queries, self.keys

    def grid(self, count: int, size: int, heads: int) -> tuple[tuple[int], int]:
        """One program a block and head, and how many blocks there are."""
        blocks = -(-count // size)
        return (blocks * heads * self.batch,), blocks


def _rows(x: Tensor) -> Tensor:
    """With rows that lie in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _step(x: Tensor, axis: int) -> int:
    return x.stride(axis) if x.shape[axis] > 1 else 0


def _block(dim: int) -> int:
    """The width of a tile that holds `dim` features."""
    return max(16, 1 << (dim - 1).bit_length())


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
    """The gradients of one call, each kernel deterministic.

    Args:
        grad: dL/do [B, H, Tq, Dv].
        factor: z = factor * x . y, a number or [B, H, Tq].
        ridge: relative to the kernel weight, a number or [B, H, Tq, 1 or D]; None where t was given.
        rule: how systems are solved, None where t was given.

    Cost: 3 products of D a pair for the right sides, those of the solve, 5 for dx and 9 for dy and dv.
    """
    call = _Call(grad, x, y, v, factor, span, kept)
    right = u = None
    if ridge is not None:
        from .local_linear_solve import solve

        assert rule is not None
        right = _right_sides(call)
        u = solve(right, call.x, call.y, factor, ridge, kept.lse, kept.kbar, span, rule)[0]
    dx, dfactor, dridge, dprobe, read = _by_rows(call, ridge, u, right)
    dy, dv = _by_keys(call, read, u is not None)
    return Gradients(dx, dy, dv, dfactor, dridge, dprobe)


def _right_sides(call: _Call) -> Tensor:
    """sum_j p_ij (gamma_ij - gammabar_i) y_j [B, H, Tq, D]."""
    from .local_linear_backward_kernels import right_kernel

    right, kept, span = call.new(call.x.shape[-1]), call.kept, call.span
    tensors = (call.grad, call.x, call.y, call.v, call.factor, kept.lse, kept.kbar, kept.vbar, span.low, span.high)

    def run(tiles: Tiles) -> None:
        grid, blocks = call.grid(call.queries, tiles.rows, call.heads)
        rest = (*call.strides, call.number, blocks, *call.sizes)
        constants = {**call.constants, "ROWS": tiles.rows, "KEYS": tiles.keys}
        launch(right_kernel, grid, *tensors, call.mask, right, *rest, tiles=tiles, **constants)

    run(BY_ROWS.pick(call.width, call.x.dtype, run, ("right",)))
    return right


class _Read(NamedTuple):
    """What the kernel by keys reads of rows: t, -u and t's rest in the dtype of products [3, B, H, Tq, D], and
    1 - m . t, gammabar - m . u and c [3, B, H, Tq]."""

    slopes: Tensor
    rows: Tensor


def _by_rows(
    call: _Call, ridge: float | Tensor | None, u: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, _Read]:
    from .local_linear_backward_kernels import query_kernel

    kept, span, dim = call.kept, call.span, call.x.shape[-1]
    none = call.new(0)
    dx = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    dfactor = call.new() if call.per_row else None
    given = ridge if isinstance(ridge, Tensor) else None
    dridge = None if given is None else call.new(given.shape[-1])
    dprobe = call.new(dim) if ridge is None else None
    split = call.x.dtype == torch.bfloat16
    shape = (call.batch, call.heads, call.queries)
    read = _Read(call.x.new_empty(3 if split else 2, *shape, dim), none.new_empty(3, *shape))
    tensors = (call.grad, call.x, call.y, call.v, call.factor, none if given is None else given, kept.t)
    solved = (none if u is None else u, kept.lse, kept.kbar, kept.vbar, span.low, span.high, call.mask)
    found = tuple(none if z is None else z for z in (dx, dfactor, dridge, dprobe))
    number = ridge if isinstance(ridge, float) else 0.0
    kind = 0 if given is None else 1 if given.shape[-1] == 1 else 2
    steps = (0, 0, 0, 0) if given is None else given.expand(*shape, given.shape[-1]).stride()

    def run(tiles: Tiles) -> None:
        grid, blocks = call.grid(call.queries, tiles.rows, call.heads)
        strides = (*call.strides[:12], *steps, *call.strides[12:])
        rest = (*strides, call.number, number, blocks, call.batch, *call.sizes)
        constants = {**call.constants, "RIDGE": kind, "SOLVED": u is not None, "SPLIT": split}
        constants |= {"ROWS": tiles.rows, "KEYS": tiles.keys}
        launch(query_kernel, grid, *tensors, *solved, *found, *read, *rest, tiles=tiles, **constants)

    run(BY_ROWS.pick(call.width, call.x.dtype, run, ("dx", u is not None)))
    return dx, dfactor, dridge, dprobe, read


def _by_keys(call: _Call, read: _Read, solved: bool) -> tuple[Tensor, Tensor]:
    from .local_linear_backward_kernels import key_kernel

    span = call.span
    dy, dv = (torch.empty_like(z, memory_format=torch.contiguous_format) for z in (call.y, call.v))
    tensors = (call.grad, call.x, call.y, call.v, call.factor, call.kept.lse, *read, span.low, span.high)
    split = read.slopes.shape[0] == 3

    def run(tiles: Tiles) -> None:
        grid, blocks = call.grid(call.keys, tiles.keys, call.kv_heads)
        rest = (*call.strides, batch_stride(span.first), call.number, blocks, call.batch, *call.sizes)
        constants = {**call.constants, "SOLVED": solved, "SPLIT": split, "ROWS": tiles.rows, "KEYS": tiles.keys}
        ranges = (span.first, span.last, call.mask)
        launch(key_kernel, grid, *tensors, *ranges, dy, dv, *rest, tiles=tiles, **constants)

    run(BY_KEYS.pick(call.width, call.x.dtype, run, (solved,)))
    return dy, dv
