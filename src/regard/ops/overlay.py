"""Values of memories as a shared base and the rows that were written: what a write costs depends on what it touches.

Every memory begins as the same base [N, Dv], which is kept once. A write appends the rows that it changes to a pool and
gives a store whose pointers lead to them. Nothing that was there is overwritten, so that

- stores from before the write remain what they were, and two that go on from one do not see each other;
- selecting and repeating memories (beam search) copies pointers only;
- the pool is the record that a backward pass needs: no table is kept, copied or rebuilt for a chunk.

Gradients of values are kept for the rows that got one, beside the pool (`RowGradients`), while a backward pass is under
way. Every write makes a number of no value, the token, that later reads and writes take, so that autograd reaches the
write after all of those; it then finds the gradients of its rows, and hands them on to the rows that they replaced. With
U = dL/dV' of the rows after the write, N_i their counts, s shares and e errors,

    dL/ds_pj = -U_i . e_p / N_i (i = slots_pj),    dL/de_p = -sum_j s_pj U_i / N_i,    dL/dV_i = U_i.

Legend: as in `estimators.slot_values`; E entries (p, j), U rows that a write changes. A row's number: below N in the
base, from N on in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import ArgumentError, require, shape
from ..estimators.slot_values import slot_values
from .row_pieces import SPARE, Groups, RowGradients, RowPieces, spread, tiles, weighted_sums

BASE = -1
"""A pointer at the base. From 0 on: a row of the pool that was written; below: -2 - a row of the pool that was not,
but stands there as in the base."""


class Pool(RowPieces):
    """The base and, behind it, all rows that were written to any store that grew from it."""

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape[1], dtype, base.device, base.detach())
        self.base = base
        self._gradients: RowGradients | None = None
        self._pass = -1

    @property
    def wide(self) -> torch.dtype:
        """In which it is computed."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gradients(self) -> RowGradients:
        """Those of the backward pass that is under way; what an earlier one left, of which only a part was asked for,
        is not among them."""
        now = torch._C._current_graph_task_id()
        if self._gradients is None or self._pass != now:
            self._gradients, self._pass = RowGradients(self.width, self.wide, self.device), now
        return self._gradients

    def tidy(self) -> None:
        """Free the gradients' memory once all were used."""
        if self._gradients is not None and self._gradients.empty:
            self._gradients = None


@dataclass(frozen=True)
class Reach:
    """Which rows hand their gradients on.

    Attributes:
        since: rows of the pool from this number on; earlier ones are from before a detach().
        attached: bool [M], memories whose untouched rows hand them on to the base; None: none does.
    """

    since: int
    attached: Tensor | None

    def of(self, pool: Pool, ids: Tensor, memory: Tensor) -> Tensor:
        """Of rows ids [E] of the memories `memory` [E], whether each does: bool [E]."""
        late = ids >= self.since
        return late if self.attached is None else late | ((ids < pool.given) & self.attached[memory])


@slot_values.register("sparse", "overlay")
@dataclass(frozen=True, eq=False)
class OverlayValues:
    """M tables of values that share their base: a `SlotValues`.

    Attributes:
        pool: the rows.
        where: int32 [M, N], a pointer of every slot.
        token: what stands for everything that was written in autograd's graph; None: no gradient flows through it.
        reach: which rows hand their gradients on.

    Precision: rows are stored in float32, bfloat16 or float64; sums and gradients are float32 at least.
    Derivatives: once.
    Cost: a read O(P K Dv) time, a write O(P K (Dv + log P K)) and a copy of the pointers (4 N bytes a memory); memory
    Dv numbers for every row that a write touched. Where no gradients are kept, rows that nothing points at any more go
    when they outnumber the others, and a memory of which more than half is written becomes a full table.
    """

    pool: Pool
    where: Tensor
    token: Tensor | None
    reach: Reach

    @classmethod
    def start(cls, base: Tensor, memories: int, dtype: torch.dtype | None = None) -> OverlayValues:
        """`memories` tables equal to `base` [N, Dv], which is not copied, written rows being stored as `dtype` (that
        of `base` where None). Gradients reach `base` as one dense tensor at the end of a backward pass."""
        pool = Pool(base, dtype or base.dtype)
        where = torch.full((memories, len(base)), BASE, dtype=torch.int32, device=base.device)
        return cls(pool, where, None, Reach(pool.size, None))._attach(where.new_ones(memories, dtype=torch.bool))

    @property
    def memories(self) -> int:
        """M."""
        return self.where.shape[0]

    @property
    def slots(self) -> int:
        """N."""
        return self.where.shape[1]

    @property
    def width(self) -> int:
        """Dv."""
        return self.pool.width

    @property
    def bytes(self) -> int:
        """The memory of pointers, pool and base; stores that grew from one share pool and base."""
        base = self.pool.base
        return self.pool.bytes + base.numel() * base.element_size() + self.where.numel() * self.where.element_size()

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        """sum over j of weights_pj V[slots_pj], [M, P, Dv], of weights and slots [M, P, K]."""
        ids = self._ids(slots)
        return _Read.apply(weights.to(self.pool.wide), self.token, self.pool, ids, self.reach)

    def rows(self, slots: Tensor) -> Tensor:
        """V[slots] [M, P, K, Dv]."""
        return _Rows.apply(self.token, self.pool, self._ids(slots), self.reach)

    def write(self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor) -> OverlayValues:
        """As in `SlotValues.write`."""
        shares, errors = shares.to(self.pool.wide), errors.to(self.pool.wide)
        recorded = torch.is_grad_enabled() and (self.token is not None or shares.requires_grad or errors.requires_grad)
        with torch.no_grad():
            plan = Plan.of(slots, shares, counted, self.slots, everything=recorded)
            old = self._row(self.where.flatten()[plan.keys], plan.keys % self.slots)
            start = self.pool.size
            plan.append(self.pool, old, shares, errors, spare=SPARE if recorded else 0.5)
            where = self._pointed(plan, start)
        if not recorded:
            return replace(self, where=where, token=None, reach=Reach(self.pool.size, None))._tidied()
        token = _Write.apply(shares, errors, self.token, self.pool, plan, old, start, self.reach)
        return replace(self, where=where, token=token)

    def reset(self, rows: Tensor) -> OverlayValues:
        """The memories `rows` (bool [M]) begun anew."""
        rows = rows.to(self.where.device)
        return replace(self, where=self.where.masked_fill(rows[:, None], BASE))._attach(rows)

    def detach(self) -> OverlayValues:
        """The same numbers, through which no gradient flows."""
        return replace(self, token=None, reach=Reach(self.pool.size, None))._tidied()

    def clone(self) -> OverlayValues:
        """A copy; what is done to the one is never seen by the other. Rows are never overwritten, so that none are
        copied while gradients are kept; else the copy has its own."""
        return replace(self, where=self.where.clone()) if self.token is not None else self._packed()

    def select(self, indices: Tensor) -> OverlayValues:
        """The memories `indices`, integers in that order or flags [M]; only pointers are copied."""
        return self._picked(lambda x: x[indices.to(x.device)])

    def repeat(self, n: int) -> OverlayValues:
        """Every memory `n` times in a row; only pointers are copied."""
        return self._picked(lambda x: x.repeat_interleave(n, 0))

    def to(self, device: torch.device | str) -> OverlayValues:
        """The store on another device; gradients do not flow back."""
        return self if self.where.device == torch.device(device) else self._packed(torch.device(device))

    def written(self) -> Tensor:
        """How many rows of each memory were written, int64 [M]."""
        return (self.where >= 0).sum(1)

    def dense(self) -> Tensor:
        """All values [M, N, Dv]: large."""
        every = torch.arange(self.slots, device=self.where.device)
        return self.rows(every.expand(self.memories, 1, -1))[:, 0]

    def to_tensors(self) -> dict[str, Tensor]:
        """base [N, Dv], rows [R, Dv] and where [M, N]."""
        packed = self._packed()
        rows = packed.pool.pieces[1] if len(packed.pool.pieces) > 1 else self.pool.base.new_empty(0, self.width)
        base = packed.pool.base.detach()
        return {"base": base.contiguous(), "rows": rows.to(self.pool.dtype), "where": packed.where}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OverlayValues:
        """The store that `to_tensors` wrote.

        Raises:
            ArgumentError: a tensor is missing or unknown, or shapes or pointers do not fit.
        """
        call = "OverlayValues.from_tensors"
        require(
            set(tensors) == {"base", "rows", "where"},
            call,
            f"got {', '.join(sorted(tensors)) or 'nothing'}, expected base, rows, where; give what to_tensors() wrote.",
        )
        base, rows, where = tensors["base"], tensors["rows"], tensors["where"]
        fit = base.dim() == 2 and rows.shape[1:] == base.shape[1:] and where.shape[1:] == base.shape[:1]
        if not (fit and rows.dim() == 2 and where.dim() == 2 and where.dtype == torch.int32):
            raise ArgumentError(
                f"{call}: base {shape(base)}, rows {shape(rows)} and where {shape(where)} ({where.dtype}), expected "
                f"[N, Dv], [R, Dv] and [M, N] (torch.int32)."
            )
        last = max(int(where.max()), -2 - int(where.min())) if where.numel() else BASE
        require(last < len(rows), call, f"where points at row {last} of {len(rows)}; the tensors are of two stores.")
        pool = Pool(base, rows.dtype)
        if len(rows):
            pool.extend(len(rows))[0].copy_(rows)
        return cls(pool, where, None, Reach(pool.size, None))

    def _row(self, where: Tensor, slots: Tensor) -> Tensor:
        """The row numbers of pointers, those of `slots`."""
        where = where.long()
        stored = torch.where(where < 0, -2 - where, where) + self.slots
        return torch.where(where == BASE, slots, stored)

    def _ids(self, slots: Tensor) -> Tensor:
        """The row numbers of slots [M, P, K]."""
        return self._row(self.where.gather(1, slots.flatten(1)).view(slots.shape), slots)

    def _pointed(self, plan: Plan, start: int) -> Tensor:
        """The pointers after a write whose rows stand from number `start` on."""
        number = torch.arange(len(plan.keys), device=self.where.device) + start - self.slots
        flat = self.where.flatten().clone() if self.where.is_contiguous() else self.where.flatten()
        if plan.changed is not None:  # what stays as in the base is not among what was written
            number = torch.where(plan.changed | (flat[plan.keys] >= 0), number, -2 - number)
        flat[plan.keys] = number.int()
        return flat.view(self.where.shape)

    def _attach(self, rows: Tensor) -> OverlayValues:
        """The store in which untouched rows of the memories `rows` (bool [M]) hand gradients on to the base."""
        if not (torch.is_grad_enabled() and self.pool.base.requires_grad and bool(rows.any())):
            return self
        known = self.reach.attached
        if known is not None:
            return replace(self, reach=replace(self.reach, attached=known | rows))
        anchor = _Base.apply(self.pool.base, self.pool)
        token = anchor if self.token is None else self.token + anchor
        return replace(self, token=token, reach=replace(self.reach, attached=rows))

    def _picked(self, pick: Any) -> OverlayValues:
        known = self.reach.attached
        reach = replace(self.reach, attached=None if known is None else pick(known))
        return replace(self, where=pick(self.where), reach=reach)

    def _tidied(self) -> OverlayValues:
        """The store without rows that nothing points at, where those are many, and with full tables of memories that
        are mostly written."""
        held = self.pool.size - self.pool.given
        if not held:
            return self
        live = (self.where != BASE).sum(1)
        crowded = (self.written() > self.slots // 2) & (live < self.slots)
        return self._packed() if held > 2 * int(live.sum()) or bool(crowded.any()) else self

    def _packed(self, device: torch.device | None = None) -> OverlayValues:
        """The store with a pool of its own, of the rows that it points at; without gradients."""
        full = self.written() > self.slots // 2
        held = (self.where != BASE) | full[:, None]
        slots = torch.arange(self.slots, device=self.where.device).expand_as(self.where)
        ids, at = torch.unique(self._row(self.where[held], slots[held]), return_inverse=True)
        pool = Pool(self.pool.base if device is None else self.pool.base.detach().to(device), self.pool.dtype)
        if len(ids):
            rows = pool.extend(len(ids))[0]
            step = 1024
            for out, some in zip(rows.split(step), ids.split(step), strict=True):
                out.copy_(self.pool.gather(some, self.pool.dtype))
        where = self.where.clone()
        where[held] = torch.where(self.where[held] >= 0, at, -2 - at).int()
        return OverlayValues(pool, where.to(pool.device), None, Reach(pool.size, None))


@dataclass(frozen=True)
class Plan:
    """What a write does to which rows, U of them.

    Attributes:
        keys: int64 [U], memory * N + slot, ascending.
        entries: int64 [U], how many entries each row has.
        entry: int64 [E], where among all [M * P * K] each entry stands, by key.
        selected: K.
        count: [U], N_i.
        changed: bool [U], whether a row is written at all; None: all are.
    """

    keys: Tensor
    entries: Tensor
    entry: Tensor
    selected: int
    count: Tensor
    changed: Tensor | None

    @classmethod
    def of(cls, slots: Tensor, shares: Tensor, counted: Tensor, size: int, *, everything: bool) -> Plan:
        """Of slots and shares [M, P, K] and counted [M, P], in memories of `size` slots. With `everything` rows of
        counted tokens with share 0 are among those to be written, since their shares have a gradient."""
        first = torch.arange(slots.shape[0], device=slots.device)[:, None, None] * size
        share, number = shares.flatten(), counted[..., None].expand(slots.shape).flatten()
        entry = (number | (share != 0)).nonzero()[:, 0]
        groups = Groups.of((slots + first).flatten()[entry])
        entry, row = entry[groups.order], spread(groups.counts)
        none = share.new_zeros(len(groups.unique))
        count = none.index_add(0, row, number[entry].to(share.dtype)).clamp_(min=1)
        changed = none.index_add(0, row, (share[entry] != 0).to(share.dtype)) > 0
        if bool(changed.all()):
            return cls(groups.unique, groups.counts, entry, slots.shape[-1], count, None)
        if everything:
            return cls(groups.unique, groups.counts, entry, slots.shape[-1], count, changed)
        kept = (groups.unique[changed], groups.counts[changed], entry[changed[row]])
        return cls(*kept, slots.shape[-1], count[changed], None)

    @property
    def row(self) -> Tensor:
        """Of every entry, which of the U rows it is for: int64 [E]."""
        return spread(self.entries)

    @property
    def owner(self) -> Tensor:
        """Of every entry, which of the M * P tokens it belongs to."""
        return self.entry // self.selected

    def coefficients(self, shares: Tensor) -> Tensor:
        """-s_pj / N_i of every entry."""
        return -shares.flatten()[self.entry] / self.count[self.row]

    def append(self, pool: Pool, old: Tensor, shares: Tensor, errors: Tensor, spare: float) -> None:
        """Append to the pool what becomes of the rows `old` [U]."""
        weights, owner, error = self.coefficients(shares), self.owner, errors.flatten(0, 1)
        in_place, start = pool.dtype == pool.wide, 0
        for view in pool.extend(len(self.keys), spare):
            stop = start + len(view)
            if in_place:
                pool.gather(old[start:stop], pool.wide, out=view)
            for rows, entries, offsets in tiles(self.entries, pool.width, start, stop):
                moved = weighted_sums(error, owner[entries], weights[entries], offsets)
                new = view[rows.start - start : rows.stop - start]
                if in_place:
                    new += moved
                else:
                    new.copy_(pool.gather(old[rows], pool.wide).add_(moved))
            start = stop


def deposit(pool: Pool, ids: Tensor, owner: Tensor, weights: Tensor | None, source: Tensor) -> None:
    """Add weights[e] source[owner[e]] to the gradient of the row ids[e], for all E entries."""
    if not len(ids):
        return
    groups = Groups.of(ids)
    owner = owner[groups.order]
    weights = source.new_ones(len(ids)) if weights is None else weights[groups.order]
    for rows, entries, offsets in tiles(groups.counts, pool.width):
        pool.gradients.add(groups.unique[rows], weighted_sums(source, owner[entries], weights[entries], offsets))


class _Base(torch.autograd.Function):
    """The token of stores that begin as a base which wants a gradient."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, pool: Pool) -> Tensor:
        ctx.pool = pool
        return base.new_zeros((), dtype=pool.wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        pool: Pool = ctx.pool
        base = pool.base
        gradient = torch.zeros_like(base)
        ids = torch.arange(len(base), device=base.device)
        place = pool.gradients.places(ids)
        ids, place = ids[place >= 0], place[place >= 0]
        for at, some in zip(ids.split(1024), place.split(1024), strict=True):
            gradient.index_copy_(0, at, pool.gradients.rows.gather(some, base.dtype))
        pool.gradients.drop(ids)
        pool.tidy()
        return gradient, None


class _Read(torch.autograd.Function):
    """Weighted sums of rows."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, token: Tensor | None, pool: Pool, ids: Tensor, reach: Reach) -> Tensor:
        ctx.save_for_backward(weights, ids, pool.pieces[0])
        ctx.pool, ctx.reach = pool, reach
        tokens = ids.shape[0] * ids.shape[1]
        out = pool.sums(ids.flatten(), weights.flatten(), _owner(ids), tokens)
        return out.view(*ids.shape[:2], pool.width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weights, ids, _ = ctx.saved_tensors  # the base only for the check that nobody has changed it
        pool, source = ctx.pool, upstream.flatten(0, 1)
        own = token = None
        if ctx.needs_input_grad[0]:
            own = pool.products(ids.flatten(), _owner(ids), source).view_as(weights)
        if ctx.needs_input_grad[1]:
            token = upstream.new_zeros(())
            at = ctx.reach.of(pool, ids.flatten(), _owner(ids) // ids.shape[1]).nonzero()[:, 0]
            deposit(pool, ids.flatten()[at], at // ids.shape[2], weights.flatten()[at], source)
        return own, token, None, None, None


class _Rows(torch.autograd.Function):
    """Rows themselves."""

    @staticmethod
    def forward(ctx: Any, token: Tensor | None, pool: Pool, ids: Tensor, reach: Reach) -> Tensor:
        ctx.pool, ctx.ids, ctx.reach = pool, ids, reach
        return pool.gather(ids.flatten(), pool.wide).view(*ids.shape, pool.width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        pool, ids = ctx.pool, ctx.ids.flatten()
        memory = _owner(ctx.ids) // ctx.ids.shape[1]
        at = ctx.reach.of(pool, ids, memory).nonzero()[:, 0]
        deposit(pool, ids[at], at, None, upstream.reshape(-1, pool.width))
        return upstream.new_zeros(()), None, None, None


class _Write(torch.autograd.Function):
    """The token of a write: what its backward finds in the pool it hands to shares, errors and the rows before."""

    @staticmethod
    def forward(
        ctx: Any,
        shares: Tensor,
        errors: Tensor,
        token: Tensor | None,
        pool: Pool,
        plan: Plan,
        old: Tensor,
        start: int,
        reach: Reach,
    ) -> Tensor:
        ctx.save_for_backward(shares, errors)
        ctx.pool, ctx.plan, ctx.old, ctx.start, ctx.reach = pool, plan, old, start, reach
        return shares.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        shares, errors = ctx.saved_tensors
        pool, plan = ctx.pool, ctx.plan
        ids = torch.arange(len(plan.keys), device=pool.device) + ctx.start
        place = pool.gradients.places(ids)
        share_grad, error_grad = torch.zeros_like(shares), torch.zeros_like(errors)
        token = shares.new_zeros(()) if ctx.needs_input_grad[2] else None
        if bool((place >= 0).any()):
            _pull(pool, plan, place, shares, errors, share_grad, error_grad)
            has = place >= 0
            memory = plan.keys[has] // (pool.given or 1)
            keep = ctx.reach.of(pool, ctx.old[has], memory)
            pool.gradients.move(ids[has], ctx.old[has], keep)
        pool.tidy()
        return share_grad, error_grad, token, None, None, None, None, None


def _pull(
    pool: Pool, plan: Plan, place: Tensor, shares: Tensor, errors: Tensor, share_grad: Tensor, error_grad: Tensor
) -> None:
    """Write the gradients of shares and errors, of those of the rows after a write, which are in places `place` [U]."""
    row = plan.row
    at = (place[row] >= 0).nonzero()[:, 0]  # a row that nobody read has none
    entry, owner, where, count = plan.entry[at], plan.owner[at], place[row[at]], plan.count[row[at]]
    rows, error = pool.gradients.rows, errors.flatten(0, 1)
    share_grad.view(-1)[entry] = -rows.products(where, owner, error) / count
    order = owner.argsort()
    weights = (-shares.flatten()[entry] / count)[order]
    error_grad.copy_(rows.sums(where[order], weights, owner[order], len(error)).view_as(errors))


def _owner(ids: Tensor) -> Tensor:
    """Of every entry of [M, P, K], which of the M * P tokens it belongs to."""
    tokens, selected = ids.shape[0] * ids.shape[1], ids.shape[2]
    return torch.arange(tokens, device=ids.device).repeat_interleave(selected)
