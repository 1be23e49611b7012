"""What an associative memory holds: pairs, or a state of fixed size. Nothing changes in place, so gradients flow.

A state of fixed size is sums over pairs (generalized-memory paper, equations 9 to 16), or the state of a global linear
model (`regard.recurrent.trends`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, within
from ...grammar import Spec, presets_registry
from ...recurrent.linear import finite_features, linear_attention
from ...recurrent.trends import as_trend, trends
from ..token_fields import hidden_where


@dataclass(frozen=True)
class Pairs:
    """n pairs of keys [B, H, n, D] and values [B, H, n, Dv], the oldest first."""

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None  # [B, 1, n], False at padding; None without padding

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def bytes(self) -> int:
        """The memory of all tensors; values that are the keys count once."""
        held = {id(t): t for t in (self.keys, self.values, self.mask) if t is not None}
        return sum(t.nbytes for t in held.values())

    def map(self, fn: Callable[[Tensor], Tensor]) -> Pairs:
        keys = fn(self.keys)
        values = keys if self.values is self.keys else fn(self.values)
        return Pairs(keys, values, None if self.mask is None else fn(self.mask))

    def plus(self, new: Pairs) -> Pairs:
        """Return these pairs followed by the new ones. Copies all: O(n)."""
        keys = torch.cat([self.keys, new.keys], 2)
        same = self.values is self.keys and new.values is new.keys
        values = keys if same else torch.cat([self.values, new.values], 2)
        if self.mask is None and new.mask is None:
            return Pairs(keys, values)
        every = (x.keys.new_ones(len(x.keys), 1, len(x), dtype=torch.bool) for x in (self, new))
        masks = [one if x.mask is None else x.mask for one, x in zip(every, (self, new), strict=True)]
        return Pairs(keys, values, torch.cat(masks, 2))

    def select(self, places: Tensor) -> Pairs:
        """Return the pairs at `places`, int64 [m]."""
        return self.map(lambda t: t.index_select(2, places))

    def newest(self, n: int) -> Pairs:
        return self.select(torch.arange(max(len(self) - n, 0), len(self), device=self.keys.device))

    def expand(self, batch: int) -> Pairs:
        """Use one memory for every sequence of a batch, without a copy."""
        return self if len(self.keys) == batch else self.map(lambda t: t.expand(batch, *t.shape[1:]))

    @property
    def leading(self) -> tuple[int, int]:
        """B and H."""
        return self.keys.shape[0], self.keys.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        return self.keys.device


def learned(keys: Tensor, values: Tensor | None, batch: int) -> Pairs:
    """Return learned slots [H, m, D] and [H, m, Dv] (None: the keys) as pairs of every sequence of a batch."""
    key = keys[None].expand(batch, -1, -1, -1)
    return Pairs(key, key if values is None else values[None].expand(batch, -1, -1, -1))


def trend_of(store: Any, call: str = "AssociativeMemory", argument: str = "store") -> Any:
    """Return the global linear model that `store` names, such as mesa(ridge=0.1), or None."""
    if isinstance(store, str) and store.split("(")[0].strip() not in trends:
        return None
    return within(call, argument, as_trend, store)


def require_finite_features(spec: Spec, trend: Any, call: str) -> None:
    """Check that the pairs of `spec` can be summed, or be the state of a global linear model."""
    if trend is not None and str(spec) != "linear":
        raise ArgumentError(f"{call}: the store {trend.name}, a global linear model, needs spec='linear'.")
    if not finite_features(spec):
        able = ", ".join(name for name, preset in presets_registry.items() if finite_features(preset))
        none = f"{spec} has no finite features, so its pairs cannot be stored as sums"
        raise ArgumentError(f"{call}: {none}; use store='pairs', or one of: {able}.")


@dataclass(frozen=True)
class Sums:
    """Sums over pairs. The features do not depend on the scale or on other parameters."""

    spec: Spec  # defines the features
    # A = sum phi(k) v^T and b = sum phi(k), in float32 at least; or the state of `trend`. None in `of` only.
    state: Any
    dtype: torch.dtype  # of the keys and values
    trend: Any = None  # a global linear model, or None

    @classmethod
    def of(cls, spec: Spec, pairs: Pairs, trend: Any = None) -> Sums:
        return cls(spec, None, pairs.dtype, trend).plus(pairs)

    def __len__(self) -> int:
        return self.state.tokens

    @property
    def bytes(self) -> int:
        return self.state.bytes

    @property
    def leading(self) -> tuple[int, int]:
        return self.state.values.shape[0], self.state.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.state.values.device

    def map(self, fn: Callable[[Tensor], Tensor]) -> Sums:
        """Apply `fn` to every tensor; sums stay in float32 at least."""

        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            return new.to(torch.promote_types(new.dtype, torch.float32)) if new.is_floating_point() else new

        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return replace(self, state=self.state.map(wide), dtype=dtype)

    def expand(self, batch: int) -> Sums:
        if self.leading[0] == batch:
            return self
        return replace(self, state=self.state.map(lambda t: t.expand(batch, *t.shape[1:])))

    def plus(self, new: Pairs) -> Sums:
        """Add pairs in their order (equations 15 and 16)."""
        mask = None if new.mask is None else new.mask[:, 0]
        return replace(self, state=self._run(new.keys[:, :, :0], new.keys, new.values, attn_mask=mask)[1])

    def _run(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        how |= {"state": self.state, "is_causal": False}
        if self.trend is None:
            return linear_attention(query, key, value, self.spec, form="parallel", **how)
        result: tuple[Tensor, Any] = self.trend.predict(query, key, value, **how)
        return result

    def minus(self, gone: Pairs) -> Sums:
        """Subtract pairs, exactly up to rounding. Non-finite numbers stay."""
        held, lost = self.state, Sums.of(self.spec, gone).state
        squares = None if held.squares is None or lost.squares is None else held.squares - lost.squares
        left = {name: getattr(held, name) - getattr(lost, name) for name in ("values", "keys", "tokens")}
        state = replace(held, **left, squares=squares)
        none = state.keys[..., -1] == 0  # where only masked pairs are left: rounding errors, whose quotient is not zero
        return replace(self, state=state.map(lambda x: hidden_where(none, x) if x.is_floating_point() else x))

    def read(self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor]) -> Tensor:
        """Return the values [B, H, Tq, Dv] for queries [B, H, Tq, D] (equations 17 to 22)."""
        none, nothing = query[:, :, :0], query.new_empty(*query.shape[:2], 0, self.state.values.shape[-1])
        if self.trend is None:
            return self._run(query, none, nothing, scale=scale, params=params)[0]
        if scale is not None or params:
            raise ArgumentError(f"AssociativeMemory.read: {self.trend!r} takes no scale and no params.")
        return self._run(query, none, nothing)[0]
