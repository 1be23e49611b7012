"""The rounds of chunked memories against a stream that is followed token by token."""

from __future__ import annotations

import random

from regard.memory.stream import schedule


def followed(pending, new, chunk):
    """[(flushed before it, chunk fill when it is read)] for each new token of one row."""
    seen = []
    for _ in range(new):
        flush = pending >= chunk
        pending = 0 if flush else pending
        seen.append((flush, pending))
        pending += 1
    return seen, pending


def test_every_partition_reads_and_writes_what_the_stream_does():
    draw = random.Random(0)
    for _ in range(300):
        chunk = draw.randint(1, 6)
        pending = [draw.randint(0, chunk + 2) for _ in range(3)]
        new = [draw.randint(0, 20) for _ in range(3)]
        steps = schedule(pending, new, chunk)
        for row in range(3):
            want, _ = followed(pending[row], new[row], chunk)
            got, fill = [], pending[row]
            for step in steps:
                fill = 0 if step.flush[row] else fill
                for place in range(step.start[row], step.stop[row]):
                    assert place == len(got)  # in order, none left out
                    got.append((step.flush[row] and place == step.start[row], fill))
                    fill += 1
            assert got == want
            assert not any(s.flush[row] for s in steps if s.start[row] == s.stop[row])  # nobody writes for no token


def test_uniform_rows_take_no_more_rounds_than_one():
    assert len(schedule([0, 0], [8, 8], 4)) == 2
    assert all(step.uniform for step in schedule([3, 3], [9, 9], 4))
    assert not schedule([0, 5], [3, 9], 4)[0].uniform
    assert schedule([2], [0], 4) == []
    assert max(step.width for step in schedule([1, 3], [9, 2], 4)) == 4
