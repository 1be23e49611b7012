"""Fields and checks that the configurations of all language models share."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig

from ... import Spec, __version__
from ...checks import ArgumentError, closest, flags, number, refuse, require, suggestion, whole
from ...grammar import as_spec
from ...nn.arguments import positive_int, positive_ints

# Keywords that transformers passes besides the fields, when it loads or converts a configuration.
_TRANSFORMERS_KEYS = {
    *("attn_implementation", "auto_map", "experts_implementation", "model_type", "name_or_path", "num_labels"),
    *("output_attentions", "quantization_config", "torch_dtype"),
}

HUB_KEYS = {"cache_dir", "force_download", "local_files_only", "revision", "token", "subfolder", "trust_remote_code"}
"""Keywords of `from_pretrained` that say where a saved model is."""
LOADING_KEYS = HUB_KEYS | {
    *("adapter_kwargs", "adapter_name", "allow_all_kernels", "code_revision", "config", "device_map", "device_mesh"),
    *("disable_mmap", "distributed_config", "from_flax", "from_tf", "fusion_config", "generation_config", "gguf_file"),
    *("ignore_mismatched_sizes", "kernel_config", "key_mapping", "low_cpu_mem_usage", "max_memory", "mirror"),
    *("offload_buffers", "offload_folder", "offload_state_dict", "output_loading_info", "proxies", "resume_download"),
    *("state_dict", "tp_plan", "tp_size", "tqdm_class", "use_auth_token", "use_kernels", "use_safetensors", "variant"),
    "weights_only",
}
"""Keywords of `from_pretrained`, of this or an earlier version, that a configuration ignores: programs pass the same
keywords to the configuration and to the model."""


MOST_LAYERS = 2**14  # most layers of a model, whose configuration has lists with an entry for each: they take seconds
AUTO_MODULE = "regard_auto"
_OF_THE_FILE = ("auto_map", "regard_version")  # keys of a saved configuration that are no fields of the model


class RegardConfig(PreTrainedConfig):
    """Fields of every language model; a subclass adds its own and checks them in `normalise`.

    Args:
        vocab_size, hidden_size: number of tokens V, and model width C.
        num_hidden_layers, num_attention_heads: number of layers, and of attention heads per layer.
        mixers: one spec (text, preset or `Spec`) for all layers, or one for each; stored as a list of canonical texts.
        max_position_embeddings: longest sequence in training. Longer ones can be computed, but `generate` raises
            an error for longer prompts.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: use the embedding matrix as the output matrix.
        use_cache: return a cache from calls outside training.
        pad_token_id, bos_token_id, eos_token_id: special tokens, for `generate`.

    Raises:
        ArgumentError: a number out of range, an unknown spec or keyword, or a list of the wrong length.
    """

    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012  (transformers reads a class attribute)
    unused: ClassVar[dict[str, str]] = {
        "temperature": "generate(temperature=) sets the sampling temperature",
        "layer_types": "mixers sets the type of each layer",
        "per_layer_config": "mixers sets the type of each layer",
    }
    """Fields of transformers that the model does not use, with the reason; they are refused instead of ignored."""
    auto_map = dict[str, str]()  # noqa: RUF012  (an annotation would make it a field)
    """Classes in a folder's code, none of which is taken; TRL reads it, `save_pretrained` sets it for a moment."""
    auto_classes: ClassVar[dict[str, type]] = {}
    """Configuration and models by the name of transformers' Auto class, set when the model is registered."""
    size_field: ClassVar[str]
    """The field that `match_parameters` changes."""
    choices: ClassVar[dict[str, Sequence[str]]] = {}
    """The words that a field may hold."""

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    mixers: Any = "softmax"
    max_position_embeddings: int = 1024
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        super().__post_init__(**kwargs)
        self.normalise()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read a configuration with transformers' `from_dict`.

        Raises:
            ArgumentError: as in the class, or for a configuration of another model type, or for a saved one that lacks
                a field: one of this version of regard any field, an earlier one a field of `RegardConfig`.
        """
        given = config_dict.get("model_type", cls.model_type)
        problem = f"the configuration is of model type {given!r}, expected {cls.model_type!r}"
        require(given == cls.model_type, cls.__name__, f"{problem}; transformers' Auto classes choose by themselves.")
        if "transformers_version" in config_dict:  # `save_pretrained` wrote it, with every field
            base = {each.name for each in fields(PreTrainedConfig)}  # transformers leaves out its own defaults
            same = config_dict.get("regard_version") == __version__  # fields of subclasses may be younger than the file
            missing = [name for name in own_fields(cls if same else RegardConfig) if name not in {*config_dict, *base}]
            lost = f"the saved configuration has no {', '.join(map(repr, missing))}, which save_pretrained writes"
            hint = "its default may be another model: give the field its value, or save the model again"
            require(not missing, cls.__name__, f"{lost}; {hint}.")
        config_dict = {name: value for name, value in config_dict.items() if name not in _OF_THE_FILE}
        return_unused = kwargs.pop("return_unused_kwargs", False)  # then the caller checks unused keywords
        config, unused = super().from_dict(config_dict, return_unused_kwargs=True, **kwargs)
        config.normalise()
        names = own_fields(cls)
        unknown = {name: value for name, value in unused.items() if name not in LOADING_KEYS}
        config._refuse_unknown({n: v for n, v in unknown.items() if not return_unused or closest(n, names, 0.85)})
        return (config, unused) if return_unused else config

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy source files into the folders of saved models."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Save as transformers does, with the file by which programs that do not import regard find its classes.

        The file holds imports, and `auto_map` names its classes, so that `from_pretrained(folder,
        trust_remote_code=True)` of transformers' Auto classes works. regard itself never runs it.
        """
        self.regard_version = __version__
        self.auto_map = {auto: f"{AUTO_MODULE}.{each.__name__}" for auto, each in self.auto_classes.items()}
        if self.auto_map:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            lines = ['"""Classes of regard, for transformers: pip install "regard[lm]"."""', ""]
            lines += [f"from {_home(kind)} import {kind.__name__}" for kind in self.auto_classes.values()]
            Path(save_directory, f"{AUTO_MODULE}.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
        try:
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        finally:
            for name in _OF_THE_FILE:
                delattr(self, name)

    @property
    def call(self) -> str:
        """Return the name of the configuration for error messages."""
        return type(self).__name__

    @property
    def mixed_layers(self) -> int:
        """Return the number of layers that `mixers` describes."""
        return self.num_hidden_layers

    def normalise(self) -> None:
        """Check every field and fill in the defaults, in place; errors as in the class. Runs again when a model is
        built, since `from_pretrained(path, field=value)` sets fields after creation."""
        own = own_fields(type(self))
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        positive_ints(self.call, **{name: getattr(self, name) for name in sizes})
        whole(self.call, "num_hidden_layers", self.num_hidden_layers, 1, MOST_LAYERS)
        number(self.call, "initializer_range", self.initializer_range, low=0.0, strict=True)
        switches = [each.name for each in fields(self) if each.name in own and each.type in (bool, "bool")]
        flags(self.call, **{name: getattr(self, name) for name in switches})
        for name, words in self.choices.items():
            given = getattr(self, name)
            if not isinstance(given, str) or given not in words:
                raise refuse(self.call, name, given, f"one of {', '.join(map(repr, words))}")
        self._check_token_ids()
        self.mixers = [str(mixer) for mixer in self.layer_mixers()]

    def layer_specs(self) -> list[Spec]:
        return [mixer for mixer in self.layer_mixers() if isinstance(mixer, Spec)]

    def read_mixer(self, mixer: str | Spec) -> Any:
        """Return what an entry of `mixers` names: a spec, unless a subclass knows other mixers."""
        return as_spec(mixer, self.call, "mixers")

    def layer_mixers(self) -> list[Any]:
        """Return the mixer of each layer, first layer first."""
        mixers, count = self.mixers, self.mixed_layers
        if isinstance(mixers, (str, Spec)):
            mixers = [mixers] * count
        if not isinstance(mixers, Sequence) or not all(isinstance(m, (str, Spec)) for m in mixers):
            raise refuse(self.call, "mixers", mixers, "a spec such as 'biweight', or a list with one per layer")
        of = "num_hidden_layers is" if count == self.num_hidden_layers else "the model mixes in"
        text = f"mixers names {len(mixers)} layers and {of} {count}; give one spec per layer, or a single one for all."
        require(len(mixers) == count, self.call, text)
        return [self.read_mixer(mixer) for mixer in mixers]

    def one_per_layer(self, name: str, kinds: tuple[type, ...], single: str) -> Sequence[Any]:
        """Return the field `name` with one entry per layer; a value of `kinds`, `single` in words, is for all."""
        given = getattr(self, name)
        if isinstance(given, kinds):
            return [given] * self.mixed_layers
        if not isinstance(given, Sequence) or len(given) != self.mixed_layers:
            raise refuse(self.call, name, given, f"{single}, or a list with one for each of {self.mixed_layers} layers")
        return given

    def fill(self, name: str, default: int) -> int:
        """Set a size that is None to its default, check it and return it."""
        size = default if getattr(self, name) is None else getattr(self, name)
        positive_int(self.call, name, size)
        setattr(self, name, size)
        return size

    def _refuse_unknown(self, extra: dict[str, Any]) -> None:
        generation = GenerationConfig().to_dict()
        for name in extra:
            if name in self.unused:
                raise ArgumentError(f"{self.call}: {name!r} is not used; {self.unused[name]}.")
            if name.startswith("_") or name in _TRANSFORMERS_KEYS:
                continue
            if name not in generation:  # transformers drops generation fields of earlier versions
                raise ArgumentError(f"{self.call}: unknown field {name!r}.{suggestion(name, own_fields(type(self)))}")

    def _check_token_ids(self) -> None:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            given = getattr(self, name)
            several = name == "eos_token_id" and isinstance(given, list) and len(given) > 0
            for token in given if several else [given]:
                if token is not None and not (type(token) is int and 0 <= token < self.vocab_size):
                    last = f"{self.vocab_size - 1} (vocab_size - 1)"
                    raise refuse(self.call, name, given, f"None or a token from 0 to {last}")


def _home(kind: type) -> str:
    public = sys.modules["regard.models"]  # inner modules may move from one release to the next
    return "regard.models" if getattr(public, kind.__name__, None) is kind else kind.__module__


def own_fields(config: type[RegardConfig]) -> list[str]:
    """Return the fields that the configuration and `RegardConfig` define, without transformers' own."""
    named: dict[str, None] = {}
    for cls in reversed(config.__mro__):
        if issubclass(cls, RegardConfig):
            named.update(dict.fromkeys(get_annotations(cls)))
    known = {each.name for each in fields(config)}  # class variables are annotated too
    return [name for name in named if name in known]
