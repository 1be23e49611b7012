"""`precision.clean` as one launch for up to three tensors, and one for the backward pass: set non-finite vectors to
zero and return their mask."""

from typing import Any

import torch
from torch import Tensor

from .launch import launch
from .operators import operator
from .tiles import TileTable, power_of_two

TABLE = TileTable.by_width("finite", [], [(32, 64, 4, 2), (16, 64, 8, 2), (8, 64, 8, 2), (2, 64, 8, 2)])


def _job(x: Tensor, cleaned: Tensor, bad: Tensor) -> tuple[Any, int, int, int, int]:
    """Return the pointers and strides of one tensor, and its numbers of heads of all sequences, heads, rows and D."""
    if x.dim() != 4 or x.stride(-1) != 1:
        x = x.contiguous().view(1, 1, -1, x.shape[-1])
    batch, heads, length, dim = x.shape
    steps = [x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1)]  # strides of axes of size 1 are arbitrary
    return (x, cleaned, bad, *steps, x.stride(2)), batch * heads, max(1, heads), length, dim


def _run(tensors: list[Tensor], flags: list[Tensor]) -> list[Tensor]:
    """Clean up to three tensors by these flags or, without any, by their numbers, and return the flags too."""
    from .kernels import clean_kernel

    outs = _empty(tensors, flags)
    jobs = [_job(*given) for given in zip(tensors, outs, flags or outs[len(tensors) :], strict=False)]
    tiles = TABLE.pick(max(job[-1] for job in jobs), jobs[0][0][0].dtype)
    grid = max(-(-length // tiles.rows) for *_, length, _ in jobs), max(most for _, most, *_ in jobs), len(jobs)
    jobs += [jobs[0]] * (3 - len(jobs))  # not read
    matrices, programs, heads, lengths, dims = zip(*jobs, strict=True)
    launch(
        clean_kernel, grid, matrices, *programs, *heads, *lengths, tiles=tiles,
        DIMS=dims, WIDTH=power_of_two(max(dims)), ROWS=tiles.rows, COUNT=grid[2], BACKWARD=bool(flags),
    )  # fmt: skip
    return outs


def _empty(tensors: list[Tensor], flags: list[Tensor]) -> list[Tensor]:
    """Return a tensor like each and, unless flags are given, a flag of each of their vectors."""
    new = [] if flags else [x.new_empty(x.shape[:-1], dtype=torch.bool) for x in tensors]
    return [x.new_empty(x.shape) for x in tensors] + new


_clean = operator("clean", _run, "(Tensor[] tensors, Tensor[] flags) -> Tensor[]", _empty)


def clean(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return for each of up to three tensors [..., D] of one dtype: the tensor with zeros for vectors with a number
    that is non-finite or beyond 2^56, and their mask, boolean [...]."""
    cleaned = _clean(tensors, [])
    return list(zip(cleaned[: len(tensors)], cleaned[len(tensors) :], strict=True))


def _save(ctx: Any, inputs: tuple[list[Tensor], ...], output: list[Tensor]) -> None:
    new, ctx.given = output[len(inputs[0]) :], len(inputs[1])
    ctx.save_for_backward(*new, *inputs[1])
    ctx.mark_non_differentiable(*new)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], list[None]]:
    """Return the gradients with zeros for bad vectors; None where there is none."""
    flags = ctx.saved_tensors
    given = [i for i in range(len(flags)) if grads[i] is not None]
    cleaned = _clean([grads[i] for i in given], [flags[i] for i in given]) if given else []
    pulled = dict(zip(given, cleaned, strict=True))
    return [pulled.get(i) for i in range(len(flags))], [None] * ctx.given


_clean.register_autograd(_differentiate, setup_context=_save)
