"""Gradients of compact attention and softmax: one kernel by blocks of queries, one by blocks of keys, no atomics.

With u = [z - theta]_+ and g = mass^(-1/r) / reach of a row, its weights are p = (u g)^r and their slope by z is
A = r g (u g)^(r-1); for softmax A = p. Given G = dL/dp and rho = sum_j B_j G_j (grammar/weighting.py),

    dL/dz_j = A_j (G_j - rho),    dL/d(margin or bias) = sum_j dL/dz_j,

and keys that tie for the best take that sum away again, in equal shares, where the threshold hangs on the best. Weights
are computed again from the row statistics; blocks without weight are not visited: lists of the others are made from
what the forward pass marked, for blocks of queries and for blocks of keys. The kernel by queries runs first and leaves
theta, g, rho and the shares of the best keys in tables that the kernel by keys reads in order.

Legend: B batch, H heads, Hkv key heads, Tq queries, Tk keys, D and Dv dimensions; a block streams past an own one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .span import Span, batch_stride
from .tiles import Tiles, TileTable

SOFTMAX, ADAPTIVE, ANCHORED, FIXED = (tl.constexpr(i) for i in range(4))
UNIFORM, ZERO, NEAREST = (tl.constexpr(i) for i in range(3))
LOG2E = tl.constexpr(1.4426950408889634)
NEAR = tl.constexpr(2.0**-19)  # as far from the best score, relative to it, as rounding may have moved another best

DQ = TileTable(
    "compact_dq",
    {
        (64, 2): Tiles(64, 64, 4, 3),
        (128, 2): Tiles(64, 64, 4, 2),
        (256, 2): Tiles(64, 64, 8, 1),
        (64, 4): Tiles(32, 32, 4, 1),
        (256, 4): Tiles(16, 16, 4, 1),
    },
)
DKV = TileTable(
    "compact_dkv",
    {
        (64, 2): Tiles(64, 64, 4, 3),
        (128, 2): Tiles(64, 64, 8, 2),
        (256, 2): Tiles(32, 64, 8, 1),
        (64, 4): Tiles(32, 32, 4, 1),
        (256, 4): Tiles(16, 16, 4, 1),
    },
)
CHUNK = 256
"""Blocks that the maker of a list looks at in one go."""


@triton.jit
def _reach(ends, start, size, total, streamed, TILE: tl.constexpr):
    """Of the blocks of TILE that stream past owners [start, start + size): (first to meet, first that all owners see
    whole, end of those, end of all)."""
    low, high = ends
    final = tl.minimum(start + size, total) - 1
    first = tl.load(low + start) // TILE
    finish = tl.maximum(first, tl.cdiv(tl.load(high + final), TILE))
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.load(low + final), TILE), first), finish)
    ended = tl.minimum(tl.maximum(tl.load(high + start) // TILE, whole), finish)
    return first, whole, ended, finish


@triton.jit
def compact_lists_kernel(
    live, listed, counts, low, high, span_stride, heads, owners, streamed, granules, blocks, steps,
    OWNER: tl.constexpr, MERGED: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Numbers of the live blocks past each MERGED granules of OWNER owners: those that need no mask from the front of
    the row, the others from its back; counts of both."""
    groups = tl.cdiv(granules, MERGED)
    group = tl.program_id(0) % groups
    head = (tl.program_id(0) // groups).to(tl.int64)
    ends = (low + head // heads * span_stride, high + head // heads * span_stride)
    _, whole_from, whole_to, _ = _reach(ends, group * MERGED * OWNER, MERGED * OWNER, owners, streamed, TILE)
    live += head * granules * blocks
    listed += (head * groups + group) * blocks
    whole, part = 0, 0
    for at in range(0, blocks, CHUNK):
        block = at + tl.arange(0, CHUNK)
        lives = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(MERGED):
            granule = group * MERGED + i
            inside = (block < blocks) & (granule < granules)
            lives |= tl.load(live + granule * steps[0] + block * steps[1], mask=inside, other=0).to(tl.int32)
        full = (lives != 0) & (block >= whole_from) & (block < whole_to)
        if MASKED:
            full = full & False
        rest = (lives != 0) & ~full
        tl.store(listed + whole + tl.cumsum(full.to(tl.int32), 0) - 1, block, mask=full)
        tl.store(listed + blocks - part - tl.cumsum(rest.to(tl.int32), 0), block, mask=rest)
        whole += tl.sum(full.to(tl.int32), 0)
        part += tl.sum(rest.to(tl.int32), 0)
    counts += (head * groups + group) * 2
    tl.store(counts, whole)
    tl.store(counts + 1, part)


@triton.jit
def _plan(lists, ends, head, start, owners, streamed, OWN, TILE, LISTED, SPLIT, MASKED, RULE):
    """What streams past one block of owners: (where its list is, how many blocks without mask, with mask, and three
    numbers that say which). Of softmax all that is visible, by its range; else the blocks of a list of granules of SPLIT
    blocks, made for LISTED owners."""
    listed, counts, groups, blocks = lists
    if RULE == SOFTMAX:
        first, whole, ended, finish = _reach(ends, start, OWN, owners, streamed, TILE)
        if MASKED:
            ended = whole
        return listed, ended - whole, finish - first - (ended - whole), first, whole, ended
    own = head * groups + start // LISTED
    return (
        listed + own * blocks,
        tl.load(counts + own * 2) * SPLIT,
        tl.load(counts + own * 2 + 1) * SPLIT,
        blocks - 1,
        0,
        0,
    )


@triton.jit
def _block(plan, t, PART: tl.constexpr, SPLIT: tl.constexpr, RULE: tl.constexpr):
    """The number of the t-th block without mask, or (PART) of the t-th with one."""
    listed, _, _, first, whole, ended = plan
    if RULE == SOFTMAX:
        if PART:
            return tl.where(t < whole - first, first + t, ended - (whole - first) + t)
        return whole + t
    if PART:
        return tl.load(listed + first - t // SPLIT).to(tl.int32) * SPLIT + t % SPLIT
    return tl.load(listed + t // SPLIT).to(tl.int32) * SPLIT + t % SPLIT


@triton.jit
def _weights(dot, c, theta, g, seen, HIDE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr):
    """(weights, slopes / r) of a tile of dot products; 0 where HIDE and not seen."""
    excess = tl.fma(dot, c, -theta)
    if RULE == SOFTMAX:
        if HIDE:
            excess = tl.where(seen, excess, float("-inf"))
        p = tl.exp2(excess)
        return p, p
    excess = tl.maximum(excess, 0.0)
    if HIDE:
        excess = tl.where(seen, excess, 0.0)
    a = excess * g
    if R == 1:
        return a, tl.where(excess > 0, g, 0.0)
    if R == 2:
        return a * a, a * g
    return a * a * a, a * a * g


@triton.jit
def _tile(at, rows, features, total, DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Rows [at, at + len(rows)) of a matrix (base, step); 0 beyond DIM and, unless WHOLE, beyond `total`."""
    base, step = at[0], at[1]
    where = base + rows[:, None] * step + features[None, :]
    if WHOLE and DIM == features.shape[0]:
        return tl.load(where)
    if WHOLE:
        return tl.load(where, mask=(features < DIM)[None, :], other=0.0)
    inside = (rows < total)[:, None]
    if DIM != features.shape[0]:
        inside = inside & (features < DIM)[None, :]
    return tl.load(where, mask=inside, other=0.0)
