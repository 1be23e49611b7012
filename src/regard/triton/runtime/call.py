"""Shared by the launches of an attention call: tensors, sizes, visible keys, and the constants of kernels.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import launch
from .span import Span
from .tiles import Tiles, TileTable, padded


class Form(NamedTuple):
    """The constants that a kernel is compiled for. Fields that it does not read keep their defaults."""

    dim: int = 0  # D
    wide: int = 0  # the power of two that holds it
    value_dim: int = 0  # Dv
    value_wide: int = 0
    factors: bool = False  # whether each row has its own factor
    masked: int = 0  # 0 without a mask over keys; 2 if heads that a program serves have different ones; else 1
    own: int = 1  # rows of a program's own block
    tile: int = 0  # rows of the blocks that stream past it
    counted: bool = False  # whether weights are counted
    precision: str = "ieee"  # of products
    # compact attention
    rule: int = 0  # code of the rule
    r: int = 1  # power of the kernel, 1 with a function `relative`
    stand: int = 0  # code of the fallback weights
    relative: Any = None  # the function of a kernel with `triton_relative`
    source: str = ""  # a key of its source, which distinguishes functions of one name in Triton's cache on disk
    given: bool = False  # whether each row has its own number
    keep: bool = False  # whether a backward pass follows
    mask_tile: int = 0  # rows that share a mark
    # the backward pass of compact attention
    listed: int = 0  # owners of a list, 0 of a range
    split: int = 1  # blocks of a listed number
    group: int = 1  # heads that stream past an own block
    tables: int = 4  # tables of rows
    steps: tuple[int, ...] = ()  # row strides of grad, q, k, v, slope_mean, which as constants take no registers
    # local linear attention
    fine: bool = False  # whether weights are multiplied in two terms
    ridge: int = 0  # 0 for a number, else how many numbers a row has, 1 or D
    solved: bool = False  # whether t is solved for; otherwise it is given
    few: int = 0  # rows with at most this many keys are solved directly
    verify: bool = False  # whether true residuals are computed
    part: int = 16  # rows whose vectors are in registers at once between sweeps
    operands: int = 0  # D-wide operands of a row in the backward pass: 2, or with rounding errors 4 (3 if t is given)
    # decoding
    most: int = 1  # the power of two that holds the queries
    raw: bool = False  # whether vectors may be non-finite


class Numbers(NamedTuple):
    """The arguments of a call of local linear attention that are not tensors."""

    factor: float  # if it is a number
    ridge: float  # if it is a number
    tol: float  # relative residual of a solution
    limit: int  # maximum steps of a row
    direct: bool  # whether rows with few keys are solved directly
    verify: bool  # whether true residuals are computed instead of those that the steps carry along
    given: bool  # whether t is given
    counted: bool = False  # whether weights are counted


class Call:
    """Queries q [B, H, Tq, D], keys k [B, Hkv, Tk, D], values v [B, Hkv, Tk, Dv], the factor of the scores, a number or
    float32 [B, H, Tq], and what each query sees."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, span: Span, **form: Any) -> None:
        self.q, self.k, self.v, self.span = q, k, v, span
        self.shape, self.dtype, self.width = q.shape[:3], k.dtype, max(q.shape[-1], v.shape[-1])
        self.sizes = q.shape[1], q.shape[1] // max(1, k.shape[1]), q.shape[2], k.shape[2]
        self.matrices, self.factor = tuple(map(matrix_of, (q, k, v))), number_or_rows(factor, span.low)
        widths = (*padded(q.shape[-1]), *padded(v.shape[-1]))
        self.form = Form(*widths, isinstance(factor, Tensor), int(span.mask is not None))._replace(**form)

    def blank(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor of that shape."""
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def new(self, *shape: int) -> Tensor:
        """Return an uninitialised float32 [B, H, Tq, ...]."""
        return self.blank(*self.shape, *shape)

    def fitted(self, tiles: Tiles, **more: Any) -> Form:
        """Return the form of a kernel with these tiles."""
        return self.form._replace(own=tiles.rows, tile=tiles.keys, **more)

    def by_rows(self, kernel: Any, table: TileTable, *args: Any, flags: tuple[Any, ...] = (), **form: Any) -> None:
        """Launch a kernel over blocks of rows with tiles of a table, which may also depend on `flags`."""

        def run(tiles: Tiles) -> None:
            launch(kernel, self.grid(tiles.rows), *args, tiles=tiles, FORM=self.fitted(tiles, **form))

        run(table.pick(self.width, self.dtype, run, flags))

    def grid(self, rows: int) -> tuple[int, int]:
        """Return the grid of programs for blocks of `rows` rows of each head."""
        return -(-self.shape[2] // rows), self.shape[0] * self.shape[1]


def matrix_of(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return a matrix [B, H, T, D] as an argument of kernels: pointer and strides of batch, head and row."""
    return x, *x.stride()[:3]


def number_or_rows(x: float | Tensor, unread: Tensor) -> tuple[Tensor, float]:
    """Return (pointer, number) of a number, with a pointer that is not read, or of a tensor of rows."""
    return (x.contiguous(), 0.0) if isinstance(x, Tensor) else (unread, float(x))
