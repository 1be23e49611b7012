"""Global linear models by name ("trends"): linear maps W_i of the keys and values so far, read at a query.

`regard.interpolated_attention` averages the residuals of one, and `regard.AssociativeMemory` can hold its state. To add
one, write a class with a name, numbers and `predict`:

    @trends.register("my-model")
    @dataclass(frozen=True)
    class MyModel(Trend): ...

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D channels of a key, Dv of a value.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, number
from ..grammar.kernels import least_reach
from ..grammar.reader import Reader, kept
from ..grammar.spec import instance_of
from ..registry import Registry
from .delta import delta_rule
from .linear import linear_attention
from .mesa import mesa_attention

RANGES: dict[str, dict[str, Any]] = {
    "ridge": {"low": 0.0, "strict": True},
    "beta": {"low": 0.0, "strict": True},
    "log_decay": {"high": 0.0, "strict": False},
}


class Trend(ABC):
    """A global linear model; its numbers are checked by `RANGES`."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            if f.name in RANGES:
                object.__setattr__(self, f.name, number(self.name, f.name, getattr(self, f.name), **RANGES[f.name]))

    @abstractmethod
    def predict(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        """Return (W_i q_i [B, H, Tq, Dv], the state after all keys).

        Args:
            query: [B, H, Tq, D]; key: [B, Hkv, Tk, D]; value: [B, Hkv, Tk, Dv].
            how: state, attn_mask, is_causal, exclude_self and segment_ids as in `regard.linear_attention`.
        """


trends: Registry[type[Trend]] = Registry("trend", "regard.trends")


@trends.register("linear-attention")
@dataclass(frozen=True)
class LinearAttention(Trend):
    """W_i = sum_j gamma_ij v_j k_j^T: linear attention.

    Args:
        log_decay: g <= 0 a token, gamma_ij = exp(g (i - j)).
    """

    log_decay: float = 0.0

    def predict(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        return linear_attention(query, key, value, "linear", scale=1.0, log_decay=self.log_decay or None, **how)


@trends.register("mesa")
@dataclass(frozen=True)
class Mesa(Trend):
    """W_i = argmin sum_j gamma_ij |v_j - W k_j|^2 + ridge |W|^2: the best linear model (`regard.mesa_attention`).

    Args:
        ridge: > 0, absolute, in units of a squared key.
        log_decay: g <= 0 a token, gamma_ij = exp(g (i - j)).
    """

    ridge: float = 1.0
    log_decay: float = 0.0

    def predict(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        return mesa_attention(query, key, value, ridge=self.ridge, log_decay=self.log_decay or None, **how)


@trends.register("delta")
@dataclass(frozen=True)
class Delta(Trend):
    """The delta rule (`regard.delta_rule`) with steps beta / |k_j|^2: one step of size 1 stores the pair.

    Args:
        beta: > 0; stable below 2.
    """

    beta: float = 1.0
    log_decay: ClassVar[float] = 0.0

    def predict(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        return delta_rule(query, key, value, unit_steps(key, self.beta), log_decay=self.log_decay or None, **how)


@trends.register("gated-delta")
@dataclass(frozen=True)
class GatedDelta(Delta):
    """The gated delta rule: `Delta`, with W multiplied by exp(log_decay) per token.

    Args:
        beta: > 0; stable below 2.
        log_decay: g <= 0 a token.
    """

    log_decay: float = -0.01  # type: ignore[misc]


def as_trend(trend: Any) -> Trend:
    """Return a trend, given as an object, a name or a text such as mesa(ridge=0.5).

    Raises:
        ArgumentError: an unknown name or argument, or a number out of range.
    """
    return _parsed(trend) if isinstance(trend, str) else instance_of(trends, trend)


@kept
def _parsed(text: str) -> Trend:
    (name, options), *more = Reader(text).terms()
    if more:
        raise ArgumentError(f"a trend is one term, such as mesa(ridge=0.5), not {text!r}.")
    return instance_of(trends, name, **options)


def unit_steps(key: Tensor, beta: float) -> Tensor:
    """Return beta / |k|^2 for every key, 0 for keys of zero, too small to divide by, or not finite: [B, Hkv, Tk]."""
    key = key.to(torch.promote_types(key.dtype, torch.float32))
    square = key.detach().square().sum(-1)
    usable = (square >= least_reach(key.dtype)) & square.isfinite()
    size = torch.linalg.vector_norm(torch.where(usable[..., None], key, 1), dim=-1)
    return torch.where(usable, beta * size.reciprocal().square(), 0)


def predict_from(
    trend: Any, query: Tensor, key: Tensor, value: Tensor, *, offset: int, attn_mask: Tensor | None = None,
    is_causal: bool = True, exclude_self: bool = False, segment_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return W_i q_i for queries at key positions i + offset, after reading the keys before them into a state.

    A negative offset gives queries that see nothing yet (0). `attn_mask` is boolean [B, Tk]; `segment_ids` [B or 1, Tk]
    need offset 0 and Tq = Tk.
    """
    rows, keys = query.shape[2], key.shape[2]
    if segment_ids is not None:
        order: dict[str, Any] = {"is_causal": is_causal, "exclude_self": exclude_self, "segment_ids": segment_ids}
        return trend.predict(query, key, value, attn_mask=attn_mask, **order)[0]
    if not (is_causal or exclude_self):
        return trend.predict(query, key, value, attn_mask=attn_mask, is_causal=False)[0]
    lead = min(max(-offset, 0), rows)
    before = min(max(offset, 0), keys)
    pairs = min(rows - lead, keys - before)

    def predict(q: Tensor, first: int, last: int, state: Any, **how: Any) -> tuple[Tensor, Any]:
        mask = None if attn_mask is None else attn_mask[:, first:last]
        return trend.predict(q, key[:, :, first:last], value[:, :, first:last], state=state, attn_mask=mask, **how)

    state = predict(query[:, :, :0], 0, before, None, is_causal=False)[1] if before else None
    out, state = predict(query[:, :, lead : lead + pairs], before, before + pairs, state, exclude_self=exclude_self)
    rows_before = query.new_zeros(*query.shape[:2], lead, value.shape[3])
    if lead + pairs == rows:
        return torch.cat([rows_before, out], 2)
    after = predict(query[:, :, lead + pairs :], keys, keys, state, is_causal=False)[0]  # later than every key
    return torch.cat([rows_before, out, after], 2)
