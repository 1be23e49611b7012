"""Helpers of tests with several documents in one row."""

from __future__ import annotations

import torch


def documents(ids):
    """(row, slice) of every run of equal ids [B, T]."""
    for row, line in enumerate(ids.tolist()):
        edges = [0, *(t for t in range(1, len(line)) if line[t] != line[t - 1]), len(line)]
        yield from ((row, slice(a, b)) for a, b in zip(edges[:-1], edges[1:], strict=True))


def restarting(ids):
    """Positions [B, T] that begin again with every run of equal ids."""
    positions = torch.zeros_like(ids)
    for row, span in documents(ids):
        positions[row, span] = torch.arange(span.stop - span.start)
    return positions
