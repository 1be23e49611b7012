"""Values of memories as whole tables that are written in place, for kernels: a `SlotValues`.

A write overwrites the rows that it changes and logs what stood there. A store is a version of its table: the newest one
is what the table holds, and of every older one a log leads to the next newer. Reading an older version swaps logs and
rows on the way, after which the table holds that version, and the logs lead back to the others (Baker 1991, shallow
binding). So every store stays what it was, a backward pass restores the rows of each chunk by going back through the
versions, and two stores that go on from one are both right; going from one to the other costs the rows between them.

Gradients by the rows of a version are summed up in one table while a backward pass is under way. Every write makes a
number of no value, the token, that later reads and writes take, so that autograd reaches the write after all of those;
it hands the table of gradients on to the version before, as it is: with U = dL/dV' of the rows after the write,

    dL/dshare_pj = -U_i . e_p / N_i (i = slots_pj),    dL/de_p = -sum_j share_pj U_i / N_i,    dL/dV_i = U_i.

Legend: as in `estimators.slot_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...checks import ArgumentError, require, shape
from ...estimators.product_key import Dot, InverseDistance, SlotScore
from ...estimators.slot_values import slot_values
from .support import DTYPES, MISSING, unsupported_device

if TYPE_CHECKING:
    from ...estimators.fast_weight_state import Tokens
    from ...estimators.fast_weight_stream import How, Looked

CALL = "TableValues"
MOST_KEYS, MOST_PAIRS = 4096, 8192
"""Sub-keys of a half, and heads times the square of k (both up to a power of two), that kernels hold at once."""


class Version:
    """What one table of values was, is or will be again.

    Attributes:
        table: [M, N, Dv], which versions share.
        link: None where the table holds this version now; otherwise another version, nearer to that one, with slots
            [M, E] and a log [M, E, Dv] of the rows by which the two differ, as this version has them.
        borrowed: the table is somebody else's, and not written.
        older: the version from which this one was written, as long as anybody keeps that.
        logged: the bytes of the logs that lead here, of older versions that were kept.
    """

    __slots__ = ("__weakref__", "_gradient", "_pass", "borrowed", "link", "logged", "older", "table")

    def __init__(self, table: Tensor, *, borrowed: bool = False) -> None:
        self.table, self.borrowed = table, borrowed
        self.link: tuple[Version, Tensor, Tensor] | None = None
        self.older: ref[Version] | None = None
        self.logged = 0
        self._gradient: Tensor | None = None
        self._pass = -1

    def rooted(self) -> Tensor:
        """The table, holding this version."""
        from .memory_write import swapped

        path: list[Version] = [self]
        while (link := path[-1].link) is not None:
            path.append(link[0])
        for version in reversed(path[:-1]):
            assert version.link is not None
            newer, slots, log = version.link
            swapped(self.table, slots, log)
            newer.link, version.link = (version, slots, log), None
        return self.table

    def follow(self, newer: Version, slots: Tensor, log: Tensor) -> None:
        """Lead to a version that was just written from this one, over this one's table. The oldest version gets a table
        of its own when the logs on the way to it are larger than that."""
        self.link, newer.older = (newer, slots, log), ref(self)
        newer.logged = self.logged + log.numel() * log.element_size()
        if newer.logged > self.table.numel() * self.table.element_size():
            oldest: Version | None = self
            while oldest is not None and oldest.table is self.table:
                last, oldest = oldest, None if oldest.older is None else oldest.older()
            last.settle()
            newer.logged = 0

    def settle(self) -> None:
        """Go on in a table of its own."""
        from .memory_write import swapped

        path: list[Version] = [self]
        while (link := path[-1].link) is not None:
            path.append(link[0])
        table = self.table.clone()
        for version in reversed(path[:-1]):
            assert version.link is not None
            _, slots, log = version.link
            swapped(table, slots, log, keep=True)
        self.table, self.link = table, None
        path[1].older = None

    def gradient(self) -> Tensor:
        """The gradients of this version [M, N, Dv], float32, of the backward pass that is under way."""
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
        """The gradients, of which it keeps none; None where there were none."""
        found = self._gradient if self._pass == torch._C._current_graph_task_id() else None
        self._gradient = None
        return found


@slot_values.register("triton", "table")
@dataclass(frozen=True, eq=False)
class TableValues:
    """M tables of values that kernels write in place: a `SlotValues`, on CUDA devices.

    Attributes:
        version: of which table and when.
        base: [N, Dv], as it is stored.
        token: what stands for everything that was written in autograd's graph; None: no gradient flows through it.

    Precision: stored in float32 or bfloat16; sums and gradients are float32.
    Derivatives: once.
    Cost: the first write copies the tables (M N Dv numbers). Then a read takes one launch and O(P K Dv) time, a write
    two launches and O(P K (P K + Dv)) (beyond 8192 entries a sort), memory P K Dv numbers of log as long as an older
    version or a graph is kept; a backward pass M N Dv float32 numbers, once. `reset`, `select`, `repeat`, `clone` and
    `detach(rows)` copy tables. No device is waited for.
    """

    version: Version
    base: Tensor
    token: Tensor | None

    @classmethod
    def start(cls, base: Tensor, memories: int, dtype: torch.dtype | None = None) -> TableValues:
        """`memories` tables equal to `base` [N, Dv], which is copied at the first write.

        Raises:
            ArgumentError: a device or dtype on which no kernel runs.
        """
        reason = cls.refuses(base, dtype)
        require(reason is None, CALL, f"impl='triton' {reason}. impl='sparse' and 'reference' can.")
        return cls._begun(base.to(dtype or base.dtype), memories)

    @classmethod
    def refuses(
        cls,
        base: Tensor,
        dtype: torch.dtype | None = None,
        query: Tensor | None = None,
        keys: Tensor | None = None,
        top_k: int = 1,
        kind: SlotScore | None = None,
    ) -> str | None:
        """None where kernels do all that these need, else why not: values [N, Dv] stored as `dtype`, query [B, T, H,
        Dk], keys [H, 2, n, Dk/2]."""
        if MISSING is not None:
            return MISSING
        reason = unsupported_device(base.device.type)
        if reason is not None:
            return reason
        stored = dtype or base.dtype
        if stored not in DTYPES:
            return f"stores values in float32 and bfloat16; these are {stored}"
        for name, x in {"query": query, "keys": keys}.items():
            if x is not None and x.dtype == torch.float64:
                return f"computes in float32; {name} is {x.dtype}"
        if kind is not None and type(kind) not in (InverseDistance, Dot):
            return f"knows the scores 'idw' and 'dot', not {type(kind).__name__}"
        if keys is not None and keys.shape[-2] > MOST_KEYS:
            return f"looks through at most {MOST_KEYS} sub-keys of a half; these are {keys.shape[-2]}"
        heads = 1 if keys is None else keys.shape[-4]
        pairs = (1 << (heads - 1).bit_length()) * 4 ** (top_k - 1).bit_length()
        if pairs > MOST_PAIRS:
            return f"joins at most {MOST_PAIRS} pairs of a token; top_k={top_k} with {heads} heads makes {pairs}"
        return None

    @classmethod
    def prefers(cls, base: Tensor, *others: Any) -> bool:
        """Whether impl="auto" takes this store: on CUDA devices, where kernels do all that is needed."""
        return base.device.type == "cuda" and cls.refuses(base, *others) is None

    @classmethod
    def _begun(cls, base: Tensor, memories: int) -> TableValues:
        version = Version(base.detach().contiguous().expand(memories, *base.shape), borrowed=True)
        return cls(version, base, None)._anchored(base.expand(memories, *base.shape))

    @classmethod
    def _made(cls, table: Tensor, base: Tensor) -> TableValues:
        """A store of tables [M, N, Dv] that nobody else holds."""
        return cls(Version(table.detach().contiguous()), base, None)._anchored(table)

    def _anchored(self, table: Tensor) -> TableValues:
        """The store whose gradients reach `table`."""
        if not (torch.is_grad_enabled() and table.requires_grad):
            return self
        return replace(self, token=_Anchor.apply(table, self.version))

    @property
    def memories(self) -> int:
        """M."""
        return self.version.table.shape[0]

    @property
    def slots(self) -> int:
        """N."""
        return self.base.shape[0]

    @property
    def width(self) -> int:
        """Dv."""
        return self.base.shape[1]

    @property
    def bytes(self) -> int:
        """The memory of tables and base, without logs, which older stores hold."""
        parts = (self.base,) if self.version.borrowed else (self.version.table, self.base)
        return sum(x.numel() * x.element_size() for x in parts)

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        """sum over j of weights_pj V[slots_pj], [M, P, Dv], of weights and slots [M, P, K]."""
        if torch.compiler.is_compiling():
            return (weights[..., None] * self._plain(slots)).sum(-2)
        return self.picked(weights.float(), slots, None)

    def picked(self, weights: Tensor, slots: Tensor, good: Tensor | None) -> Tensor:
        """`read`, 0 for tokens that are not `good` (bool [M, P]); weights float32."""
        self._require_device()
        return _Read.apply(weights, self.token, self.version, slots, good)

    def rows(self, slots: Tensor) -> Tensor:
        """V[slots] [M, P, K, Dv]."""
        if torch.compiler.is_compiling() or self.token is None:
            return self._plain(slots)
        return _Rows.apply(self.token, self.version, slots)

    def _plain(self, slots: Tensor) -> Tensor:
        first = torch.arange(self.memories, device=slots.device)[:, None, None]
        return self.version.rooted()[first, slots].float()

    def write(self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor | None) -> TableValues:
        """As in `SlotValues.write`; counted None: all are."""
        self._require_device()
        shares, errors = shares.float(), errors.float()
        recorded = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (shares, errors, self.token)
        )
        new, count = self._write(slots, shares.detach(), errors.detach(), counted)
        if not recorded:
            return replace(self, version=new, token=None)
        token = _Write.apply(shares, errors, self.token, self.version, new, slots, count, counted)
        return replace(self, version=new, token=token)

    @torch.no_grad()
    def _write(self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor | None) -> tuple[Version, Tensor]:
        """The version after the write, and N_i of every entry [M, P, K]."""
        from .memory_write import order_of, written

        order, before = order_of(slots, counted, self.slots), self.version
        table, log = before.rooted(), None
        if before.borrowed:
            table = table.clone(memory_format=torch.contiguous_format)
        else:
            log = torch.empty(len(table), order.slots.shape[1], self.width, dtype=table.dtype, device=table.device)
        written(table, order, shares, errors, log)
        after = Version(table)
        if log is not None:
            before.follow(after, order.slots, log)
        return after, order.count.view(slots.shape)

    def looked(self, how: How, query: Tensor, keys: Tensor, good: Tensor | None) -> Looked | None:
        """What tokens find and read, by kernels: `estimators.fast_weight_stream.Rounds`."""
        from .memory_rounds import looked

        return looked(self, how, query, keys, good)

    def rewritten(
        self, how: How, keys: Tensor, tokens: Tokens, following: dict[str, Tensor] | None
    ) -> tuple[Tensor, TableValues] | None:
        """Keys and values after a write, by kernels: `estimators.fast_weight_stream.Rounds`."""
        from .memory_rounds import rewritten

        return rewritten(self, how, keys, tokens, following)

    def reset(self, rows: Tensor) -> TableValues:
        """The memories `rows` (bool [M]) begun anew."""
        return self._made(torch.where(rows.to(self.base.device)[:, None, None], self.base, self.dense()), self.base)

    def detach(self, rows: Tensor | None = None) -> TableValues:
        """The same numbers; through the memories `rows` (bool [M]; None: all) no gradient flows any more."""
        if rows is None:
            return replace(self, token=None, base=self.base if self.base.is_leaf else self.base.detach())
        if self.token is None:
            return self
        table = self.dense()
        return self._made(torch.where(rows.to(table.device)[:, None, None], table.detach(), table), self.base)

    def clone(self) -> TableValues:
        """A copy with a table of its own; gradients flow through it."""
        return self._made(self.dense(), self.base.clone())

    def select(self, indices: Tensor) -> TableValues:
        """The memories `indices`, integers in that order or flags [M]: a copy of their tables."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        index = indices.to(self.base.device)
        return self._copied(len(index), lambda table: table[index])

    def repeat(self, n: int) -> TableValues:
        """Every memory `n` times in a row: a copy of their tables."""
        return self._copied(self.memories * n, lambda x: x[:, None].expand(-1, n, -1, -1).flatten(0, 1))

    def _copied(self, memories: int, pick: Callable[[Tensor], Tensor]) -> TableValues:
        if not self.version.borrowed:
            return self._made(pick(self.dense()), self.base)
        begun = self._begun(self.base, memories)
        return begun if self.token is not None else replace(begun, token=None)

    def written(self) -> Tensor:
        """How many rows of each memory differ from the base, int64 [M]."""
        return (self.version.rooted() != self.base).any(-1).sum(-1)

    def dense(self) -> Tensor:
        """All values [M, N, Dv], a copy."""
        if self.token is None:
            return self.version.rooted().clone(memory_format=torch.contiguous_format)
        return _Dense.apply(self.token, self.version)

    def to_tensors(self) -> dict[str, Tensor]:
        """values [M, N, Dv] and base [N, Dv]."""
        return {"values": self.dense(), "base": self.base.contiguous()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TableValues:
        """The store that `to_tensors` wrote, on whatever device; only on CUDA devices it can be read and written.

        Raises:
            ArgumentError: a tensor is missing or unknown, or shapes do not fit.
        """
        call = f"{CALL}.from_tensors"
        require(
            set(tensors) == {"values", "base"},
            call,
            f"got {', '.join(sorted(tensors)) or 'nothing'}, expected base, values; give what to_tensors() wrote.",
        )
        values, base = tensors["values"], tensors["base"]
        fit = values.dim() == 3 and values.shape[1:] == base.shape
        if not (fit and values.dtype == base.dtype and base.dtype in DTYPES):
            raise ArgumentError(
                f"{call}: values {shape(values)} ({values.dtype}) and base {shape(base)} ({base.dtype}), expected "
                f"[M, N, Dv] and [N, Dv] of one dtype, torch.float32 or torch.bfloat16."
            )
        return cls._made(values.clone(memory_format=torch.contiguous_format), base)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableValues:
        """A store with a table of its own, without gradients; it shares the base unless that is copied too."""
        table = self.version.rooted().clone(memory_format=torch.contiguous_format)
        return TableValues(Version(table), memo.get(id(self.base), self.base), None)

    def __reduce__(self) -> Any:
        return TableValues.from_tensors, ({name: x.detach() for name, x in self.to_tensors().items()},)

    def _require_device(self) -> None:
        reason = unsupported_device(self.base.device.type)
        if reason is not None:
            raise ArgumentError(
                f"{CALL}: impl='triton' {reason}; move the state to a CUDA device, or begin with impl='sparse'."
            )


# Gradients ----------------------------------------------------------------------------------------------------


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` that refuses to be differentiated, instead of giving a part of the derivative."""
    plain = once_differentiable(backward)

    def checked(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():  # on in a backward pass that makes a graph of its own
            raise ArgumentError(
                "fast_weight_memory: a backward pass with create_graph=True goes through impl='triton', which has first "
                "derivatives only; choose impl='reference'."
            )
        return plain(ctx, *upstream)

    return checked


class _Anchor(torch.autograd.Function):
    """The token of stores whose tables came from a tensor [M, N, Dv] that wants a gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, version: Version) -> Tensor:
        ctx.version, ctx.dtype = version, table.dtype
        return torch.zeros((), device=table.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        found = ctx.version.take()
        return None if found is None else found.to(ctx.dtype), None


class _Read(torch.autograd.Function):
    """Weighted sums of rows."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, token: Tensor | None, version: Version, slots: Tensor, good: Tensor | None
    ) -> Tensor:
        from .memory_read import picked_rows

        ctx.save_for_backward(weights, slots, good)
        ctx.version = version
        out = picked_rows(version.rooted(), slots, weights, good=good)[0]
        assert out is not None
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        from .memory_read import picked_rows
        from .memory_write import order_of, written

        (weights, slots, good), version = ctx.saved_tensors, ctx.version
        own = token = None
        if ctx.needs_input_grad[0]:
            own = picked_rows(version.rooted(), slots, None, upstream, good)[1]
        if ctx.needs_input_grad[1]:
            token = upstream.new_zeros(())
            order = order_of(slots, good, version.table.shape[1])
            written(version.gradient(), order, weights, upstream, add=True)
        return own, token, None, None, None


class _Rows(torch.autograd.Function):
    """Rows themselves."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, version: Version, slots: Tensor) -> Tensor:
        ctx.version, ctx.slots = version, slots
        first = torch.arange(len(slots), device=slots.device)[:, None, None]
        return version.rooted()[first, slots].float()

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        from .memory_write import order_of, written

        slots = ctx.slots.flatten(1)[..., None]  # every entry a token of its own
        order = order_of(slots, None, ctx.version.table.shape[1])
        ones = torch.ones_like(slots, dtype=torch.float32)
        written(ctx.version.gradient(), order, ones, upstream.flatten(1, 2), add=True)
        return upstream.new_zeros(()), None, None


class _Write(torch.autograd.Function):
    """The token of a write that was done: what its backward finds by the version after it, it hands to shares, errors
    and the version before."""

    @staticmethod
    def forward(
        ctx: Any,
        shares: Tensor,
        errors: Tensor,
        token: Tensor | None,
        before: Version,
        after: Version,
        slots: Tensor,
        count: Tensor,
        counted: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(shares, errors, slots, count, counted)
        ctx.before, ctx.after = before, after
        return shares.new_zeros(())

    @staticmethod
    @first_order
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        from .memory_read import picked_rows

        shares, errors, slots, count, counted = ctx.saved_tensors
        found = ctx.after.take()
        none = (None,) * 5
        token = shares.new_zeros(()) if ctx.needs_input_grad[2] else None
        if found is None:
            return torch.zeros_like(shares), torch.zeros_like(errors), token, *none
        own, dots = picked_rows(found, slots, -shares / count, errors, counted)
        assert dots is not None
        if token is not None:
            ctx.before.give(found)
        return -dots / count, own, token, *none


class _Dense(torch.autograd.Function):
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
