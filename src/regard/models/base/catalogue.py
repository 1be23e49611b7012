"""Registry of the language models, their parameter counts, and configurations matched to a parameter count.

A new model is one file in this folder's parent, `regard/models`, that ends with

    language_models.register("my-model")(LanguageModel(MyConfig, MyForCausalLM, "One sentence about it."))
"""

import copy
from dataclasses import dataclass

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ...checks import ArgumentError, require, shown, suggestion, within
from ...nn.arguments import positive_int
from ...registry import Registry
from .base import RegardForCausalLM
from .base_config import RegardConfig, own_fields


@dataclass(frozen=True)
class LanguageModel:
    """A configuration class (a subclass of `RegardConfig`), the model class built from it, and a sentence about it."""

    config: type[RegardConfig]
    model: type[RegardForCausalLM]
    about: str

    def __post_init__(self) -> None:
        classes = {"AutoConfig": self.config, "AutoModel": self.model.model_class, "AutoModelForCausalLM": self.model}
        self.config.auto_classes = classes
        AutoConfig.register(self.config.model_type, self.config, exist_ok=True)
        AutoModel.register(self.config, self.model.model_class, exist_ok=True)
        AutoModelForCausalLM.register(self.config, self.model, exist_ok=True)


language_models: Registry[LanguageModel] = Registry("model", "regard.models", home="regard.models")


def model_of(config: RegardConfig) -> type[RegardForCausalLM]:
    """Return the model class of `config`; raise `ArgumentError` if none is registered."""
    for _, entry in language_models.items():
        if isinstance(config, entry.config):
            return entry.model
    known = ", ".join(entry.config.__name__ for _, entry in language_models.items())
    raise ArgumentError(f"model_of: got {type(config).__name__}, expected the configuration of a model: {known}.")


@dataclass(frozen=True)
class Matched:
    """A configuration matched to a number of parameters.

    Attributes:
        config, parameters: the matched configuration and its number of parameters, tied matrices counted once.
        target, field: the number asked for, and the field that was changed.
    """

    config: RegardConfig
    parameters: int
    target: int
    field: str

    @property
    def gap(self) -> float:
        """Return (parameters - target) / target."""
        return (self.parameters - self.target) / self.target

    def __str__(self) -> str:
        kind = f"{type(self.config).__name__} with {self.field}={getattr(self.config, self.field)}"
        return f"{kind}: {self.parameters:,} parameters, {self.gap:+.2%} of {self.target:,}"


def count_parameters(config: RegardConfig) -> int:
    """Return the number of parameters of the model of `config`, tied matrices counted once; allocates no memory."""
    make = within("count_parameters", "config", model_of, config)
    with torch.device("meta"):
        model = make(copy.deepcopy(config))
        model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def match_parameters(config: RegardConfig, target: int | RegardConfig, *, field: str | None = None) -> Matched:
    """Return a copy of `config` with the width whose parameter count is closest to `target`.

    Args:
        target: a number of parameters, or another model's configuration.
        field: the width to change, on which the size depends linearly; default: the configuration's `size_field`.

    Raises:
        ArgumentError: the target is neither a positive number nor a configuration, the field is unknown, the model at
            width 1 is larger than the target, or its size is not linear in the field (the feed-forward layer is off, or
            other widths follow the field).
    """
    call = "match_parameters"
    within(call, "config", model_of, config)
    name = config.size_field if field is None else field
    if isinstance(target, RegardConfig):
        target = count_parameters(target)
    if not isinstance(target, int):
        raise ArgumentError(f"{call}: target is a {type(target).__name__}, expected a number or a RegardConfig.")
    positive_int(call, "target", target)
    known = own_fields(type(config))
    require(name in known, call, f"unknown field {shown(name)}.{suggestion(shown(name), known)}")

    def at(width: int) -> tuple[RegardConfig, int]:
        changed = copy.deepcopy(config)
        setattr(changed, name, width)
        changed.normalise()
        return changed, count_parameters(changed)

    least, two, this = at(1)[1], at(2)[1], f"this {type(config).__name__}"
    require(two != least, call, f"the size of {this} does not depend on {name}; give another field.")
    large = f"{this} has {least:,} parameters at {name}=1 already, more than the target of {target:,}"
    require(least <= target, call, f"{large}; make it narrower, or give another field.")
    width = 1 + round((target - least) / (two - least))
    changed, parameters = at(width)
    linear = parameters == least + (width - 1) * (two - least)
    require(linear, call, f"the size of {this} is not linear in {name}.")
    return Matched(changed, parameters, target, name)
