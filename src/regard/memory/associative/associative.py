"""Attention seen as a memory: write pairs, read by content, forget.

The generalized-memory paper reads attention as an extension of Cooper's distributed memory: a memory is a set of
pairs of values and keys, M(i) = (v_i, k_i) (its equation 5), and reading weighs every value by how well its key
matches the query (equations 7 and 8). Any sentence of the grammar is such a weighting. With the linear kernel all
pairs fold into one matrix, sum v_i k_i^T (equations 9 to 11), which `store="sums"` holds in their place.

Legend: B batch, H heads, n pairs, Tq queries, D channels of a key, Dv of a value. Every tensor may leave out B, or B
and H: [n, D] and [H, n, D] are read as [1, 1, n, D] and [1, H, n, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...checks import (
    ArgumentError,
    choice,
    flag,
    flags,
    instance,
    mapping,
    number,
    on_device,
    optional_whole,
    shape,
    shown,
    whole,
    within,
)
from ...grammar import Spec, as_spec
from ...pairwise.attention import attention
from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import implementations_registry
from .arguments import four_axes, one_way, paired, places_of, row_numbers, transforming
from .energy import require_energy, well
from .pairs import Pairs, learned
from .sums import Sums, require_finite_features, trend_of

CALL = "AssociativeMemory"
Store = Literal["pairs", "sums"]
Combine = Literal["shared", "separate"]
Overflow = Literal["oldest", "error"]


@dataclass(frozen=True)
class Retrieval:
    """A read with what led to it.

    Attributes:
        values: what was retrieved, [..., Tq, Dv].
        trajectory: the query and what each step made of it, [steps + 1, ..., Tq, D]; None unless asked for.
        energy: along the trajectory, [steps + 1, ..., Tq]; None unless asked for.
        diagnostics: of the last step: one `Diagnostics` for each row of weights, which is one, or two (long-term,
            short-term) where they are normalised apart; None unless asked for.
    """

    values: Tensor
    trajectory: Tensor | None = None
    energy: Tensor | None = None
    diagnostics: tuple[Diagnostics, ...] | None = None


class AssociativeMemory(nn.Module):
    """A memory of pairs that is read by content through `regard.attention`.

    The memory is M = (L, S) (generalized-memory paper, equation 4): `slots` learned pairs L, parameters that
    training changes, beside the short-term pairs S, which `write` and `forget` change. With `combine="shared"`
    they are one memory: one row of weights over the union of L and S, divided by one sum (equation 8b over both).
    With "separate" each is read with a sum of its own, and the two reads are added, as the parts of Cooper's
    matrix are. For sums that are not normalised (equation 8a) the two are the same.

    Args:
        spec: a sentence of the grammar or its text. `store="sums"` takes those whose kernel is a finite dot
            product of features (linear, cosine, shift-cosine, relu, relu2, elu).
        scale: of the scores; the spec's default where None.
        params: the spec's numbers (`spec.params`); `read` takes tensors for both.
        store: "pairs" keeps every pair: O(n) memory, O(n) a read. "sums" keeps sum phi(k) v^T and sum phi(k):
            O(D Dv) whatever n, and a pair can be forgotten only by giving it again. A global linear model, such as
            "delta" or "mesa(ridge=0.1)" (`regard.recurrent.trends`), with spec="linear", keeps its state and forgets
            all or nothing.
        capacity: the most short-term pairs held; None for no bound. Needs `store="pairs"`.
        overflow: what a write beyond the capacity does: "oldest" drops the oldest pairs (`write` returns how
            many), "error" raises and writes nothing.
        slots: how many learned pairs a head has.
        heads, dim, value_dim: H, D and Dv of the slots; without slots `dim` and `value_dim` are taken from the
            first write.
        tied: the slots' values are their keys, as in a Hopfield network.
        combine: see above.
        impl: of `regard.attention`.
        generator: for the first slots, normal of standard deviation 1/sqrt(D) and 1/sqrt(Dv).

    Attributes:
        slot_keys, slot_values: parameters [H, slots, D] and [H, slots, Dv]; None without slots, the latter if tied.

    Raises:
        ArgumentError: sizes that do not fit, an unknown choice, or one that the spec cannot have.

    The short-term memory moves with `.to()`, and is not part of `state_dict()`: save `pairs()` and write them again.
    Reading and writing are differentiable by everything; `detach()` cuts what was written so far from its graph.
    """

    def __init__(
        self,
        spec: Spec | str = "softmax",
        *,
        scale: float | None = None,
        params: Mapping[str, float] | None = None,
        store: Store | Any = "pairs",
        capacity: int | None = None,
        overflow: Overflow = "oldest",
        slots: int = 0,
        heads: int = 1,
        dim: int | None = None,
        value_dim: int | None = None,
        tied: bool = False,
        combine: Combine = "shared",
        impl: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.spec = as_spec(spec, CALL)
        if scale is not None:
            number(CALL, "scale", scale, low=0.0, strict=True)
        self.scale, self.params = scale, mapping(CALL, "params", params)
        self.impl = choice(CALL, "impl", impl, ["auto", *implementations_registry.names()])
        self.trend = trend_of(store)
        store = store if self.trend is None else "sums"
        for name, word, kind in (
            ("store", store, Store),
            ("overflow", overflow, Overflow),
            ("combine", combine, Combine),
        ):
            choice(CALL, name, word, get_args(kind))
        self.store, self.overflow, self.combine = store, overflow, combine
        if store == "sums":
            require_finite_features(self.spec, self.trend, CALL)
            if capacity is not None:
                raise ArgumentError(f"{CALL}: sums do not know which pair is the oldest; leave capacity out.")
        self.capacity = optional_whole(CALL, "capacity", capacity, 1)
        self._sizes: tuple[int, int] | None = None  # D and Dv, once known
        self._short: Pairs | Sums | None = None
        self._own_values = False  # values were written that are not the keys
        flag(CALL, "tied", tied)
        whole(CALL, "heads", heads, 1)
        if generator is not None:
            instance(CALL, "generator", generator, torch.Generator, "a torch.Generator or None")
        self._make_slots(whole(CALL, "slots", slots, 0), heads, dim, value_dim, tied, generator)
        for name, given in self.params.items():
            number(CALL, f"params[{name!r}]", given)
        within(CALL, None, self.spec.resolve, dim or 1, scale, self.params)  # found now, not at the first read

    def _make_slots(
        self,
        slots: int,
        heads: int,
        dim: int | None,
        value_dim: int | None,
        tied: bool,
        generator: torch.Generator | None,
    ) -> None:
        if dim is not None:
            value_dim = dim if value_dim is None else value_dim
            self._sizes = (whole(CALL, "dim", dim, 1), whole(CALL, "value_dim", value_dim, 1))
        elif slots or value_dim is not None:
            raise ArgumentError(f"{CALL}: {'slots need' if slots else 'value_dim needs'} dim, the channels of a key.")
        if tied and (not slots or dim != value_dim):
            raise ArgumentError(f"{CALL}: tied=True is for slots with value_dim equal to dim, got slots={slots}.")
        self.register_parameter("slot_keys", None)
        self.register_parameter("slot_values", None)
        if not slots or self._sizes is None:
            return
        drawn = [torch.randn(heads, slots, d, generator=generator) * d**-0.5 for d in self._sizes]
        self.slot_keys = nn.Parameter(drawn[0])
        self.slot_values = None if tied else nn.Parameter(drawn[1])

    # Size ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many short-term pairs are held (with sums: how many were written and not forgotten)."""
        return 0 if self._short is None else len(self._short)

    def __bool__(self) -> bool:
        return True  # an empty memory is still a module

    @property
    def bytes(self) -> int:
        """Of the short-term memory and the slots."""
        slots = {id(p): p.numel() * p.element_size() for p in self.parameters()}
        return sum(slots.values()) + (0 if self._short is None else self._short.bytes)

    @property
    def autoassociative(self) -> bool:
        """Whether every value is its own key, so that a memory has an energy."""
        return not self._own_values and self.slot_values is None

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The short-term keys [B, H, n, D] and values [B, H, n, Dv], the oldest first.

        Raises:
            ArgumentError: nothing was written yet, or only sums are held.
        """
        if not isinstance(self._short, Pairs):
            what = "nothing was written yet" if self._short is None else "sums do not hold the pairs"
            raise ArgumentError(f"{CALL}.pairs: {what}; write pairs into a memory with store='pairs'.")
        return self._short.keys, self._short.values

    def extra_repr(self) -> str:
        """For `print(memory)`."""
        bound = "" if self.capacity is None else f", capacity={self.capacity}"
        slots = "" if self.slot_keys is None else f", slots={self.slot_keys.shape[1]}, combine={self.combine!r}"
        return f"{str(self.spec)!r}, store={self.trend or self.store!r}, pairs={len(self)}{bound}{slots}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AssociativeMemory:
        super()._apply(fn, recurse)
        if self._short is not None:
            self._short = self._short.map(fn)
        return self

    def detach(self) -> AssociativeMemory:
        """Cut what was written so far from the graph that made it; returns the memory itself."""
        if self._short is not None:
            self._short = self._short.map(Tensor.detach)
        return self

    def transform(self, fn: Callable[[Tensor], Tensor]) -> AssociativeMemory:
        """Put `fn` of each short-term tensor of numbers (keys and values, or sums) in its place; returns the memory.

        `memory.transform(lambda t: 0.9 * t)` lets what was written fade; adding noise damages it. `fn` must keep
        shape and dtype.
        """
        changed = transforming(f"{CALL}.transform", fn)
        if self._short is not None:
            self._short = self._short.map(changed)
        return self

    # Writing ------------------------------------------------------------------------------------------------

    def write(self, keys: Tensor, values: Tensor | None = None, *, mask: Tensor | None = None) -> int:
        """Add pairs to the short-term memory.

        Args:
            keys: [B, H, n, D].
            values: [B, H, n, Dv]; None stores the keys as their own values (autoassociation).
            mask: boolean [B, n] (or [n]), False at places that hold nothing; their contents never matter.

        Returns:
            How many old pairs were dropped for want of capacity.

        Raises:
            ArgumentError: shapes, dtypes or devices that differ from each other or from what is held; a full memory
                with `overflow="error"`.

        Cost: pairs O(n) (everything is copied, nothing changed in place); sums O(new pairs * F * Dv).
        """
        call = f"{CALL}.write"
        new = paired(keys, values, mask, call)
        self._check_fit(new.keys, new.values, call)
        room = None if self.capacity is None else self.capacity - len(self)
        if room is not None and self.overflow == "error" and len(new) > room:
            raise ArgumentError(
                f"{call}: {len(new)} pairs for {room} free places of {self.capacity}; forget some first, or use "
                f"overflow='oldest'."
            )
        self._own_values |= values is not None and values is not keys
        self._sizes = (new.keys.shape[3], new.values.shape[3])
        if self.store == "sums":
            self._short = Sums.with_new(self._short, self.spec, new, self.trend)
            return 0
        assert self._short is None or isinstance(self._short, Pairs)
        both = new.map(torch.clone) if self._short is None else self._short.append(new)
        kept = both if self.capacity is None or len(both) <= self.capacity else both.newest(self.capacity)
        self._short = kept
        return len(both) - len(kept)

    def _check_fit(self, key: Tensor, value: Tensor, call: str) -> None:
        """Sizes, dtype and device are those of what is held already."""
        wanted: list[tuple[str, Any, Any]] = []
        if self._sizes is not None:
            wanted += [("keys: D", key.shape[3], self._sizes[0]), ("values: Dv", value.shape[3], self._sizes[1])]
        if self.slot_keys is not None:
            wanted += [("keys: heads", key.shape[1], self.slot_keys.shape[0])]
            wanted += [(f"keys: {n}", getattr(key, n), getattr(self.slot_keys, n)) for n in ("dtype", "device")]
        if self._short is not None:
            held = self._short
            wanted += [("keys: B and H", tuple(key.shape[:2]), held.leading)]
            wanted += [(f"keys: {n}", getattr(key, n), getattr(held, n)) for n in ("dtype", "device")]
        for name, came, expected in wanted:
            if came != expected:
                raise ArgumentError(f"{call}: {name} is {came}, expected {expected}, that of what the memory holds.")

    # Forgetting ---------------------------------------------------------------------------------------------

    def forget(
        self,
        indices: Sequence[int] | Tensor | None = None,
        *,
        oldest: int | None = None,
        everything: bool = False,
        pairs: tuple[Tensor, Tensor] | None = None,
    ) -> int:
        """Remove short-term pairs; say which in one of four ways. Learned slots stay.

        Args:
            indices: places, 0 the oldest, negative from the newest; the same for every batch and head.
            oldest: the n oldest (all, if fewer are held).
            everything: all of them.
            pairs: (keys, values) to subtract from sums, as they were written. Nothing can check that they
                were: what was never written leaves its negative behind.

        Returns:
            How many were removed.

        Raises:
            ArgumentError: none or several ways are named, a place that is not held, or a way that the store
                does not have (sums: `everything` and `pairs`; pairs: all but `pairs`).
        """
        call = f"{CALL}.forget"
        given = {
            "indices": indices is not None,
            "oldest": oldest is not None,
            "everything": flag(call, "everything", everything),
            "pairs": pairs is not None,
        }
        if self.store == "sums":
            ways = ("everything", "pairs") if self.trend is None else ("everything",)
            one_way(call, given, ways, "sums do not know one pair from another")
        else:
            one_way(call, given, ("indices", "oldest", "everything"), "stored pairs are named by their places")
        before = len(self)
        if everything:
            self._short = None
        elif pairs is not None:
            within(call, "pairs", self._subtract, pairs, call)
        elif oldest is not None:
            count = whole(call, "oldest", oldest, 0)
            if isinstance(self._short, Pairs):
                self._short = self._short.newest(max(before - count, 0))
        else:
            self._drop(places_of(call, indices, before))
        self._own_values &= len(self) > 0
        return before - len(self)

    def _subtract(self, pairs: tuple[Tensor, Tensor], call: str) -> None:
        if not isinstance(pairs, tuple) or len(pairs) != 2:
            raise ArgumentError(f"{call}: got {shown(pairs)}, expected (keys, values).")
        gone = paired(*pairs, None, call)
        self._check_fit(gone.keys, gone.values, call)
        if not isinstance(self._short, Sums) or len(gone) > len(self):
            raise ArgumentError(f"{call}: {len(gone)} pairs were given and {len(self)} are held.")
        self._short = self._short.minus(gone)

    def _drop(self, places: list[int]) -> None:
        held = len(self)
        if isinstance(self._short, Pairs):
            gone = {place % held for place in places}
            kept = [place for place in range(held) if place not in gone]
            self._short = self._short.select(torch.tensor(kept, dtype=torch.int64, device=self._short.keys.device))

    # Reading ------------------------------------------------------------------------------------------------

    def forward(self, queries: Tensor) -> Tensor:
        """`read` in one step, so that a memory can stand in a model as a layer."""
        out: Tensor = self.read(queries)
        return out

    def read(
        self,
        queries: Tensor,
        steps: int = 1,
        *,
        scale: float | Tensor | None = None,
        params: Mapping[str, float | Tensor] | None = None,
        return_trajectory: bool = False,
        return_energy: bool = False,
        return_diagnostics: bool = False,
    ) -> Any:
        """Retrieve a value for every query.

        Args:
            queries: [B, H, Tq, D]; a memory written with B = 1 serves a batch of any size.
            steps: how often; what was retrieved is the next query (Hopfield's iteration), for which keys
                and values must share a space.
            scale, params: in place of the memory's own; tensors broadcastable to [B, H, Tq].
            return_trajectory, return_energy, return_diagnostics: return a `Retrieval` with those.

        Returns:
            [B, H, Tq, Dv] with the axes of `queries`, or a `Retrieval`. A memory that holds nothing reads 0 (of the
            queries' width, if it was never told another). A NaN in a pair makes NaN of every read that sees it:
            those of its batch and head, until it is forgotten.

        Raises:
            ArgumentError: shapes or dtypes that do not fit, steps > 1 between different spaces, or an energy
                asked of a memory that has none (see `energy`).

        Cost: that of `regard.attention` with n + slots keys, a step; the energy O(Tq (n + slots)) memory.
        """
        call = f"{CALL}.read"
        query = self._checked_queries(queries, call)
        steps = whole(call, "steps", steps, 1)
        flags(call, return_trajectory=return_trajectory, return_energy=return_energy)
        flag(call, "return_diagnostics", return_diagnostics)
        width = query.shape[3] if self._sizes is None else self._sizes[1]
        if (steps > 1 or return_trajectory) and width != query.shape[3]:
            raise ArgumentError(
                f"{call}: keys have {query.shape[3]} channels and values {width}, so that what is retrieved cannot be "
                f"the next query; use steps=1{' and no trajectory' if return_trajectory else ''}."
            )
        if return_diagnostics and self.store == "sums":
            raise ArgumentError(f"{call}: sums hold no weights to diagnose; use store='pairs'.")
        numbers = (self.scale if scale is None else scale, self.params if params is None else params)
        path: list[Tensor] = [query]
        found: tuple[Diagnostics, ...] = ()
        for _ in range(steps):
            out, found = within(call, None, self._step, path[-1], *numbers, return_diagnostics)
            path.append(out)
        values = path[-1].reshape(*queries.shape[:-1], width)
        if not (return_trajectory or return_energy or return_diagnostics):
            return values
        along = None
        if return_energy:
            levels = [within(call, "return_energy", self.energy, q, scale=numbers[0], params=numbers[1]) for q in path]
            along = torch.stack(levels).reshape(steps + 1, *queries.shape[:-1])
        track = torch.stack(path).reshape(steps + 1, *queries.shape) if return_trajectory else None
        return Retrieval(values, track, along, found if return_diagnostics else None)

    def energy(
        self,
        queries: Tensor,
        *,
        scale: float | Tensor | None = None,
        params: Mapping[str, float | Tensor] | None = None,
    ) -> Tensor:
        """The energy [B, H, Tq], float32 at least, that no step of retrieval raises; see `energy`.

        softmax: |q|^2/2 - logsumexp(scale k.q) / scale; entmax: the conjugate of Tsallis' entropy in place of
        the logsumexp. Differentiable; on the dot product the gradient by q is q - read(q), except at ties.

        Raises:
            ArgumentError: no energy is known for the spec (the message lists those that have one), the values
                are not the keys, or only sums are held.
        """
        call = f"{CALL}.energy"
        found = require_energy(self.spec, call)
        if self.store == "sums":
            raise ArgumentError(f"{call}: the energy needs the pairs; use store='pairs'.")
        if not self.autoassociative:
            raise ArgumentError(
                f"{call}: the energy belongs to a memory whose values are its keys; write(keys) without values"
                f"{', slots with tied=True' if self.slot_keys is not None else ''}."
            )
        query = self._checked_queries(queries, call)
        scale = self.scale if scale is None else scale
        numbers = row_numbers(call, query, scale, self.params if params is None else params)
        parts = self._parts(query.shape[0])
        if len(parts) > 1 and not found.additive:
            raise ArgumentError(f"{call}: no energy is known for two reads of {self.spec} added; use combine='shared'.")
        square = query.to(torch.promote_types(query.dtype, torch.float32)).square().sum(-1) / 2
        for part in parts:
            mask = None if part.mask is None else part.mask[:, None]
            square = square - within(call, None, well, self.spec, query, part.keys, mask, *numbers)
        return square.reshape(queries.shape[:-1])

    def _parts(self, batch: int) -> list[Pairs]:
        """The memories that are read apart, without those that hold nothing."""
        short = [self._short.expand(batch)] if isinstance(self._short, Pairs) else []
        if self.slot_keys is None:
            return short
        long = learned(self.slot_keys, self.slot_values, batch)
        return [long.append(short[0])] if short and self.combine == "shared" else [long, *short]

    def _step(
        self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor], diagnostics: bool
    ) -> tuple[Tensor, tuple[Diagnostics, ...]]:
        """One read: the reads of the parts, added."""
        if isinstance(self._short, Sums):
            return self._read_sums(self._short.expand(query.shape[0]), query, scale, params), ()
        parts = self._parts(query.shape[0]) or [self._nothing(query)]
        reads, found = [], []
        for part in parts:
            mask = None if part.mask is None else part.mask[:, None, None]
            read = attention(
                query, part.keys, part.values, self.spec,
                attn_mask=mask, scale=scale, params=params, impl=self.impl, return_diagnostics=diagnostics,
            )  # fmt: skip
            reads.append(read[0] if diagnostics else read)
            found.append(read[1] if diagnostics else None)
        return sum(reads[1:], reads[0]), tuple(f for f in found if f is not None)

    def _read_sums(
        self, sums: Sums, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor]
    ) -> Tensor:
        """One read of the sums and of the slots, which are added to the sums or read apart."""
        if self.slot_keys is None:
            return sums.read(query, scale, params)
        long = learned(self.slot_keys, self.slot_values, query.shape[0])
        if self.combine == "shared":
            return sums.plus(long).read(query, scale, params)
        return sums.read(query, scale, params) + Sums.of(self.spec, long, self.trend).read(query, scale, params)

    def _nothing(self, query: Tensor) -> Pairs:
        width = query.shape[3] if self._sizes is None else self._sizes[1]
        empty = query.new_empty(*query.shape[:2], 0, query.shape[3])
        return Pairs(empty, query.new_empty(*query.shape[:2], 0, width))

    def _checked_queries(self, queries: Tensor, call: str) -> Tensor:
        query = four_axes("queries", queries, call)
        if self._sizes is not None and query.shape[3] != self._sizes[0]:
            raise ArgumentError(f"{call}: queries have {query.shape[3]} channels and keys {self._sizes[0]}.")
        held = self._short
        heads = held.leading[1] if held is not None else None if self.slot_keys is None else self.slot_keys.shape[0]
        if heads is not None and query.shape[1] != heads:
            raise ArgumentError(f"{call}: queries {shape(queries)} have {query.shape[1]} heads, the memory {heads}.")
        if held is not None and held.leading[0] not in (1, query.shape[0]):
            raise ArgumentError(
                f"{call}: queries {shape(queries)} are {query.shape[0]} sequences, the memory holds {held.leading[0]}."
            )
        dtype = held.dtype if held is not None else query.dtype if self.slot_keys is None else self.slot_keys.dtype
        place = held.device if held is not None else query.device if self.slot_keys is None else self.slot_keys.device
        on_device(call, "queries", query, place, "the memory")
        if query.dtype != dtype:
            raise ArgumentError(f"{call}: queries are {query.dtype} and the memory {dtype}; convert one with .to().")
        return query
