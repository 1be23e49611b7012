"""Pairs of a key and a value that belongs to the next token, as in ICLM and Memory Mosaics.

A pair is complete one token after its key. The key of a value is that of the last real row before it.

Shapes: B batch, R rows in this call, S rows so far, n pairs so far (S - 1), H heads, D channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import require
from ..pairwise.visibility import runs_of


@dataclass(frozen=True)
class Pairs:
    """The row of each pair's key if rows are padded or hold several documents."""

    index: Tensor  # int64 [B, new], the key of each new pair, as an index into the pending row and those of this call
    last: Tensor  # int64 [B, 1], the row that waits for the next value, indexed alike
    visible: Tensor  # boolean [B, n], the pairs whose value is real and has a key in its document
    real: Tensor  # boolean [B, R], the real rows of this call
    segments: Tensor | None = None  # integers [B or 1, R], the documents, without earlier rows; None: one per row

    @classmethod
    def of(cls, real: Tensor, rows: int, segments: Tensor | None = None) -> "Pairs":
        """Return the pairs of a text, of whose rows so far `real` [B, S] are real and the last `rows` are in this call;
        `segments` [B or 1, S] are their documents, and then all rows must be in this call."""
        size = real.shape[1]
        part = f"segments come with {size} rows, {rows} of them in this call"
        fits = segments is None or rows == size
        require(fits, "Pairs.of", f"{part}, expected all: a cache holds one document.")
        earlier = size - rows
        index = torch.arange(size, device=real.device).expand(real.shape)
        latest = torch.where(real, index, -1).cummax(1).values
        begins = torch.zeros_like(index) if segments is None else runs_of(segments)[0]
        visible = real[:, 1:] & (latest[:, :-1] >= begins[:, 1:])
        # with earlier rows, index 0 is the pending row and index 1 the first row of this call
        key = (latest - earlier + int(earlier > 0)).clamp_min(0)
        return cls(key[:, max(earlier - 1, 0) : -1], key[:, -1:], visible, real[:, earlier:], segments)


def pair_rows(rows: Tensor, pending: Tensor | None, pairs: Pairs | None) -> tuple[Tensor, Tensor]:
    """Return the part of `rows` [B, H, R, D] that belongs to the new pairs, [B, H, R, D] or [B, H, R - 1, D] without
    `pending`, and the part [B, H, 1, D] that waits for the next value. `pending` [B, H, 1, D] is of the row before
    them, if there is one. Without `pairs`, all rows are real."""
    x = rows if pending is None else torch.cat((pending, rows), -2)
    if pairs is None:
        return x[..., :-1, :], x[..., -1:, :]
    pick = lambda index: x.gather(-2, index[:, None, :, None].expand(*x.shape[:2], -1, x.shape[-1]))  # noqa: E731
    return pick(pairs.index), pick(pairs.last)
