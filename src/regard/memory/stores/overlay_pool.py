"""The pool of rows behind `overlay`, and its gradients.

During a backward pass, gradients of rows are collected beside the pool (`RowGradients`). Every write returns a scalar,
the token, which later reads and writes take as an input, so autograd runs the backward of a write after theirs. It then
takes the gradients of its rows and passes them on to the rows that these replaced. With U = dL/dV' of the rows after
the write, N_i their counts, s shares and e errors,

    dL/ds_pj = -U_i . e_p / N_i (i = slots_pj),    dL/de_p = -sum_j s_pj U_i / N_i,    dL/dV_i = U_i.

Shapes as in `slot_values`; E entries (p, j), U rows that a write changes. Row numbers below N are rows of the base,
those from N on are rows of the pool.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...checks import ArgumentError
from .row_pieces import Groups, RowGradients, RowPieces, spread, tiles, weighted_sums


class Hold:
    """A reference to rows of a pool, which are not reused while it lives: those of one write, from `start` to `stop`,
    and of the writes before it."""

    __slots__ = ("__weakref__", "spans", "start", "stop", "total")

    def __init__(self, start: int, stop: int, before: "Hold | None") -> None:
        self.start, self.stop = start, stop
        spans: list[tuple[int, int]] = []
        for low, high in sorted((*(before.spans if before else ()), (start, stop))):
            if spans and spans[-1][1] == low:
                spans[-1] = (spans[-1][0], high)
            else:
                spans.append((low, high))
        self.spans: tuple[tuple[int, int], ...] = tuple(spans)  # disjoint ranges (from, to), ascending
        self.total: int = sum(high - low for low, high in spans)


class Pool(RowPieces):
    """The base followed by the written rows of all stores that continue from it."""

    def __init__(self, base: Tensor, dtype: torch.dtype) -> None:
        super().__init__(base.shape[1], dtype, base.device, base.detach())
        self.base = base
        self.writes = 0
        self.stamps = torch.zeros(0, dtype=torch.int32, device=base.device)  # of every added row, its write
        self._holds: WeakSet[Hold] = WeakSet()
        self._gradients: RowGradients | None = None
        self._pass = -1

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def claim(self, count: int, before: Hold | None, spare: float) -> Hold:
        """Return `count` consecutive rows that no `Hold` refers to, so that stores that were dropped leave room."""
        start = self.given
        for low, high in sorted({span for held in self._holds for span in held.spans}):
            if low - start >= count:
                break
            start = max(start, high)
        hold = Hold(start, start + count, before)
        self._holds.add(hold)
        if hold.stop > self.size:
            self.extend(hold.stop - self.size, spare)
            more = self.room - self.given - len(self.stamps)
            self.stamps = torch.cat((self.stamps, self.stamps.new_zeros(more))) if more else self.stamps
        self.writes += 1
        self.stamps[start - self.given : hold.stop - self.given] = self.writes
        return hold

    @property
    def gradients(self) -> RowGradients:
        """The gradients of the current backward pass, without those that an earlier, partial one left."""
        now = torch._C._current_graph_task_id()
        if self._gradients is None or self._pass != now:
            self._gradients, self._pass = RowGradients(self.width, self.wide, self.device), now
        return self._gradients

    def tidy(self) -> None:
        """Free the gradients' memory once all are used."""
        if self._gradients is not None and self._gradients.empty:
            self._gradients = None


@dataclass(frozen=True)
class Reach:
    """Which rows pass gradients on."""

    since: Tensor | None  # int32 [M], the last write before a detach(): only later rows do; None: all rows
    attached: Tensor | None  # bool [M], memories whose untouched rows pass gradients on to the base; None: none
    hold: Hold | None = None  # keeps the rows that a graph or store needs; None before the first write

    def of(self, pool: Pool, ids: Tensor, memory: Tensor) -> Tensor:
        """Return whether rows ids [E] of the memories `memory` [E] do, bool [E]."""
        late = ids >= pool.given
        if self.since is not None and len(pool.stamps):
            late &= pool.stamps[(ids - pool.given).clamp_min(0)] > self.since[memory]
        return late if self.attached is None else late | ((ids < pool.given) & self.attached[memory])


@dataclass(frozen=True)
class Plan:
    """The U rows that a write changes, and their entries."""

    keys: Tensor  # int64 [U], memory * N + slot, ascending
    entries: Tensor  # int64 [U], the number of entries of each row
    entry: Tensor  # int64 [E], the index of each entry among all [M * P * K], sorted by row
    selected: int  # K
    count: Tensor  # [U], N_i
    changed: Tensor | None  # bool [U], whether any share of a row is not 0; None: always

    @classmethod
    def of(cls, slots: Tensor, shares: Tensor, counted: Tensor, size: int, *, everything: bool) -> "Plan":
        """Return the plan for slots and shares [M, P, K] and counted [M, P], in memories of `size` slots. With
        `everything`, rows of counted tokens with share 0 are included, since these shares have a gradient."""
        first = torch.arange(slots.shape[0], device=slots.device)[:, None, None] * size
        share, number = shares.flatten(), counted[..., None].expand(slots.shape).flatten()
        entry = (number | (share != 0)).nonzero()[:, 0]
        groups = Groups.of((slots + first).flatten()[entry])
        entry, row = entry[groups.order], spread(groups.counts)
        none = share.new_zeros(len(groups.unique))
        count = none.index_add(0, row, number[entry].to(share.dtype)).clamp_(min=1)
        changed = none.index_add(0, row, (share[entry] != 0).to(share.dtype)) > 0
        always = bool(changed.all())
        if always or everything:
            return cls(groups.unique, groups.counts, entry, slots.shape[-1], count, None if always else changed)
        kept = (groups.unique[changed], groups.counts[changed], entry[changed[row]])
        return cls(*kept, slots.shape[-1], count[changed], None)

    @property
    def row(self) -> Tensor:
        """The row of every entry among the U, int64 [E]."""
        return spread(self.entries)

    @property
    def owner(self) -> Tensor:
        """The token of every entry among the M * P."""
        return self.entry // self.selected

    def coefficients(self, shares: Tensor) -> Tensor:
        """Return -s_pj / N_i for every entry."""
        return -shares.flatten()[self.entry] / self.count[self.row]

    def carry_out(self, pool: Pool, hold: Hold, old: Tensor, shares: Tensor, errors: Tensor) -> None:
        """Write the new values of the rows `old` [U] into the rows of `hold`."""
        weights, owner, error = self.coefficients(shares), self.owner, errors.flatten(0, 1)
        in_place, start = pool.dtype == pool.wide, 0
        for view in pool.views(hold.start, hold.stop):
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
    """Add weights[e] source[owner[e]] to the gradient of row ids[e], for all E entries."""
    if not len(ids):
        return
    groups = Groups.of(ids)
    owner = owner[groups.order]
    weights = source.new_ones(len(ids)) if weights is None else weights[groups.order]
    for rows, entries, offsets in tiles(groups.counts, pool.width):
        pool.gradients.add(groups.unique[rows], weighted_sums(source, owner[entries], weights[entries], offsets))


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `backward` that refuses to be differentiated. `once_differentiable` alone is not enough: its error node
    is not reached from the inputs, so `torch.autograd.grad` would silently return a part of the derivative."""
    plain = once_differentiable(backward)

    def checked(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():  # in a backward pass with create_graph=True
            why = "goes through impl='sparse' or 'triton', which have first derivatives only; choose impl='reference'"
            raise ArgumentError(f"fast_weight_memory: a backward pass with create_graph=True {why}.")
        return plain(ctx, *upstream)

    return checked


class Base(torch.autograd.Function):
    """Make the token of a store whose base needs a gradient."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, pool: Pool) -> Tensor:
        ctx.pool = pool
        return base.new_zeros((), dtype=pool.wide)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        pool: Pool = ctx.pool
        base = pool.base
        gradient = torch.zeros_like(base)
        ids = torch.arange(len(base), device=base.device)
        places = pool.gradients.places(ids)
        ids, places = ids[places >= 0], places[places >= 0]
        for at, some in zip(ids.split(1024), places.split(1024), strict=True):
            gradient.index_copy_(0, at, pool.gradients.rows.gather(some, base.dtype))
        pool.gradients.drop(ids)
        pool.tidy()
        return gradient, None


class Read(torch.autograd.Function):
    """Return weighted sums of rows."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, token: Tensor | None, pool: Pool, ids: Tensor, reach: Reach) -> Tensor:
        ctx.save_for_backward(weights, ids, pool.pieces[0])
        ctx.pool, ctx.reach = pool, reach
        out = pool.sums(ids.flatten(), weights.flatten(), _owner(ids), ids.shape[0] * ids.shape[1])
        return out.view(*ids.shape[:2], pool.width)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        weights, ids, _ = ctx.saved_tensors  # the base is saved so that autograd detects changes in place
        pool, source = ctx.pool, upstream.flatten(0, 1)
        by_weights = token = None
        if ctx.needs_input_grad[0]:
            by_weights = pool.products(ids.flatten(), _owner(ids), source).view_as(weights)
        if ctx.needs_input_grad[1]:
            token = upstream.new_zeros(())
            at = ctx.reach.of(pool, ids.flatten(), _owner(ids) // ids.shape[1]).nonzero()[:, 0]
            deposit(pool, ids.flatten()[at], at // ids.shape[2], weights.flatten()[at], source)
        return by_weights, token, None, None, None


class Rows(torch.autograd.Function):
    """Return rows."""

    @staticmethod
    def forward(ctx: Any, token: Tensor | None, pool: Pool, ids: Tensor, reach: Reach) -> Tensor:
        ctx.pool, ctx.ids, ctx.reach = pool, ids, reach
        return pool.gather(ids.flatten(), pool.wide).view(*ids.shape, pool.width)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        pool, ids = ctx.pool, ctx.ids.flatten()
        at = ctx.reach.of(pool, ids, _owner(ctx.ids) // ctx.ids.shape[1]).nonzero()[:, 0]
        deposit(pool, ids[at], at, None, upstream.reshape(-1, pool.width))
        return upstream.new_zeros(()), None, None, None


class Write(torch.autograd.Function):
    """Make the token of a write. Its backward passes the gradients of the rows on to shares, errors and old rows."""

    @staticmethod
    def forward(
        ctx: Any, shares: Tensor, errors: Tensor, token: Tensor | None, made: tuple[Pool, Plan, Tensor, Hold, Reach]
    ) -> Tensor:
        """`made`: the pool, the plan, the old rows [U], the new ones, and which rows passed gradients on."""
        ctx.save_for_backward(shares, errors)
        ctx.made = made
        return shares.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        shares, errors = ctx.saved_tensors
        pool, plan, old, hold, reach = ctx.made
        ids, gradients = torch.arange(hold.start, hold.stop, device=pool.device), pool.gradients
        places = gradients.places(ids)
        has = places >= 0  # rows that were not read have no gradient
        share_grad, error_grad = torch.zeros_like(shares), torch.zeros_like(errors)
        token = shares.new_zeros(()) if ctx.needs_input_grad[2] else None
        if bool(has.any()):
            row, error = plan.row, errors.flatten(0, 1)
            at = has[row].nonzero()[:, 0]
            entry, owner, where, count = plan.entry[at], plan.owner[at], places[row[at]], plan.count[row[at]]
            share_grad.view(-1)[entry] = -gradients.rows.products(where, owner, error) / count
            order = owner.argsort()
            weights = (-shares.flatten()[entry] / count)[order]
            error_grad.copy_(gradients.rows.sums(where[order], weights, owner[order], len(error)).view_as(errors))
            gradients.move(ids[has], old[has], reach.of(pool, old[has], plan.keys[has] // (pool.given or 1)))
        pool.tidy()
        return share_grad, error_grad, token, None


def _owner(ids: Tensor) -> Tensor:
    """Return the token of every entry of [M, P, K] among the M * P."""
    tokens, selected = ids.shape[0] * ids.shape[1], ids.shape[2]
    return torch.arange(tokens, device=ids.device).repeat_interleave(selected)
