"""The slots of an ICLM, and where the tokens stand among them.

Slot s of a document has the tokens before x_s as context. With a start slot a document of n tokens has n + 1 slots, and
token t is what slot t + 1 has read last; without one the first token takes its place. Documents that are packed into a
row each have a start slot of their own, so that the slots of a row are

    start x_0 x_1 x_2 | start x_0 x_1 | start x_0 ... | (left over, where other rows have more documents)

Shapes: B batch, T tokens given now, S slots so far, R slots given now.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.functional_gradient import Pairs
from ...pairwise.visibility import runs_of
from ..base.base import Context


@dataclass(frozen=True)
class Slots:
    """The slots of a call.

    Attributes:
        positions: integers [B or 1, R].
        mask: boolean [B, S], true where a slot is real; None where all are.
        pairs: which slots go with which values; None where all are real and of one document.
        segments: integers [B or 1, R], the documents of the slots; None where a row is one document.
        places: integers [B or 1, T], the slot of every token where rows have several start slots; None where tokens
            have the last slots.
    """

    positions: Tensor
    mask: Tensor | None
    pairs: Pairs | None
    segments: Tensor | None = None
    places: Tensor | None = None

    @classmethod
    def of(cls, context: Context, start: bool) -> Slots:
        """Make the slots of tokens; with `start`, one more before the first token of every document."""
        positions, mask, segments = context.positions, context.mask, context.segments
        if segments is not None:
            return _packed(positions, mask, segments, start)
        tokens = positions.shape[1]
        if not start:
            return cls(positions, mask, None if mask is None else Pairs.of(mask, tokens))
        # the start slot stands right before the first real token, whatever the positions of padding
        following, rows = positions + 1, tokens
        if context.past == 0:
            rows += 1
            first = _first(positions, mask, None)[:, :1]
            following = torch.cat((first, following.expand(len(first), -1)), 1)
        if mask is None:
            return cls(following, None, None)
        mask = F.pad(mask, (1, 0), value=True)
        return cls(following, mask, Pairs.of(mask, rows))

    def of_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """Take what the slots of T tokens have, [B, T, C], of x [B, R, C]."""
        return of_tokens(x, self.places, tokens, 1)

    def maps(self, weights: Tensor, past: int, tokens: int) -> Tensor:
        """Return the weights between tokens [B, H, T, N], of weights between slots [B, H, R, S]."""
        rows = of_tokens(weights, self.places, tokens, 2)
        return of_tokens(rows, self.places, past + tokens, 3)

    def completing(self, words: Tensor) -> Tensor:
        """What completes the pairs of the slots, [B, R - 1, E], of words [B, T, E] where there are start slots: zeros
        where a document begins, for its start slot completes none."""
        if self.places is None:
            return words
        spread = words.new_zeros(len(words), self.positions.shape[1], words.shape[2])
        return place(spread, words, self.places)[:, 1:]


def of_tokens(x: Tensor, places: Tensor | None, tokens: int, axis: int) -> Tensor:
    """Take what the slots of T tokens have of x [B, ...], which has an axis of R slots; `places` as in `Slots`."""
    if places is None:
        return x.narrow(axis, x.shape[axis] - tokens, tokens)
    index = places.reshape(len(places), *(places.shape[1] if a == axis % x.dim() else 1 for a in range(1, x.dim())))
    return x.gather(axis, index.expand(*(tokens if a == axis % x.dim() else n for a, n in enumerate(x.shape))))


def place(rows: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """Rows [B, R, C] with x [B, T, C] at the places [B or 1, T]."""
    return rows.scatter(1, places[..., None].expand_as(x), x)


def _first(positions: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """The position of the first real token of every token's document, [B, T]; 0 where there is none."""
    if mask is None:
        mask = positions.new_ones(1, 1, dtype=torch.bool)
    far = torch.iinfo(positions.dtype).max
    known = torch.where(mask, positions, far)
    run = known.new_zeros(known.shape, dtype=torch.int64) if segments is None else runs_of(segments)[0].expand_as(known)
    least = known.new_full(known.shape, far).scatter_reduce(1, run, known, "amin").gather(1, run)
    return torch.where(least == far, 0, least)


def _packed(positions: Tensor, mask: Tensor | None, segments: Tensor, start: bool) -> Slots:
    """The slots of rows of several documents [B or 1, T]. With `start`, how many there are waits for a device."""
    batch = max(len(positions), len(segments), 1 if mask is None else len(mask))
    positions, segments = positions.expand(batch, -1), segments.expand(batch, -1)
    tokens = positions.shape[1]
    if not start:
        real = torch.ones_like(segments, dtype=torch.bool) if mask is None else mask
        return Slots(positions, mask, Pairs.of(real, tokens, segments), segments)
    at = torch.arange(tokens, device=positions.device)
    starts = (runs_of(segments)[0] == at).cumsum(1)
    places, rows = at + starts, tokens + int(starts[:, -1].max())

    # a token's values go to its slot and the one before it: that of the token before, put right by it, or the start
    def spread(start: Tensor, token: Tensor, left: int) -> Tensor:
        return start.new_full((batch, rows), left).scatter(1, places - 1, start).scatter(1, places, token)

    number = runs_of(segments)[0]
    found = spread(number, number, tokens)  # those left over are a document by themselves
    following = spread(_first(positions, mask, segments), positions + 1, 0)
    ones = torch.ones_like(segments, dtype=torch.bool)
    visible = spread(ones, ones if mask is None else mask, False)
    alike = mask is None and bool((starts[:, -1] == rows - tokens).all())
    return Slots(following, None if alike else visible, Pairs.of(visible, rows, found), found, places)
