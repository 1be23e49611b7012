"""What every state of fixed size can do: the protocol by which caches, beam search and checkpoints handle it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from ..checks import ArgumentError, require, shape, whole

S = TypeVar("S", bound="State")


@dataclass(frozen=True)
class State:
    """Tensors whose first axis is the batch, and `tokens`, how many positions were seen, masked ones included; a
    subclass names the tensors as fields.

    Nothing is changed in place: every method gives a new state.
    """

    OPTIONAL: ClassVar[dict[str, str]] = {}
    """Fields that may be None, and when they are there."""

    tokens: int = field(default=0, kw_only=True)

    def map(self: S, fn: Callable[[Tensor], Tensor]) -> S:
        """The same state with `fn` applied to every tensor."""
        return replace(self, **{name: fn(x) for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    def reset(self: S) -> S:
        """The state before the first pair."""
        return replace(self.map(torch.zeros_like), tokens=0)

    def clone(self: S) -> S:
        """A copy that shares no memory; gradients flow through it."""
        return self.map(torch.clone)

    def detach(self: S) -> S:
        """The same numbers, through which no gradient flows (truncated backpropagation)."""
        return self.map(Tensor.detach)

    def select(self: S, indices: Tensor) -> S:
        """The sequences `indices`, integers [N] in that order (beam search) or flags [B]."""
        return self.map(lambda x: x[indices.to(x.device)])

    def repeat(self: S, n: int) -> S:
        """Every sequence `n` times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def crop(self: S, n: int) -> S:
        """The state itself where `n` is no less than `tokens` (a negative n counts from the end).

        Raises:
            ArgumentError: fewer tokens are asked for: a sum does not remember what it was made of.
        """
        wanted = self.tokens + n if n < 0 else n
        require(
            wanted >= self.tokens,
            f"{type(self).__name__}.crop",
            f"cannot go back from {self.tokens} tokens to {max(wanted, 0)}: the state is a sum over all pairs, which "
            f"cannot forget some of them; keep a clone() from before, or reset() and read the tokens again.",
        )
        return self

    @property
    def bytes(self) -> int:
        """The memory of the tensors; it does not depend on how many tokens were seen."""
        return sum(x.numel() * x.element_size() for x in self._tensors().values())

    def to_tensors(self) -> dict[str, Tensor]:
        """Name to tensor, contiguous, for safetensors; `from_tensors` gives the same state back."""
        own = {name: x.contiguous() for name, x in self._tensors().items()}
        return {**own, "tokens": torch.tensor(self.tokens)}

    @classmethod
    def from_tensors(cls: type[S], tensors: Mapping[str, Tensor]) -> S:
        """The state that `to_tensors` wrote.

        Raises:
            ArgumentError: a tensor is missing or unknown.
        """
        known = {f.name for f in fields(cls)}
        some = "".join(f" ({name} only where {when})" for name, when in cls.OPTIONAL.items())
        require(
            known - set(cls.OPTIONAL) <= set(tensors) <= known,
            f"{cls.__name__}.from_tensors",
            f"got {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(sorted(known))}{some}.",
        )
        own = {name: tensors.get(name) for name in known - {"tokens"}}
        return cls(**own, tokens=int(tensors["tokens"]))


def joined(states: Sequence[S], order: Tensor) -> S:
    """Return the sequences of all states as one state, in the order of the indices `order`; `tokens` is the largest."""
    own = [state._tensors() for state in states]
    tensors = {name: torch.cat([x[name] for x in own])[order] for name in own[0]}
    return replace(states[0], **tensors, tokens=max(state.tokens for state in states))


def require_state(
    call: str, state: object, kind: type[State], sizes: Mapping[str, tuple[int, ...] | None], like: Tensor
) -> None:
    """Check that `state` is a `kind` with tensors of these shapes (None: without that tensor), in the dtype and on the
    device of `like`, and with flags of what was not finite where the kind has them.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(state, kind):
        raise ArgumentError(f"{call}: state is a {type(state).__name__}, expected a {kind.__name__} or None.")
    if hasattr(state, "poisoned"):
        sizes = {**sizes, "poisoned": next(size for size in sizes.values() if size is not None)[:2]}
    for name, size in sizes.items():
        held = getattr(state, name)
        if not isinstance(held, Tensor if size is not None else type(None)):
            given, needed = type(held).__name__, "none" if size is None else f"a tensor {list(size)}"
            raise ArgumentError(
                f"{call}: state has a {given} as {name}, but these arguments need {needed}; give each layer its own "
                f"state."
            )
        if held is None or size is None:
            continue
        if tuple(held.shape) != size:
            raise ArgumentError(
                f"{call}: state holds {name} {shape(held)}, but these tensors need [{', '.join(map(str, size))}]; give "
                f"each layer its own state."
            )
        dtype = torch.bool if name == "poisoned" else like.dtype
        if held.dtype != dtype or held.device != like.device:
            raise ArgumentError(
                f"{call}: {name} of the state is {held.dtype} on {held.device}, but these tensors are computed in "
                f"{dtype} on {like.device}; convert it with state.map."
            )
    whole(f"{call}: state", "tokens", state.tokens, 0)
