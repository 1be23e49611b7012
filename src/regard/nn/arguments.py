"""Checks of arguments that several layers share."""

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, boolean_mask, on_device, refuse, require, shape, sizes, tensor, whole
from ..precision import autocast
from .attention.rotary import check_angles


def is_plain(weight: Tensor) -> bool:
    """Return whether a weight holds its numbers as they are; quantised ones are integers or of one byte."""
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def as_input(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return x in the dtype of the layer's matrix; as it is for a quantised layer, which converts it itself."""
    return x.to(layer.weight.dtype) if is_plain(layer.weight) else x


def plain_linear(call: str, layer: nn.Module, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return matrix and bias of a linear layer, to compute with on `device`; raise `ArgumentError` if it is quantised.

    Those of a layer with an adapter, such as LoRA's, or with offloaded weights are read from its outputs, since
    `weight` lacks what the adapter adds, or is empty.
    """
    weight: Any = layer.weight
    if not is_plain(weight):
        hint = "leave the layer out when quantising (llm_int8_skip_modules, modules_to_not_convert)"
        raise ArgumentError(f"{call}: a matrix is quantised ({weight.dtype}), which cannot be read; {hint}.")
    if isinstance(layer, nn.Linear) and not _elsewhere(weight, device):
        return weight, layer.bias
    inputs = weight.shape[1]
    outputs = layer(torch.eye(inputs + 1, inputs, dtype=weight.dtype, device=device))
    return (outputs[:-1] - outputs[-1]).T, outputs[-1]


def plain_table(layer: nn.Module, device: torch.device) -> Tensor:
    """Return the table [V, C] of an embedding layer; with an adapter or offloaded, as `plain_linear` does."""
    weight: Any = layer.weight
    held = isinstance(layer, nn.Embedding) and not _elsewhere(weight, device)
    return weight if held else layer(torch.arange(weight.shape[0], device=device))


def plain_filters(layer: nn.Module, device: torch.device) -> Tensor:
    """Return the filters [G, W] of a depthwise convolution without bias, read as in `plain_linear`."""
    weight: Any = layer.weight
    if isinstance(layer, nn.Conv1d) and not _elsewhere(weight, device):
        return weight[:, 0]
    channels, _, width = weight.shape
    impulse = torch.zeros(1, channels, 2 * width - 1, dtype=weight.dtype, device=device)
    impulse[..., width - 1] = 1
    response = layer(impulse)[0]
    padding = (response.shape[-1] - width) // 2
    return response[:, padding : padding + width].flip(-1)


def _elsewhere(weight: Tensor, device: torch.device) -> bool:
    """Return whether a weight is offloaded: on meta until its layer is called."""
    return weight.is_meta and device.type != "meta"


def check_hidden(call: str, name: str, given: Any, size: int, layer: nn.Module) -> None:
    """Check hidden states [B, T, C] with T >= 1 in the dtype of `layer`'s weights.

    Any dtype is accepted under autocast, and for weights that are not plain floating-point numbers.
    """
    tensor(call, name, given, "B", "T", size)
    if given.shape[1] == 0:
        raise ArgumentError(f"{call}: {name} has shape {shape(given)}, expected {sizes(('B', 'T', size))} with T >= 1.")
    weight = next(layer.parameters(), None)
    if weight is None or not is_plain(weight):
        return
    if given.is_meta and not weight.is_meta:
        raise ArgumentError(f"{call}: {name} is on meta, but the layer on {weight.device}; move one with .to().")
    if given.dtype != weight.dtype and not autocast(given.device.type):
        raise ArgumentError(f"{call}: {name} is {given.dtype}, but the layer {weight.dtype}; convert one with .to().")


def check_positions(call: str, given: Any, like: Tensor, head_dim: int) -> None:
    """Check that positions are None or (cos, sin), each [B or 1, T, R/2] with R <= D, for `like` [B, T, ...]."""
    if given is None:
        return
    name = "position_embeddings"
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise refuse(call, name, given, "None or (cos, sin) of rotary_angles")
    check_angles(f"{call}: {name}", (given[0], given[1]), (*like.shape[:2], head_dim), like, "the hidden state")


def check_shared(
    call: str, share_query_key: bool, num_heads: int, num_kv_heads: int, name: str = "num_kv_heads"
) -> None:
    """Check that shared queries and keys have equally many heads; `name` is that of the number of the latter."""
    need = f"{num_heads} query heads need {num_heads} key/value heads, not {num_kv_heads}"
    text = f"share_query_key uses the keys as queries, so {need}; leave {name} or share_query_key out."
    require(not share_query_key or num_heads == num_kv_heads, call, text)


def check_heads(
    call: str,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    names: tuple[str, str, str] = ("hidden_size", "num_heads", "num_kv_heads"),
    mend: str = "change one, or give head_dim",
) -> int:
    """Return the channels of a head, after checking that the sizes fit together; `mend` ends an error."""
    given = dict(zip(names, (hidden_size, num_heads, num_kv_heads), strict=True))
    positive_ints(call, **{**given, "head_dim": 1 if head_dim is None else head_dim})
    uneven = f"{num_heads} query heads ({names[1]}) do not divide among {num_kv_heads} key/value heads ({names[2]})"
    require(num_heads % num_kv_heads == 0, call, f"{uneven}; choose a divisor of {num_heads}.")
    if head_dim is not None:
        return head_dim
    uneven = f"hidden_size {hidden_size} is not a multiple of {num_heads} heads ({names[1]})"
    require(hidden_size % num_heads == 0, call, f"{uneven}; {mend}.")
    return hidden_size // num_heads


def check_window(call: str, window: int | None, name: str = "window") -> int | None:
    """Return `window`, after checking that it is None or a positive integer."""
    if window is not None and not (type(window) is int and window > 0):
        positive_int(call, name, window)
    return window


def positive_int(call: str, name: str, value: object) -> None:
    """Check that `value` is an integer from 1 to 2^48."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refuse(call, name, value, "a positive integer")
    whole(call, name, value, 1, 2**48)


def positive_ints(call: str, **given: object) -> None:
    """Check every argument as `positive_int` does."""
    for name, value in given.items():
        positive_int(call, name, value)


def described(**options: object) -> str:
    """Return options as text for `extra_repr`, without those that are None or False."""
    return ", ".join(f"{name}={given!r}" for name, given in options.items() if given is not None and given is not False)


def columns_of(call: str, mask: Tensor, tokens: int, device: torch.device) -> Tensor:
    """Return a mask as boolean [B, 1 or H, 1 or T, N], after checking that it has at least `tokens` columns."""
    boolean_mask(call, "attention_mask", mask)
    on_device(call, "attention_mask", mask, device)
    if mask.dim() not in (2, 4) or mask.shape[-1] < tokens:  # torch.compile cannot trace the text of a symbolic length
        expected = f"[B, N] or [B, 1 or H, T, N] with N >= {tokens}, the tokens so far"
        raise ArgumentError(f"{call}: attention_mask has shape {shape(mask)}, expected {expected}.")
    return mask[:, None, None] if mask.dim() == 2 else mask


def layer_of(call: str, cache: object, layer_idx: int | None) -> Any:
    """Return the layer of a cache, None if it has no such layer; raise `ArgumentError` without `layer_idx`."""
    if layer_idx is None:
        raise ArgumentError(f"{call}: past_key_values: a cache was given to a layer without layer_idx; set it.")
    layers = getattr(cache, "layers", ())
    return layers[layer_idx] if layer_idx < len(layers) else None


def require_growing(cache: object, call: str) -> None:
    """Check that `cache` is not padded to a fixed length: queries are taken to be at the end of its keys."""
    if getattr(cache, "is_compileable", False):
        hint = "use a cache that grows, such as transformers.DynamicCache"
        raise ArgumentError(f"{call}: cache is a {type(cache).__name__}, which is padded to a fixed length; {hint}.")
