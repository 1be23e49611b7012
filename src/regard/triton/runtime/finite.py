"""`precision.clean` as one launch for up to three tensors, and one for the backward pass: set non-finite vectors to
zero and return their mask."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from .launch import launch
from .operators import operator
from .tiles import TileTable, power_of_two

TABLE = TileTable.by_width("finite", [], [(32, 64, 4, 2), (16, 64, 8, 2), (8, 64, 8, 2), (2, 64, 8, 2)])
Some: TypeAlias = Tensor | None


def _job(x: Tensor, cleaned: Tensor, bad: Tensor) -> tuple[Any, int, int, int, int]:
    """Return the pointers and strides of one tensor, and its numbers of heads of all sequences, heads, rows and D."""
    if x.dim() != 4 or x.stride(-1) != 1:
        x = x.contiguous().view(1, 1, -1, x.shape[-1])
    batch, heads, length, dim = x.shape
    steps = [x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1)]  # strides of axes of size 1 are arbitrary
    return (x, cleaned, bad, *steps, x.stride(2)), batch * heads, max(1, heads), length, dim


def _run(*given: Some) -> tuple[Tensor, ...]:
    """Clean three tensors by three flags or, if the first of these is None, by their numbers, and return flags too."""
    from .kernels import clean_kernel

    outs, backward = _empty(*given), given[3] is not None
    wanted = zip(given[:3], outs[:3], given[3:] if backward else outs[3:], strict=True)
    jobs = [_job(x, y, bad) for x, y, bad in wanted if x is not None and bad is not None]
    tiles = TABLE.pick(max(job[-1] for job in jobs), jobs[0][0][0].dtype)
    grid = max(-(-length // tiles.rows) for *_, length, _ in jobs), max(most for _, most, *_ in jobs), len(jobs)
    jobs += [jobs[0]] * (3 - len(jobs))  # not read
    matrices, programs, heads, lengths, dims = zip(*jobs, strict=True)
    launch(
        clean_kernel, grid, matrices, *programs, *heads, *lengths, tiles=tiles,
        DIMS=dims, WIDTH=power_of_two(max(dims)), ROWS=tiles.rows, COUNT=grid[2], BACKWARD=backward,
    )  # fmt: skip
    return outs


def _empty(*given: Some) -> tuple[Tensor, ...]:
    """Return three tensors and, unless flags are given, a flag of each of their vectors, empty for None."""
    first = given[0]
    assert first is not None
    shapes = [(0,) if x is None else x.shape for x in given[:3]]
    flags = [(0,) if x is None or given[3] is not None else x.shape[:-1] for x in given[:3]]
    return *map(first.new_empty, shapes), *(first.new_empty(shape, dtype=torch.bool) for shape in flags)


_clean = operator(
    "clean", _run,
    "(Tensor x, Tensor? y, Tensor? z, Tensor? bad_x, Tensor? bad_y, Tensor? bad_z) -> "
    f"({', '.join(6 * ['Tensor'])})", _empty,
)  # fmt: skip


def clean(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each of up to three tensors [..., D] of one dtype: the tensor with zeros for vectors with a number
    that is non-finite or beyond 2^56, and their mask, boolean [...]."""
    cleaned = _clean(*tensors, *(None,) * (6 - len(tensors)))
    return [(cleaned[i], cleaned[3 + i]) for i in range(len(tensors))]


def _save(ctx: Any, inputs: tuple[Some, ...], output: tuple[Tensor, ...]) -> None:
    ctx.given = [x is not None for x in inputs[:3]]  # outputs of what was not given are empty
    ctx.save_for_backward(*(output[3:] if inputs[3] is None else inputs[3:]))
    ctx.mark_non_differentiable(*output[3:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Some) -> tuple[Some, ...]:
    """Return the gradients with zeros for bad vectors; None where there is none."""
    given = [i for i in range(3) if ctx.given[i] and grads[i] is not None]
    if not given:
        return (None,) * 6
    more = (None,) * (3 - len(given))
    cleaned = _clean(*(grads[i] for i in given), *more, *(ctx.saved_tensors[i] for i in given), *more)
    pulled = dict(zip(given, cleaned, strict=False))
    return *(pulled.get(i) for i in range(3)), None, None, None


_clean.register_autograd(_differentiate, setup_context=_save)
