"""Compact attention, forward, for rules that rank keys below the best one (adaptive, anchored): first the search, which
finds every row's threshold and marks the key blocks that can have weight, then the output from those.

A program serves a block of queries of one head. The first pass of the search makes the largest score of every row and
marks the key blocks that come near enough to it; each later pass visits the blocks still marked, and marks again.
Newton's method (`grammar.threshold`) starts from the threshold of a few keys of each row, the best of those in every
KEYS-th place: fewer keys have a lower threshold, so that the descent of the peak stays monotone, and most of it needs
no further pass. A row that has converged is left alone, whatever others of its block still do.

Legend: R = ROWS queries of a program, K = KEYS keys of a block; e excess; marks: uint8 [granules of rows, key blocks]
of one head, the number of the pass that made them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .compact_math import (
    ADAPTIVE,
    ANCHORED,
    block_of_rows,
    cube_root,
    edge_block,
    excess,
    factors,
    key_blocks,
    key_scores,
    load_block,
    load_rows,
    lower_power,
    own_rows,
    power,
    row_number,
    seen,
    store_row,
)

STEPS = tl.constexpr(24)  # passes at most, each marking with its number
START = tl.constexpr(5)  # steps of the search among a few keys
CHUNK = tl.constexpr(256)  # marks that are looked at in one go
FINEST = tl.constexpr(2.0**-20)
BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def marks_of(marks_ptr, head, row_block, queries, blocks, GRANULE: tl.constexpr, GRANULES: tl.constexpr):
    """(the first mark of these rows, how many granules of rows they have)."""
    most = (queries + GRANULE - 1) // GRANULE
    at = marks_ptr + (head.to(tl.int64) * most + row_block * GRANULES) * blocks
    return at, tl.minimum(most - row_block * GRANULES, GRANULES)


@triton.jit
def collect(marks_at, list_at, blocks, granules, first, full, partial, last, mark, GRANULES: tl.constexpr):
    """List the blocks that have this mark: (how many lie in [full, partial), at the front of the list; how many
    outside, at its back)."""
    tl.debug_barrier()  # other threads made the marks
    inner = 0
    outer = 0
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        hit = tl.load(marks_at + block, mask=block < last, other=0) == mark
        for i in tl.static_range(1, GRANULES):
            inside = block < tl.where(granules > i, last, first)
            hit = hit | (tl.load(marks_at + i * blocks.to(tl.int64) + block, mask=inside, other=0) == mark)
        whole = (block >= full) & (block < partial)
        a = (hit & whole).to(tl.int32)
        b = (hit & (block < last)).to(tl.int32) - a
        tl.store(list_at + inner + tl.cumsum(a, 0) - 1, block, mask=a > 0)
        tl.store(list_at + blocks - outer - tl.cumsum(b, 0), block, mask=b > 0)
        inner += tl.sum(a, 0)
        outer += tl.sum(b, 0)
    tl.debug_barrier()
    return inner, outer


@triton.jit
def leave(marks_at, blocks, granules, first, last, mark, GRANULES: tl.constexpr):
    """Put 1 where this mark is, and 0 elsewhere."""
    tl.debug_barrier()
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        for i in tl.static_range(GRANULES):
            at = marks_at + i * blocks.to(tl.int64) + block
            inside = block < tl.where(granules > i, last, first)
            tl.store(at, (tl.load(at, mask=inside, other=0) == mark).to(tl.uint8), mask=inside)


@triton.jit
def descend(peak, total, lower, R: tl.constexpr):
    """One step of Newton's method on the R-norm of e / R, from total = sum e^R and lower = sum e^(R - 1)."""
    some = total > 0
    total = tl.where(some, total, 1.0)
    lower = tl.where(some, lower, 1.0)
    if R == 1:
        step = (total - 1) / lower
    elif R == 2:
        norm = tl.sqrt(total) * 0.5
        step = (norm - 1) * norm / (lower * 0.5)
    else:
        norm = cube_root(total) * (1.0 / 3.0)
        step = (norm - 1) * norm * norm / (lower * (1.0 / 9.0))
    return tl.where(some, peak - step, peak)


@triton.jit
def first_peak(tops, best, factor, R: tl.constexpr):
    """The peak of a few keys of each row, whose q.k are `tops` [R, K] with the largest, `best`, among them."""
    d = (tops - best[:, None]) * factor[:, None]
    peak = tl.full(best.shape, 1.0, tl.float32)
    for _ in range(START):
        e = tl.maximum(d + R * peak[:, None], 0.0)
        new = descend(peak, tl.sum(power(e, R), 1), tl.sum(lower_power(e, R), 1), R)
        peak = tl.where(new < peak, new, peak)
    return peak


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_search_kernel(
    q_ptr, k_ptr, factor_ptr, given_ptr, low_ptr, high_ptr, mask_ptr, floats_ptr, flags_ptr, marks_ptr, list_ptr,
    scale, number, tolerance, heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row,
    range_batch, mask_batch, mask_head, RULE: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr,
    MASK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    GRANULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Top, theta, reach and status of the rows, and marks: 1 where a block can have weight."""
    GRANULES: tl.constexpr = ROWS // GRANULE
    blocks = (keys + KEYS - 1) // KEYS
    head, row_block, batch, own = block_of_rows(queries, heads, ROWS)
    rows, real = own_rows(row_block, queries, ROWS)
    flat = head.to(tl.int64) * queries + rows
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    factor, by = factors(factor_ptr, flat, scale, ROWS, FACTOR)
    q = load_rows(q_ptr + batch * q_batch + own * q_head, rows, q_row, DIM, WIDTH)
    k_at = k_ptr + batch * k_batch + own // group * k_head
    mask_at = mask_ptr + batch * mask_batch + own * mask_head
    marks_at, granules = marks_of(marks_ptr, head, row_block, queries, blocks, GRANULE, GRANULES)
    row_marks = marks_at + (tl.arange(0, ROWS) // GRANULE).to(tl.int64) * blocks
    first, full, partial, last = key_blocks(low, high, MASK, KEYS)

    best = tl.full((ROWS,), -float("inf"), tl.float32)
    tops = tl.full((ROWS, KEYS), -float("inf"), tl.float32)
    within = row_number(given_ptr, flat, number, ROWS, GIVEN)  # a key further below the best has no weight
    if RULE == ADAPTIVE:
        within = within * 0 + R
    for side in tl.static_range(2):
        for t in range((full - first + last - partial) if side == 0 else (partial - full)):
            block = edge_block(t, first, full, partial, last) if side == 0 else partial - 1 - t
            dot, columns = key_scores(q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, side == 0, WIDE)
            if side == 0:
                dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
            if RULE == ADAPTIVE:
                tops = tl.maximum(tops, dot)
            here = tl.max(dot, 1)
            best = tl.maximum(best, here)
            near = tl.maximum(within, tl.abs(best * by) * FINEST)
            tl.store(row_marks + block, 1, mask=real & (here * by > best * by - near))
    empty = best == -float("inf")
    best = tl.where(empty, 0.0, best)
    top = best * by
    finest = tl.abs(top) * FINEST  # below it rounding alone says which keys are near enough
    reach = tl.maximum(within, finest)
    status = tl.zeros((ROWS,), tl.int32)

    if RULE == ADAPTIVE:
        list_at = list_ptr + (head.to(tl.int64) * ((queries + ROWS - 1) // ROWS) + row_block) * blocks
        inner, outer = collect(marks_at, list_at, blocks, granules, first, full, partial, last, 1, GRANULES)
        least = finest * (1.0 / R)
        peak = tl.maximum(first_peak(tops, best, by, R), least)
        active = real & (empty == 0) & (least < 1)  # beyond, rounding alone sets the peak
        step = 0
        while (tl.max(active.to(tl.int32), 0) > 0) & (step < STEPS):
            theta = top - R * peak
            total = tl.zeros((ROWS,), tl.float32)
            lower = tl.zeros((ROWS,), tl.float32)
            for side in tl.static_range(2):
                for t in range(outer if side == 0 else inner):
                    block = tl.load(list_at + ((blocks - 1 - t) if side == 0 else t))
                    dot, columns = key_scores(
                        q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, side == 0, WIDE
                    )
                    e = excess(dot, by[:, None], theta[:, None])
                    if side == 0:
                        e = tl.where(seen(columns, low, high, mask_at, keys, MASK), e, 0.0)
                    part = tl.sum(lower_power(e, R), 1)
                    lower += part
                    total += tl.sum(power(e, R), 1)
                    tl.store(row_marks + block, step + 2, mask=real & (part > 0))
            new = tl.maximum(descend(peak, total, lower, R), least)
            moved = active & (new < peak)
            active = moved & (peak - new > tolerance * new)
            peak = tl.where(moved, new, peak)
            step += 1
            inner, outer = collect(marks_at, list_at, blocks, granules, first, full, partial, last, step + 1, GRANULES)
        reach = R * peak
        status = active.to(tl.int32)
        leave(marks_at, blocks, granules, first, last, step + 1, GRANULES)

    reach = tl.where(empty, 1.0, reach)
    one = tl.full((ROWS,), 1.0, tl.float32)
    store_row(
        floats_ptr, flags_ptr, flat, real, top, top - reach, reach, one, one * 0, one * 0, empty, empty & False, status
    )


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_weigh_kernel(
    q_ptr, k_ptr, v_ptr, factor_ptr, low_ptr, high_ptr, mask_ptr, floats_ptr, flags_ptr, marks_ptr, list_ptr,
    out_ptr, index_ptr, tilt_ptr, scale, heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, range_batch, mask_batch, mask_head, RULE: tl.constexpr, R: tl.constexpr,
    FACTOR: tl.constexpr, MASK: tl.constexpr, KEEP: tl.constexpr, COUNTED: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    GRANULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The output, the mass of the rows, and for a backward pass tilt or index. Of marks that are 1 those of blocks that
    have weight become 2, where the rule is anchored: its marks were made before the best scores were known."""
    GRANULES: tl.constexpr = ROWS // GRANULE
    TILT: tl.constexpr = KEEP and RULE == ADAPTIVE
    TIES: tl.constexpr = KEEP and RULE == ANCHORED
    blocks = (keys + KEYS - 1) // KEYS
    head, row_block, batch, own = block_of_rows(queries, heads, ROWS)
    rows, real = own_rows(row_block, queries, ROWS)
    flat = head.to(tl.int64) * queries + rows
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    factor, by = factors(factor_ptr, flat, scale, ROWS, FACTOR)
    q = load_rows(q_ptr + batch * q_batch + own * q_head, rows, q_row, DIM, WIDTH)
    k_at = k_ptr + batch * k_batch + own // group * k_head
    v_at = v_ptr + batch * v_batch + own // group * v_head
    mask_at = mask_ptr + batch * mask_batch + own * mask_head
    marks_at, granules = marks_of(marks_ptr, head, row_block, queries, blocks, GRANULE, GRANULES)
    row_marks = marks_at + (tl.arange(0, ROWS) // GRANULE).to(tl.int64) * blocks
    first, full, partial, last = key_blocks(low, high, MASK, KEYS)
    list_at = list_ptr + (head.to(tl.int64) * ((queries + ROWS - 1) // ROWS) + row_block) * blocks
    inner, outer = collect(marks_at, list_at, blocks, granules, first, full, partial, last, 1, GRANULES)
    theta = tl.load(floats_ptr + flat * 6 + 1)
    g = 1.0 / tl.load(floats_ptr + flat * 6 + 2)

    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    if TILT:
        tilt = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
        tilt_mass = tl.zeros((ROWS,), tl.float32)
    if TIES:
        top = tl.load(floats_ptr + flat * 6)
        nearly = top - tl.abs(top) * (FINEST * 0.25)
        first_tie = tl.full((ROWS,), BEYOND, tl.int32)
        last_tie = tl.full((ROWS,), -1, tl.int32)
        ties = tl.zeros((ROWS,), tl.int32)
    support = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for side in tl.static_range(2):
        for t in range(outer if side == 0 else inner):
            block = tl.load(list_at + ((blocks - 1 - t) if side == 0 else t))
            dot, columns = key_scores(q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, side == 0, WIDE)
            e = excess(dot, by[:, None], theta[:, None])
            if side == 0:
                e = tl.where(seen(columns, low, high, mask_at, keys, MASK), e, 0.0)
            u = e * g[:, None]
            v = load_block(v_at, block, v_row, keys, VALUES, VALUE_WIDTH, KEYS, side == 0, WIDE)
            p = power(u, R).to(v.dtype)
            w = p.to(tl.float32)  # summed as they are applied, so that they sum to one
            acc = tl.dot(p, v, acc, input_precision="ieee")
            part = tl.sum(w, 1)
            mass += part
            if TILT:
                b = lower_power(u, R).to(v.dtype)
                tilt = tl.dot(b, v, tilt, input_precision="ieee")
                tilt_mass += tl.sum(b.to(tl.float32), 1)
            if TIES:
                tl.store(row_marks + block, 2, mask=real & (part > 0))
                tie = (e > 0) & (dot * by[:, None] >= nearly[:, None])
                ties += tl.sum(tie.to(tl.int32), 1)
                first_tie = tl.minimum(first_tie, tl.min(tl.where(tie, columns[None, :], BEYOND), 1))
                last_tie = tl.maximum(last_tie, tl.max(tl.where(tie, columns[None, :], -1), 1))
            if COUNTED:
                support += tl.sum(tl.where(w > 0, 1.0, 0.0), 1)
                square += tl.sum(w * w, 1)

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    columns = tl.arange(0, VALUE_WIDTH)
    stored = real[:, None] & (columns < VALUES)[None, :]
    place = flat[:, None] * VALUES + columns[None, :]
    tl.store(out_ptr + place, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    if COUNTED:
        tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
        tl.store(floats_ptr + flat * 6 + 5, tl.where(some, mass * mass / tl.where(some, square, 1.0), 0.0), mask=real)
    if TILT:
        tl.store(tilt_ptr + place, tilt / tl.where(tilt_mass > 0, tilt_mass, 1.0)[:, None], mask=stored)
    if TIES:
        tl.store(index_ptr + flat * 3, tl.where(ties > 0, first_tie, 0), mask=real)
        tl.store(index_ptr + flat * 3 + 1, tl.where(ties > 0, last_tie, 0), mask=real)
        tl.store(index_ptr + flat * 3 + 2, ties, mask=real)
        leave(marks_at, blocks, granules, first, last, 2, GRANULES)
