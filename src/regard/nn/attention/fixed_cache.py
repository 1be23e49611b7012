"""Attention to a cache of fixed length (`StaticCache`), which returns all places: a mask says which a query sees.

Shapes: B batch, H query heads, T tokens in this call, N tokens so far, K places that the cache returns.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import require
from ...pairwise.visibility import Visibility, runs_of
from ..arguments import columns_of


class Seen(NamedTuple):
    """Which keys a query sees: arguments of `regard.attention`."""

    is_causal: bool = False
    exclude_self: bool = False
    window: int | None = None
    attn_mask: Tensor | None = None
    segment_ids: Tensor | None = None

    def counts(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how many keys each query sees, int64 [B or 1, H or 1, Tq]."""
        tokens, keys = query.shape[2], key.shape[2]
        runs = None if self.segment_ids is None else runs_of(self.segment_ids)
        visible = Visibility(tokens, keys, *self[:3], keys - tokens, self.attn_mask, runs)
        return visible.counts(query.device)


def visible_places(
    call: str, layer: Any, mask: Tensor | None, tokens: int, order: Seen, device: torch.device
) -> Tensor:
    """Return which places each token of a call sees, boolean [B or 1, 1 or H, T, K]; to be asked before `update`.

    `mask` is boolean [B, N] or [B, 1 or H, T, N], True where a key may be attended, or None; further columns are those
    of places that are not filled yet. More tokens than places (checked on a CPU, where it costs no waiting) are an
    ArgumentError, unless the places are those of the window.
    """
    past = layer.get_seq_length()
    reach = None if order.window is None else order.window + order.exclude_self
    slides = layer.is_sliding and reach is not None and reach <= layer.max_cache_len
    if not slides and not torch.compiler.is_compiling() and device.type == "cpu":
        places, total = layer.max_cache_len, int(past) + tokens
        full = f"the cache has places for {places} tokens, and this call makes it {total}; make a longer cache."
        require(total <= places, call, full)
    places, first = layer.get_mask_sizes(tokens)
    key = torch.arange(first, first + places, device=device)
    last = torch.arange(tokens, device=device)[:, None] + past - int(order.exclude_self)
    seen = key <= last
    if order.window is not None:
        seen = seen & (key > last - order.window)
    if mask is None:
        return seen[None, None]
    mask = columns_of(call, mask, tokens, device)
    missing = max(first + places - mask.shape[-1], 0)
    return seen & F.pad(mask, (0, missing), value=False)[..., first : first + places]
