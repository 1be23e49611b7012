"""The sparse store of slot values: a shared base, and the written rows of each memory.

All memories share one base [N, Dv]. A write appends the rows that it changes to a pool, and returns a store with
pointers to them. Rows are never overwritten, so

- older stores do not change, and two stores that continue from one are independent;
- selecting and repeating memories (beam search) copies only pointers;
- the backward pass finds all old rows in the pool: no table is kept, copied or rebuilt for a chunk.

Shapes as in `slot_values`. Row numbers below N are rows of the base, those from N on are rows of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, require, shape
from ...precision import transformed
from .overlay_pool import Base, Hold, Plan, Pool, Reach, Read, Rows, Write
from .row_pieces import SPARE
from .slot_values import require_names, slot_values

BASE = -1
"""The pointer to the base. Pointers from 0 on are written rows of the pool; those below -1 are -2 - (a row of the pool
that equals the base)."""


@slot_values.register("sparse", "overlay")
@dataclass(frozen=True, eq=False)
class OverlayValues:
    """M tables of values that share their base. Methods are described in `SlotValues`.

    Precision: rows are stored in float32, bfloat16 or float64; sums and gradients are float32 at least.
    Derivatives: first order only. A compiled graph holds reads of written rows that pass no gradient on (after
    `detach()`, or without gradients); others are run between two graphs.
    Cost: a read takes O(P K Dv) time, a write O(P K (Dv + log P K)) and a copy of the pointers (4 N bytes per memory),
    and Dv numbers of memory per row touched. Without gradients, unused rows are freed when they outnumber the used
    ones, and a memory with more than half of its rows written becomes a full table."""

    pool: Pool  # the rows
    where: Tensor  # int32 [M, N], the pointer of every slot
    token: Tensor | None  # a scalar that represents all writes in autograd's graph; None: no gradient flows to them
    reach: Reach  # which rows pass gradients on

    @classmethod
    def refuses(cls, *_: Any) -> str | None:
        """Return None, or why it cannot run now."""
        return "has no forward mode and no torch.func transforms" if transformed() else None

    @classmethod
    def start(cls, base: Tensor, memories: int, dtype: torch.dtype | None = None) -> OverlayValues:
        """Return `memories` tables equal to `base` [N, Dv], which is not copied. Written rows are stored as `dtype`
        (None: that of `base`). `base` gets one dense gradient at the end of a backward pass."""
        pool = Pool(base, dtype or base.dtype)
        where = torch.full((memories, len(base)), BASE, dtype=torch.int32, device=base.device)
        return cls(pool, where, None, Reach(None, None))._attach(where.new_ones(memories, dtype=torch.bool))

    @property
    def memories(self) -> int:
        return self.where.shape[0]

    @property
    def slots(self) -> int:
        return self.where.shape[1]

    @property
    def width(self) -> int:
        return self.pool.width

    @property
    def bytes(self) -> int:
        """The memory of pointers, pool and base. Stores that continue from one share pool and base."""
        return self.pool.bytes + self.pool.base.nbytes + self.where.nbytes

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        ids, weights = self._ids(slots), weights.to(self.pool.wide)
        if self._traceable:
            return (weights[..., None] * self.pool.traced(ids, self.pool.wide)).sum(-2)
        return Read.apply(weights, self.token, self.pool, ids, self.reach)

    def rows(self, slots: Tensor) -> Tensor:
        ids = self._ids(slots)
        if self._traceable:
            return self.pool.traced(ids, self.pool.wide)
        return Rows.apply(self.token, self.pool, ids, self.reach)

    def write(self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> OverlayValues:
        shares, errors = shares.to(self.pool.wide), errors.to(self.pool.wide)
        recorded = torch.is_grad_enabled() and (self.token is not None or shares.requires_grad or errors.requires_grad)
        with torch.no_grad():
            plan = Plan.of(slots, shares, counted, self.slots, everything=recorded)
            if not len(plan.keys):
                return self if recorded or self.token is None else self.detach()
            old = self._row(self.where.flatten()[plan.keys], plan.keys % self.slots)
            hold = self.pool.claim(len(plan.keys), self.reach.hold, SPARE if recorded else 0.5)
            plan.carry_out(self.pool, hold, old, shares, errors)
            where = self._pointed(plan, hold.start)
        if not recorded:
            return replace(self, where=where, token=None, reach=self._cut(hold))._tidied()
        token = Write.apply(shares, errors, self.token, (self.pool, plan, old, hold, self.reach))
        return replace(self, where=where, token=token, reach=replace(self.reach, hold=hold))

    def reset(self, rows: Tensor) -> OverlayValues:
        rows = rows.to(self.where.device)
        return replace(self, where=self.where.masked_fill(rows[:, None], BASE))._attach(rows)

    def detach(self, rows: Tensor | None = None) -> OverlayValues:
        if rows is None:
            return replace(self, token=None, reach=self._cut(self.reach.hold))._tidied()
        rows, known = rows.to(self.where.device), self.reach
        since = torch.where(rows, self.pool.writes, 0 if known.since is None else known.since).int()
        attached = None if known.attached is None else known.attached & ~rows
        return replace(self, reach=Reach(since, attached, known.hold))

    def clone(self) -> OverlayValues:
        """Return an independent copy. With gradients it shares the rows, which are never overwritten."""
        return replace(self, where=self.where.clone()) if self.token is not None else self._packed()

    def select(self, indices: Tensor) -> OverlayValues:
        return self._picked(lambda x: x[indices.to(x.device)])

    def repeat(self, n: int) -> OverlayValues:
        return self._picked(lambda x: x.repeat_interleave(n, 0))

    def written(self) -> Tensor:
        return (self.where >= 0).sum(1)

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.slots, device=self.where.device).expand(self.memories, 1, -1))[:, 0]

    def to_tensors(self) -> dict[str, Tensor]:
        """Return base [N, Dv], rows [R, Dv] and where [M, N]."""
        packed = self._packed()
        rows = packed.pool.pieces[1] if len(packed.pool.pieces) > 1 else self.pool.base.new_empty(0, self.width)
        base = packed.pool.base.detach()
        return {"base": base.contiguous(), "rows": rows.to(self.pool.dtype), "where": packed.where}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OverlayValues:
        call = "OverlayValues.from_tensors"
        require_names(call, tensors, "base", "rows", "where")
        base, rows, where = tensors["base"], tensors["rows"], tensors["where"]
        fit = base.dim() == 2 and rows.shape[1:] == base.shape[1:] and where.shape[1:] == base.shape[:1]
        if not (fit and rows.dim() == 2 and where.dim() == 2 and where.dtype == torch.int32):
            given = f"base {shape(base)}, rows {shape(rows)} and where {shape(where)} ({where.dtype})"
            raise ArgumentError(f"{call}: {given}, expected [N, Dv], [R, Dv] and [M, N] (torch.int32).")
        last = max(int(where.max()), -2 - int(where.min())) if where.numel() else BASE
        require(last < len(rows), call, f"where points at row {last} of {len(rows)}; the tensors are from two stores.")
        pool = Pool(base, rows.dtype)
        return cls._filled(pool, where, lambda view, start: view.copy_(rows[start : start + len(view)]), len(rows))

    @classmethod
    def _filled(cls, pool: Pool, where: Tensor, fill: Callable[[Tensor, int], Any], count: int) -> OverlayValues:
        """Return a store, without gradients, of `count` rows that `fill` writes into views of a new pool."""
        hold, start = pool.claim(count, None, 0.0), 0
        for view in pool.views(hold.start, hold.stop):
            fill(view, start)
            start += len(view)
        store = cls(pool, where, None, Reach(None, None, hold))
        return replace(store, reach=store._cut(hold))

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlayValues:
        """Return a store with its own pool, without gradients. It shares the base, unless that is copied too."""
        packed = self._packed()
        packed.pool.base = memo.get(id(self.pool.base), self.pool.base)
        packed.pool.pieces[0] = packed.pool.base.detach()
        return packed

    def __reduce__(self) -> Any:
        return OverlayValues.from_tensors, (self.to_tensors(),)

    @property
    def _traceable(self) -> bool:
        """Whether a compiler is tracing and no gradient flows to written rows."""
        return torch.compiler.is_compiling() and (self.token is None or not torch.is_grad_enabled())

    def _row(self, where: Tensor, slots: Tensor) -> Tensor:
        """Map slots, given their entries of `where`, to rows of the table or of the written copies."""
        where = where.long()
        return torch.where(where == BASE, slots, torch.where(where < 0, -2 - where, where) + self.slots)

    def _ids(self, slots: Tensor) -> Tensor:
        return self._row(self.where.gather(1, slots.flatten(1)).view(slots.shape), slots)

    def _pointed(self, plan: Plan, start: int) -> Tensor:
        """Return the pointers after a write to the rows from `start` on."""
        number = torch.arange(len(plan.keys), device=self.where.device) + start - self.slots
        flat = self.where.flatten().clone() if self.where.is_contiguous() else self.where.flatten()
        if plan.changed is not None:  # rows that still equal the base do not count as written
            number = torch.where(plan.changed | (flat[plan.keys] >= 0), number, -2 - number)
        flat[plan.keys] = number.int()
        return flat.view(self.where.shape)

    def _attach(self, rows: Tensor) -> OverlayValues:
        """Let untouched rows of the memories `rows` (bool [M]) pass gradients on to the base."""
        if not (torch.is_grad_enabled() and self.pool.base.requires_grad and bool(rows.any())):
            return self
        known = self.reach.attached
        if known is not None:
            return replace(self, reach=replace(self.reach, attached=known | rows))
        anchor = Base.apply(self.pool.base, self.pool)
        token = anchor if self.token is None else self.token + anchor
        return replace(self, token=token, reach=replace(self.reach, attached=rows))

    def _picked(self, pick: Any) -> OverlayValues:
        since, attached = (None if x is None else pick(x) for x in (self.reach.since, self.reach.attached))
        return replace(self, where=pick(self.where), reach=replace(self.reach, since=since, attached=attached))

    def _cut(self, hold: Hold | None) -> Reach:
        """Return a reach without any write so far."""
        return Reach(self.where.new_full((self.memories,), self.pool.writes), None, hold)

    def _tidied(self) -> OverlayValues:
        """Free unused rows if they are many, and make full tables of memories that are mostly written."""
        if self.reach.hold is None:
            return self
        live = (self.where != BASE).sum(1)
        crowded = (self.written() > self.slots // 2) & (live < self.slots)
        return self._packed() if self.reach.hold.total > 2 * int(live.sum()) or bool(crowded.any()) else self

    def _packed(self) -> OverlayValues:
        """Return the store with its own pool of only the rows in use, without gradients."""
        held = (self.where != BASE) | (self.written() > self.slots // 2)[:, None]
        slots = torch.arange(self.slots, device=self.where.device).expand_as(self.where)
        ids, at = torch.unique(self._row(self.where[held], slots[held]), return_inverse=True)
        where = self.where.clone()
        where[held] = torch.where(self.where[held] >= 0, at, -2 - at).int()

        def fill(view: Tensor, start: int) -> None:
            for out, some in zip(view.split(1024), ids[start : start + len(view)].split(1024), strict=True):
                out.copy_(self.pool.gather(some, self.pool.dtype))

        return self._filled(Pool(self.pool.base, self.pool.dtype), where, fill, len(ids))
