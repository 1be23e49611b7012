"""Tokens that a memory has read: their fields, and the tokens that wait to be written.

Shapes: B batch, T tokens, R streams, w tokens of a piece, M memories.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checks import require
from ..precision import clean_each, either

Tensors = dict[str, Tensor]
"""Fields of tokens by name, [R, w, ...]. The optional field `good`, boolean [R, w], marks the tokens that exist and are
finite."""


@dataclass(frozen=True)
class Waiting:
    """Tokens that were read but not yet written."""

    # consecutive, each wider than the next; a single one, each row's tokens at its left, if counts differ
    pieces: tuple[Tensors, ...]
    counts: tuple[int, ...]  # waiting tokens of each row, or one number if the batch shares a memory

    @property
    def empty(self) -> bool:
        return not any(self.counts)

    @property
    def even(self) -> bool:
        return len(set(self.counts)) <= 1

    def tokens(self) -> Tensors:
        """Return all waiting tokens, fields [R, max counts, ...]; {} if none waits."""
        return joined(self.pieces) if self.pieces else {}

    def append(self, new: Tensors, counts: Sequence[int]) -> "Waiting":
        """Append the first counts[r] tokens of each row r of `new`."""
        total = tuple(a + b for a, b in zip(self.counts, counts, strict=True))
        if self.even and len(set(counts)) <= 1:
            pieces = (*self.pieces, new) if not self.empty else (new,)
            # merge pieces like the digits of a binary counter, so that no token is copied often
            while len(pieces) > 1 and width(pieces[-2]) <= width(pieces[-1]):
                pieces = (*pieces[:-2], joined(pieces[-2:]))
            return Waiting(pieces, total)
        old = 0 if self.empty else width(self.tokens())
        both = marked(new if self.empty else joined((self.tokens(), new)))
        position = torch.arange(max(total))
        held, all_ = (torch.tensor(x)[:, None] for x in (self.counts, total))
        index = torch.where(position < held, position, position - held + old).clamp(max=width(both) - 1)
        device = both["good"].device
        tokens = taken(both, index.to(device))
        return Waiting(({**tokens, "good": tokens["good"] & (position < all_).to(device)},), total)

    def written(self, rows: Sequence[bool]) -> "Waiting":
        """Drop the tokens of these rows."""
        counts = tuple(0 if gone else n for gone, n in zip(rows, self.counts, strict=True))
        return Waiting((limited(self.tokens(), [not gone for gone in rows]),) if any(counts) else (), counts)

    def select(self, index: Tensor) -> "Waiting":
        """Select the waiting tokens of batch rows `index`, integers [N]."""
        counts = picked(self.counts, index)
        if not any(counts):
            return Waiting((), counts)
        if self.even:
            return replace(self.map(lambda x: x[index]), counts=counts)
        return Waiting(({name: x[index, : max(counts)] for name, x in self.tokens().items()},), counts)

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Waiting":
        return replace(self, pieces=tuple({name: fn(x) for name, x in piece.items()} for piece in self.pieces))

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for piece in self.pieces for x in piece.values())


def marked(tokens: Tensors) -> Tensors:
    """Add the field `good` if it is missing."""
    if "good" in tokens:
        return tokens
    like = next(iter(tokens.values()))
    return {**tokens, "good": like.new_ones(like.shape[:2], dtype=torch.bool)}


def limited(tokens: Tensors, rows: Sequence[bool]) -> Tensors:
    """Mark only tokens of these rows as good."""
    tokens = marked(tokens)
    return {**tokens, "good": tokens["good"] & torch.tensor(rows, device=device_of(tokens))[:, None]}


def joined(pieces: Sequence[Tensors]) -> Tensors:
    """Concatenate pieces along the tokens, after checking that their fields agree."""
    if len(pieces) == 1:
        return pieces[0]
    if any("good" in piece for piece in pieces):
        pieces = [marked(piece) for piece in pieces]
    first = pieces[0]
    alike = all(
        piece.keys() == first.keys() and all(x.shape[2:] == first[name].shape[2:] for name, x in piece.items())
        for piece in pieces[1:]
    )
    other = "tokens that are not written yet were read with another top_k, key_update or gate"
    require(alike, "Waiting", f"{other}; flush(state) before these change.")
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in first}


def finite_tokens(tokens: Tensors, look: Callable[..., Sequence[tuple[Tensor, Tensor | None]]] = clean_each) -> Tensors:
    """Set non-finite vectors of the fields [B, T, ...] to 0, and mark the tokens without any in `good`, which is left
    out if `look` finds none."""
    bad, fields = None, {}
    flat = [x.flatten(2) if x.dim() > 2 else x[..., None] for x in tokens.values()]
    for (name, x), (whole, flags) in zip(tokens.items(), look(*flat), strict=True):
        fields[name], bad = whole.view(x.shape), either(bad, flags)
    return fields if bad is None else {**fields, "good": ~bad}


def hidden_where(gone: Tensor, x: Tensor) -> Tensor:
    """Set x [R, W, ...] to 0 where `gone`, boolean [R, W]."""
    return x.masked_fill(gone.view(*gone.shape, *(1,) * (x.dim() - 2)), 0)


def blend(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x [M, ...] or [...] for the memories `rows`, y [M, ...] for the rest."""
    return torch.where(rows.view(-1, *(1,) * (y.dim() - 1)), x, y)


def picked(counts: Sequence[int], indices: Tensor) -> tuple[int, ...]:
    """Return the counts at `indices`; if all counts are equal, the device is not waited for."""
    if len(set(counts)) == 1:
        return (counts[0],) * len(indices)
    return tuple(counts[i] for i in indices.tolist())


def repeated(counts: Sequence[int], n: int) -> tuple[int, ...]:
    return tuple(count for count in counts for _ in range(n))


def taken(tokens: Tensors, index: Tensor) -> Tensors:
    """Return the tokens at `index` [R, w] of each row."""
    at = {x.dim(): index.view(*index.shape, *[1] * (x.dim() - 2)) for x in tokens.values()}
    return {n: x.gather(1, at[x.dim()].expand(*index.shape, *x.shape[2:])) for n, x in tokens.items()}


def width(tokens: Tensors) -> int:
    return next(iter(tokens.values())).shape[1]


def device_of(tokens: Tensors) -> torch.device:
    return next(iter(tokens.values())).device
