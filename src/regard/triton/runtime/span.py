"""What each query sees, as kernels read it: two numbers a query, and for the backward pass two a key.

Causal order, strict order, windows, packed sequences, offsets and unequal lengths all leave a query a range of keys,
whose ends do not decrease from one query to the next; so do the queries that see a key lie in one range. A mask over
keys is looked up within it.

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...pairwise.visibility import Visibility


class Span(NamedTuple):
    """Ranges, int32 and contiguous.

    Attributes:
        low, high: [B or 1, Tq]; query i sees keys [low_i, high_i) that `mask` lets be seen.
        first, last: [B or 1, Tk]; key j is seen by queries [first_j, last_j).
        mask: uint8 [B or 1, H or 1, Tk], 1 where a key may be seen, or None.
    """

    low: Tensor
    high: Tensor
    first: Tensor
    last: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, visible: Visibility, device: torch.device) -> Span:
        """The ranges of a call whose mask, if any, is one over keys."""
        low, high = visible.bounds(0, visible.queries, device)
        low, high = low.contiguous(), high.contiguous()
        keys = torch.arange(visible.keys, device=device).expand(low.shape[0], -1).contiguous()
        first = torch.searchsorted(high, keys, right=True)  # the first query that sees beyond the key
        last = torch.searchsorted(low, keys, right=True)
        mask = visible.mask
        if mask is not None:
            mask = mask[..., 0, :].expand(*mask.shape[:2], visible.keys).to(torch.uint8).contiguous()
        low, high, first, last = (x.to(torch.int32) for x in (low, high, first, torch.maximum(first, last)))
        return cls(low, high, first, last, mask)


def batch_stride(x: Tensor) -> int:
    """The step from one sequence to the next, 0 where one range serves them all."""
    return x.stride(0) if x.shape[0] > 1 else 0
