"""`precision.clean` as one launch for up to three tensors: set vectors that are not finite to zero, and return which
those are. The backward pass is one launch, too.

Legend: N vectors of D numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

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
Some: TypeAlias = Tensor | None


def _start(tensors: Sequence[Some], found: Sequence[Tensor], bad: Sequence[Some], backward: bool) -> None:
    """Fill `found` from the tensors: forward with `bad`, which is filled, too; backward by it."""
    from .finite_kernel import clean_kernel

    jobs = [_job(x, y, z) for x, y, z in zip(tensors, found, bad, strict=True) if x is not None and z is not None]
    tiles = TABLE.pick(max(job[-1] for job in jobs), jobs[0][0][0].dtype)
    grid = max(-(-length // tiles.rows) for *_, length, _ in jobs), max(most for _, most, *_ in jobs), len(jobs)
    jobs += [jobs[0]] * (3 - len(jobs))  # not read
    matrices, programs, heads, lengths, dims = zip(*jobs, strict=True)
    launch(
        clean_kernel, grid, matrices, *programs, *heads, *lengths, tiles=tiles,
        DIMS=dims, WIDTH=1 << (max(dims) - 1).bit_length(), ROWS=tiles.rows, COUNT=grid[2], BACKWARD=backward,
    )  # fmt: skip


def _job(x: Tensor, found: Tensor, bad: Tensor) -> tuple[Any, int, int, int, int]:
    """Return the pointers and strides of one tensor, and its numbers of heads of all sequences, heads, rows and D."""
    if x.dim() != 4 or x.stride(-1) != 1:
        x = x.contiguous().view(1, 1, -1, x.shape[-1])
    batch, heads, length, dim = x.shape
    steps = [x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1)]  # strides of axes of size 1 are arbitrary
    return (x, found, bad, *steps, x.stride(2)), batch * heads, max(1, heads), length, dim


def _run(*tensors: Some) -> tuple[Tensor, ...]:
    found, bad = _like(tensors, 0), _like(tensors, 1)
    _start(tensors, found, bad, backward=False)
    return *found, *bad


def _pull(*given: Some) -> tuple[Tensor, ...]:
    found = _like(given[:3], 0)
    _start(given[:3], found, given[3:], backward=True)
    return tuple(found)


def _like(tensors: Sequence[Some], flags: int) -> list[Tensor]:
    """Return a tensor for each of three, or with `flags` a flag for each vector; an empty one for None."""
    first = tensors[0]
    assert first is not None
    kind = torch.bool if flags else first.dtype
    return [first.new_empty(x.shape[: x.dim() - flags] if x is not None else 0, dtype=kind) for x in tensors]


_GIVEN = "Tensor x, Tensor? y, Tensor? z"
_clean = operator(
    "clean", _run, f"({_GIVEN}) -> ({', '.join(6 * ['Tensor'])})", lambda *x: (*_like(x, 0), *_like(x, 1))
)
_backward = operator(
    "clean_backward", _pull, f"({_GIVEN}, Tensor bad_x, Tensor? bad_y, Tensor? bad_z) -> (Tensor, Tensor, Tensor)",
    lambda *given: tuple(_like(given[:3], 0)),
)  # fmt: skip


def clean(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each of up to three tensors [..., D] of one dtype: the tensor with zeros for vectors with numbers not
    finite or beyond 2^56, and which these are, boolean [...]."""
    found = _clean(*tensors, *(None,) * (3 - len(tensors)))
    return [(found[i], found[3 + i]) for i in range(len(tensors))]


def _pulled(grads: Sequence[Some], bad: Sequence[Tensor]) -> list[Some]:
    """Return the gradients with zeros for bad vectors; None where there is none."""
    given = [(x, flags) for x, flags in zip(grads, bad, strict=False) if x is not None]
    more = (None,) * (3 - len(given))
    found = iter(_backward(*(x for x, _ in given), *more, *(flags for _, flags in given), *more) if given else ())
    return [None if x is None else next(found) for x in grads]


def _save(ctx: Any, inputs: tuple[Some, ...], output: tuple[Tensor, ...]) -> None:
    ctx.given = [x is not None for x in inputs]  # outputs of what was not given are empty
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Some) -> tuple[Some, ...]:
    given = [x if there else None for x, there in zip(grads, ctx.given, strict=False)]
    return tuple(_pulled(given, ctx.saved_tensors))


def _save_flags(ctx: Any, inputs: tuple[Some, ...], output: tuple[Tensor, ...]) -> None:
    ctx.given = [x is not None for x in inputs[:3]]
    ctx.save_for_backward(*(x for x in inputs[3:] if x is not None))
    ctx.set_materialize_grads(False)


def _differentiate_again(ctx: Any, *grads: Some) -> tuple[Some, ...]:
    return (*_differentiate(ctx, *grads), None, None, None)


_clean.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_differentiate_again, setup_context=_save_flags)
