"""The model of a run: from the flags and options of a `TrainConfig` to an entry of the catalogue.

A model is chosen by its name in `regard.models.language_models`. Sizes and sentences have flags of their own;
every further field of the model's configuration is an option, `--option key=value`, whose value is read by the type of
the field. So a model that is registered, by whomever, can be trained with no edit here.
"""

from __future__ import annotations

import dataclasses
import sys
from inspect import get_annotations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from ..checks import ArgumentError, suggestion
from ..models.base.base_config import own_fields
from ..models.base.catalogue import LanguageModel, language_models
from .config import TrainConfig
from .fields import from_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..models import RegardConfig

SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "spec": "mixers",
    "context": "max_position_embeddings",
}
"""Flag to field, of what every model has."""
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
"""Flag to field, of what some models have."""
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
_ABSENT = {"qk_norm": "none"}  # how a flag says None


def language_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The model that `config` describes, for the tokenizer's vocabulary. Draws its first weights.

    Raises:
        ArgumentError: as `model_config`.
    """
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    made = model_config(config, call="train", vocab_size=len(tokenizer), **special)
    return language_models.get(config.model).model(made)


def model_config(config: TrainConfig, *, call: str, vocab_size: int, **special: int | None) -> RegardConfig:
    """The configuration of the model that `config` describes.

    Args:
        special: ids of the special tokens.

    Raises:
        ArgumentError: an unknown model or option, a flag that the model does not know, a value that it refuses, or
            sentences that are not as many as it takes.
    """
    entry = language_models.get(config.model)
    fields = {SIZES[flag]: getattr(config, flag) for flag in ("width", "layers", "heads", "context")}
    fields |= _flagged(config, entry, call) | _options(config, entry, call)
    fields |= {"vocab_size": vocab_size, **special}
    sentences = config.spec
    if len(sentences) > 1:
        count = _made(config, entry, {"num_hidden_layers": config.layers}, call).mixed_layers
        if len(sentences) != count:
            where = "layers" if count == config.layers else f"places of --model {config.model} that take one"
            raise ArgumentError(
                f"{call}: --spec has {len(sentences)} sentences for {count} {where}; give one for all or {count}."
            )
    return _made(config, entry, {**fields, "mixers": sentences[0] if len(sentences) == 1 else list(sentences)}, call)


def check_model(config: TrainConfig, call: str) -> RegardConfig:
    """Build the model without memory, so that what it refuses is known before anything is written.

    Returns:
        Its configuration, for a vocabulary that is not known yet.

    Raises:
        ArgumentError: as `model_config`, or what the model's layers refuse.
    """
    made = model_config(config, call=call, vocab_size=2)
    try:
        with torch.device("meta"):
            language_models.get(config.model).model(made)
    except ArgumentError as error:
        raise ArgumentError(f"{call}: --model {config.model}: {error}") from None
    return made


def has_field(model: str, field: str) -> bool:
    """Whether the configuration of a model has a field.

    Raises:
        ArgumentError: no such model.
    """
    return field in own_fields(language_models.get(model).config)


def options(model: str) -> tuple[list[str], dict[str, Any]]:
    """The flags of `FLAGS` that a model takes, and its further fields with their defaults.

    Raises:
        ArgumentError: no such model.
    """
    entry = language_models.get(model)
    own = own_fields(entry.config)
    defaults = {field.name: field.default for field in dataclasses.fields(entry.config)}
    return [flag for flag, field in FLAGS.items() if field in own], {name: defaults[name] for name in _free(entry)}


def _made(config: TrainConfig, entry: LanguageModel, fields: dict[str, Any], call: str) -> RegardConfig:
    try:
        return entry.config(**fields)
    except ArgumentError as error:
        raise ArgumentError(f"{call}: --model {config.model}: {error}") from None


def _free(entry: LanguageModel) -> list[str]:
    """The fields that only `--option` reaches."""
    taken = {*SIZES.values(), *FLAGS.values(), *_FROM_TOKENIZER}
    return [name for name in own_fields(entry.config) if name not in taken]


def _flagged(config: TrainConfig, entry: LanguageModel, call: str) -> dict[str, Any]:
    """The fields of the flags that were given: the others are left to the model's own defaults."""
    found = {}
    for flag, field in FLAGS.items():
        value = getattr(config, flag)
        if value == getattr(TrainConfig, flag):
            continue
        if field not in own_fields(entry.config):
            knowing = [name for name, other in language_models.items() if field in own_fields(other.config)]
            raise ArgumentError(
                f"{call}: --{flag.replace('_', '-')} is not for --model {config.model}, which has no {field}; leave it "
                f"out, or choose --model {' or '.join(knowing)}."
            )
        found[field] = None if value == _ABSENT.get(flag) else value
    return found


def _options(config: TrainConfig, entry: LanguageModel, call: str) -> dict[str, Any]:
    """The fields that `--option` names, their values read by type."""
    flag_of = {field: flag for flag, field in {**SIZES, **FLAGS}.items()}
    known = _free(entry)
    found: dict[str, Any] = {}
    for word in config.option:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or not name:
            raise ArgumentError(f"{call}: --option is {word!r}, expected key=value, such as initializer_range=0.05.")
        if name in _FROM_TOKENIZER:
            raise ArgumentError(f"{call}: --option {name}: the tokenizer says that; choose it with --tokenizer.")
        if name in flag_of and name in own_fields(entry.config):
            flag = flag_of[name].replace("_", "-")
            raise ArgumentError(f"{call}: --option {name}: this field has a flag of its own, --{flag}.")
        if name not in known:
            raise ArgumentError(
                f"{call}: --option {name}: --model {config.model} has no such field.{suggestion(name, known)}"
            )
        if name in found:
            raise ArgumentError(f"{call}: --option {name} is given twice; give it once.")
        found[name] = from_text(text.strip(), _hint(entry.config, name), f"{call}: --option {name}")
    return found


def _hint(config: type[RegardConfig], name: str) -> Any:
    """The type of one field (all at once cannot be asked for: transformers' own name modules that are not there)."""
    owner = next(cls for cls in config.__mro__ if name in get_annotations(cls))
    alone = SimpleNamespace(__annotations__={name: get_annotations(owner)[name]})
    return get_type_hints(alone, vars(sys.modules[owner.__module__]))[name]
