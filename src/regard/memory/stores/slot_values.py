"""The protocol of stores of slot values, and the reference store.

A store holds M tables of N values, which all begin as one table, the base. It is immutable: a write returns a new
store, and reads of the old one stay differentiable. `impl=` chooses a registered store by name: "reference" is
`DenseValues`; "sparse" (`overlay`) keeps the base once and, of each memory, only the written rows; "triton" keeps whole
tables, which kernels write in place on CUDA devices.

Shapes: M memories, N slots, P tokens, K selected slots of a token (all heads), Dv width of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...checks import ArgumentError, require, shape
from ...precision import transformed
from ...registry import Registry

V = TypeVar("V", bound="SlotValues")


class SlotValues(Protocol):
    """M tables of values. Arithmetic and reads are float32 (float64 for float64 tables), whatever the storage."""

    @classmethod
    def start(cls: type[V], base: Tensor, memories: int, dtype: torch.dtype | None = None) -> V:
        """Return `memories` tables equal to `base` [N, Dv], stored as `dtype` (None: that of `base`). Gradients flow to
        `base`."""

    @property
    def memories(self) -> int:
        """M."""

    @property
    def slots(self) -> int:
        """N."""

    @property
    def width(self) -> int:
        """Dv."""

    @property
    def bytes(self) -> int:
        """The memory of all tensors, the base once."""

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        """Return sum_j weights_pj V[slots_pj], [M, P, Dv], for weights and slots [M, P, K]; differentiable in the
        weights and all writes."""

    def rows(self, slots: Tensor) -> Tensor:
        """Return V[slots] [M, P, K, Dv], differentiable in all writes."""

    def write(self: V, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> V:
        """Return the store with

            V_i' = V_i - (1 / N_i) sum over p, j with slots_pj = i of shares_pj errors_p,

        where N_i >= 1 is the number of entries (p, j) of counted tokens with slots_pj = i. Slots and shares [M, P, K],
        errors [M, P, Dv], counted bool [M, P]. Entries with share 0 are not written. Differentiable in shares, errors
        and the old values."""

    def reset(self: V, rows: Tensor) -> V:
        """Set the memories `rows` (bool [M]) back to the base."""

    def detach(self: V, rows: Tensor | None = None) -> V:
        """Cut off the gradients of the memories `rows` (bool [M]; None: all). Memories that are reset later pass
        gradients to the base again if it is a leaf of the graph (a parameter)."""

    def clone(self: V) -> V:
        """Return a copy that shares no memory; gradients flow through it."""

    def select(self: V, indices: Tensor) -> V:
        """Return the memories `indices`, integers in that order or flags [M]."""

    def repeat(self: V, n: int) -> V:
        """Repeat every memory `n` times in a row."""

    def written(self) -> Tensor:
        """Return the number of rows of each memory that differ from the base, int64 [M]."""

    def dense(self) -> Tensor:
        """Return all values [M, N, Dv]."""

    def to_tensors(self) -> dict[str, Tensor]:
        """Return name to tensor, contiguous, for safetensors, including the base."""

    @classmethod
    def from_tensors(cls: type[V], tensors: Mapping[str, Tensor]) -> V:
        """Return the store that `to_tensors` wrote; tensors with other names or shapes are an ArgumentError."""


slot_values: Registry[type[SlotValues]] = Registry(
    "slot value store", "regard.slot_values", home="regard.implementations"
)


def require_names(call: str, tensors: Mapping[str, Tensor], *names: str) -> None:
    """Check that a store is given the tensors that it wrote."""
    got = f"got {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(names)}; give what to_tensors() wrote."
    require(set(tensors) == set(names), call, got)


def whole_tables(
    call: str, tensors: Mapping[str, Tensor], dtypes: tuple[torch.dtype, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Return values [M, N, Dv] and base [N, Dv] that a store of whole tables wrote, in one of `dtypes` (empty: any)."""
    require_names(call, tensors, "base", "values")
    values, base = tensors["values"], tensors["base"]
    fit = values.dim() == 3 and values.shape[1:] == base.shape and values.dtype == base.dtype
    if not (fit and (not dtypes or base.dtype in dtypes)):
        given = f"values {shape(values)} ({values.dtype}) and base {shape(base)} ({base.dtype})"
        among = f", {' or '.join(map(str, dtypes))}" if dtypes else ""
        raise ArgumentError(f"{call}: {given}, expected [M, N, Dv] and [N, Dv] of one dtype{among}.")
    return values, base


def preferred(base: Tensor, *others: Any) -> str:
    """Return the store for impl="auto": "reference" under forward mode or a torch.func transform, which it alone has;
    otherwise the first whose `prefers(base, *others)` is true, then "sparse" if it is registered, then "reference"."""
    if transformed():
        return "reference"
    for name, store in slot_values.items():
        prefers = getattr(store, "prefers", None)
        if prefers is not None and prefers(base, *others):
            return name
    return "sparse" if "sparse" in slot_values else "reference"


@slot_values.register("reference", "dense")
@dataclass(frozen=True)
class DenseValues:
    """Whole tables and autograd, which every other store is tested against. A write makes two tensors of their size."""

    values: Tensor  # [M, N, Dv]
    base: Tensor  # [N, Dv]

    @classmethod
    def start(cls, base: Tensor, memories: int, dtype: torch.dtype | None = None) -> DenseValues:
        stored = base.to(dtype or base.dtype)
        return cls(stored.expand(memories, *base.shape), stored)

    @property
    def memories(self) -> int:
        return self.values.shape[0]

    @property
    def slots(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        return self.values.shape[2]

    @property
    def bytes(self) -> int:
        return self.base.nbytes + (0 if self.values.data_ptr() == self.base.data_ptr() else self.values.nbytes)

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.values.dtype, torch.float32)

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        return (weights[..., None, :].to(self._wide) @ self.rows(slots)).squeeze(-2)

    def rows(self, slots: Tensor) -> Tensor:
        first = torch.arange(self.memories, device=slots.device)[:, None, None] * self.slots
        rows = self.values.reshape(-1, self.width).index_select(0, (slots + first).reshape(-1))
        return rows.view(*slots.shape, self.width).to(self._wide)

    def write(self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> DenseValues:
        first = torch.arange(self.memories, device=slots.device)[:, None, None] * self.slots
        flat = (slots + first).reshape(-1)
        entries = counted[..., None].expand(slots.shape).reshape(-1).to(self._wide)
        count = entries.new_zeros(self.memories * self.slots).index_add(0, flat, entries).clamp(min=1)
        parts = (shares[..., None] * errors[..., None, :]).reshape(-1, self.width).to(self._wide)
        moved = parts.new_zeros(self.memories * self.slots, self.width).index_add(0, flat, parts)
        after = self.values.to(self._wide) - (moved / count[:, None]).view_as(self.values)
        return replace(self, values=after.to(self.values.dtype))

    def reset(self, rows: Tensor) -> DenseValues:
        return replace(self, values=torch.where(rows[:, None, None], self.base, self.values))

    def detach(self, rows: Tensor | None = None) -> DenseValues:
        if rows is None:
            return DenseValues(self.values.detach(), self.base if self.base.is_leaf else self.base.detach())
        return replace(self, values=torch.where(rows[:, None, None], self.values.detach(), self.values))

    def clone(self) -> DenseValues:
        return DenseValues(self.values.clone(), self.base.clone())

    def select(self, indices: Tensor) -> DenseValues:
        return replace(self, values=self.values[indices.to(self.values.device)])

    def repeat(self, n: int) -> DenseValues:
        return replace(self, values=self.values.repeat_interleave(n, 0))

    def written(self) -> Tensor:
        return (self.values != self.base).any(-1).sum(-1)

    def dense(self) -> Tensor:
        return self.values

    def to_tensors(self) -> dict[str, Tensor]:
        return {"values": self.values.contiguous(), "base": self.base.contiguous()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> DenseValues:
        return cls(*whole_tables("DenseValues.from_tensors", tensors))
