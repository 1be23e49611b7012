"""`precision.clean` in one pass: set vectors that are not finite to zero and return which those are.

Legend: N vectors of D numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .launch import launch
from .operators import operator
from .tiles import Tiles, TileTable

TABLE = TileTable(
    "finite",
    {
        (64, 4): Tiles(rows=32),
        (128, 4): Tiles(rows=16, warps=8),
        (256, 4): Tiles(rows=8, warps=8),
        (1 << 20, 4): Tiles(rows=2, warps=8),
    },
)


def _run(x: Tensor) -> tuple[Tensor, Tensor]:
    from .finite_kernel import clean_kernel

    good, bad = x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.bool)
    if x.dim() != 4 or x.stride(-1) != 1:
        x = x.contiguous().view(1, 1, -1, x.shape[-1])
    batch, heads, length, dim = x.shape
    tiles = TABLE.pick(dim, x.dtype)
    grid = (-(-length // tiles.rows), batch * heads)
    steps = [x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1)]  # strides of axes of size 1 are arbitrary
    launch(
        clean_kernel, grid, x, good, bad, heads, length, *steps, x.stride(2),
        tiles=tiles, D=dim, WIDTH=1 << (dim - 1).bit_length(), ROWS=tiles.rows,
    )  # fmt: skip
    return good, bad


_clean = operator(
    "clean",
    _run,
    "(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.bool)),
)


def clean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [..., D] with zeros for vectors with numbers not finite or beyond 2^56, and which [...]."""
    good, bad = _clean(x)
    return good, bad


def _save(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _pull(ctx: Any, grad: Tensor, _: Any) -> Tensor:
    return torch.where(ctx.saved_tensors[0][..., None], 0, grad)


_clean.register_autograd(_pull, setup_context=_save)
