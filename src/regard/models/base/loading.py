"""Loading of saved models that treats a mismatch as an error.

transformers initialises missing tensors at random, ignores unknown ones and only warns; the model that results is not
the one that was trained.
"""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ...checks import ArgumentError, refuse
from .arguments import CACHE_NAMES
from .base_config import HUB_KEYS, RegardConfig, own_fields

DAMAGE = (SafetensorError, RecursionError, TypeError, KeyError, AttributeError)
"""What transformers raises for damaged files, beside errors that name the folder (`OSError`, `ValueError`)."""


class RegardPreTrainedModel(PreTrainedModel):
    """Base of the models with and without the output matrix; `from_pretrained` refuses checkpoints that do not fit."""

    config: RegardConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = [*CACHE_NAMES]  # noqa: RUF012  (transformers reads a class attribute)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy source files into the folders of saved models."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model with transformers' `from_pretrained`; with path None, from `config` and `state_dict`.

        A configuration that differs from the saved one may add tensors, which get their initial values, and drop
        others. With `output_loading_info=True` nothing is refused and the mismatches are returned with the model.

        Raises:
            ArgumentError: another model type, a damaged file, or tensors missing, unknown, misshapen or not finite.
            OSError: the folder or a file of it is missing, or `config.json` is no JSON.
        """
        if pretrained_model_name_or_path is None:
            cls._check_without_path(kwargs.get("config"), kwargs.get("state_dict"))
        kwargs.setdefault("trust_remote_code", False)  # otherwise transformers may ask, and run code of a folder
        if kwargs.pop("output_loading_info", False):
            return super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        config_class = cls.config_class
        if "variant" in kwargs and config_class is not None and "variant" in own_fields(config_class):
            hint = f"config={config_class.__name__}.from_pretrained(path, variant={kwargs['variant']!r})"
            read = "transformers reads variant as the name of a file"
            raise ArgumentError(f"{cls.__name__}.from_pretrained: {read}; set the model's by {hint}.")
        lenient = {"ignore_mismatched_sizes": True, **kwargs}  # mismatches are reported below, in one line
        path = pretrained_model_name_or_path
        try:
            model, loading = super().from_pretrained(path, *args, output_loading_info=True, **lenient)
        except DAMAGE as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ArgumentError(f"{cls.__name__}.from_pretrained: cannot load {path}: {reason}.") from error
        if kwargs.get("ignore_mismatched_sizes"):
            loading["mismatched_keys"] = set()
        source = "the tensors of state_dict"
        if path is not None:
            source = f"the weights in {path}"
            hub = {name: value for name, value in kwargs.items() if name in HUB_KEYS}
            loading = without_changes(model, path, loading, **hub)
        mismatches = misfits(model, loading)
        if mismatches:
            unfit = f"{source} do not fit their config ({'; '.join(mismatches)})"
            hint = "with output_loading_info=True the tensors that fit are loaded"
            raise ArgumentError(f"{cls.__name__}.from_pretrained: {unfit}; {hint}.")
        return model

    @classmethod
    def _check_without_path(cls, config: Any, tensors: Any) -> None:
        call, kind = f"{cls.__name__}.from_pretrained", cls.config_class
        if config is None or tensors is None:
            raise ArgumentError(f"{call}: without a path give both config and state_dict, the tensors by name.")
        if kind is not None and not isinstance(config, kind):
            raise ArgumentError(f"{call}: config is a {type(config).__name__}, expected a {kind.__name__}.")
        if not isinstance(tensors, Mapping) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
            raise refuse(call, "state_dict", tensors, "a dict of names to tensors")


def without_changes(model: PreTrainedModel, path: Any, loading: Mapping[str, Any], **hub: Any) -> dict[str, Any]:
    """Return the loading info without tensors that a changed config of the saved `path` (at `hub`) added or removed."""
    saved = type(model.config).from_pretrained(path, **hub)
    if all(getattr(saved, name) == getattr(model.config, name) for name in own_fields(type(saved))):
        return dict(loading)
    with torch.device("meta"):
        before = set(type(model)(saved).state_dict())
    now = set(model.state_dict())
    if saved.tie_word_embeddings and not model.config.tie_word_embeddings:
        now.discard("lm_head.weight")  # it is not in the file and would be initialised at random
    return {
        **loading,
        "missing_keys": set(loading["missing_keys"]) - (now - before),
        "unexpected_keys": set(loading["unexpected_keys"]) - (before - now),
    }


def misfits(model: PreTrainedModel, loading: Mapping[str, Any]) -> list[str]:
    """Return the mismatches in transformers' loading info of a model, one short text each."""
    tensors = model.state_dict()
    mismatches = []
    for kind, keys in loading.items():
        names = sorted(
            key if isinstance(key, str) else f"{key[0]} {list(key[1])}, not {list(key[2])}"  # wrong shape
            for key in keys or ()
        )
        if kind == "unexpected_keys" and not hasattr(model, "lm_head"):  # the decoder alone has no output matrix
            names = [name for name in names if not name.startswith("lm_head.")]
        if names:
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            mismatches.append(f"{kind.replace('_', ' ')}: {names[0]}{more}")
    if len(loading.get("missing_keys", ())) > len(tensors) // 2:
        mismatches.append("the tensors are those of another model")
    if mismatches:
        return mismatches
    plain = (torch.Tensor, torch.nn.Parameter)  # quantised tensors are of classes of their own, with few operations
    values = ((n, x) for n, x in tensors.items() if type(x) in plain and x.is_floating_point() and not x.is_meta)
    return [f"not finite: {name}" for name, value in values if not value.isfinite().all()][:1]
