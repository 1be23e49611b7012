"""The kernels of the fast-weight memory as torch custom operators with fakes, for `rounds` and `versions`. Arguments
and results are documented at the kernels; no operator imports triton before it runs.

No derivative is registered here: `rounds` and `versions` differentiate whole steps, since the values that a read or a
write uses belong to versions of a table and are no tensors of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..runtime.operators import operator

RULES = {"normalized": 0, "paper": 1, "reference": 2}
"""Codes of the step rules that kernels support."""


def _operator(function: str, schema: str, fake: Callable[..., Any], mutated: tuple[str, ...] = ()) -> Any:
    """Register the operator regard::triton_memory_<name> for a `function` of this folder, "module.name"."""
    module, name = function.split(".")

    def run(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f".{module}", __package__), name)(*args, **options)

    return operator(f"memory_{name}", run, schema, fake, mutated)


def _like(x: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


def _found(query: Tensor, keys: Tensor, k: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    shape = (*query.shape[:3], 2, k)
    return _like(query, *shape), _like(query, *shape, dtype=torch.int64)


best_halves = _operator(
    "search.best_halves",
    "(Tensor query, Tensor keys, int k, float eps, *, bool distance) -> (Tensor, Tensor)",
    _found,
)


def _joined(half_scores: Tensor, halves: Tensor, n: int) -> tuple[Tensor, Tensor]:
    shape = (*halves.shape[:3], halves.shape[-1])
    return _like(halves, *shape, dtype=torch.int64), _like(halves, *shape)


join = _operator("read.join", "(Tensor half_scores, Tensor halves, int n) -> (Tensor, Tensor)", _joined)


def _picked(
    table: Tensor, slots: Tensor, weights: Tensor | None, other: Tensor | None = None, good: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    sums = (0,) if weights is None else (*slots.shape[:2], table.shape[-1])
    return _like(table, *sums), _like(table, *((0,) if other is None else slots.shape))


picked_rows = _operator(
    "read.picked_rows",
    "(Tensor table, Tensor slots, Tensor? weights, Tensor? other=None, Tensor? good=None) -> (Tensor, Tensor)",
    _picked,
)
mixed_rows = _operator(
    "read.mixed_rows",
    "(Tensor table, Tensor slots, Tensor weights, Tensor? good, Tensor value, Tensor? gate) -> (Tensor, Tensor)",
    lambda table, slots, weights, good, value, gate: (
        _like(table, *slots.shape[:2], table.shape[-1]), _like(table, *value.shape)
    ),
)  # fmt: skip
pulled_rows = _operator(
    "read.pulled_rows",
    "(Tensor table, Tensor slots, Tensor? good, Tensor? by_sum, Tensor by_mix, Tensor sums, Tensor value, Tensor? gate)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda table, slots, good, by_sum, by_mix, sums, value, gate: tuple(
        _like(table, *shape) for shape in (slots.shape, sums.shape, value.shape, value.shape[:2])
    ),
)


def _errors(read: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens = read.shape[:2]
    return _like(read, *read.shape), _like(read, *tokens, dtype=torch.bool), _like(read, *tokens, dtype=torch.int64)


errors_of = _operator(
    "targets.errors_of",
    "(Tensor read, Tensor value, Tensor? following, Tensor? good, Tensor? good_next, bool look_ahead)"
    " -> (Tensor, Tensor, Tensor)",
    _errors,
)
shares_of = _operator(
    "targets.shares_of",
    "(Tensor weights, Tensor slots, Tensor? gate, Tensor? counted, Tensor written, str rule, float rate) -> Tensor",
    lambda weights, *_: _like(weights, *weights.shape),
)


def _marginal(
    scores: Tensor, halves: Tensor, counted: Tensor | None, memories: int, n: int, *, raw: bool = False
) -> tuple[Tensor, Tensor]:
    shape = (memories * halves.shape[2] * 2, n)
    return _like(scores, *shape), _like(scores, *((0,) if raw else shape))


marginal_of = _operator(
    "keys.marginal_of",
    "(Tensor scores, Tensor halves, Tensor? counted, int memories, int n, *, bool raw=False) -> (Tensor, Tensor)",
    _marginal,
)
moved_keys = _operator(
    "keys.moved_keys",
    "(Tensor keys, Tensor query, Tensor scores, Tensor halves, Tensor? counted, Tensor? slope, float rate, *,"
    " bool distance) -> Tensor",
    lambda keys, *_, **__: _like(keys, *keys.shape),
)


def _ordered(slots: Tensor, *_: Any) -> tuple[Tensor, ...]:
    shape = slots.shape[0], slots.shape[1] * slots.shape[2]
    return tuple(_like(slots, *shape, dtype=torch.int32) for _ in range(3))


order_of = _operator("write.order_of", "(Tensor slots, Tensor? counted, int n) -> (Tensor, Tensor, Tensor)", _ordered)
written = _operator(
    "write.written",
    "(Tensor(a!) table, Tensor slots, Tensor entries, Tensor shares, Tensor errors, Tensor(b!)? log, *,"
    " bool add=False) -> ()",  # no default for log: torch 2.10 cannot count the changes of an argument left out
    lambda *_, **__: None,
    ("table", "log"),
)
swapped = _operator(
    "write.swapped",
    "(Tensor(a!) table, Tensor slots, Tensor(b!) log, *, bool keep=False) -> ()",
    lambda *_, **__: None,
    ("table", "log"),
)
