"""When a memory that is written in chunks reads and writes, whatever way its stream is cut into calls.

A stream is cut into chunks of C tokens, counted from its first. All tokens of a chunk read the memory as it was at the
chunk's start. A full chunk waits: it is written when the next token arrives, and before that token is read, since the
next token is the target of the chunk's last one. So what is read and written depends on the stream alone, not on the
calls that brought it, and a token is never a target before it is there.

Rows are streams of their own, each at its own place in its chunk: rows of a padded batch count their real tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One round of writing, then reading.

    Attributes:
        flush: of each row, whether its waiting tokens are written first.
        start, stop: of each row, the range of its new tokens that is read then (empty: start = stop).
    """

    flush: tuple[bool, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def width(self) -> int:
        """The longest range."""
        return max(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def uniform(self) -> bool:
        """Whether all rows do the same."""
        return len(set(zip(self.flush, self.start, self.stop, strict=True))) == 1


def schedule(pending: Sequence[int], new: Sequence[int], chunk: int) -> list[Step]:
    """The rounds of one call.

    Args:
        pending: of each row, how many tokens wait, that were read and not yet written. More than `chunk` of them are
            written at once (a chunk size may shrink between calls).
        new: of each row, how many tokens come now.
        chunk: C.

    Returns:
        As many rounds as the row with the most chunks needs; none where no row has a new token. A row without tokens
        left reads and writes nothing.
    """
    waiting, read = list(pending), [0] * len(new)
    steps = []
    while any(at < count for at, count in zip(read, new, strict=True)):
        flush, start = [], tuple(read)
        for row, count in enumerate(new):
            left = count - read[row]
            flush.append(left > 0 and waiting[row] >= chunk)
            if flush[row]:
                waiting[row] = 0
            taken = min(left, chunk - waiting[row]) if left > 0 else 0
            read[row] += taken
            waiting[row] += taken
        steps.append(Step(tuple(flush), start, tuple(read)))
    return steps
