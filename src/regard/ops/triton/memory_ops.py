"""The kernels of the fast-weight memory as torch custom operators, with fakes: what `memory_rounds` and
`memory_versions` call. What they take and give is said where the kernels are; none imports triton before it runs.

No derivative is filed here: `memory_rounds` and `memory_versions` differentiate whole steps, since the values that a
read or a write works on belong to versions of a table and are no tensors of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _like(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


@torch.library.custom_op("regard::triton_memory_search", mutates_args=())
def _search(query: Tensor, keys: Tensor, k: int, eps: float, distance: bool) -> tuple[Tensor, Tensor]:
    from .memory_search import best_halves

    return best_halves(query, keys, k, eps, distance=distance)


@_search.register_fake
def _(query, keys, k, eps, distance):
    shape = (*query.shape[:3], 2, k)
    return _like(query, *shape), _like(query, *shape, dtype=torch.int64)


def best_halves(query: Tensor, keys: Tensor, k: int, eps: float, *, distance: bool) -> tuple[Tensor, Tensor]:
    """`memory_search.best_halves`."""
    return _search(query, keys, k, eps, distance)


@torch.library.custom_op("regard::triton_memory_join", mutates_args=())
def join(half_scores: Tensor, halves: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """`memory_read.join`."""
    from .memory_read import join as run

    return run(half_scores, halves, n)


@join.register_fake
def _(half_scores, halves, n):
    shape = (*halves.shape[:3], halves.shape[-1])
    return _like(halves, *shape, dtype=torch.int64), _like(halves, *shape)


@torch.library.custom_op("regard::triton_memory_rows", mutates_args=())
def _rows(
    table: Tensor, slots: Tensor, weights: Tensor | None, other: Tensor | None, good: Tensor | None
) -> tuple[Tensor, Tensor]:
    from .memory_read import picked_rows

    found = picked_rows(table, slots, weights, other, good)
    sums, dots = (_like(table, 0) if x is None else x for x in found)
    return sums, dots


@_rows.register_fake
def _(table, slots, weights, other, good):
    sums = _like(table, 0) if weights is None else _like(table, *slots.shape[:2], table.shape[-1])
    return sums, _like(table, 0) if other is None else _like(table, *slots.shape)


def picked_rows(
    table: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    other: Tensor | None = None,
    good: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """`memory_read.picked_rows`."""
    sums, dots = _rows(table, slots, weights, other, good)
    return None if weights is None else sums, None if other is None else dots


@torch.library.custom_op("regard::triton_memory_errors", mutates_args=())
def errors_of(
    read: Tensor,
    value: Tensor,
    following: Tensor | None,
    good: Tensor | None,
    good_next: Tensor | None,
    look_ahead: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`memory_targets.errors_of`."""
    from .memory_targets import errors_of as run

    return run(read, value, following, good, good_next, look_ahead)


@errors_of.register_fake
def _(read, value, following, good, good_next, look_ahead):
    tokens = read.shape[:2]
    return _like(read, *read.shape), _like(read, *tokens, dtype=torch.bool), _like(read, *tokens, dtype=torch.int64)


@torch.library.custom_op("regard::triton_memory_shares", mutates_args=())
def shares_of(
    weights: Tensor,
    slots: Tensor,
    gate: Tensor | None,
    counted: Tensor | None,
    written: Tensor,
    rule: str,
    rate: float,
) -> Tensor:
    """`memory_targets.shares_of`."""
    from .memory_targets import shares_of as run

    return run(weights, slots, gate, counted, written, rule, rate)


@shares_of.register_fake
def _(weights, slots, gate, counted, written, rule, rate):
    return _like(weights, *weights.shape)


@torch.library.custom_op("regard::triton_memory_marginal", mutates_args=())
def _marginal(
    scores: Tensor, halves: Tensor, counted: Tensor | None, memories: int, n: int, raw: bool
) -> tuple[Tensor, Tensor]:
    from .memory_keys import marginal_of

    mean, slope = marginal_of(scores, halves, counted, memories, n, raw=raw)
    return mean, _like(mean, 0) if raw else slope  # no two outputs may be one tensor


@_marginal.register_fake
def _(scores, halves, counted, memories, n, raw):
    sets = memories * halves.shape[2] * 2
    return _like(scores, sets, n), _like(scores, 0) if raw else _like(scores, sets, n)


def marginal_of(
    scores: Tensor, halves: Tensor, counted: Tensor | None, memories: int, n: int, *, raw: bool = False
) -> tuple[Tensor, Tensor]:
    """`memory_keys.marginal_of`; with `raw` there is no slope."""
    return _marginal(scores, halves, counted, memories, n, raw)


@torch.library.custom_op("regard::triton_memory_keys", mutates_args=())
def _moved(
    keys: Tensor,
    query: Tensor,
    scores: Tensor,
    halves: Tensor,
    counted: Tensor | None,
    slope: Tensor | None,
    rate: float,
    distance: bool,
) -> Tensor:
    from .memory_keys import moved_keys

    return moved_keys(keys, query, scores, halves, counted, slope, rate, distance=distance)


@_moved.register_fake
def _(keys, query, scores, halves, counted, slope, rate, distance):
    return _like(keys, *keys.shape)


def moved_keys(
    keys: Tensor,
    query: Tensor,
    scores: Tensor,
    halves: Tensor,
    counted: Tensor | None,
    slope: Tensor | None,
    rate: float,
    *,
    distance: bool,
) -> Tensor:
    """`memory_keys.moved_keys`."""
    return _moved(keys, query, scores, halves, counted, slope, rate, distance)


@torch.library.custom_op("regard::triton_memory_order", mutates_args=())
def order_of(slots: Tensor, counted: Tensor | None, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """`memory_write.order_of`: slots, entries and count of an `Order`."""
    from .memory_write import order_of as run

    ordered, entries, count = run(slots, counted, n)
    return ordered, entries, count


@order_of.register_fake
def _(slots, counted, n):
    shape = slots.shape[0], slots.shape[1] * slots.shape[2]
    ordered, entries, count = (_like(slots, *shape, dtype=torch.int32) for _ in range(3))
    return ordered, entries, count


@torch.library.custom_op("regard::triton_memory_write", mutates_args=("table", "log"))
def _write(
    table: Tensor,
    log: Tensor | None,
    slots: Tensor,
    entries: Tensor,
    count: Tensor,
    shares: Tensor,
    errors: Tensor,
    add: bool,
) -> None:
    from .memory_write import Order, written

    written(table, Order(slots, entries, count), shares, errors, log, add=add)


@_write.register_fake
def _(table, log, slots, entries, count, shares, errors, add):
    return None


def written(
    table: Tensor,
    order: tuple[Tensor, Tensor, Tensor],
    shares: Tensor,
    errors: Tensor,
    log: Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    """`memory_write.written`."""
    _write(table, log, *order, shares, errors, add)


@torch.library.custom_op("regard::triton_memory_swap", mutates_args=("table", "log"))
def _swap(table: Tensor, slots: Tensor, log: Tensor, keep: bool) -> None:
    from .memory_write import swapped

    swapped(table, slots, log, keep=keep)


@_swap.register_fake
def _(table, slots, log, keep):
    return None


def swapped(table: Tensor, slots: Tensor, log: Tensor, *, keep: bool = False) -> None:
    """`memory_write.swapped`."""
    _swap(table, slots, log, keep)
