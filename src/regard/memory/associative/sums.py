"""What a memory holds in place of its pairs, of fixed size: sums (generalized-memory paper, equations 9 to 16), or the
state of a global linear model (`regard.recurrent.trends`)."""

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
    """The global linear model that a store names, such as mesa(ridge=0.1); None for one that names none."""
    if isinstance(store, str) and store.split("(")[0].strip() not in trends:
        return None
    return within(call, argument, as_trend, store)


def require_finite_features(spec: Spec, trend: Any, call: str) -> None:
    """The pairs of `spec` fold into sums, or into the state of a trend.

    Raises:
        ArgumentError: they do not; the message lists the presets whose pairs do.
    """
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
    """Sums over the pairs written, whose features do not depend on the scale or on any number learned.

    Attributes:
        spec: the sentence, which decides the features.
        state: A = sum phi(k) v^T and b = sum phi(k), in float32 at least; with a trend, its state.
        dtype: of the keys and values.
        trend: the global linear model whose state is held, or None.
    """

    spec: Spec
    state: LinearState | MesaState | DeltaState
    dtype: torch.dtype
    trend: Any = None

    @classmethod
    def of(cls, spec: Spec, pairs: Pairs, trend: Any = None) -> Sums:
        """The sums over some pairs."""
        if trend is not None:
            nobody = pairs.keys[:, :, :0]
            how: dict[str, Any] = {"attn_mask": pairs.mask, "is_causal": False}
            return cls(spec, trend.predict(nobody, pairs.keys, pairs.values, **how)[1], pairs.dtype, trend)
        state = LinearState.empty(
            spec, *pairs.leading, pairs.keys.shape[3], pairs.values.shape[3], dtype=pairs.dtype, device=pairs.device
        )
        return cls(spec, state, pairs.dtype).plus(pairs)

    @classmethod
    def with_new(cls, held: Any, spec: Spec, new: Pairs, trend: Any = None) -> Sums:
        """What is held, and these pairs; nothing is held yet where `held` are no sums."""
        return held.plus(new) if isinstance(held, cls) else cls.of(spec, new, trend)

    def __len__(self) -> int:
        return self.state.tokens

    @property
    def bytes(self) -> int:
        """Of the sums: the same for any number of pairs."""
        return self.state.bytes

    @property
    def leading(self) -> tuple[int, int]:
        """B and H."""
        return self.state.values.shape[0], self.state.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.state.values.device

    def map(self, fn: Callable[[Tensor], Tensor]) -> Sums:
        """The same sums with `fn` applied to every tensor; they stay in float32 at least."""

        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            return new.to(torch.promote_types(new.dtype, torch.float32)) if new.is_floating_point() else new

        dtype = fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return replace(self, state=self.state.map(wide), dtype=dtype)

    def expand(self, batch: int) -> Sums:
        """One memory for every sequence of a batch, without a copy."""
        if self.leading[0] == batch:
            return self
        return replace(self, state=self.state.map(lambda t: t.expand(batch, *t.shape[1:])))

    def plus(self, new: Pairs) -> Sums:
        """With these pairs added (equations 15 and 16), in their order."""
        nobody = new.keys[:, :, :0]
        if self.trend is not None:
            how: dict[str, Any] = {"state": self.state, "attn_mask": new.mask, "is_causal": False}
            return replace(self, state=self.trend.predict(nobody, new.keys, new.values, **how)[1])
        assert isinstance(self.state, LinearState)
        _, state = linear_attention(
            nobody,
            new.keys,
            new.values,
            self.spec,
            state=self.state,
            attn_mask=new.mask,
            is_causal=False,
            form="parallel",
        )
        return replace(self, state=state)

    def minus(self, gone: Pairs) -> Sums:
        """With these pairs taken away again; exact but for rounding. What was not finite stays."""
        lost = Sums.of(self.spec, gone).state
        held = self.state
        assert isinstance(lost, LinearState)
        assert isinstance(held, LinearState)
        squares = None if held.squares is None or lost.squares is None else held.squares - lost.squares
        state = replace(
            held,
            values=held.values - lost.values,
            keys=held.keys - lost.keys,
            squares=squares,
            tokens=held.tokens - lost.tokens,
        )
        return replace(self, state=state)

    def read(self, query: Tensor, scale: float | Tensor | None, params: Mapping[str, float | Tensor]) -> Tensor:
        """What the queries [B, H, Tq, D] retrieve (equations 17 to 22), [B, H, Tq, Dv].

        Raises:
            ArgumentError: a scale or a number for a trend, which has its own.
        """
        none = query.new_empty(*query.shape[:2], 0, query.shape[3])
        width = self.state.values.shape[-1]
        if self.trend is not None:
            if scale is not None or params:
                raise ArgumentError(f"AssociativeMemory.read: {self.trend!r} takes no scale and no params.")
            nothing = query.new_empty(*query.shape[:2], 0, width)
            out: Tensor = self.trend.predict(query, none, nothing, state=self.state, is_causal=False)[0]
            return out
        assert isinstance(self.state, LinearState)
        return linear_attention(
            query, none, query.new_empty(*query.shape[:2], 0, width), self.spec,
            state=self.state, is_causal=False, form="parallel", scale=scale, params=params,
        )[0]  # fmt: skip
