"""Which keys each query sees, as kernels read it: two numbers a query, and for the backward pass two a key.

Causal and strict order, windows, packed sequences, offsets and unequal lengths all give a query a range of keys whose
ends do not decrease from query to query; the queries that see a key form a range, too. A mask over keys is applied
within it.

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

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ends of the queries' ranges, and the mask or, as a pointer that is not read, one of these."""
        return self.low, self.high, self.low if self.mask is None else self.mask

    @property
    def mask_steps(self) -> tuple[int, int]:
        """The `mask_steps` of the mask."""
        return mask_steps(self.mask)

    @property
    def steps(self) -> tuple[int, int, int]:
        """Step of the queries' ranges from one sequence to the next, and `mask_steps`."""
        return batch_stride(self.low), *self.mask_steps

    @classmethod
    def of(cls, visible: Visibility, device: torch.device) -> Span:
        """Return the ranges of a call whose mask, if any, is over keys."""
        low, high, mask = ends_of(visible, device)
        keys = torch.arange(visible.keys, device=device).expand(low.shape[0], -1).contiguous()
        first = torch.searchsorted(high, keys, right=True)  # first query whose range ends after the key
        last = torch.searchsorted(low, keys, right=True)
        first, last = first.to(torch.int32), torch.maximum(first, last).to(torch.int32)
        return cls(low.to(torch.int32), high.to(torch.int32), first, last, mask)


def ends_of(visible: Visibility, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return low, high (int64) and mask of a call whose mask, if any, is over keys, contiguous."""
    low, high = (x.contiguous() for x in visible.bounds(0, visible.queries, device))
    mask = visible.mask
    if mask is not None:
        mask = mask[..., 0, :].expand(*mask.shape[:2], visible.keys).to(torch.uint8).contiguous()
    return low, high, mask


def batch_stride(x: Tensor) -> int:
    """Return the step from one sequence to the next, 0 if all share one range."""
    return x.stride(0) if x.shape[0] > 1 else 0


def mask_steps(mask: Tensor | None) -> tuple[int, int]:
    """Return the steps of a mask from one sequence, and from one head, to the next: 0 if these share it."""
    return (0, 0) if mask is None else (batch_stride(mask), mask.stride(1) if mask.shape[1] > 1 else 0)
