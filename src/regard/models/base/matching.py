"""Models of equal size: how many numbers a configuration learns, and another of the same number.

Comparisons between models are of "equal parameters" only where someone counted. `count_parameters` counts without
memory, `match_parameters` changes the one width of a configuration that is free (its `size_field`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from ...checks import ArgumentError, shown, suggestion, within
from ...nn.arguments import positive_int
from .base_config import RegardConfig, own_fields
from .catalogue import model_of


@dataclass(frozen=True)
class Matched:
    """A configuration brought to a number of parameters.

    Attributes:
        config: the configuration.
        parameters: how many numbers it learns, tied matrices counted once.
        target: how many it should have learned.
        field: the field that was changed.
    """

    config: RegardConfig
    parameters: int
    target: int
    field: str

    @property
    def gap(self) -> float:
        """(parameters - target) / target."""
        return (self.parameters - self.target) / self.target

    def __str__(self) -> str:
        width = getattr(self.config, self.field)
        return (
            f"{type(self.config).__name__} with {self.field}={width}: {self.parameters:,} parameters, {self.gap:+.2%} "
            f"of {self.target:,}"
        )


def count_parameters(config: RegardConfig) -> int:
    """The numbers that a model of `config` learns, tied matrices counted once. Nothing is allocated."""
    make = within("count_parameters", "config", model_of, config)
    with torch.device("meta"):
        model = make(copy.deepcopy(config))
        model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def match_parameters(config: RegardConfig, target: int | RegardConfig, *, field: str | None = None) -> Matched:
    """`config` with the width at which it learns as nearly as possible the number of `target`.

    Args:
        config: is not changed.
        target: a number of parameters, or the configuration of another model.
        field: the width to change, one on which the size depends linearly; default the configuration's `size_field`.

    Raises:
        ArgumentError: the target is neither a positive number nor a configuration, the field is unknown, the model is
            larger than the target at width 1 already, or its size does not depend linearly on the field (a
            feed-forward layer that is off; a width that others follow).
    """
    call = "match_parameters"
    within(call, "config", model_of, config)
    name = config.size_field if field is None else field
    if isinstance(target, RegardConfig):
        target = count_parameters(target)
    if not isinstance(target, int):
        raise ArgumentError(f"{call}: target is a {type(target).__name__}, expected a number or a RegardConfig.")
    positive_int(call, "target", target)
    if not isinstance(name, str) or name not in own_fields(type(config)):
        hint = suggestion(shown(name), own_fields(type(config)))
        raise ArgumentError(f"{call}: unknown field {shown(name)}.{hint}")

    def at(width: int) -> tuple[RegardConfig, int]:
        changed = copy.deepcopy(config)
        setattr(changed, name, width)
        changed.normalise()
        return changed, count_parameters(changed)

    least, two = at(1)[1], at(2)[1]
    if two == least:
        raise ArgumentError(
            f"{call}: the size of this {type(config).__name__} does not depend on {name}; give another field."
        )
    if least > target:
        raise ArgumentError(
            f"{call}: this {type(config).__name__} has {least:,} parameters at {name}=1 already, more than the "
            f"target of {target:,}; make it narrower, or give another field."
        )
    width = 1 + round((target - least) / (two - least))
    changed, found = at(width)
    if found != least + (width - 1) * (two - least):
        raise ArgumentError(f"{call}: the size of this {type(config).__name__} is not linear in {name}.")
    return Matched(changed, found, target, name)
