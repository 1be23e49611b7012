"""Attention to a cache of fixed length, such as transformers' `StaticCache`.

Such a cache returns all of its places, filled or not, so that shapes stay equal from token to token, as compiled graphs
need. A mask then says which places a query sees.

Shapes: B batch, H query heads, T tokens in this call, N tokens so far, K places that the cache returns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import ArgumentError, boolean_mask, on_device, shape
from ..arguments import require_growing


class FixedLayer(Protocol):
    """A cache layer of fixed length, `cache.layers[layer_idx]`; transformers' `StaticLayer` is one."""

    max_cache_len: int
    is_sliding: bool

    def get_seq_length(self) -> int | Tensor:
        """Return the number of tokens seen."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return K for a call with this many tokens, and the position of the first place."""


class Order(NamedTuple):
    """The order arguments of `regard.attention`."""

    is_causal: bool = False
    exclude_self: bool = False
    window: int | None = None


def fixed_layer(call: str, cache: Any, layer_idx: int) -> FixedLayer | None:
    """Return the layer of a cache if its length is fixed, otherwise None; refuse other padded caches."""
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else None
    if layer is not None and hasattr(layer, "max_cache_len"):
        return layer
    if layer is None:
        require_growing(cache, call)
    return None


def visible_places(
    call: str, layer: FixedLayer, mask: Tensor | None, tokens: int, order: Order, device: torch.device
) -> Tensor:
    """Return which places each token of a call sees, boolean [B or 1, 1 or H, T, K]; to be asked before `update`.

    Args:
        call: name for error messages.
        layer: of the cache.
        mask: boolean [B, N] or [B, 1 or H, T, N], True where a key may be attended, or None; further columns are
            those of places that are not filled yet.
        tokens: T.
        order: causality and window.
        device: of the keys.

    Raises:
        ArgumentError: more tokens than places (checked on a CPU, where it costs no waiting), or a wrong mask.
    """
    past = layer.get_seq_length()
    if not layer.is_sliding and not torch.compiler.is_compiling() and device.type == "cpu":
        total = int(past) + tokens
        if total > layer.max_cache_len:
            raise ArgumentError(
                f"{call}: the cache has places for {layer.max_cache_len} tokens, and this call makes it {total}; "
                f"make a longer cache."
            )
    places, first = layer.get_mask_sizes(tokens)
    key = torch.arange(first, first + places, device=device)
    last = torch.arange(tokens, device=device)[:, None] + past - int(order.exclude_self)
    seen = key <= last
    if order.window is not None:
        seen = seen & (key > last - order.window)
    if mask is None:
        return seen[None, None]
    boolean_mask(call, "attention_mask", mask)
    on_device(call, "attention_mask", mask, device)
    if mask.dim() not in (2, 4) or mask.shape[-1] < tokens:
        raise ArgumentError(
            f"{call}: attention_mask has shape {shape(mask)}, expected [B, N] or [B, 1, {tokens}, N] with N >= "
            f"{tokens}, the tokens so far."
        )
    missing = max(first + places - mask.shape[-1], 0)
    mask = F.pad(mask, (0, missing), value=False)[..., first : first + places]
    return seen & (mask[:, None, None] if mask.dim() == 2 else mask)
