"""Values of memories as whole tables that kernels write in place: a `SlotValues`. A store is a version of its table
(`versions`), so that it keeps its values when another store is written from it.

Legend: as in `slot_values`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checks import require
from ...memory.product_key import Dot, InverseDistance, SlotScore
from ...memory.stores.slot_values import slot_values, whole_tables
from ...precision import clean_each, outside_graphs, transformed
from ..runtime.finite import clean
from ..runtime.operators import applied
from ..runtime.support import DTYPES, GRID, MISSING, unsupported_device
from .versions import Anchor, Dense, Read, Version, Write

CALL = "TableValues"
MOST_KEYS, MOST_PAIRS = 4096, 8192
"""Limits of sub-keys of a half, and of heads times k^2 (both rounded up to powers of two), that kernels can hold."""


@slot_values.register("triton", "table")
@dataclass(frozen=True, eq=False)
class TableValues:
    """M tables of values that kernels write in place, for CUDA devices. Methods are described in `SlotValues`.

    Attributes:
        version: the version of a table.
        base: [N, Dv], in the stored dtype.
        token: represents everything that was written in autograd's graph; None: no gradient flows through it.

    Precision: stored in float32 or bfloat16; sums and gradients are float32. Derivatives: once.
    Cost: the first write, `reset`, `select`, `repeat`, `clone` and `detach(rows)` copy the tables. A read takes one
    launch and O(P K Dv) time; a write two launches, O(P K (P K + Dv)) time (above 8192 entries a sort), and P K Dv
    numbers of log; a backward pass M N Dv float32 numbers. Nothing waits for the device."""

    version: Version
    base: Tensor
    token: Tensor | None

    @classmethod
    def start(cls, base: Tensor, memories: int, dtype: torch.dtype | None = None) -> TableValues:
        """Return `memories` tables equal to `base` [N, Dv], which is copied at the first write. It is an ArgumentError
        if no kernel runs on its device and dtype."""
        reason = cls.refuses(base, dtype)
        require(reason is None, CALL, f"impl='triton' {reason}. impl='sparse' and 'reference' can.")
        return cls._begun(base.to(dtype or base.dtype), memories)

    @classmethod
    def refuses(
        cls, base: Tensor, dtype: torch.dtype | None = None, query: Tensor | None = None, keys: Tensor | None = None,
        top_k: int = 1, kind: SlotScore | None = None,
    ) -> str | None:  # fmt: skip
        """Return None, or why kernels cannot: values [N, Dv] as `dtype`, query [B, T, H, Dk], keys [H, 2, n, Dk/2]."""
        if MISSING is not None:
            return MISSING
        if transformed():
            return "has no forward mode and no torch.func transforms"
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
            return f"supports the scores 'idw' and 'dot', not {type(kind).__name__}"
        if keys is not None and keys.shape[-2] > MOST_KEYS:
            return f"searches at most {MOST_KEYS} sub-keys of a half; these are {keys.shape[-2]}"
        heads = 1 if keys is None else keys.shape[-4]
        pairs = (1 << (heads - 1).bit_length()) * 4 ** (top_k - 1).bit_length()
        if pairs > MOST_PAIRS:
            return f"joins at most {MOST_PAIRS} pairs of a token; top_k={top_k} with {heads} heads makes {pairs}"
        sets = 2 * heads * (1 if query is None else len(query))
        if sets > GRID:
            return f"takes at most {GRID} sets of sub-keys at once; two halves of {heads} heads of every row are {sets}"
        return None

    @classmethod
    def prefers(cls, base: Tensor, *others: Any) -> bool:
        """Return whether impl="auto" takes this store: on CUDA devices, if kernels do all that is needed."""
        return base.device.type == "cuda" and cls.refuses(base, *others) is None

    @classmethod
    def _begun(cls, base: Tensor, memories: int) -> TableValues:
        return cls._made(base.contiguous().expand(memories, *base.shape), base, borrowed=True)

    @classmethod
    def _made(cls, table: Tensor, base: Tensor, *, borrowed: bool = False) -> TableValues:
        """Return a store of tables [M, N, Dv], which gradients reach; no other object holds them if not `borrowed`."""
        version = Version(table.detach() if borrowed else table.detach().contiguous(), borrowed=borrowed)
        graded = torch.is_grad_enabled() and table.requires_grad
        return cls(version, base, Anchor.apply(table, version) if graded else None)

    @property
    def memories(self) -> int:
        return self.version.table.shape[0]

    @property
    def slots(self) -> int:
        return self.base.shape[0]

    @property
    def width(self) -> int:
        return self.base.shape[1]

    @property
    def bytes(self) -> int:
        """The memory of tables and base, without logs, which older stores hold."""
        return self.base.nbytes + (0 if self.version.borrowed else self.version.table.nbytes)

    def read(self, weights: Tensor, slots: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.token is None:
            return (weights[..., None] * self.version.rows(slots)).sum(-2)
        return self.mixed(weights.float(), slots, None)[0]

    @outside_graphs
    def mixed(
        self, weights: Tensor, slots: Tensor, good: Tensor | None, value: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return `read` and its mix with `value` [B, T, Dv] by `gate` [B, T] (None: the sum), or None without a value.
        Both are 0 for tokens that are not `good` (bool [M, P]). Weights are float32."""
        self._require_device()
        return applied(Read, weights, self.token, self.version, slots, good, value, gate)

    def rows(self, slots: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or self.token is None:
            return self.version.rows(slots)
        each = slots.flatten(1)[..., None]  # every entry is a token of its own
        return self.mixed(torch.ones_like(each, dtype=torch.float32), each, None)[0].view(*slots.shape, self.width)

    @outside_graphs
    def write(
        self, slots: Tensor, shares: Tensor, errors: Tensor, counted: Tensor | None,
        order: tuple[Tensor, Tensor] | None = None,
    ) -> TableValues:  # fmt: skip
        """Do `SlotValues.write`; `counted` None: all tokens are. `order`: of `order_of`, if it is known."""
        from .prepare import order_of
        from .write import written

        self._require_device()
        shares, errors = shares.float(), errors.float()
        given = shares, errors, self.token
        recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        (ordered, entries), before = order or order_of(slots, counted, self.slots), self.version
        table, log, count = before.rooted(), None, None
        if before.borrowed:
            table = table.clone(memory_format=torch.contiguous_format)
        else:
            log = torch.empty(len(table), ordered.shape[1], self.width, dtype=table.dtype, device=table.device)
        if recorded:
            count = torch.ones(slots.shape, dtype=torch.int32, device=slots.device)  # N_i, for tokens that count
        written(table, ordered, entries, shares.detach(), errors.detach(), log, count)
        new, token = Version(table), None
        if log is not None:
            before.follow(new, ordered, log)
        if count is not None:
            token = Write.apply(shares, errors, self.token, before, new, slots, count, counted)
        return replace(self, version=new, token=token)

    def clean(self, *tensors: Tensor) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Do `precision.clean_each` by one kernel."""
        kernel = all(x.dtype == torch.float32 and unsupported_device(x.device.type) is None for x in tensors)
        return clean(*tensors) if kernel else clean_each(*tensors)

    def looked(self, *given: Any) -> tuple[Tensor, dict[str, Tensor]] | None:
        if MISSING is not None:
            return None
        from .rounds import looked

        return looked(self, *given)

    @outside_graphs
    def rewritten(self, *given: Any) -> tuple[Tensor, TableValues] | None:
        from .rounds import rewritten

        return rewritten(self, *given)

    def reset(self, rows: Tensor) -> TableValues:
        return self._made(torch.where(rows.to(self.base.device)[:, None, None], self.base, self.dense()), self.base)

    def detach(self, rows: Tensor | None = None) -> TableValues:
        if rows is None:
            return replace(self, token=None, base=self.base if self.base.is_leaf else self.base.detach())
        if self.token is None:
            return self
        table = self.dense()
        return self._made(torch.where(rows.to(table.device)[:, None, None], table.detach(), table), self.base)

    def clone(self) -> TableValues:
        return self._made(self.dense(), self.base.clone())

    def select(self, indices: Tensor) -> TableValues:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        index = indices.to(self.base.device)
        return self._copied(len(index), lambda table: table[index])

    def repeat(self, n: int) -> TableValues:
        return self._copied(self.memories * n, lambda x: x[:, None].expand(-1, n, -1, -1).flatten(0, 1))

    def _copied(self, memories: int, pick: Callable[[Tensor], Tensor]) -> TableValues:
        if not self.version.borrowed:
            return self._made(pick(self.dense()), self.base)
        begun = self._begun(self.base, memories)
        return begun if self.token is not None else replace(begun, token=None)

    def written(self) -> Tensor:
        return (self.version.rooted() != self.base).any(-1).sum(-1)

    def dense(self) -> Tensor:
        """Return a copy of all values [M, N, Dv]."""
        if self.token is None:
            return self.version.rooted().clone(memory_format=torch.contiguous_format)
        return Dense.apply(self.token, self.version)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return values [M, N, Dv] and base [N, Dv]."""
        return {"values": self.dense(), "base": self.base.contiguous()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> TableValues:
        """Return the store that `to_tensors` wrote, on any device; it can be read and written only on CUDA devices.

        Raises:
            ArgumentError: a tensor is missing or unknown, or shapes do not fit."""
        values, base = whole_tables(f"{CALL}.from_tensors", tensors, DTYPES)
        return cls._made(values.clone(memory_format=torch.contiguous_format), base)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableValues:
        """Return a store with a table of its own, without gradients. The base is shared unless it is copied too."""
        table = self.version.rooted().clone(memory_format=torch.contiguous_format)
        return TableValues(Version(table), memo.get(id(self.base), self.base), None)

    def __reduce__(self) -> Any:
        return TableValues.from_tensors, ({name: x.detach() for name, x in self.to_tensors().items()},)

    def _require_device(self) -> None:
        reason = unsupported_device(self.base.device.type)
        then = "move the state to a CUDA device, or begin with impl='sparse'."
        require(reason is None, CALL, f"impl='triton' {reason}; {then}")
