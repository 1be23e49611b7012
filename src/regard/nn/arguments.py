"""Checks of what layers are given, which several of them share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..checks import ArgumentError, optional_whole, refuse, shape, sizes, tensor
from ..estimators.precision import autocast


def check_hidden(call: str, name: str, given: Any, size: int, layer: nn.Module) -> None:
    """Check hidden states [B, T, C] with T >= 1 in the dtype of `layer`'s weights (any dtype under autocast, and where
    weights are no plain floating-point numbers)."""
    tensor(call, name, given, "B", "T", size)
    if given.shape[1] == 0:
        raise ArgumentError(f"{call}: {name} has shape {shape(given)}, expected {sizes(('B', 'T', size))} with T >= 1.")
    weight = next(layer.parameters(), None)
    if weight is None or not weight.is_floating_point() or weight.dtype.itemsize == 1:
        return
    if given.is_meta and not weight.is_meta:
        raise ArgumentError(f"{call}: {name} is on meta, but the layer on {weight.device}; move one with .to().")
    if given.dtype != weight.dtype and not autocast(given.device.type):
        raise ArgumentError(f"{call}: {name} is {given.dtype}, but the layer {weight.dtype}; convert one with .to().")


def check_positions(call: str, given: Any, like: Tensor, head_dim: int, name: str = "position_embeddings") -> None:
    """Check that positions are None or (cos, sin), each [B or 1, T, R/2] with R <= D, for `like` [B, T, ...]."""
    if given is None:
        return
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise refuse(call, name, given, "None or (cos, sin) of rotary_angles")
    batch, tokens = like.shape[:2]
    for part, x in zip(("cos", "sin"), given, strict=True):
        tensor(call, f"{name}: {part}", x, "B or 1", tokens, "R/2", like=like, of="the hidden state")
        if x.shape[0] not in (1, batch) or 2 * x.shape[2] > head_dim or x.shape != given[0].shape:
            raise ArgumentError(
                f"{call}: {name}: {part} has shape {shape(x)}, expected [{batch} or 1, {tokens}, R/2], as cos, with R "
                f"at most the {head_dim} channels of a head."
            )


def check_layer_idx(call: str, given: Any) -> int | None:
    """Return the number of a layer, after checking that it is None or a whole number >= 0."""
    found: int | None = optional_whole(call, "layer_idx", given, 0)
    return found
