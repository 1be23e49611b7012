"""A memory of key-value pairs that is read by attention.

The generalized-memory paper describes attention as reading from a set of pairs M(i) = (v_i, k_i) (equation 5): a read
weights every value by how well its key matches the query (equations 7 and 8). The weights are those of any attention
spec. For kernels with finite features, all pairs can be summed into one matrix, sum v_i k_i^T (equations 9 to 11):
`store="sums"` keeps this matrix instead of the pairs.

Shapes: B batch, H heads, n pairs, Tq queries, D channels of a key, Dv of a value. Every tensor may leave out B, or B
and H: [n, D] and [H, n, D] are read as [1, 1, n, D] and [1, H, n, D].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ... import checks
from ...checks import ArgumentError, choice, flags, mapping, number, require, shown, whole, within
from ...grammar import Spec, as_spec
from ...pairwise.attention import attention
from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import implementations_registry
from ...recurrent.arguments import row_numbers
from .arguments import checked_queries, one_way, paired, places_of, require_fit, transforming
from .contents import Pairs, Sums, learned, require_finite_features, trend_of
from .energy import require_energy, well

CALL = "AssociativeMemory"
Store = Literal["pairs", "sums"]
Combine = Literal["shared", "separate"]
Overflow = Literal["oldest", "error"]


@dataclass(frozen=True)
class Retrieval:
    """The result of a read. Fields other than `values` are None unless they were requested.

    Attributes:
        values: [..., Tq, Dv].
        trajectory: the query and the result of every step, [steps + 1, ..., Tq, D].
        energy: along the trajectory, [steps + 1, ..., Tq].
        diagnostics: of the last step: one `Diagnostics`, or (long-term, short-term) if these are normalised separately.
    """

    values: Tensor
    trajectory: Tensor | None = None
    energy: Tensor | None = None
    diagnostics: tuple[Diagnostics, ...] | None = None


class AssociativeMemory(nn.Module):
    """A memory of key-value pairs that is read through `regard.attention`.

    The memory has two parts (generalized-memory paper, equation 4): `slots` learned pairs, which are parameters, and
    short-term pairs, which `write` and `forget` change.

    Args:
        spec: an attention spec or its text. `store="sums"` needs a kernel with finite features (linear, cosine,
            shift-cosine, relu, relu2, elu).
        scale: of the scores; None for the spec's default.
        params: numbers of the spec (`spec.params`); `read` takes tensors for both.
        store: "pairs" keeps every pair: O(n) memory, and O(n) time per read. "sums" keeps sum phi(k) v^T and
            sum phi(k): O(D Dv) whatever n; to forget a pair, pass it to `forget`. A global linear model, such as
            "delta" or "mesa(ridge=0.1)" (`regard.recurrent.trends`), keeps its state, needs spec="linear" and forgets
            all or nothing.
        capacity: the largest number of short-term pairs; None for no limit. Needs `store="pairs"`.
        overflow: a write beyond the capacity drops the "oldest" pairs, or raises an "error" and writes nothing.
        slots: the number of learned pairs per head.
        heads, dim, value_dim: H, D and Dv of the slots. Without slots, `dim` and `value_dim` come from the first write.
        tied: the slots' values are their keys, as in a Hopfield network.
        combine: "shared": one normalisation over all pairs (equation 8b). "separate": each part is normalised, and the
            two reads are added. Without normalisation (equation 8a) they are the same.
        impl: of `regard.attention`.
        generator: for the initial slots, normal with standard deviation 1/sqrt(D) and 1/sqrt(Dv).

    Attributes:
        slot_keys, slot_values: parameters [H, slots, D] and [H, slots, Dv]; None without slots, the latter if tied.

    Raises:
        ArgumentError: sizes that do not fit, an unknown choice, or one that the spec does not allow.

    The short-term memory moves with `.to()` but is not part of `state_dict()`: save `pairs()` and write them again.
    Writing and reading are differentiable in all tensors.
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
        self.store = choice(CALL, "store", store if self.trend is None else "sums", get_args(Store))
        self.overflow = choice(CALL, "overflow", overflow, get_args(Overflow))
        self.combine = choice(CALL, "combine", combine, get_args(Combine))
        if self.store == "sums":
            require_finite_features(self.spec, self.trend, CALL)
            require(capacity is None, CALL, "sums do not store which pair is the oldest; leave capacity out.")
        self.capacity = checks.optional_whole(CALL, "capacity", capacity, 1)
        self._sizes: tuple[int, int] | None = None  # D and Dv, once known
        self._short: Pairs | Sums | None = None
        self._own_values = False  # whether values were written that are not the keys
        flags(CALL, tied=tied)
        whole(CALL, "heads", heads, 1)
        if generator is not None:
            checks.instance(CALL, "generator", generator, torch.Generator, "a torch.Generator or None")
        whole(CALL, "slots", slots, 0)
        if dim is not None:
            value_dim = dim if value_dim is None else value_dim
            self._sizes = (whole(CALL, "dim", dim, 1), whole(CALL, "value_dim", value_dim, 1))
        elif slots or value_dim is not None:
            raise ArgumentError(f"{CALL}: {'slots need' if slots else 'value_dim needs'} dim, the channels of a key.")
        if tied and (not slots or dim != value_dim):
            raise ArgumentError(f"{CALL}: tied=True is for slots with value_dim equal to dim, got slots={slots}.")
        self.register_parameter("slot_keys", None)
        self.register_parameter("slot_values", None)
        if slots and self._sizes is not None:
            drawn = [torch.randn(heads, slots, d, generator=generator) * d**-0.5 for d in self._sizes]
            self.slot_keys = nn.Parameter(drawn[0])
            self.slot_values = None if tied else nn.Parameter(drawn[1])
        for name, given in self.params.items():
            number(CALL, f"params[{name!r}]", given)
        within(CALL, None, self.spec.resolve, dim or 1, scale, self.params)  # raises now, not at the first read

    def __len__(self) -> int:
        """Return the number of short-term pairs (with sums: of those written and not forgotten)."""
        return 0 if self._short is None else len(self._short)

    def __bool__(self) -> bool:
        return True  # an empty memory is still a module

    @property
    def bytes(self) -> int:
        """The memory of the short-term part and the slots."""
        return sum(p.nbytes for p in self.parameters()) + (0 if self._short is None else self._short.bytes)

    @property
    def autoassociative(self) -> bool:
        """Whether every value is its own key; only then is there an energy."""
        return not self._own_values and self.slot_values is None

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the short-term keys [B, H, n, D] and values [B, H, n, Dv], the oldest first. Raise ArgumentError if
        nothing was written yet, or if the memory keeps sums."""
        if not isinstance(self._short, Pairs):
            what = "nothing was written yet" if self._short is None else "sums do not hold the pairs"
            raise ArgumentError(f"{CALL}.pairs: {what}; write pairs into a memory with store='pairs'.")
        return self._short.keys, self._short.values

    def extra_repr(self) -> str:
        bound = "" if self.capacity is None else f", capacity={self.capacity}"
        slots = "" if self.slot_keys is None else f", slots={self.slot_keys.shape[1]}, combine={self.combine!r}"
        return f"{str(self.spec)!r}, store={self.trend or self.store!r}, pairs={len(self)}{bound}{slots}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AssociativeMemory":
        super()._apply(fn, recurse)
        return self._map(fn)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> "AssociativeMemory":
        if self._short is not None:
            self._short = self._short.map(fn)
        return self

    def detach(self) -> "AssociativeMemory":
        """Detach everything written so far from the graph, and return the memory itself."""
        return self._map(Tensor.detach)

    def transform(self, fn: Callable[[Tensor], Tensor]) -> "AssociativeMemory":
        """Replace every short-term tensor of numbers (keys and values, or sums) by `fn` of it, of the same shape and
        dtype, and return the memory: `memory.transform(lambda t: 0.9 * t)` lets it fade; adding noise damages it."""
        return self._map(transforming(f"{CALL}.transform", fn))

    def write(self, keys: Tensor, values: Tensor | None = None, *, mask: Tensor | None = None) -> int:
        """Add pairs to the short-term memory.

        Args:
            keys: [B, H, n, D].
            values: [B, H, n, Dv]; None: the keys are their own values (autoassociation).
            mask: boolean [B, n] (or [n]), False at padding, whose content never matters.

        Returns:
            The number of old pairs dropped because of the capacity.

        Raises:
            ArgumentError: shapes, dtypes or devices that differ from each other or from those of the memory; a full
                memory with `overflow="error"`.

        Cost: pairs O(n), since all are copied and nothing changes in place; sums O(new pairs * F * Dv).
        """
        call = f"{CALL}.write"
        new = paired(keys, values, mask, call)
        self._check_fit(new.keys, new.values, call)
        room = None if self.capacity is None else self.capacity - len(self)
        if room is not None and self.overflow == "error" and len(new) > room:
            hint = "forget some first, or use overflow='oldest'"
            raise ArgumentError(f"{call}: {len(new)} pairs for {room} free places of {self.capacity}; {hint}.")
        self._own_values |= values is not None and values is not keys
        self._sizes = (new.keys.shape[3], new.values.shape[3])
        if self._short is not None:
            both: Pairs | Sums = self._short.plus(new)
        else:
            both = Sums.of(self.spec, new, self.trend) if self.store == "sums" else new.map(torch.clone)
        self._short = both
        if isinstance(both, Pairs) and self.capacity is not None and len(both) > self.capacity:
            self._short = both.newest(self.capacity)
        return len(both) - len(self._short)

    def _check_fit(self, key: Tensor, value: Tensor, call: str) -> None:
        sizes = (key.shape[3], value.shape[3])
        dims = list(zip(("keys: D", "values: Dv"), sizes, self._sizes or sizes, strict=True))
        require_fit(call, "keys", key, dims, self._short, self.slot_keys)

    def forget(
        self,
        indices: Sequence[int] | Tensor | None = None,
        *,
        oldest: int | None = None,
        everything: bool = False,
        pairs: tuple[Tensor, Tensor] | None = None,
    ) -> int:
        """Remove short-term pairs, given by exactly one argument. Learned slots stay.

        Args:
            indices: 0 is the oldest pair, negative numbers count from the newest; the same for every batch and head.
            oldest: the n oldest (all, if there are fewer).
            everything: all of them.
            pairs: (keys, values) to subtract from sums, as they were written. This is not checked: a pair that was
                never written leaves its negative in the sums.

        Returns:
            The number of removed pairs.

        Raises:
            ArgumentError: no argument or several, an index out of range, or an argument that the store does not
                support (sums: `everything` and `pairs`; pairs: all but `pairs`).
        """
        call = f"{CALL}.forget"
        flags(call, everything=everything)
        given = {"indices": indices is not None, "oldest": oldest is not None, "everything": everything}
        given["pairs"] = pairs is not None
        if self.store == "sums":
            ways = ("everything", "pairs") if self.trend is None else ("everything",)
            one_way(call, given, ways, "sums cannot tell one pair from another")
        else:
            one_way(call, given, ("indices", "oldest", "everything"), "stored pairs are selected by index")
        before = len(self)
        if everything:
            self._short = None
        elif pairs is not None:
            if not isinstance(pairs, tuple) or len(pairs) != 2:
                raise ArgumentError(f"{call}: pairs: got {shown(pairs)}, expected (keys, values).")
            gone = within(call, "pairs", paired, *pairs, None, call)
            within(call, "pairs", self._check_fit, gone.keys, gone.values, call)
            if not isinstance(self._short, Sums) or len(gone) > before:
                raise ArgumentError(f"{call}: pairs: {len(gone)} pairs were given and {before} are held.")
            # without pairs only rounding errors are left, and the quotient of two is not zero
            self._short = self._short.minus(gone) if len(gone) < before else None
        elif oldest is not None:
            count = whole(call, "oldest", oldest, 0)
            if isinstance(self._short, Pairs):
                self._short = self._short.newest(max(before - count, 0))
        else:
            dropped = {index % before for index in places_of(call, indices, before)}
            if isinstance(self._short, Pairs):
                kept = [index for index in range(before) if index not in dropped]
                self._short = self._short.select(torch.tensor(kept, dtype=torch.int64, device=self._short.device))
        self._own_values &= len(self) > 0
        return before - len(self)

    def forward(self, queries: Tensor) -> Tensor:
        """Read in one step, so that a memory can be a layer of a model."""
        return self.read(queries)

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
        """Return a value for every query.

        Args:
            queries: [B, H, Tq, D]; a memory written with B = 1 serves a batch of any size.
            steps: the number of reads; each result is the next query (Hopfield's iteration), so D must equal Dv.
            scale, params: instead of the memory's own; tensors broadcastable to [B, H, Tq].
            return_trajectory, return_energy, return_diagnostics: return a `Retrieval` with these.

        Returns:
            [B, H, Tq, Dv] with the axes of `queries`, or a `Retrieval`. An empty memory reads 0 (of the queries' width
            if Dv is not known). A NaN in a pair makes every read of its batch and head NaN until it is forgotten.

        Raises:
            ArgumentError: shapes or dtypes that do not fit, steps > 1 with D != Dv, or an energy that does not exist
                (see `energy`).

        Cost: per step, that of `regard.attention` with n + slots keys; the energy takes O(Tq (n + slots)) memory.
        """
        call = f"{CALL}.read"
        query = checked_queries(call, queries, self._sizes, self._short, self.slot_keys)
        steps = whole(call, "steps", steps, 1)
        flags(call, return_trajectory=return_trajectory, return_energy=return_energy)
        flags(call, return_diagnostics=return_diagnostics)
        width = query.shape[3] if self._sizes is None else self._sizes[1]
        if (steps > 1 or return_trajectory) and width != query.shape[3]:
            given = f"keys have {query.shape[3]} channels and values {width}"
            hint = f"use steps=1{' and no trajectory' * return_trajectory}"
            raise ArgumentError(f"{call}: {given}, so the result cannot be the next query; {hint}.")
        diagnosable = self.store == "pairs" or not return_diagnostics
        require(diagnosable, call, "sums hold no weights to diagnose; use store='pairs'.")
        numbers = (self.scale if scale is None else scale, self.params if params is None else params)
        path: list[Tensor] = [query]
        diagnostics: tuple[Diagnostics, ...] = ()
        for _ in range(steps):
            out, diagnostics = within(call, None, self._step, path[-1], *numbers, return_diagnostics)
            path.append(out)
        values = path[-1].reshape(*queries.shape[:-1], width)
        if not (return_trajectory or return_energy or return_diagnostics):
            return values
        along = None
        if return_energy:
            levels = [within(call, "return_energy", self.energy, q, scale=numbers[0], params=numbers[1]) for q in path]
            along = torch.stack(levels).reshape(steps + 1, *queries.shape[:-1])
        track = torch.stack(path).reshape(steps + 1, *queries.shape) if return_trajectory else None
        return Retrieval(values, track, along, diagnostics if return_diagnostics else None)

    def energy(
        self,
        queries: Tensor,
        *,
        scale: float | Tensor | None = None,
        params: Mapping[str, float | Tensor] | None = None,
    ) -> Tensor:
        """Return the energy [B, H, Tq], float32 at least, which no read increases (see `associative.energy`).

        softmax: |q|^2/2 - logsumexp(scale k.q) / scale; entmax: the conjugate of Tsallis' entropy instead of the
        logsumexp. Differentiable; with the dot product, the gradient by q is q - read(q), except at ties.

        Raises:
            ArgumentError: no energy is known for the spec (the message lists those that have one), the values are
                not the keys, or the memory keeps sums.
        """
        call = f"{CALL}.energy"
        known = require_energy(self.spec, call)
        require(self.store == "pairs", call, "the energy needs the pairs; use store='pairs'.")
        if not self.autoassociative:
            hint = f"write(keys) without values{', slots with tied=True' if self.slot_keys is not None else ''}"
            raise ArgumentError(f"{call}: there is an energy only if the values are the keys; {hint}.")
        query = checked_queries(call, queries, self._sizes, self._short, self.slot_keys)
        params, scale = self.params if params is None else params, self.scale if scale is None else scale
        numbers = row_numbers(call, query, scale, params, query.dtype)
        parts = [part for part in self._parts(query.shape[0]) if isinstance(part, Pairs)]
        if len(parts) > 1 and not known.additive:
            reads = f"two reads of {self.spec}"
            raise ArgumentError(f"{call}: no energy is known for the sum of {reads}; use combine='shared'.")
        square = query.to(torch.promote_types(query.dtype, torch.float32)).square().sum(-1) / 2
        for part in parts:
            square = square - within(call, None, well, self.spec, query, part.keys, part.mask, *numbers)
        return square.reshape(queries.shape[:-1])

    def _parts(self, batch: int) -> Sequence[Pairs | Sums]:
        """Return the parts that are read separately, without empty ones."""
        held = None if self._short is None else self._short.expand(batch)
        if self.slot_keys is None:
            return [] if held is None else [held]
        slots = learned(self.slot_keys, self.slot_values, batch)
        if held is not None and self.combine == "shared":
            return [held.plus(slots) if isinstance(held, Sums) else slots.plus(held)]
        long = Sums.of(self.spec, slots, self.trend) if self.store == "sums" else slots
        return [long] if held is None else [long, held]

    def _step(
        self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor], diagnostics: bool
    ) -> tuple[Tensor, tuple[Diagnostics, ...]]:
        """Return the sum of the parts' reads, and their diagnostics."""
        parts = self._parts(query.shape[0])
        if not parts:
            width = query.shape[3] if self._sizes is None else self._sizes[1]
            parts = [Pairs(query[:, :, :0], query.new_empty(*query.shape[:2], 0, width))]
        reads, each = [], []
        for part in parts:
            if isinstance(part, Sums):
                reads.append(part.read(query, scale, params))
                continue
            mask = None if part.mask is None else part.mask[:, None]
            read = attention(
                query, part.keys, part.values, self.spec,
                attn_mask=mask, scale=scale, params=params, impl=self.impl, return_diagnostics=diagnostics,
            )  # fmt: skip
            reads.append(read[0] if diagnostics else read)
            each += [read[1]] if diagnostics else []
        return sum(reads[1:], reads[0]), tuple(each)
