"""Trends: global linear models of the pairs, W_i, whose residuals a local constant model then averages
(local-linear-attention paper, equation 9):

    o_i = sum_j s_ij (v_j - W_i k_j) + W_i q_i

A trend holds numbers; `regard.recurrent.trends` computes it. It is made of the pairs that its query may see, in order,
and knows neither the scale nor the weights s of the local model.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..checks import number
from ..registry import Registry

trends: Registry[Any] = Registry("trend", "regard.trends")

RANGES: dict[str, dict[str, Any]] = {
    "ridge": {"low": 0.0, "strict": True},
    "beta": {"low": 0.0, "strict": True},
    "log_decay": {"high": 0.0, "strict": False},
}


class _Checked:
    name: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            value = number(self.name, f.name, getattr(self, f.name), **RANGES[f.name])
            object.__setattr__(self, f.name, value)


@trends.register("linear-attention")
@dataclass(frozen=True)
class LinearAttention(_Checked):
    """W_i = sum_j gamma_ij v_j k_j^T: the sums of linear attention, as if keys were uncorrelated and of length one.

    Args:
        log_decay: g <= 0 a token, gamma_ij = exp(g (i - j)).
    """

    log_decay: float = 0.0
    name: ClassVar[str] = "linear-attention"


@trends.register("mesa")
@dataclass(frozen=True)
class Mesa(_Checked):
    """W_i = argmin sum_j gamma_ij |v_j - W k_j|^2 + ridge |W|^2: the best linear model (`regard.mesa_attention`).

    Args:
        ridge: > 0, absolute, in units of a squared key.
        log_decay: g <= 0 a token, gamma_ij = exp(g (i - j)).
    """

    ridge: float = 1.0
    log_decay: float = 0.0
    name: ClassVar[str] = "mesa"


@trends.register("delta")
@dataclass(frozen=True)
class Delta(_Checked):
    """The delta rule (`regard.delta_rule`) with steps beta / |k_j|^2: one step of size 1 stores the pair.

    Args:
        beta: > 0; stable below 2.
    """

    beta: float = 1.0
    name: ClassVar[str] = "delta"


@trends.register("gated-delta")
@dataclass(frozen=True)
class GatedDelta(_Checked):
    """The gated delta rule: `Delta`, and W fades by exp(log_decay) a token.

    Args:
        beta: > 0; stable below 2.
        log_decay: g <= 0 a token.
    """

    beta: float = 1.0
    log_decay: float = -0.01
    name: ClassVar[str] = "gated-delta"
