"""Ridges: penalties on the slope of the local linear model, which may depend on the token (docs/layers.md).

Equation 27 of Local Linear Attention (arXiv 2510.01450) is lambda = sigmoid(W x), x the hidden state of a token. Here W
is [H r, C], r = 1 (per head) or D (per channel), since [d, d_lambda] as printed cannot multiply x; a floor is added.

Legend: B batch, H heads, T tokens, D channels of a head, C width of the hidden state.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softplus

from ...checks import ArgumentError, one_of, require
from ...grammar import Spec
from ...registry import Registry
from .layer_rules import Rule, as_rule

ridges: Registry[Any] = Registry("ridge", "regard.ridges")


class Ridge(Rule):
    """Base of the ridge rules; a new rule also has `numbers`, `bias` and `values`."""

    def numbers(self, dim: int) -> int:
        """Return the number of learned values per head and token: 1, `dim` (one per channel), or 0 (not learned)."""
        return 0

    def bias(self) -> float:
        """Return the initial output of the projection, the same for every token."""
        return 0.0

    def values(self, x: Tensor) -> Tensor:
        """Return ridges above 0 from the outputs of the projection, elementwise, at least in float32."""
        missing = f"{type(self).__name__} has no values(x); define it to return numbers above 0 in the shape of x"
        raise ArgumentError(f"ridge {self.name!r}: {missing}.")

    def require(self, call: str, spec: Spec) -> None:
        """Check that `spec` is local linear with a solver that uses a ridge, or that this rule is not learned."""
        solves = spec.degree == 1 and spec.solver.name != "learned"
        hint = "omit it or use a spec such as 'local-linear[biweight]'"
        none = f"ridge {self} needs a local linear model whose solver uses a ridge, and {spec} is not one; {hint}."
        require(not self.numbers(1) or solves, call, none)


@ridges.register("fixed")
@dataclass(frozen=True)
class FixedRidge(Ridge):
    """The ridge of the spec, `linear(ridge=0.1)`, for all tokens and heads."""


LINKS = ("sigmoid", "softplus")  # keep a learned ridge above its floor; sigmoid also keeps it below floor + 1


@ridges.register("learned")
@dataclass(frozen=True)
class LearnedRidge(Ridge):
    """One value per head, computed from the token: floor + link(W x + b), link "sigmoid" (equation 27) or "softplus".

    Initially W is 0 and b such that every ridge is `start`.
    """

    start: float = 0.1
    floor: float = 0.001
    link: str = "sigmoid"
    positive: ClassVar[tuple[str, ...]] = ("start", "floor")

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "link", self.link, LINKS)
        most = self.floor + 1 if self.link == "sigmoid" else math.inf
        span = f"a number between floor {self.floor:g} and {most:g}, which a {self.link} above the floor can reach"
        require(self.floor < self.start < most, self.name, f"start is {self.start:g}, expected {span}.")

    def numbers(self, dim: int) -> int:
        return 1

    def bias(self) -> float:
        above = self.start - self.floor
        return math.log(above / (1 - above)) if self.link == "sigmoid" else above + math.log(-math.expm1(-above))

    def values(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.floor + (x.sigmoid() if self.link == "sigmoid" else softplus(x))


@ridges.register("learned-per-dimension")
@dataclass(frozen=True)
class LearnedRidgePerDimension(LearnedRidge):
    """As "learned", with one value per channel of a head, in the coordinates after rotation.

    With rotary positions, predictions then depend on absolute positions: a rotation of all keys and queries changes
    which directions have which ridge.
    """

    def numbers(self, dim: int) -> int:
        return dim


class RidgeProjection(nn.Module):
    """The projection W x + b of equation 27, initially with W = 0, for a rule with learned values.

    It is no `nn.Linear`, which LoRA or a quantised layer would replace, and with it the rule.
    """

    def __init__(self, hidden_size: int, heads: int, dim: int, rule: Ridge) -> None:
        super().__init__()
        self.heads, self.rule = heads, rule
        outputs = heads * rule.numbers(dim)
        self.weight = nn.Parameter(torch.empty(outputs, hidden_size))
        self.bias = nn.Parameter(torch.empty(outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W to 0 and b to the initial value of the rule."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.rule.bias())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return ridges [B, H, T, 1 or D] of hidden states [B, T, C]."""
        projected = linear(hidden_states, self.weight, self.bias)
        return self.rule.values(projected.unflatten(-1, (self.heads, -1)).transpose(1, 2))


def as_ridge(given: str | Ridge, call: str = "as_ridge", argument: str = "given") -> Ridge:
    """Return the rule `given`, or the one that its text describes: `fixed`, `learned(start=0.5,link=softplus)`.

    Raises:
        ArgumentError: as in `as_temperature`.
    """
    return as_rule(Ridge, ridges, given, call, argument, "learned(start=0.5)")
