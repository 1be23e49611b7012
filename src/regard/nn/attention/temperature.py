"""Temperatures: scales of the scores, which may depend on the number of visible keys (docs/layers.md).

Scores are z = scale * s, and a temperature is the factor m of the usual scale: scale = m * default. n is the number of
keys that a query may see (`Visibility.counts`). Learned values, one per head, are parameters of the caller.

Legend: B batch, H heads, Tq queries.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import ArgumentError, in_range, shape
from ...grammar import Spec, presets
from ...registry import Registry
from .layer_rules import Rule, as_rule

temperatures: Registry[Any] = Registry("temperature", "regard.temperatures")

Learned = Mapping[str, Tensor]


class Temperature(Rule):
    """Base of the temperature rules; a new rule also has `start` and `multiplier`."""

    counted: ClassVar[bool] = True  # whether n is needed

    def start(self) -> dict[str, float]:
        """Return the parameters that are learned per head, with their initial values."""
        return {}

    def multiplier(self, n: Tensor, learned: Learned) -> float | Tensor:
        """Return m > 0, broadcastable to [B, H, Tq], for n, the numbers of visible keys [B or 1, H or 1, Tq],
        floating-point and at least 1, for empty rows too, and the parameters `learned` of `start`, each [1, H or 1, 1].
        """
        missing = f"{type(self).__name__} has no multiplier(n, learned)"
        raise ArgumentError(f"temperature {self.name!r}: {missing}; define it to return the factor of the usual scale.")

    @property
    def neutral(self) -> bool:
        """Return whether this is the usual scale, which every spec accepts."""
        return False

    def scale(self, n: Tensor | None = None, default: float = 1.0, learned: Learned | None = None) -> float | Tensor:
        """Return the scale of the scores, for `regard.attention(..., scale=)`.

        Args:
            n: number of visible keys, integers broadcastable to [B, H, Tq]; required if the rule is `counted`.
            default: the usual scale: 1/sqrt(D) for the dot product and the Euclidean similarity, 1 for the cosine.
            learned: the parameters of `start`, each [H]; None for their initial values.

        Returns:
            A number, or a tensor [B or 1, H or 1, Tq or 1], at least in float32, differentiable in `learned`.

        Raises:
            ArgumentError: n is missing, or `learned` does not have the parameters of `start`.
        """
        call = f"temperature {self}"
        if learned is None:
            learned = {name: torch.tensor([value]) for name, value in self.start().items()}
        elif set(learned) != set(self.start()):
            wanted = ", ".join(self.start()) or "none"
            raise ArgumentError(f"{call}: learned has {', '.join(learned) or 'none'}, expected {wanted}.")
        for name, value in learned.items():
            if value.dim() != 1:
                raise ArgumentError(f"{call}: learned[{name!r}] has shape {shape(value)}, expected [H].")
        if n is None:
            if self.counted:
                raise ArgumentError(f"{call}: n is missing, the number of keys that each row may see.")
            n = torch.ones(1, 1, 1)
        dtype = reduce(torch.promote_types, (value.dtype for value in learned.values()), torch.float32)
        rows = {name: value.to(dtype)[None, :, None] for name, value in learned.items()}
        return default * self.multiplier(n.to(dtype).clamp_min(1), rows)

    def arguments(
        self, spec: Spec, dim: int, n: Tensor | None = None, learned: Learned | None = None, usual: float | None = None
    ) -> dict[str, Any]:
        """Return the arguments that give `regard.attention` this temperature for heads of `dim` channels; none for the
        usual scale, which is `usual`, or the default of the similarity. `n` and `learned` are as in `scale`.

        If the bandwidth is a distance, `fixed(h=...)`, the scale is 1/h^2, so that h becomes h / sqrt(m).
        """
        if self.neutral:
            return {} if usual is None else {"scale": usual}
        self.require("temperature", spec)
        if spec.takes_scale:
            return {"scale": self.scale(n, spec.similarity.default_scale(dim) if usual is None else usual, learned)}
        return {"params": {"h": spec.params["h"].default * self.scale(n, 1.0, learned) ** -0.5}}

    def require(self, call: str, spec: Spec) -> None:
        """Check that the scores of `spec` have a scale, or that this rule does not need one."""
        if self.neutral or spec.takes_scale or "h" in spec.params:
            return
        able = ", ".join(name for name, preset in presets().items() if preset.takes_scale)
        none = f"temperature {self} needs scores that have a scale, and the spec {spec} has none"
        raise ArgumentError(f"{call}: {none}; leave it out or choose one of: {able}, or a fixed(h=...).")


@temperatures.register("fixed")
@dataclass(frozen=True)
class FixedTemperature(Temperature):
    """scale = default / value for all rows; value 1 is the usual scale, which every spec accepts."""

    value: float = 1.0
    positive: ClassVar[tuple[str, ...]] = ("value",)
    counted: ClassVar[bool] = False

    @property
    def neutral(self) -> bool:
        return self.value == 1.0

    def multiplier(self, n: Tensor, learned: Learned) -> float:
        return 1 / self.value


@temperatures.register("learned")
@dataclass(frozen=True)
class LearnedTemperature(Temperature):
    """scale = default / t, with t = exp(log_temperature) learned per head; `value` is the initial t."""

    value: float = 1.0
    positive: ClassVar[tuple[str, ...]] = ("value",)
    counted: ClassVar[bool] = False

    def start(self) -> dict[str, float]:
        return {"log_temperature": math.log(self.value)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        return torch.exp(-learned["log_temperature"])


@temperatures.register("log")
@dataclass(frozen=True)
class LogTemperature(Temperature):
    """scale = default * s log n, with s = exp(log_slope) learned per head; `slope` is the initial s.

    Scalable softmax (Nakanishi 2025, arXiv:2501.19399), whose weights are n^(s z_j) / sum_l n^(s z_l), for any kernel.
    With 0.43, the s of that paper's Figure 1, the scale at n = 10 is the usual one. The formula is 0 at n = 1, where a
    weight that is not normalised would vanish, so n counts as at least 2.
    """

    slope: float = 0.43
    positive: ClassVar[tuple[str, ...]] = ("slope",)

    def start(self) -> dict[str, float]:
        return {"log_slope": math.log(self.slope)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        return learned["log_slope"].exp() * n.clamp_min(2).log()


@temperatures.register("power")
@dataclass(frozen=True)
class PowerTemperature(Temperature):
    """scale = default * (base + gain n^a), with base, gain > 0 and 0 < a < 1 learned per head.

    The form of Memory Mosaics v2 (arXiv:2507.03285), beta = beta_0 + beta_1 n^a. The fields are initial values: the
    usual scale at n = 1, 2.5 times that at n = 256.
    """

    exponent: float = 0.25
    base: float = 0.5
    gain: float = 0.5
    positive: ClassVar[tuple[str, ...]] = ("exponent", "base", "gain")

    def __post_init__(self) -> None:
        super().__post_init__()
        in_range("power", "exponent", self.exponent, high=1.0, strict=True)

    def start(self) -> dict[str, float]:
        odds = self.exponent / (1 - self.exponent)
        return {"log_base": math.log(self.base), "log_gain": math.log(self.gain), "logit_exponent": math.log(odds)}

    def multiplier(self, n: Tensor, learned: Learned) -> Tensor:
        return learned["log_base"].exp() + learned["log_gain"].exp() * n ** learned["logit_exponent"].sigmoid()


def as_temperature(given: str | Temperature, call: str = "as_temperature", argument: str = "given") -> Temperature:
    """Return the rule `given`, or the one that its text describes: `log`, `fixed(value=2)`, `power(exponent=0.5)`.

    Raises:
        ArgumentError: an unknown rule or a wrong argument of one; the error names `call` and `argument`.
    """
    return as_rule(Temperature, temperatures, given, call, argument, "power(exponent=0.5)")
