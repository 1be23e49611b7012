"""Ridges: what penalises the slope of the local linear model in a layer, which may depend on the token.

Equation 27 of Local Linear Attention (arXiv 2510.01450) makes the ridge of a token from its hidden state x,
lambda = sigmoid(W x). As printed W is [d, d_lambda], which cannot be applied to x, and d_lambda is called the channels
of a head where one number a head is meant; here W is [H r, C], with r = 1 number a head, or r = D, one for every
channel. A floor is added, since a ridge of 0 leaves the first D rows of a sequence, whose keys span less than the
space, without a unique answer.

Each rule is a frozen dataclass, registered under its name; its text form is that of the grammar's words,
`learned(start=0.5)`.

Legend: B batch, H heads, T tokens, D channels of a head, C width of the hidden state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ...checks import ArgumentError, require, within
from ...grammar import Spec
from ...registry import Registry
from .rules import Rule, positive, read_rule

ridges: Registry[Any] = Registry("ridge", "regard.ridges")


class Ridge(Rule):
    """What a rule says of itself.

    A new rule is a frozen dataclass that derives from this one, registered by `ridges.register(name)`, with `name`,
    `numbers`, `bias` and `values`.
    """

    name: ClassVar[str]

    def numbers(self, dim: int) -> int:
        """How many numbers a head and token: 1, or `dim` for one a channel; 0 for the spec's own, the same for all."""
        return 0

    def bias(self) -> float:
        """What the projection gives where learning starts, for every token."""
        return 0.0

    def values(self, x: Tensor) -> Tensor:
        """Ridges above 0 from what the projection gave, number by number, in float32 at least.

        Raises:
            ArgumentError: the rule learns and does not define it.
        """
        raise ArgumentError(
            f"ridge {self.name!r}: {type(self).__name__} has no values(x); define it to return numbers above 0 in the "
            f"shape of x."
        )

    def require(self, call: str, spec: Spec) -> None:
        """This rule has a meaning for `spec`.

        Raises:
            ArgumentError: the spec has no ridge: it is of degree 0, or its solver takes the slope from the caller.
        """
        solves = spec.degree == 1 and spec.solver.name != "learned"
        require(
            not self.numbers(1) or solves,
            call,
            f"ridge {self} needs a local linear model that is solved for, and {spec} is none; leave it out or take a "
            f"spec such as 'local-linear[biweight]'.",
        )


@ridges.register("fixed")
@dataclass(frozen=True)
class FixedRidge(Ridge):
    """The number of the spec, `linear(ridge=0.1)`, for all tokens and heads."""

    name: ClassVar[str] = "fixed"


LINKS = ("sigmoid", "softplus")
"""What keeps a learned ridge above its floor: sigmoid also keeps it below floor + 1, softplus does not."""


@ridges.register("learned")
@dataclass(frozen=True)
class LearnedRidge(Ridge):
    """One number a head, made of the token: floor + link(W x + b), link "sigmoid" (equation 27) or "softplus".

    W starts at 0 and b so that every ridge is `start`.
    """

    start: float = 0.1
    floor: float = 0.001
    link: str = "sigmoid"
    name: ClassVar[str] = "learned"

    def __post_init__(self) -> None:
        positive(self, "start")
        positive(self, "floor")
        if self.link not in LINKS:
            raise ArgumentError(f"{self.name}: link is {self.link!r}, expected one of {', '.join(LINKS)}.")
        most = self.floor + 1 if self.link == "sigmoid" else math.inf
        if not self.floor < self.start < most:
            raise ArgumentError(
                f"{self.name}: start is {self.start:g}, expected a number between floor {self.floor:g} and {most:g}, "
                f"which a {self.link} above the floor can reach."
            )

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
    """As "learned", with a number of its own for every channel of a head, in the coordinates after rotary turning."""

    name: ClassVar[str] = "learned-per-dimension"

    def numbers(self, dim: int) -> int:
        return dim


class RidgeProjection(nn.Linear):
    """The projection W x + b of equation 27, where learning starts at first: W = 0.

    Args:
        hidden_size: C.
        heads: H.
        dim: D.
        rule: which has numbers to learn.
    """

    def __init__(self, hidden_size: int, heads: int, dim: int, rule: Ridge) -> None:
        self.heads, self.rule = heads, rule
        super().__init__(hidden_size, heads * rule.numbers(dim))

    def reset_parameters(self) -> None:
        """W = 0 and b as the rule says, in place."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, self.rule.bias())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Ridges [B, H, T, 1 or D] of hidden states [B, T, C]."""
        return self.rule.values(super().forward(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2))


def as_ridge(given: str | Ridge, call: str = "as_ridge", argument: str = "given") -> Ridge:
    """A rule as it is, or the one that a text names: `fixed`, `learned`, `learned(start=0.5,link=softplus)`.

    Raises:
        ArgumentError: what cannot be read, an unknown name (with a suggestion) or a number out of range.
    """
    if isinstance(given, Ridge):
        return given
    rule: Ridge = within(call, argument, read_rule, ridges, given, "learned(start=0.5)")
    return rule
