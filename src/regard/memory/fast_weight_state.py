"""What a memory of fast weights carries from call to call: sub-keys, values, and the tokens that wait to be written.

Legend: B rows, M memories (B, or 1 where the batch shares one), w tokens, H heads, n sub-keys of a half, N slots, k
slots a head, Dk width of a query, Dv of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError, require, shape
from ..recurrent.states import State
from .stores.slot_values import SlotValues, preferred, slot_values

CALL = "FastWeightState"


@dataclass(frozen=True)
class Tokens:
    """Tokens that were read, first axes [B, w].

    Attributes:
        slots, weights: [B, w, H, k].
        read, value: [B, w, Dv].
        position: int64 [B, w], of all real tokens of the row's stream.
        gate: [B, w], or None.
        good: bool [B, w], or None where all are: whether there is a finite token in that place.
        query: [B, w, H, Dk], halves, half_scores: [B, w, H, 2, k], scores: [B, w, H, k]; None where the keys' update
            does not need them.
    """

    slots: Tensor
    weights: Tensor
    read: Tensor
    value: Tensor
    position: Tensor
    gate: Tensor | None = None
    good: Tensor | None = None
    query: Tensor | None = None
    halves: Tensor | None = None
    half_scores: Tensor | None = None
    scores: Tensor | None = None

    @property
    def width(self) -> int:
        """w."""
        return self.slots.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Name to tensor, of those that are there."""
        return {f.name: x for f in fields(self) if (x := getattr(self, f.name)) is not None}

    def map(self, fn: Callable[[Tensor], Tensor]) -> Tokens:
        """The same with `fn` applied to every tensor."""
        return Tokens(**{name: fn(x) for name, x in self.tensors().items()})

    @classmethod
    def joined(cls, pieces: Sequence[Tokens]) -> Tokens:
        """One after the other.

        Raises:
            ArgumentError: they were read in different ways.
        """
        if len(pieces) == 1:
            return pieces[0]
        if any(piece.good is not None for piece in pieces):
            pieces = [piece.marked() for piece in pieces]
        named = [piece.tensors() for piece in pieces]
        alike = all(
            x.keys() == named[0].keys() and x["slots"].shape[2:] == named[0]["slots"].shape[2:] for x in named[1:]
        )
        require(
            alike,
            "fast_weight_memory",
            "the tokens that wait to be written were read with another top_k, key_update or gate; flush(state) before "
            "these change.",
        )
        return cls(**{name: torch.cat([x[name] for x in named], 1) for name in named[0]})

    def marked(self) -> Tokens:
        """With `good` written out."""
        if self.good is not None:
            return self
        return replace(self, good=self.slots.new_ones(self.slots.shape[:2], dtype=torch.bool))

    def places(self, index: Tensor, good: Tensor) -> Tokens:
        """The tokens in places `index` [B, w'] of each row, those of them `good` that were and are now."""

        def taken(x: Tensor) -> Tensor:
            at = index.view(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
            return x.gather(1, at)

        found = self.marked().map(taken)
        assert found.good is not None
        return replace(found, good=found.good & good)


@dataclass(frozen=True)
class Waiting:
    """The tokens that were read and not yet written.

    Attributes:
        pieces: one after the other, each wider than the next. Where the rows' counts differ there is one, whose rows
            begin at its left.
        counts: how many of each row, or one number where the batch shares a memory.
    """

    pieces: tuple[Tokens, ...]
    counts: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether none waits."""
        return not any(self.counts)

    @property
    def even(self) -> bool:
        """Whether all rows have as many."""
        return len(set(self.counts)) <= 1

    def tokens(self) -> Tokens:
        """All of them, [B, max counts]."""
        return Tokens.joined(self.pieces)

    def append(self, new: Tokens, counts: Sequence[int]) -> Waiting:
        """With `new` behind, of which row b has the first counts[b]."""
        total = tuple(a + b for a, b in zip(self.counts, counts, strict=True))
        if self.even and len(set(counts)) <= 1:
            pieces = (*self.pieces, new) if not self.empty else (new,)
            while len(pieces) > 1 and pieces[-2].width <= pieces[-1].width:  # so that no token is copied often
                pieces = (*pieces[:-2], Tokens.joined(pieces[-2:]))
            return Waiting(pieces, total)
        old = 0 if self.empty else self.tokens().width
        both = new if self.empty else Tokens.joined((self.tokens(), new))
        place = torch.arange(max(total))
        held, all_ = (torch.tensor(x)[:, None] for x in (self.counts, total))
        index = torch.where(place < held, place, place - held + old).clamp(max=both.width - 1)
        device = new.slots.device
        return Waiting((both.places(index.to(device), (place < all_).to(device)),), total)

    def written(self, flags: Sequence[bool]) -> Waiting:
        """Without the tokens of the rows `flags`."""
        counts = tuple(0 if gone else n for gone, n in zip(flags, self.counts, strict=True))
        if not any(counts):
            return Waiting((), counts)
        tokens = self.tokens().marked()
        assert tokens.good is not None
        kept = torch.tensor([not gone for gone in flags], device=tokens.good.device)
        return Waiting((replace(tokens, good=tokens.good & kept[:, None]),), counts)

    def rows(self, index: Tensor, counts: Sequence[int]) -> Waiting:
        """The rows `index`, of which so many tokens wait."""
        if not any(counts):
            return Waiting((), tuple(counts))
        if self.even:
            return Waiting(tuple(piece.map(lambda x: x[index]) for piece in self.pieces), tuple(counts))
        tokens = self.tokens().map(lambda x: x[index, : max(counts)])  # those of the rows left may be fewer
        return Waiting((tokens,), tuple(counts))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Waiting:
        """The same with `fn` applied to every tensor."""
        return replace(self, pieces=tuple(piece.map(fn) for piece in self.pieces))


@dataclass(frozen=True)
class FastWeightState(State):
    """A memory of fast weights in the middle of a stream. Nothing is changed in place.

    Attributes:
        keys: [M, H, 2, n, Dk/2], float32 or float64.
        initial_keys: [H, 2, n, Dk/2], with which every memory began.
        values: the values of all memories, and with which they began. A store may keep those themselves, not a copy:
            where they change in place (an optimiser's step), so does what was not yet written.
        waiting: tokens that were read and not yet written.
        seen: how many real tokens of each row were read.
        writes: how many times each memory was written.
        shared: whether the batch has one memory.
        tokens: how many positions were seen, masked ones included.
    """

    keys: Tensor
    initial_keys: Tensor
    values: SlotValues
    waiting: Waiting
    seen: tuple[int, ...]
    writes: tuple[int, ...]
    shared: bool = False

    @classmethod
    def empty(
        cls,
        keys: Tensor,
        values: Tensor,
        batch: int,
        *,
        shared: bool = False,
        storage: torch.dtype | None = None,
        impl: str = "auto",
    ) -> FastWeightState:
        """Nothing seen yet: every memory is `keys` [H, 2, n, Dk/2] and `values` [N, Dv], through which gradients reach
        both."""
        name = impl if impl != "auto" else preferred(values, storage)
        start = keys.to(torch.promote_types(keys.dtype, torch.float32))
        memories = 1 if shared else batch
        held = slot_values.get(name).start(values, memories, storage)
        own = start.expand(memories, *start.shape)
        none = (0,) * memories
        return cls(own, start, held, Waiting((), none), (0,) * batch, none, shared)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.seen)

    def _each(self, fn: Callable[[Tensor], Tensor], values: SlotValues) -> FastWeightState:
        return replace(
            self,
            keys=fn(self.keys),
            initial_keys=fn(self.initial_keys),
            values=values,
            waiting=self.waiting.map(fn),
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> FastWeightState:
        """The same state with `fn`, which moves it elsewhere, applied to every tensor; no gradient flows through."""
        values = {name: fn(x) for name, x in self.values.to_tensors().items()}
        return self.detach()._each(fn, type(self.values).from_tensors(values))

    def reset(self) -> FastWeightState:
        """The state before the first token."""
        rows = torch.ones(self.values.memories, dtype=torch.bool, device=self.keys.device)
        return replace(self.restart(rows), seen=(0,) * self.batch, tokens=0)

    def restart(self, rows: Tensor) -> FastWeightState:
        """The memories `rows` (bool [M]) as they began, with nothing that waits."""
        flags = rows.tolist()
        return replace(
            self,
            keys=torch.where(rows.view(-1, 1, 1, 1, 1), self.initial_keys, self.keys),
            values=self.values.reset(rows),
            waiting=self.waiting.written(flags),
            writes=tuple(0 if again else n for again, n in zip(flags, self.writes, strict=True)),
        )

    def clone(self) -> FastWeightState:
        """A copy that shares no memory; gradients flow through it."""
        return self._each(torch.clone, self.values.clone())

    def detach(self) -> FastWeightState:
        """The same numbers, through which no gradient flows (truncated backpropagation), but from a memory that begins
        anew to what it begins with, where those are leaves of the graph (parameters)."""
        first = self.initial_keys if self.initial_keys.is_leaf else self.initial_keys.detach()
        return replace(self._each(Tensor.detach, self.values.detach()), initial_keys=first)

    def select(self, indices: Tensor) -> FastWeightState:
        """The sequences `indices`, integers [N] in that order (beam search) or flags [B].

        Raises:
            ArgumentError: the batch shares one memory, which cannot follow some of its sequences.
        """
        self._require_own("select")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        index = indices.to(self.keys.device)
        return replace(
            self,
            keys=self.keys[index],
            values=self.values.select(index),
            waiting=self.waiting.rows(index, _picked(self.waiting.counts, indices)),
            seen=_picked(self.seen, indices),
            writes=_picked(self.writes, indices),
        )

    def repeat(self, n: int) -> FastWeightState:
        """Every sequence `n` times in a row.

        Raises:
            ArgumentError: as `select`.
        """
        self._require_own("repeat")
        more = lambda counts: tuple(c for c in counts for _ in range(n))  # noqa: E731
        again = lambda x: x.repeat_interleave(n, 0)  # noqa: E731
        return replace(
            self,
            keys=again(self.keys),
            values=self.values.repeat(n),
            waiting=replace(self.waiting.map(again), counts=more(self.waiting.counts)),
            seen=more(self.seen),
            writes=more(self.writes),
        )

    def _require_own(self, what: str) -> None:
        require(
            not self.shared,
            f"{CALL}.{what}",
            "the batch shares one memory, in which what single sequences wrote cannot be told apart (beam search and "
            "several returned sequences need it); use a memory for each sequence (shared=False).",
        )

    @property
    def bytes(self) -> int:
        """The memory of all tensors."""
        waiting = [x for piece in self.waiting.pieces for x in piece.tensors().values()]
        own = (self.keys, self.initial_keys, *waiting)
        return self.values.bytes + sum(x.numel() * x.element_size() for x in own)

    def to_tensors(self) -> dict[str, Tensor]:
        """Name to tensor, contiguous, for safetensors; `from_tensors` gives the same state back."""
        names = {kind: name for name, kind in slot_values.items()}
        found = {
            "keys": self.keys,
            "initial_keys": self.initial_keys,
            "counts": torch.tensor(self.waiting.counts),
            "seen": torch.tensor(self.seen),
            "writes": torch.tensor(self.writes),
            "shared": torch.tensor(self.shared),
            "tokens": torch.tensor(self.tokens),
            "store": torch.tensor(list(names[type(self.values)].encode()), dtype=torch.uint8),
            **{f"values.{name}": x for name, x in self.values.to_tensors().items()},
        }
        if not self.waiting.empty:
            found |= {f"waiting.{name}": x for name, x in self.waiting.tokens().tensors().items()}
        return {name: x.contiguous() for name, x in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FastWeightState:
        """The state that `to_tensors` wrote.

        Raises:
            ArgumentError: a tensor is missing or unknown, or they do not fit each other.
        """
        call = f"{CALL}.from_tensors"
        own = {"keys", "initial_keys", "counts", "seen", "writes", "shared", "tokens", "store"}
        parts: dict[str, dict[str, Tensor]] = {"values": {}, "waiting": {}}
        for name in set(tensors) - own:
            part, _, rest = name.partition(".")
            require(part in parts and rest != "", call, f"unknown tensor {name!r}; give what to_tensors() wrote.")
            parts[part][rest] = tensors[name]
        missing = sorted(own - set(tensors))
        require(not missing, call, f"{', '.join(missing)} missing; give what to_tensors() wrote.")
        counts = tuple(tensors["counts"].tolist())
        known = {f.name for f in fields(Tokens)}
        needed = {"slots", "weights", "read", "value", "position"} if any(counts) else set()
        require(
            needed <= set(parts["waiting"]) <= known,
            call,
            f"got waiting tensors {', '.join(sorted(parts['waiting'])) or 'none'}; give what to_tensors() wrote.",
        )
        store = slot_values.get(bytes(tensors["store"].tolist()).decode())
        waiting = Waiting((Tokens(**parts["waiting"]),) if any(counts) else (), counts)
        state = cls(
            tensors["keys"],
            tensors["initial_keys"],
            store.from_tensors(parts["values"]),
            waiting,
            tuple(tensors["seen"].tolist()),
            tuple(tensors["writes"].tolist()),
            bool(tensors["shared"]),
            tokens=int(tensors["tokens"]),
        )
        _require_whole(call, state)
        return state


def _require_whole(call: str, state: FastWeightState) -> None:
    """The parts of `state` fit each other."""
    require(state.keys.dim() == 5, call, f"keys is {shape(state.keys)}, expected [M, H, 2, n, Dk/2].")
    memories, (heads, _, n, half) = 1 if state.shared else state.batch, state.keys.shape[1:]
    found = {
        "keys": (tuple(state.keys.shape), (memories, heads, 2, n, half)),
        "initial_keys": (tuple(state.initial_keys.shape), (heads, 2, n, half)),
        "values": ((state.values.memories, state.values.slots), (memories, n * n)),
        "writes": ((len(state.writes),), (memories,)),
        "counts": ((len(state.waiting.counts),), (memories,)),
    }
    for piece in state.waiting.pieces:
        rows, k = (state.batch, max(*piece.slots.shape[1:2], *state.waiting.counts)), piece.slots.shape[-1:]
        every, halves, wide = (heads, *k), (heads, 2, *k), (state.values.width,)
        sizes = {"slots": every, "weights": every, "scores": every, "halves": halves, "half_scores": halves}
        sizes |= {"query": (heads, 2 * half), "read": wide, "value": wide}
        for name, x in piece.tensors().items():
            found[f"waiting.{name}"] = tuple(x.shape), (*rows, *sizes.get(name, ()))
    for name, (size, wanted) in found.items():
        if size != wanted:
            raise ArgumentError(
                f"{call}: {name} is {list(size)}, but the other tensors need {list(wanted)}; give all that one "
                f"to_tensors() wrote."
            )


def _picked(counts: Sequence[int], indices: Tensor) -> tuple[int, ...]:
    if len(set(counts)) == 1:  # which rows they are need not be read from the device
        return (counts[0],) * len(indices)
    return tuple(counts[i] for i in indices.tolist())


def check_state(
    call: str, state: Any, keys: Tensor, values: Tensor, batch: int, shared: bool, top_k: int
) -> FastWeightState:
    """`state` fits what is read now.

    Raises:
        ArgumentError: it does not.
    """
    if not isinstance(state, FastWeightState):
        raise ArgumentError(f"{call}: state is a {type(state).__name__}, expected a FastWeightState or None.")
    held = (tuple(state.keys.shape[1:]), (state.values.slots, state.values.width))
    wanted = (tuple(keys.shape), tuple(values.shape))
    if held != wanted:
        raise ArgumentError(
            f"{call}: state holds keys {list(held[0])} and values {list(held[1])}, but this memory has "
            f"{list(wanted[0])} and {list(wanted[1])}; give each memory its own state."
        )
    if state.shared != shared:
        raise ArgumentError(
            f"{call}: state is of {'one memory for the batch' if state.shared else 'a memory for each sequence'}, but "
            f"shared={shared}; begin a new stream with state=None."
        )
    if state.keys.device != keys.device:
        raise ArgumentError(
            f"{call}: state is on {state.keys.device}, but the rest is on {keys.device}; move it: state.map(lambda x: "
            f"x.to(...))."
        )
    if state.batch != batch:
        require(
            shared and state.waiting.empty,
            call,
            f"state is of {state.batch} sequences, but {batch} came; select() or repeat() them"
            + (", or flush(state) before the batch changes its size." if shared else "."),
        )
        state = replace(state, seen=(max(state.seen, default=0),) * batch)
    if not state.waiting.empty and state.waiting.pieces[0].slots.shape[-1] != top_k:
        raise ArgumentError(
            f"{call}: top_k is {top_k}, but {max(state.waiting.counts)} tokens that wait to be written were read with "
            f"another; flush(state) before it changes."
        )
    return state
