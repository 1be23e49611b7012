"""The model of a run: from the flags and options of a `TrainConfig` to an entry of the catalogue.

Sizes and specs have flags of their own; `--option key=value` sets any other field of the model's configuration. So a
registered model, built in or not, can be trained without an edit here.
"""

import dataclasses
import sys
from inspect import get_annotations
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import ArgumentError, require, suggestion, within
from ..models.base.base_config import RegardConfig, own_fields
from ..models.base.catalogue import LanguageModel, language_models
from .config import TrainConfig
from .fields import flag, from_text

SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "spec": "mixers",
    "context": "max_position_embeddings",
}
"""Option to configuration field, for every model."""
FLAGS = {
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "window": "window",
    "temperature": "temperatures",
    "ridge": "ridges",
    "qk_norm": "qk_norm",
    "share_query_key": "share_query_key",
    "exclude_self": "exclude_self",
}
"""Option to configuration field, for some models."""
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
_ABSENT = {"qk_norm": "none"}  # the value that stands for None


def language_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the model that `config` describes, for the tokenizer's vocabulary; errors as in `model_config`."""
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    made = model_config(config, call="train", vocab_size=len(tokenizer), **special)
    return language_models.get(config.model).model(made)


def model_config(config: TrainConfig, *, call: str, vocab_size: int, **special: int | None) -> RegardConfig:
    """Return the configuration of the model that `config` describes.

    Args:
        special: ids of the special tokens.

    Raises:
        ArgumentError: an unknown model or option, a flag or value that it does not take, or a wrong number of specs.
    """
    entry = language_models.get(config.model)
    fields = {SIZES[flag]: getattr(config, flag) for flag in ("width", "layers", "heads", "context")}
    fields |= _flagged(config, entry, call) | _options(config, entry, call)
    fields |= {"vocab_size": vocab_size, **special}
    specs = config.spec
    if len(specs) > 1:
        count = _build(config, entry, {"num_hidden_layers": config.layers}, call).mixed_layers
        if len(specs) != count:
            where = "layers" if count == config.layers else f"layers of --model {config.model} that take one"
            raise ArgumentError(f"{call}: --spec has {len(specs)} specs for {count} {where}; give 1 or {count}.")
    return _build(config, entry, {**fields, "mixers": specs[0] if len(specs) == 1 else list(specs)}, call)


def check_model(config: TrainConfig, call: str) -> RegardConfig:
    """Build the model on the meta device; return its configuration. Errors are those of `model_config` and layers."""
    made = model_config(config, call=call, vocab_size=2)
    with torch.device("meta"):
        within(call, f"--model {config.model}", language_models.get(config.model).model, made)
    return made


def has_field(model: str, field: str) -> bool:
    """Return whether the configuration of a model has a field; raise `ArgumentError` for an unknown model."""
    return field in own_fields(language_models.get(model).config)


def options(model: str) -> tuple[list[str], dict[str, Any]]:
    """Return the options of `FLAGS` that a model takes, and its other fields with their defaults."""
    entry = language_models.get(model)
    fields = own_fields(entry.config)
    defaults = {field.name: field.default for field in dataclasses.fields(entry.config)}
    flags = [option for option, field in FLAGS.items() if field in fields]
    return flags, {name: defaults[name] for name in _free(entry)}


def _build(config: TrainConfig, entry: LanguageModel, fields: dict[str, Any], call: str) -> RegardConfig:
    return within(call, f"--model {config.model}", lambda: entry.config(**fields))


def _free(entry: LanguageModel) -> list[str]:
    """Return the fields that only `--option` sets."""
    taken = {*SIZES.values(), *FLAGS.values(), *_FROM_TOKENIZER}
    return [name for name in own_fields(entry.config) if name not in taken]


def _flagged(config: TrainConfig, entry: LanguageModel, call: str) -> dict[str, Any]:
    """Return the fields set by flags. A flag at its default leaves the field to the model's own default."""
    fields = {}
    for option, field in FLAGS.items():
        value = getattr(config, option)
        if value == getattr(TrainConfig, option):
            continue
        if field not in own_fields(entry.config):
            others = [name for name, other in language_models.items() if field in own_fields(other.config)]
            problem = f"{flag(option)} is not for --model {config.model}, which has no {field}"
            raise ArgumentError(f"{call}: {problem}; omit it, or choose --model {' or '.join(others)}.")
        fields[field] = None if value == _ABSENT.get(option) else value
    return fields


def _options(config: TrainConfig, entry: LanguageModel, call: str) -> dict[str, Any]:
    """Return the fields set by `--option`, with their values read by type."""
    option_of = {field: option for option, field in {**SIZES, **FLAGS}.items()}
    known = _free(entry)
    fields: dict[str, Any] = {}
    for word in config.option:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        expected = "expected key=value, such as initializer_range=0.05"
        require(bool(equals and name), call, f"--option is {word!r}, {expected}.")
        where = f"{call}: --option {name}"
        require(name not in _FROM_TOKENIZER, where, "set by the tokenizer; choose one with --tokenizer.")
        if name in option_of and name in own_fields(entry.config):
            raise ArgumentError(f"{where}: use the flag of this field, {flag(option_of[name])}.")
        if name not in known:
            raise ArgumentError(f"{where}: --model {config.model} has no such field.{suggestion(name, known)}")
        require(name not in fields, call, f"--option {name} is given twice; give it once.")
        fields[name] = from_text(text.strip(), _hint(entry.config, name), where)
    return fields


def _hint(config: type[RegardConfig], name: str) -> Any:
    """Return the type of one field (`get_type_hints` on the class fails: transformers' fields name absent modules)."""
    owner = next(cls for cls in config.__mro__ if name in get_annotations(cls))
    alone = SimpleNamespace(__annotations__={name: get_annotations(owner)[name]})
    return get_type_hints(alone, vars(sys.modules[owner.__module__]))[name]
