"""The base class of states of fixed size: what caches, beam search and checkpoints need of a state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..checks import ArgumentError, instance, require, shape, whole

S = TypeVar("S", bound="State")
Size: TypeAlias = tuple[int, ...] | None
Sizes: TypeAlias = dict[str, Size]


@dataclass(frozen=True)
class State:
    """A state of fixed size. A subclass names its tensors as fields; their first axis is the batch.

    `tokens` counts the positions seen, masked ones included. Every method returns a new state.
    """

    OPTIONAL: ClassVar[dict[str, str]] = {}
    """Fields that may be None, each with the condition under which it is a tensor."""

    tokens: int = field(default=0, kw_only=True)

    def map(self: S, fn: Callable[[Tensor], Tensor]) -> S:
        """Return the state with `fn` applied to every tensor."""
        return replace(self, **{name: fn(x) for name, x in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        return {f.name: x for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)}

    def reset(self: S) -> S:
        """Return the state before the first token."""
        return replace(self.map(torch.zeros_like), tokens=0)

    def clone(self: S) -> S:
        """Return a copy that shares no memory; gradients flow through it."""
        return self.map(torch.clone)

    def detach(self: S) -> S:
        """Return the state without gradient, for truncated backpropagation."""
        return self.map(Tensor.detach)

    def select(self: S, indices: Tensor) -> S:
        """Return some sequences: `indices` holds integers [N] (beam search) or booleans [B]."""
        return self.map(lambda x: x[indices.to(x.device)])

    def repeat(self: S, n: int) -> S:
        """Return the state with every sequence repeated `n` times in a row."""
        return self.map(lambda x: x.repeat_interleave(n, dim=0))

    def crop(self: S, n: int) -> S:
        """Return the state itself if `n` is at least `tokens`; a negative n counts from the end.

        Raises:
            ArgumentError: for fewer tokens, since tokens cannot be subtracted from a sum.
        """
        wanted = self.tokens + n if n < 0 else n
        back = f"cannot go back from {self.tokens} tokens to {max(wanted, 0)}: the state is a sum over all tokens and"
        hint = "keep an earlier clone(), or reset() and read the tokens again"
        require(wanted >= self.tokens, f"{type(self).__name__}.crop", f"{back} cannot forget some of them; {hint}.")
        return self

    @property
    def bytes(self) -> int:
        """The memory of the tensors in bytes, whatever the number of tokens seen."""
        return sum(x.nbytes for x in self._tensors().values())

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, contiguous, for safetensors; `from_tensors` reads them."""
        tensors = {name: x.contiguous() for name, x in self._tensors().items()}
        return {**tensors, "tokens": torch.tensor(self.tokens)}

    @classmethod
    def from_tensors(cls: type[S], tensors: Mapping[str, Tensor]) -> S:
        """Return the state that `to_tensors` wrote.

        Raises:
            ArgumentError: a tensor is missing or unknown.
        """
        known = {f.name for f in fields(cls)}
        some = "".join(f" ({name} only where {when})" for name, when in cls.OPTIONAL.items())
        text = f"got {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(sorted(known))}{some}."
        require(known - set(cls.OPTIONAL) <= set(tensors) <= known, f"{cls.__name__}.from_tensors", text)
        values = {name: tensors.get(name) for name in known - {"tokens"}}
        return cls(**values, tokens=int(tensors["tokens"]))


@dataclass(frozen=True)
class LinearMap(State, ABC):
    """A state whose sizes follow from those of a key and a value."""

    @staticmethod
    @abstractmethod
    def sizes(dim: int, value_dim: int) -> Sizes:
        """Return the size per head of every tensor but `non_finite`."""

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Any:
        """Return the state before the first token, for keys of `dim` and values of `value_dim` (default `dim`)."""
        sizes = cls.sizes(dim, dim if value_dim is None else value_dim)
        return cls(**zeros(batch, kv_heads, torch.promote_types(dtype, torch.float32), device, **sizes))


def zeros(batch: int, heads: int, dtype: torch.dtype, device: Any, **sizes: Size) -> dict[str, Any]:
    """Return the fields of an empty state: zeros [batch, heads, *size], None for None, and `non_finite`."""
    make = partial(torch.zeros, batch, heads, dtype=dtype, device=device)
    fields = {name: None if size is None else make(*size) for name, size in sizes.items()}
    return {**fields, "non_finite": torch.zeros(batch, heads, dtype=torch.bool, device=device)}


def joined(states: Sequence[S], order: Tensor) -> S:
    """Return the sequences of all states as one state, in the order of the indices `order`; `tokens` is the largest."""
    parts = [state._tensors() for state in states]
    tensors = {name: torch.cat([x[name] for x in parts])[order] for name in parts[0]}
    return replace(states[0], **tensors, tokens=max(state.tokens for state in states))


def require_state(call: str, state: Any, kind: type[State], sizes: Mapping[str, Size], like: Tensor) -> None:
    """Raise ArgumentError unless `state` is a `kind` with tensors like `like` of these sizes (None: missing)."""
    instance(call, "state", state, kind, f"None or the {kind.__name__} of an earlier call")
    if hasattr(state, "non_finite"):
        sizes = {**sizes, "non_finite": next(size for size in sizes.values() if size is not None)[:2]}
    hint = "give each layer its own state"
    for name, size in sizes.items():
        held, dtype = getattr(state, name), torch.bool if name == "non_finite" else like.dtype
        if not isinstance(held, Tensor if size is not None else type(None)):
            given, needed = type(held).__name__, "none" if size is None else f"a tensor {list(size)}"
            raise ArgumentError(f"{call}: state has a {given} as {name}, but these arguments need {needed}; {hint}.")
        if held is None or size is None:
            continue
        if tuple(held.shape) != size:
            needed = f"these tensors need [{', '.join(map(str, size))}]"
            raise ArgumentError(f"{call}: state holds {name} {shape(held)}, but {needed}; {hint}.")
        if held.dtype != dtype or held.device != like.device:
            needed = f"these tensors are computed in {dtype} on {like.device}; convert it with state.map"
            raise ArgumentError(f"{call}: {name} of the state is {held.dtype} on {held.device}, but {needed}.")
    whole(f"{call}: state", "tokens", state.tokens, 0)
