"""Registry of the language models, for the trainer, the command line and transformers' Auto classes.

A new model is one file in this folder's parent, `regard/models`, that ends with

    language_models.register("my-model")(LanguageModel(MyConfig, MyForCausalLM, "One sentence about it."))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ...checks import ArgumentError
from ...registry import Registry
from .base_config import RegardConfig

if TYPE_CHECKING:
    from .base import RegardForCausalLM


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
