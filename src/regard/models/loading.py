"""Reading saved models: what does not fit is an error.

transformers fills tensors that are missing from a checkpoint with random numbers, leaves out those that it does not
know, and says so in a warning; the model then computes something, but not what was trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..checks import ArgumentError
from .base_config import HUB_KEYS, own_fields


class CheckedLoading(PreTrainedModel):
    """A transformers model whose `from_pretrained` refuses checkpoints that do not fit."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' `from_pretrained`. A configuration that differs from the saved one may add tensors, which begin
        at their initial values. With `output_loading_info=True` nothing is refused and what did not fit is
        returned beside the model.

        Raises:
            ArgumentError: the checkpoint is of another model type, or a tensor is missing, unknown, of another shape,
                or not finite.
        """
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
        allowed = {"mismatched_keys"} if kwargs.get("ignore_mismatched_sizes") else set()
        hub = {name: value for name, value in kwargs.items() if name in HUB_KEYS}
        if reconfigured(model, pretrained_model_name_or_path, **hub):
            allowed.add("missing_keys")  # what the change of configuration added
        wrong = misfits(model, {kind: found for kind, found in loading.items() if kind not in allowed})
        if wrong:
            raise ArgumentError(
                f"{cls.__name__}.from_pretrained: the weights in {pretrained_model_name_or_path} do not fit their "
                f"config ({wrong[0]}); with output_loading_info=True they are taken as far as they go."
            )
        return model


def reconfigured(model: PreTrainedModel, path: Any, **hub: Any) -> bool:
    """Whether the model was built with other fields than were saved beside its weights."""
    saved = type(model.config).from_pretrained(path, **hub)
    return any(getattr(saved, name) != getattr(model.config, name) for name in own_fields(type(saved)))


def misfits(model: nn.Module, loading: Mapping[str, Any]) -> list[str]:
    """What is wrong with a model that was just loaded, a few words each.

    Args:
        model: the model.
        loading: what transformers' `output_loading_info=True` gave.
    """
    wrong = []
    for kind, found in loading.items():
        names = sorted(name if isinstance(name, str) else str(name[0]) for name in found or ())
        if kind == "unexpected_keys" and not hasattr(model, "lm_head"):  # the decoder alone has no output matrix
            names = [name for name in names if not name.startswith("lm_head.")]
        wrong += [f"{kind.replace('_', ' ')}: {names[0]}"] if names else []
    return wrong + [f"not finite: {name}" for name, p in model.named_parameters() if not (p.is_meta or finite(p))]


def finite(tensor: Any) -> bool:
    """Whether every entry is a finite number."""
    return bool(tensor.isfinite().all())
