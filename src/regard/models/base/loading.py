"""Reading saved models: what does not fit is an error.

transformers fills tensors that are missing from a checkpoint with random numbers, leaves out those that it does not
know, and says so in a warning; the model then computes something, but not what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checks import ArgumentError, refuse
from .base_config import HUB_KEYS, own_fields


class CheckedLoading(PreTrainedModel):
    """A transformers model whose `from_pretrained` refuses checkpoints that do not fit."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`; with None as path, from config and state_dict. A configuration that differs
        from the saved one may add tensors, which begin at their initial values, and leave others out. With
        `output_loading_info=True` nothing is refused, and what did not fit is returned beside the model.

        Raises:
            ArgumentError: the checkpoint is of another model type, or a tensor is missing, unknown, of another shape,
                or not finite.
        """
        if pretrained_model_name_or_path is None:
            cls._check_at_hand(kwargs.get("config"), kwargs.get("state_dict"))
        kwargs.setdefault("trust_remote_code", False)  # otherwise transformers may ask, and run what lies in a folder
        if kwargs.pop("output_loading_info", False):
            return super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        config_class = cls.config_class
        if "variant" in kwargs and config_class is not None and "variant" in own_fields(config_class):
            raise ArgumentError(
                f"{cls.__name__}.from_pretrained: variant names a file to transformers; change the model's by "
                f"config={config_class.__name__}.from_pretrained(path, variant={kwargs['variant']!r})."
            )
        lenient = {"ignore_mismatched_sizes": True, **kwargs}  # they are reported below, in one line
        model, loading = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **lenient
        )
        if kwargs.get("ignore_mismatched_sizes"):
            loading["mismatched_keys"] = set()
        source = "the tensors of state_dict"
        if pretrained_model_name_or_path is not None:
            source = f"the weights in {pretrained_model_name_or_path}"
            hub = {name: value for name, value in kwargs.items() if name in HUB_KEYS}
            loading = without_changes(model, pretrained_model_name_or_path, loading, **hub)
        wrong = misfits(model, loading)
        if wrong:
            raise ArgumentError(
                f"{cls.__name__}.from_pretrained: {source} do not fit their config ({'; '.join(wrong)}); with "
                f"output_loading_info=True they are taken as far as they go."
            )
        return model

    @classmethod
    def _check_at_hand(cls, config: Any, tensors: Any) -> None:
        """A model that is made without a path has a configuration and tensors.

        Raises:
            ArgumentError: one is missing, or not that.
        """
        call, kind = f"{cls.__name__}.from_pretrained", cls.config_class
        if config is None or tensors is None:
            raise ArgumentError(f"{call}: without a path give both config and state_dict, the tensors by name.")
        if kind is not None and not isinstance(config, kind):
            raise ArgumentError(f"{call}: config is a {type(config).__name__}, expected a {kind.__name__}.")
        if not isinstance(tensors, Mapping) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
            raise refuse(call, "state_dict", tensors, "a dict of names to tensors")


def without_changes(model: PreTrainedModel, path: Any, loading: Mapping[str, Any], **hub: Any) -> dict[str, Any]:
    """`loading` without the tensors that a change of configuration added or took away.

    Args:
        model: as it was loaded.
        path: from where; beside the weights lies the configuration they were saved with.
        loading: what transformers' `output_loading_info=True` gave.
        hub: where to look, in the words of `from_pretrained`.
    """
    saved = type(model.config).from_pretrained(path, **hub)
    if all(getattr(saved, name) == getattr(model.config, name) for name in own_fields(type(saved))):
        return dict(loading)
    with torch.device("meta"):
        before = set(type(model)(saved).state_dict())
    now = set(model.state_dict())
    if saved.tie_word_embeddings and not model.config.tie_word_embeddings:
        now.discard("lm_head.weight")  # it is no part of the file, and would begin at random
    return {
        **loading,
        "missing_keys": set(loading["missing_keys"]) - (now - before),
        "unexpected_keys": set(loading["unexpected_keys"]) - (before - now),
    }


def misfits(model: PreTrainedModel, loading: Mapping[str, Any]) -> list[str]:
    """What does not fit between a model and the tensors it was loaded from, a few words each.

    Args:
        model: the model.
        loading: what transformers' `output_loading_info=True` gave.
    """
    tensors = model.state_dict()
    wrong = []
    for kind, found in loading.items():
        names = sorted(
            key if isinstance(key, str) else f"{key[0]} {list(key[1])}, not {list(key[2])}"  # misshapen
            for key in found or ()
        )
        if kind == "unexpected_keys" and not hasattr(model, "lm_head"):  # the decoder alone has no output matrix
            names = [name for name in names if not name.startswith("lm_head.")]
        if names:
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            wrong.append(f"{kind.replace('_', ' ')}: {names[0]}{more}")
    if len(loading.get("missing_keys", ())) > len(tensors) // 2:
        wrong.append("they are those of another model")
    if wrong:
        return wrong
    values = ((name, value) for name, value in tensors.items() if value.is_floating_point() and not value.is_meta)
    return [f"not finite: {name}" for name, value in values if not value.isfinite().all()][:1]
