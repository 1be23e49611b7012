"""What a memory holds as sums over pairs, of fixed size (generalized-memory paper, equations 9 to 16)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..estimators.linear import LinearState, finite_features, linear_attention
from ..grammar import Spec, presets_registry
from .pairs import Pairs


def require_finite_features(spec: Spec, call: str) -> None:
    """The pairs of `spec` fold into sums.

    Raises:
        ArgumentError: they do not; the message lists the presets whose pairs do.
    """
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
        state: A = sum phi(k) v^T and b = sum phi(k), in float32 at least.
        dtype: of the keys and values.
    """

    spec: Spec
    state: LinearState
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: Spec, pairs: Pairs) -> Sums:
        """The sums over some pairs."""
        state = LinearState.empty(
            spec, *pairs.leading, pairs.keys.shape[3], pairs.values.shape[3], dtype=pairs.dtype, device=pairs.device
        )
        return cls(spec, state, pairs.dtype).plus(pairs)

    def __len__(self) -> int:
        return self.state.tokens

    @property
    def bytes(self) -> int:
        """Of the sums: the same for any number of pairs."""
        return self.state.bytes

    @property
    def leading(self) -> tuple[int, int]:
        """B and H."""
        return self.state.keys.shape[0], self.state.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self.state.keys.device

    def map(self, fn: Callable[[Tensor], Tensor]) -> Sums:
        """The same sums with `fn` applied to every tensor; they stay in float32 at least."""

        def wide(t: Tensor) -> Tensor:
            new = fn(t)
            return new.to(torch.promote_types(new.dtype, torch.float32)) if new.is_floating_point() else new

        return Sums(self.spec, self.state.map(wide), fn(torch.empty(0, dtype=self.dtype, device=self.device)).dtype)

    def expand(self, batch: int) -> Sums:
        """One memory for every sequence of a batch, without a copy."""
        if self.leading[0] == batch:
            return self
        return replace(self, state=self.state.map(lambda t: t.expand(batch, *t.shape[1:])))

    def plus(self, new: Pairs) -> Sums:
        """With these pairs added (equations 15 and 16)."""
        nobody = new.keys[:, :, :0]
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
        """What the queries [B, H, Tq, D] retrieve (equations 17 to 22), [B, H, Tq, Dv]."""
        none = query.new_empty(*query.shape[:2], 0, query.shape[3])
        width = self.state.values.shape[-1]
        return linear_attention(
            query, none, query.new_empty(*query.shape[:2], 0, width), self.spec,
            state=self.state, is_causal=False, form="parallel", scale=scale, params=params,
        )[0]  # fmt: skip
