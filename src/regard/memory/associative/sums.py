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
from ...recurrent.delta import DeltaState
from ...recurrent.linear import LinearState, finite_features, linear_attention
from ...recurrent.mesa import MesaState
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
        raise ArgumentError(
            f"{call}: {spec} has no finite features, so that its pairs do not fold into sums; use store='pairs', or "
            f"one of: {able}."
        )


@dataclass(frozen=True)
class Sums:
    """Sums over pairs. The features do not depend on the scale or on other parameters."""

    spec: Spec  # defines the features
    # A = sum phi(k) v^T and b = sum phi(k), in float32 at least; or the state of `trend`
    state: LinearState | MesaState | DeltaState
    dtype: torch.dtype  # of the keys and values
    trend: Any = None  # a global linear model, or None

    @classmethod
    def of(cls, spec: Spec, pairs: Pairs, trend: Any = None) -> Sums:
        """Return the sums over `pairs`."""
        if trend is not None:
            how: dict[str, Any] = {"attn_mask": pairs.mask, "is_causal": False}
            state = trend.predict(pairs.keys[:, :, :0], pairs.keys, pairs.values, **how)[1]
            return cls(spec, state, pairs.dtype, trend)
        state = LinearState.empty(
            spec, *pairs.leading, pairs.keys.shape[3], pairs.values.shape[3], dtype=pairs.dtype, device=pairs.device
        )
        return cls(spec, state, pairs.dtype).plus(pairs)

    def __len__(self) -> int:
        return self.state.tokens

    @property
    def bytes(self) -> int:
        """The memory of the state, whatever the number of pairs."""
        return self.state.bytes

    @property
    def leading(self) -> tuple[int, int]:
        """B and H."""
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
        """Use one memory for every sequence of a batch, without a copy."""
        if self.leading[0] == batch:
            return self
        return replace(self, state=self.state.map(lambda t: t.expand(batch, *t.shape[1:])))

    def plus(self, new: Pairs) -> Sums:
        """Add pairs in their order (equations 15 and 16)."""
        nobody = new.keys[:, :, :0]
        how: dict[str, Any] = {"state": self.state, "attn_mask": new.mask, "is_causal": False}
        if self.trend is not None:
            return replace(self, state=self.trend.predict(nobody, new.keys, new.values, **how)[1])
        return replace(self, state=linear_attention(nobody, new.keys, new.values, self.spec, form="parallel", **how)[1])

    def minus(self, gone: Pairs) -> Sums:
        """Subtract pairs, exactly up to rounding. Non-finite numbers stay."""
        lost = Sums.of(self.spec, gone).state
        held = self.state
        assert isinstance(lost, LinearState)
        assert isinstance(held, LinearState)
        squares = None if held.squares is None or lost.squares is None else held.squares - lost.squares
        left = {name: getattr(held, name) - getattr(lost, name) for name in ("values", "keys", "tokens")}
        return replace(self, state=replace(held, **left, squares=squares))

    def read(self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor]) -> Tensor:
        """Return the values [B, H, Tq, Dv] for queries [B, H, Tq, D] (equations 17 to 22)."""
        none, nothing = query[:, :, :0], query.new_empty(*query.shape[:2], 0, self.state.values.shape[-1])
        how: dict[str, Any] = {"state": self.state, "is_causal": False}
        if self.trend is not None:
            if scale is not None or params:
                raise ArgumentError(f"AssociativeMemory.read: {self.trend!r} takes no scale and no params.")
            out: Tensor = self.trend.predict(query, none, nothing, **how)[0]
            return out
        how |= {"form": "parallel", "scale": scale, "params": params}
        return linear_attention(query, none, nothing, self.spec, **how)[0]
