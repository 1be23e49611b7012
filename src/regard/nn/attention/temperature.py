"""Temperatures: how sharp a row of weights is, which may depend on how many keys the row sees.

Scores are z = scale * s, and a temperature is the multiplier m of the usual scale: scale = m * default. As a row
sees more keys, the weight of its best one falls; a multiplier that grows with n, the number of keys the row may
see, holds it up. n is counted with mask, window, causal order, cache and padding (`Visibility.counts`); it is never
the length of the sequence.

Each rule is a frozen dataclass, registered under its name; its text form is that of the grammar's words,
`power(exponent=0.5)`. What it learns are numbers per head, which the caller holds.

Legend: B batch, H heads, Tq queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError, in_range, shape, within
from ...grammar import Spec, presets
from ...registry import Registry
from .rules import Rule, positive, read_rule

temperatures: Registry[Any] = Registry("temperature", "regard.temperatures")

Learned = Mapping[str, Tensor]


class Temperature(Rule):
    """What a rule says of itself, and what every rule can do.

    A new rule is a frozen dataclass that derives from this one, registered by `temperatures.register(name)`, with
    `name`, `start` and `multiplier`; `counted = False` where it does not ask for n.
    """

    name: ClassVar[str]
    counted: ClassVar[bool] = True

    def start(self) -> dict[str, float]:
        """The numbers that are learned per head, by name, with the value from which each starts."""
        return {}

    def multiplier(self, n: Tensor, learned: Learned) -> float | Tensor:
        """m > 0, broadcastable to [B, H, Tq].

        Args:
            n: visible keys, [B or 1, H or 1, Tq], floating-point and at least 1 (empty rows included).
            learned: the numbers of `start`, each [1, H or 1, 1].

        Raises:
            ArgumentError: the rule does not define it.
        """
        raise ArgumentError(
            f"temperature {self.name!r}: {type(self).__name__} has no multiplier(n, learned); define it to return the "
            f"factor of the usual scale."
        )

    @property
    def neutral(self) -> bool:
        """Whether this is the usual scale, so that every spec takes it."""
        return False

    def scale(self, n: Tensor | None = None, default: float = 1.0, learned: Learned | None = None) -> float | Tensor:
        """The scale of the scores, for `regard.attention(..., scale=)`.

        Args:
            n: the keys each row may see, integers broadcastable to [B, H, Tq] (`Visibility.counts`); needed where
                the rule is `counted`.
            default: the usual scale: 1/sqrt(D) for the dot product and the Euclidean similarity, 1 for the cosine.
            learned: the numbers named by `start`, each [H]; their starting values where None.

        Returns:
            A number, or a tensor [B or 1, H or 1, Tq or 1] in float32 at least, differentiable in `learned`.

        Raises:
            ArgumentError: n is missing, or `learned` is not what `start` names.
        """
        call = f"temperature {self}"
        if learned is None:
            learned = {name: torch.tensor([value]) for name, value in self.start().items()}
        elif set(learned) != set(self.start()):
            wanted = ", ".join(self.start()) or "none"
            raise ArgumentError(f"{call}: learned has {', '.join(learned) or 'none'}, expected {wanted}.")
        for name, value in learned.items():
            if value.dim() != 1:
                raise ArgumentError(f"{call}: learned[{name!r}] has shape {shape(value)}, expected [H], one a head.")
        if n is None:
            if self.counted:
                raise ArgumentError(f"{call}: n is missing, the number of keys that each row may see.")
            n = torch.ones(1, 1, 1)
        dtype = torch.float32
        for value in learned.values():
            dtype = torch.promote_types(dtype, value.dtype)
        rows = {name: value.to(dtype)[None, :, None] for name, value in learned.items()}
        return default * self.multiplier(n.to(dtype).clamp_min(1), rows)

    def arguments(
        self,
        spec: Spec,
        dim: int,
        n: Tensor | None = None,
        learned: Learned | None = None,
        usual: float | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments that give `regard.attention` this temperature for `spec` at head dimension `dim`.

        Where the bandwidth is given in units of distance, `fixed(h=...)`, the scale is 1/h^2, so that h becomes
        h / sqrt(m); elsewhere they are `scale`. Nothing for the usual scale. `usual` is that scale where it is not the
        similarity's own.

        Raises:
            ArgumentError: as `scale`, and for a spec without a scale.
        """
        if self.neutral:
            return {} if usual is None else {"scale": usual}
        self.require("temperature", spec)
        if spec.takes_scale:
            return {"scale": self.scale(n, spec.similarity.default_scale(dim) if usual is None else usual, learned)}
        return {"params": {"h": spec.params["h"].default * self.scale(n, 1.0, learned) ** -0.5}}

    def require(self, call: str, spec: Spec) -> None:
        """This rule has a meaning for `spec`.

        Raises:
            ArgumentError: scores of `spec` have no scale; the message lists the presets whose scores have one.
        """
        if self.neutral or spec.takes_scale or "h" in spec.params:
            return
        able = ", ".join(name for name, preset in presets().items() if preset.takes_scale)
        raise ArgumentError(
            f"{call}: temperature {self} needs scores that have a scale, and the spec {spec} has none; leave it out or "
            f"choose one of: {able}, or a fixed(h=...)."
        )


@temperatures.register("fixed")
@dataclass(frozen=True)
class FixedTemperature(Temperature):
    """scale = default / value: the same for all rows; value 1 is the usual scale, which every spec takes."""

    value: float = 1.0
    name: ClassVar[str] = "fixed"
    counted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive(self, "value")

    @property
    def neutral(self) -> bool:
        return self.value == 1.0

    def multiplier(self, n: Tensor, learned: Learned) -> float:
        return 1 / self.value


@temperatures.register("learned")
@dataclass(frozen=True)
class LearnedTemperature(Temperature):
    """scale = default / t with one learned t = exp(log_temperature) per head, from `value` on."""

    value: float = 1.0
    name: ClassVar[str] = "learned"
    counted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        positive(self, "value")

    def start(self) -> dict[str, float]:
        return {"log_temperature": math.log(self.value)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        return torch.exp(-learned["log_temperature"])


@temperatures.register("log")
@dataclass(frozen=True)
class LogTemperature(Temperature):
    """scale = default * s log n with one learned s = exp(log_slope) per head, from `slope` on.

    Scalable softmax (Nakanishi 2025, arXiv:2501.19399), whose weights are n^(s z_j) / sum_l n^(s z_l), for any
    kernel; 0.43, the s of that paper's Figure 1, gives the usual scale at n = 10. At n = 1 the formula says 0. A
    single key has weight 1 at any scale where weights sum to one, but a sum that is not normalised would lose it,
    so n counts as 2 at least.
    """

    slope: float = 0.43
    name: ClassVar[str] = "log"

    def __post_init__(self) -> None:
        positive(self, "slope")

    def start(self) -> dict[str, float]:
        return {"log_slope": math.log(self.slope)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        return learned["log_slope"].exp() * n.clamp_min(2).log()


@temperatures.register("power")
@dataclass(frozen=True)
class PowerTemperature(Temperature):
    """scale = default * (base + gain n^a), with base, gain > 0 and 0 < a < 1 learned per head.

    The form of Memory Mosaics v2 (arXiv:2507.03285), beta = beta_0 + beta_1 n^a. The fields are where learning
    starts: the usual scale at n = 1, 2.5 times that at n = 256.
    """

    exponent: float = 0.25
    base: float = 0.5
    gain: float = 0.5
    name: ClassVar[str] = "power"

    def __post_init__(self) -> None:
        for name in ("exponent", "base", "gain"):
            positive(self, name)
        in_range("power", "exponent", self.exponent, high=1.0, strict=True)

    def start(self) -> dict[str, float]:
        odds = self.exponent / (1 - self.exponent)
        return {"log_base": math.log(self.base), "log_gain": math.log(self.gain), "logit_exponent": math.log(odds)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        growth = n ** learned["logit_exponent"].sigmoid()
        return learned["log_base"].exp() + learned["log_gain"].exp() * growth


def as_temperature(given: str | Temperature, call: str = "as_temperature", argument: str = "given") -> Temperature:
    """A rule as it is, or the one that a text names: `log`, `fixed(value=2)`, `power(exponent=0.5)`.

    Raises:
        ArgumentError: what cannot be read, an unknown name (with a suggestion) or a number out of range.
    """
    if isinstance(given, Temperature):
        return given
    rule: Temperature = within(call, argument, read_rule, temperatures, given, "power(exponent=0.5)")
    return rule
