"""The slots of an ICLM and the slot of every token.

The context of slot s are the tokens before x_s of its document. With a start slot a document of n tokens has n + 1
slots, and token t is the last one that slot t + 1 has read; without one the first token takes its place. Each document
of a packed row has its own start slot, so that the slots of a row are

    start x_0 x_1 x_2 | start x_0 x_1 | start x_0 ... | (unused, if other rows have more documents)

Shapes: B batch, T tokens in this call, S slots so far, R slots in this call.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...nn.shifted_pairs import Pairs
from ...pairwise.visibility import runs_of
from ..base.base import Context


@dataclass(frozen=True)
class Slots:
    """The slots of a call."""

    positions: Tensor  # integers [B or 1, R]
    mask: Tensor | None  # boolean [B, S], True where a slot is real; None if all are
    pairs: Pairs | None  # of slots and values; None if all slots are real and in one document
    segments: Tensor | None = None  # integers [B or 1, R], the document of each slot; None if every row is one
    token_slots: Tensor | None = None  # integers [B or 1, T], if rows have several start slots; None: the last slots

    @classmethod
    def of(cls, context: Context, start: bool) -> "Slots":
        """Return the slots of the tokens; with `start`, one more before the first token of every document."""
        positions, mask, segments = context.positions, context.mask, context.segments
        if segments is not None:
            return _packed(positions, mask, segments, start)
        tokens = positions.shape[1]
        if not start:
            return cls(positions, mask, None if mask is None else Pairs.of(mask, tokens))
        # the start slot is directly before the first real token, whatever the positions of padding are
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
        """Select the slots of T tokens, [B, T, C], from x [B, R, C]."""
        return of_tokens(x, self.token_slots, tokens, 1)

    def maps(self, weights: Tensor, past: int, tokens: int) -> Tensor:
        """Return weights between tokens [B, H, T, N] from weights between slots [B, H, R, S]."""
        rows = of_tokens(weights, self.token_slots, tokens, 2)
        return of_tokens(rows, self.token_slots, past + tokens, 3)

    def completing(self, words: Tensor) -> Tensor:
        """Return the values that complete the pairs, [B, R - 1, E], from token embeddings [B, T, E].

        A start slot completes no pair, so its value is zero.
        """
        if self.token_slots is None:
            return words
        zeros = words.new_zeros(len(words), self.positions.shape[1], words.shape[2])
        return scatter_tokens(zeros, words, self.token_slots)[:, 1:]


def of_tokens(x: Tensor, token_slots: Tensor | None, tokens: int, axis: int) -> Tensor:
    """Select the slots of T tokens from x [B, ...] along an axis of R slots; `token_slots` as in `Slots`."""
    if token_slots is None:
        return x.narrow(axis, x.shape[axis] - tokens, tokens)
    index = token_slots.reshape(len(token_slots), *(-1 if a == axis else 1 for a in range(1, x.dim())))
    return x.gather(axis, index.expand(*(tokens if a == axis else n for a, n in enumerate(x.shape))))


def scatter_tokens(rows: Tensor, x: Tensor, token_slots: Tensor) -> Tensor:
    """Return rows [B, R, C] with x [B, T, C] written to the slots [B or 1, T]."""
    return rows.scatter(1, token_slots[..., None].expand_as(x), x)


def _first(positions: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return the position of the first real token of every token's document, [B, T]; 0 if there is none."""
    if mask is None:
        mask = positions.new_ones(1, 1, dtype=torch.bool)
    far = torch.iinfo(positions.dtype).max
    known = torch.where(mask, positions, far)
    run = known.new_zeros(known.shape, dtype=torch.int64) if segments is None else runs_of(segments)[0].expand_as(known)
    least = known.new_full(known.shape, far).scatter_reduce(1, run, known, "amin").gather(1, run)
    return torch.where(least == far, 0, least)


def _packed(positions: Tensor, mask: Tensor | None, segments: Tensor, start: bool) -> Slots:
    """Return the slots of packed rows [B or 1, T]. With `start`, counting them waits for the device."""
    batch = max(len(positions), len(segments), 1 if mask is None else len(mask))
    positions, segments = positions.expand(batch, -1), segments.expand(batch, -1)
    tokens = positions.shape[1]
    if not start:
        real = torch.ones_like(segments, dtype=torch.bool) if mask is None else mask
        return Slots(positions, mask, Pairs.of(real, tokens, segments), segments)
    index, documents = torch.arange(tokens, device=positions.device), runs_of(segments)[0]
    starts = (documents == index).cumsum(1)
    token_slots, rows = index + starts, tokens + int(starts[:, -1].max())

    # A token writes to its own slot and the one before. The latter is a start slot, or is overwritten by its own token.
    def spread(start: Tensor, token: Tensor, left: int) -> Tensor:
        return start.new_full((batch, rows), left).scatter(1, token_slots - 1, start).scatter(1, token_slots, token)

    slot_documents = spread(documents, documents, tokens)  # the unused slots are a separate document
    following = spread(_first(positions, mask, segments), positions + 1, 0)
    ones = torch.ones_like(segments, dtype=torch.bool)
    visible = spread(ones, ones if mask is None else mask, False)
    all_visible = mask is None and bool((starts[:, -1] == rows - tokens).all())
    pairs = Pairs.of(visible, rows, slot_documents)
    return Slots(following, None if all_visible else visible, pairs, slot_documents, token_slots)
