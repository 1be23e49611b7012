"""The keys that each query may see: causal order, window, mask and segments in one object.

Query i has the key position i + offset. A key j is visible to it if all of these hold:

    causal          j <= i + offset           (strict: j < i + offset)
    window W        j is among the last W positions that causal order permits; without causal, |i + offset - j| < W
    mask            mask[..., i, j] is True
    runs            j is in the same run of equal segment ids as position i + offset (packed sequences)

Legend: B batch, H heads, Tq queries, Tk keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(eq=False)  # not frozen, which would take longer to make
class Visibility:
    """The visible pairs of queries and keys (see the module docstring)."""

    queries: int
    keys: int
    causal: bool = False
    strict: bool = False  # implies causal
    window: int | None = None
    offset: int | Tensor = 0  # or int64 [B]
    mask: Tensor | None = None  # boolean [B or 1, H or 1, Tq or 1, Tk or 1]
    runs: Tensor | None = None  # int64 [2, B or 1, Tk]: the first key of each key's run, and the key after its last
    kept: Any = None  # what an implementation derived from these fields and needs again

    @property
    def positional(self) -> bool:
        """Whether visibility depends on position."""
        return self.causal or self.window is not None or self.runs is not None

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return a range of keys [low, high) that holds all keys visible to queries [first, last)."""
        if isinstance(self.offset, Tensor) or not self.positional:
            return 0, self.keys
        ends = first + self.offset, last - 1 + self.offset
        low, high = self._limits(ends[0])[0], self._limits(ends[1])[1]
        if self.runs is not None and self.runs.device.type == "cpu" and self.runs.numel() and last > first:
            start, stop = (min(max(at, 0), self.keys - 1) for at in ends)
            low, high = max(low, int(self.runs[0, :, start].min())), min(high, int(self.runs[1, :, stop].max()))
        high = min(max(high, 0), self.keys)
        return min(max(low, 0), high), high

    def _limits(self, at: Any) -> tuple[Any, Any]:
        """Return the range [low, high) that order and window allow queries at key positions `at`, ints or a tensor."""
        if self.causal:
            high = at if self.strict else at + 1
            return 0 * at if self.window is None else high - self.window, high
        if self.window is not None:
            return at - self.window + 1, at + self.window
        return 0 * at, 0 * at + self.keys

    def bounds(self, first: int, last: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the range of keys [low, high) of each query of [first, last), without the mask: int64 [B or 1, q]."""
        rows = torch.arange(first, last, device=device)
        at = rows[None] + (self.offset[:, None] if isinstance(self.offset, Tensor) else self.offset)
        low, high = self._limits(at)
        if self.runs is not None and self.keys:
            start, stop = self.runs[:, :, at[0].clamp(0, self.keys - 1)]
            low, high = torch.maximum(low, start), torch.minimum(high, stop)
        return low.clamp(0, self.keys), high.clamp(0, self.keys)

    def block(self, first: int, last: int, low: int, high: int, device: torch.device, positional: bool = True) -> Any:
        """Return the visible pairs of queries [first, last) and keys [low, high): boolean [B or 1, H or 1, q or 1, k],
        or None if all are visible; without `positional` those that the mask alone allows."""
        visible: Any = None
        if positional and self.positional:
            start, stop = self.bounds(first, last, device)
            at = torch.arange(low, high, device=device)
            visible = at < stop[..., None]
            if self.window is not None or self.runs is not None:
                visible = visible & (at >= start[..., None])
            visible = visible[:, None]
        if self.mask is not None:
            rows = self.mask if self.mask.shape[-2] == 1 else self.mask[..., first:last, :]
            part = rows if rows.shape[-1] == 1 else rows[..., low:high]
            visible = part if visible is None else visible & part
        return visible

    def counts(self, device: torch.device | None = None) -> Tensor:
        """Return how many keys each query sees: int64 [B or 1, H or 1, Tq]. O(Tq + Tk) without a mask of pairs."""
        mask = self.mask
        if mask is None:
            low, high = self.bounds(0, self.queries, torch.device("cpu") if device is None else device)
            return (high - low)[:, None]
        if mask.shape[-2] == 1:
            return self._count(mask[..., 0, :].expand(*mask.shape[:2], self.keys))
        visible = self.block(0, self.queries, 0, self.keys, mask.device)
        return visible.expand(*visible.shape[:-1], self.keys).sum(-1)

    def any_seen(self, marked: Tensor) -> Tensor:
        """Return which queries [B, H, Tq] see a marked key; `marked` is boolean [B, H, Tk]."""
        if self.mask is None or self.mask.shape[-2] == 1:
            return self._count(marked if self.mask is None else marked & self.mask[..., 0, :]) > 0
        visible = self.block(0, self.queries, 0, self.keys, marked.device)
        visible = visible.expand(*visible.shape[:-1], self.keys).float()
        if visible.shape[1] == 1:  # one mask for all heads: one matrix product
            seen = (visible[:, 0] @ marked.float().transpose(-1, -2)).transpose(-1, -2)
        else:
            seen = (visible @ marked.float()[..., None])[..., 0]
        return (seen > 0).expand(*marked.shape[:2], self.queries)

    def _count(self, marked: Tensor) -> Tensor:
        """Return how many marked keys are in the range of each query, for marks [B or 1, H or 1, Tk]."""
        low, high = self.bounds(0, self.queries, marked.device)
        before = pad(marked.cumsum(-1), (1, 0))
        shape = torch.broadcast_shapes(before.shape[:2], (low.shape[0], 1))  # a batch of 0 against 1
        low, high = (x[:, None].expand(*shape, self.queries) for x in (low, high))
        before = before.expand(*shape, self.keys + 1)
        return before.gather(-1, high) - before.gather(-1, low)


def runs_of(segment_ids: Tensor) -> Tensor:
    """Return `Visibility.runs` of ids [B, T]. A run ends where the id changes; an id that recurs starts a new run."""
    at = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand(segment_ids.shape)
    edge = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = pad(edge, (1, 0), value=True)
    last = pad(edge, (0, 1), value=True)
    start = torch.where(first, at, 0).cummax(1).values
    stop = torch.where(last, at + 1, segment_ids.shape[1]).flip(1).cummin(1).values.flip(1)
    return torch.stack([start, stop])
