"""Versions of a table of values that is written in place, and gradients through them.

A write overwrites rows and logs their old values. The table holds the newest version; from every older one a log leads
to the next newer. Reading an older version swaps logs and rows on the way, after which the table holds that version and
the logs lead back (Baker 1991, shallow binding). So every version keeps its values, a backward pass restores the rows
of each chunk, and two stores written from one are both correct. Changing versions costs the rows between them.

Gradients of a version's rows are summed in one table during a backward pass. Every write returns a scalar without
meaning, the token, which later reads and writes take as input, so that autograd reaches the write after all of them.
The write passes the table of gradients on to the version before: with U = dL/dV' of the rows after the write,

    dL/dshare_pj = -U_i . e_p / N_i (i = slots_pj),    dL/de_p = -sum_j share_pj U_i / N_i,    dL/dV_i = U_i.

Legend: as in `slot_values`; E = P K entries.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...memory.stores.overlay_pool import first_order


class Version:
    """One version of a table of values."""

    __slots__ = ("__weakref__", "_gradient", "_pass", "borrowed", "link", "logged", "older", "table")

    def __init__(self, table: Tensor, *, borrowed: bool = False) -> None:
        self.table = table  # [M, N, Dv], which versions share
        self.borrowed = borrowed  # whether the table belongs to another object and must not be written
        # None if the table holds this version now; else a version nearer to that one, slots [M, E], and a log
        # [M, E, Dv] of the rows by which the two differ, as in this version
        self.link: tuple[Version, Tensor, Tensor] | None = None
        self.older: ref[Version] | None = None  # the version from which this was written, while it is referenced
        self.logged = 0  # bytes of the logs that lead here from older versions that were kept
        self._gradient: Tensor | None = None
        self._pass = -1

    def _path(self) -> list["Version"]:
        """Return the versions from this one to the one that the table holds."""
        path = [self]
        while (link := path[-1].link) is not None:
            path.append(link[0])
        return path

    def rooted(self) -> Tensor:
        """Return the table after making it hold this version."""
        for version in reversed(self._path()[:-1]):
            from .write import swapped

            assert version.link is not None
            newer, slots, log = version.link
            swapped(self.table, slots, log)
            newer.link, version.link = (version, slots, log), None
        return self.table

    def follow(self, newer: "Version", slots: Tensor, log: Tensor) -> None:
        """Link to a version that was just written from this one. The oldest gets a table when logs outgrow one."""
        self.link, newer.older = (newer, slots, log), ref(self)
        kept = self.older is not None and self.older() is not None  # otherwise the earlier logs are gone as well
        newer.logged = kept * self.logged + log.nbytes
        if newer.logged > self.table.nbytes:
            oldest: Version | None = self
            while oldest is not None and oldest.table is self.table:
                last, oldest = oldest, None if oldest.older is None else oldest.older()
            last.settle()
            newer.logged = 0

    def rows(self, slots: Tensor) -> Tensor:
        """Return V[slots] [M, P, K, Dv], float32."""
        first = torch.arange(len(slots), device=slots.device)[:, None, None]
        return self.rooted()[first, slots].float()

    def settle(self) -> None:
        """Copy the table and continue in the copy."""
        path, table = self._path(), self.rooted().clone()
        path[-1].rooted()
        self.table, self.link, path[1].older = table, None, None

    def gradient(self) -> Tensor:
        """Return the gradients of this version [M, N, Dv], float32, in the current backward pass."""
        if self._gradient is None or self._pass != torch._C._current_graph_task_id():
            self.give(torch.zeros(self.table.shape, dtype=torch.float32, device=self.table.device))
        assert self._gradient is not None
        return self._gradient

    def give(self, gradient: Tensor) -> None:
        """Add to the gradients; the tensor may be kept."""
        now = torch._C._current_graph_task_id()
        if self._gradient is None or self._pass != now:
            self._gradient, self._pass = gradient, now
        else:
            self._gradient += gradient

    def take(self) -> Tensor | None:
        """Return the gradients and forget them; None if there are none."""
        gradient = self._gradient if self._pass == torch._C._current_graph_task_id() else None
        self._gradient = None
        return gradient


class Anchor(torch.autograd.Function):
    """The token of stores whose tables came from a tensor [M, N, Dv] that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, version: Version) -> Tensor:
        ctx.version, ctx.dtype = version, table.dtype
        return torch.zeros((), device=table.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient = ctx.version.take()
        return None if gradient is None else gradient.to(ctx.dtype), None


class Read(torch.autograd.Function):
    """Weighted sums of rows [M, P, Dv] and, if values [B, T, Dv] are given, their mixes with those, else None."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, token: Tensor | None, version: Version, slots: Tensor, good: Tensor | None,
        value: Tensor | None, gate: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        from .read import picked_rows

        ctx.version = version
        ctx.set_materialize_grads(False)
        read, _, mixed = picked_rows(version.rooted(), slots, weights, None, good, value, gate)
        ctx.save_for_backward(weights, slots, good, None if value is None else read, value, gate)
        return read, None if value is None else mixed

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor | None, by_mix: Tensor | None) -> tuple[Tensor | None, ...]:
        from .prepare import order_of
        from .read import picked_rows, pulled_rows
        from .write import written

        (weights, slots, good, read, value, gate), version = ctx.saved_tensors, ctx.version
        by_weights = token = by_value = by_gate = None
        if by_mix is not None:
            by_weights, upstream, by_value, by_gate = pulled_rows(
                version.rooted(), slots, good, upstream, by_mix, read, value, gate
            )
        elif upstream is not None and ctx.needs_input_grad[0]:
            by_weights = picked_rows(version.rooted(), slots, None, upstream, good)[1]
        if upstream is not None and ctx.needs_input_grad[1]:
            token = upstream.new_zeros(())
            order = order_of(slots, good, version.table.shape[1])
            written(version.gradient(), *order, weights, upstream, add=True)
        return by_weights, token, None, None, None, by_value, None if gate is None else by_gate


class Write(torch.autograd.Function):
    """The token of a write: its backward pass takes the later version's gradient to shares, errors, the older one."""

    @staticmethod
    def forward(
        ctx: Any, shares: Tensor, errors: Tensor, token: Tensor | None, before: Version, after: Version,
        slots: Tensor, count: Tensor, counted: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(shares, errors, slots, count, counted)
        ctx.before, ctx.after = before, after
        return shares.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        from .read import picked_rows

        shares, errors, slots, count, counted = ctx.saved_tensors
        gradient = ctx.after.take()
        none = (None,) * 5
        token = shares.new_zeros(()) if ctx.needs_input_grad[2] else None
        if gradient is None:
            return torch.zeros_like(shares), torch.zeros_like(errors), token, *none
        count = -count
        by_errors, dots, _ = picked_rows(gradient, slots, shares / count, errors, counted)
        if token is not None:
            ctx.before.give(gradient)
        return dots / count, by_errors, token, *none


class Dense(torch.autograd.Function):
    """The whole tables."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, version: Version) -> Tensor:
        ctx.version = version
        return version.rooted().clone(memory_format=torch.contiguous_format)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        ctx.version.give(upstream.to(torch.float32, copy=True, memory_format=torch.contiguous_format))
        return upstream.new_zeros((), dtype=torch.float32), None
