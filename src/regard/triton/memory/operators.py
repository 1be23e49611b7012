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


best_halves = _operator(
    "search.best_halves", "(Tensor query, Tensor keys, int k, float eps, *, bool distance) -> (Tensor, Tensor)",
    lambda query, keys, k, *_, **__: tuple(
        _like(query, *query.shape[:3], 2, k, dtype=dtype) for dtype in (torch.float32, torch.int64)
    ),
)  # fmt: skip
join = _operator(
    "read.join", "(Tensor half_scores, Tensor halves, int n) -> (Tensor, Tensor)",
    lambda scores, halves, n: tuple(
        _like(halves, *halves.shape[:3], halves.shape[-1], dtype=dtype) for dtype in (torch.int64, torch.float32)
    ),
)  # fmt: skip
picked_rows = _operator(
    "read.picked_rows",
    "(Tensor table, Tensor slots, Tensor? weights, Tensor? other=None, Tensor? good=None, Tensor? value=None, "
    "Tensor? gate=None) -> (Tensor, Tensor, Tensor)",
    lambda table, slots, weights, other=None, good=None, value=None, gate=None: (
        _like(table, *((0,) if weights is None else (*slots.shape[:2], table.shape[-1]))),
        _like(table, *((0,) if other is None else slots.shape)),
        _like(table, *((0,) if value is None else value.shape)),
    ),
)
pulled_rows = _operator(
    "read.pulled_rows",
    "(Tensor table, Tensor slots, Tensor? good, Tensor? by_sum, Tensor by_mix, Tensor sums, Tensor value, Tensor? gate)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda table, slots, good, by_sum, by_mix, sums, value, gate: tuple(
        _like(table, *shape) for shape in (slots.shape, sums.shape, value.shape, value.shape[:2])
    ),
)
errors_of = _operator(
    "targets.errors_of",
    "(Tensor read, Tensor value, Tensor? following, Tensor? good, Tensor? good_next, bool look_ahead)"
    " -> (Tensor, Tensor, Tensor)",
    lambda read, *_: (
        _like(read, *read.shape), *(_like(read, *read.shape[:2], dtype=dtype) for dtype in (torch.bool, torch.int64))
    ),
)  # fmt: skip
shares_of = _operator(
    "targets.shares_of",
    "(Tensor weights, Tensor slots, Tensor? gate, Tensor? counted, Tensor written, str rule, float rate) -> Tensor",
    lambda weights, *_: _like(weights, *weights.shape),
)
marginal_of = _operator(
    "keys.marginal_of",
    "(Tensor scores, Tensor halves, Tensor? counted, int memories, int n, *, bool raw=False) -> (Tensor, Tensor)",
    lambda scores, halves, counted, memories, n, *, raw=False: (
        _like(scores, memories * halves.shape[2] * 2, n),
        _like(scores, *((0,) if raw else (memories * halves.shape[2] * 2, n))),
    ),
)
moved_keys = _operator(
    "keys.moved_keys",
    "(Tensor keys, Tensor query, Tensor scores, Tensor halves, Tensor? counted, Tensor? slope, float rate, *,"
    " bool distance) -> Tensor",
    lambda keys, *_, **__: _like(keys, *keys.shape),
)
order_of = _operator(
    "write.order_of", "(Tensor slots, Tensor? counted, int n) -> (Tensor, Tensor, Tensor)",
    lambda slots, *_: tuple(
        _like(slots, slots.shape[0], slots.shape[1] * slots.shape[2], dtype=torch.int32) for _ in range(3)
    ),
)  # fmt: skip
written = _operator(
    "write.written",
    "(Tensor(a!) table, Tensor slots, Tensor entries, Tensor shares, Tensor errors, Tensor(b!)? log, *,"
    " bool add=False) -> ()",  # no default for log: torch 2.10 cannot count the changes of an argument left out
    lambda *_, **__: None, ("table", "log"),
)  # fmt: skip
swapped = _operator(
    "write.swapped", "(Tensor(a!) table, Tensor slots, Tensor(b!) log, *, bool keep=False) -> ()",
    lambda *_, **__: None, ("table", "log"),
)  # fmt: skip
