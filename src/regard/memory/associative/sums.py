"""States of fixed size instead of pairs: sums (generalized-memory paper, equations 9 to 16), or the state of a global
linear model (`regard.recurrent.trends`)."""

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
from .pairs import Pairs


def trend_of(store: Any, call: str = "AssociativeMemory", argument: str = "store") -> Any:
    """Return the global linear model that `store` names, such as mesa(ridge=0.1), or None."""
    if isinstance(store, str) and store.split("(")[0].strip() not in trends:
        return None
    return within(call, argument, as_trend, store)


def require_finite_features(spec: Spec, trend: Any, call: str) -> None:
    """Check that the pairs of `spec` can be summed, or be the state of a global linear model."""
    if trend is not None and str(spec) != "linear":
        raise ArgumentError(f"{call}: a global linear model ({trend.name}) is read as one; give spec='linear' with it.")
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
        return replace(self, state=self._run(new.keys[:, :, :0], new.keys, new.values, attn_mask=new.mask)[1])

    def _run(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        how |= {"state": self.state, "is_causal": False}
        if self.trend is None:
            return linear_attention(query, key, value, self.spec, form="parallel", **how)
        found: tuple[Tensor, Any] = self.trend.predict(query, key, value, **how)
        return found

    def minus(self, gone: Pairs) -> Sums:
        """Subtract pairs, exactly up to rounding. Non-finite numbers stay."""
        held, lost = self.state, Sums.of(self.spec, gone).state
        squares = None if held.squares is None or lost.squares is None else held.squares - lost.squares
        left = {name: getattr(held, name) - getattr(lost, name) for name in ("values", "keys", "tokens")}
        return replace(self, state=replace(held, **left, squares=squares))

    def read(self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor]) -> Tensor:
        """Return the values [B, H, Tq, Dv] for queries [B, H, Tq, D] (equations 17 to 22)."""
        none, nothing = query[:, :, :0], query.new_empty(*query.shape[:2], 0, self.state.values.shape[-1])
        if self.trend is None:
            return self._run(query, none, nothing, scale=scale, params=params)[0]
        if scale is not None or params:
            raise ArgumentError(f"AssociativeMemory.read: {self.trend!r} takes no scale and no params.")
        return self._run(query, none, nothing)[0]
