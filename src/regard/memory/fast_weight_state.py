"""The state of a fast-weight product-key memory: sub-keys, values, and the tokens that wait to be written.

Legend: B rows, M memories (B, or 1 if the batch shares one), P waiting tokens, H heads, n sub-keys of a half, N slots,
k slots a head, Dk width of a query, Dv of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, instance, require, shape
from ..precision import transformed
from .stores.slot_values import SlotValues, preferred, slot_values
from .stream import StreamState
from .token_fields import Waiting, picked, repeated

CALL = "FastWeightState"
NEEDED = {"slots", "weights", "read", "value", "position"}
OPTIONAL = {"gate", "good", "query", "halves", "half_scores", "scores"}
"""Fields of waiting tokens: slots and weights [B, P, H, k]; read and value [B, P, Dv]; position int64 [B, P], counted
in the real tokens of the row's stream; gate [B, P]; and, where the rule that moves the sub-keys needs them, query
[B, P, H, Dk], halves and half_scores [B, P, H, 2, k], scores [B, P, H, k]."""


@dataclass(frozen=True, kw_only=True)
class FastWeightState(StreamState):
    """A memory of fast weights in the middle of a stream: a `StreamState` with keys and values.

    Attributes:
        keys: [M, H, 2, n, Dk/2], float32 or float64.
        initial_keys: [H, 2, n, Dk/2], the first sub-keys of every memory.
        values: the values of all memories, and their first values. A store may hold the tensors it was given, not a
            copy: if those change in place (an optimiser's step), so does all that was not yet written.
        waiting: tokens with the fields `NEEDED` and some of `OPTIONAL`.
        seen: the number of real tokens of each row.
    """

    MEMORY: ClassVar = {"keys": "initial_keys"}

    keys: Tensor
    initial_keys: Tensor
    values: SlotValues
    seen: tuple[int, ...]

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
        """Return the state before the first token: every memory is `keys` [H, 2, n, Dk/2] and `values` [N, Dv], and
        gradients reach both."""
        name = impl if impl != "auto" else preferred(values, storage)
        start = keys.to(torch.promote_types(keys.dtype, torch.float32))
        memories = 1 if shared else batch
        none = (0,) * memories
        first: dict[str, Any] = {"keys": start.expand(memories, *start.shape), "initial_keys": start}
        first["values"] = slot_values.get(name).start(values, memories, storage)
        return cls(**first, waiting=Waiting((), none), seen=(0,) * batch, writes=none, shared=shared)

    @property
    def batch(self) -> int:
        return len(self.seen)

    @property
    def bytes(self) -> int:
        return super().bytes + self.initial_keys.nbytes + self.values.bytes

    def map(self, fn: Callable[[Tensor], Tensor]) -> FastWeightState:
        """Apply `fn`, which moves tensors elsewhere, to every tensor; no gradient flows through it."""
        values = {name: fn(x) for name, x in self.values.to_tensors().items()}
        return replace(StreamState.map(self.detach(), fn), values=type(self.values).from_tensors(values))

    def clone(self) -> FastWeightState:
        return replace(super().clone(), values=self.values.clone())

    def detach(self) -> FastWeightState:
        return replace(super().detach(), values=self.values.detach())

    def detach_written(self, names: Collection[str], rows: Tensor | None) -> FastWeightState:
        return replace(super().detach_written(("keys",), rows), values=self.values.detach(rows))

    def restart(self, rows: Tensor) -> FastWeightState:
        return replace(super().restart(rows), values=self.values.reset(rows))

    def reset(self) -> FastWeightState:
        return replace(super().reset(), seen=(0,) * self.batch)

    def select(self, indices: Tensor) -> FastWeightState:
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        chosen = super().select(indices)
        return replace(chosen, values=self.values.select(indices), seen=picked(self.seen, indices))

    def repeat(self, n: int) -> FastWeightState:
        return replace(super().repeat(n), values=self.values.repeat(n), seen=repeated(self.seen, n))

    def to_tensors(self) -> dict[str, Tensor]:
        names = {kind: name for name, kind in slot_values.items()}
        tensors = {
            **super().to_tensors(),
            "counts": torch.tensor(self.waits),
            **{name: torch.tensor(getattr(self, name)) for name in ("seen", "writes", "shared")},
            "store": torch.tensor(list(names[type(self.values)].encode()), dtype=torch.uint8),
            **{f"values.{name}": x for name, x in self.values.to_tensors().items()},
            **{f"waiting.{name}": x for name, x in self.waiting.tokens().items()},
        }
        return {name: x.contiguous() for name, x in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> FastWeightState:
        """Return the state that `to_tensors` wrote; missing, unknown or unfit tensors are an ArgumentError."""
        call = f"{CALL}.from_tensors"
        names = {"keys", "initial_keys", "counts", "seen", "writes", "shared", "tokens", "store"}
        parts: dict[str, dict[str, Tensor]] = {"values": {}, "waiting": {}}
        for name in set(tensors) - names:
            part, _, rest = name.partition(".")
            require(part in parts and rest != "", call, f"unknown tensor {name!r}; give what to_tensors() wrote.")
            parts[part][rest] = tensors[name]
        missing = sorted(names - set(tensors))
        require(not missing, call, f"{', '.join(missing)} missing; give what to_tensors() wrote.")
        counts, seen, writes = (tuple(tensors[name].tolist()) for name in ("counts", "seen", "writes"))
        text = f"got waiting tensors {', '.join(sorted(parts['waiting'])) or 'none'}; give what to_tensors() wrote."
        require((NEEDED if any(counts) else set()) <= set(parts["waiting"]) <= NEEDED | OPTIONAL, call, text)
        store = slot_values.get(bytes(tensors["store"].tolist()).decode())
        held: dict[str, Any] = {name: tensors[name] for name in ("keys", "initial_keys")}
        held |= {"seen": seen, "writes": writes, "shared": bool(tensors["shared"]), "tokens": int(tensors["tokens"])}
        waiting = Waiting((parts["waiting"],) if any(counts) else (), counts)
        state = cls(**held, values=store.from_tensors(parts["values"]), waiting=waiting)
        _require_whole(call, state)
        return state


def _require_whole(call: str, state: FastWeightState) -> None:
    """Check that the parts of `state` fit each other."""
    require(state.keys.dim() == 5, call, f"keys is {shape(state.keys)}, expected [M, H, 2, n, Dk/2].")
    memories, (heads, _, n, half) = 1 if state.shared else state.batch, state.keys.shape[1:]
    shapes = {
        "keys": (tuple(state.keys.shape), (memories, heads, 2, n, half)),
        "initial_keys": (tuple(state.initial_keys.shape), (heads, 2, n, half)),
        "values": ((state.values.memories, state.values.slots), (memories, n * n)),
        "writes": ((len(state.writes),), (memories,)),
        "counts": ((len(state.waits),), (memories,)),
    }
    for piece in state.waiting.pieces:
        slots = piece["slots"]
        rows, k = (state.batch, max(*slots.shape[1:2], *state.waits)), slots.shape[-1:]
        every, halves, wide = (heads, *k), (heads, 2, *k), (state.values.width,)
        sizes = {"slots": every, "weights": every, "scores": every, "halves": halves, "half_scores": halves}
        sizes |= {"query": (heads, 2 * half), "read": wide, "value": wide}
        for name, x in piece.items():
            shapes[f"waiting.{name}"] = tuple(x.shape), (*rows, *sizes.get(name, ()))
    for name, (size, wanted) in shapes.items():
        if size != wanted:
            hint = "give all tensors that one call of to_tensors() returned"
            raise ArgumentError(f"{call}: {name} is {list(size)}, but the other tensors need {list(wanted)}; {hint}.")


def check_state(
    call: str, state: Any, keys: Tensor, values: Tensor, batch: int, shared: bool, top_k: int
) -> FastWeightState:
    """Check that `state` fits the tensors of a call, and return it."""
    instance(call, "state", state, FastWeightState, "None or the FastWeightState of an earlier call")
    sizes = (tuple(state.keys.shape[1:]), (state.values.slots, state.values.width))
    wanted = (tuple(keys.shape), tuple(values.shape))
    if sizes != wanted:
        why = f"this memory has {list(wanted[0])} and {list(wanted[1])}; give each memory its own state"
        raise ArgumentError(f"{call}: state holds keys {list(sizes[0])} and values {list(sizes[1])}, but {why}.")
    if transformed() and not isinstance(state.values, slot_values.get("reference")):
        why = "a store that has no forward mode and no torch.func transforms"
        raise ArgumentError(f"{call}: state holds {why}; begin the stream with impl='reference'.")
    if state.shared != shared:
        held = "one memory for the whole batch" if state.shared else "one memory for each sequence"
        raise ArgumentError(f"{call}: state has {held}, but shared={shared}; begin a new stream with state=None.")
    if state.keys.device != keys.device:
        hint = "move it: state.map(lambda x: x.to(...))"
        raise ArgumentError(f"{call}: state is on {state.keys.device}, but the rest is on {keys.device}; {hint}.")
    if state.batch != batch:
        hint = "select() or repeat() them" + ", or flush(state) before the batch changes its size" * shared
        text = f"state has {state.batch} sequences, but the input has {batch}; {hint}."
        require(shared and state.waiting.empty, call, text)
        state = replace(state, seen=(max(state.seen, default=0),) * batch)
    if not state.waiting.empty and state.waiting.pieces[0]["slots"].shape[-1] != top_k:
        waiting = f"{max(state.waits)} tokens that are not written yet were read with another"
        raise ArgumentError(f"{call}: top_k is {top_k}, but {waiting}; flush(state) before it changes.")
    return state
