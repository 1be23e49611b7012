"""Compact attention, forward: one program for a block of queries of one head, which takes its key blocks in turn.

Rules that rank keys below the best one (adaptive, anchored) `search`: the first pass makes the largest score of every row
and marks the key blocks that come near enough to it; each later pass visits the blocks still marked, and marks again. The
others, softmax and a fixed threshold, `stream`: one pass, rescaled as better keys turn up.

Newton's method for the adaptive threshold (`grammar.threshold`) starts from the threshold of a few keys of each row, the
best of those in every KEYS-th place: fewer keys have a lower threshold, so that the descent of the peak stays monotone,
and most of it needs no further pass. A row that has converged is left alone, whatever others of its block still do.

Legend: R = ROWS queries of a program, K = KEYS keys of a block; e excess, g 1 / reach; marks, live: [granules of rows, key
blocks] of one head. A mark is the number of the pass that made it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import compact
from .compact_math import (
    ADAPTIVE,
    ANCHORED,
    LOG2E,
    NEAREST,
    SOFTMAX,
    UNIFORM,
    cube_root,
    excess,
    key_blocks,
    load_block,
    lower_power,
    power,
    seen,
)
from .launch import launch
from .span import Span, batch_stride
from .tiles import Tiles

STEPS = tl.constexpr(24)
START = tl.constexpr(5)
OUTPUT = tl.constexpr(255)  # the mark of the output pass
CHUNK = tl.constexpr(256)
FINEST = tl.constexpr(2.0**-20)
import os
PV = tl.constexpr(os.environ.get("PV","ieee"))
SMALLEST = tl.constexpr(2.0**-100)
BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def scores(q, k_at, block, stride, keys, DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, EDGE: tl.constexpr):
    """(q.k of a key block [R, K], the numbers of its keys)."""
    columns = block * KEYS + tl.arange(0, KEYS)
    k = load_block(k_at, columns, stride, keys, DIM, WIDTH, EDGE)
    return tl.dot(q, tl.trans(k), input_precision="tf32x3"), columns


@triton.jit
def edge_block(t, first, full, partial, last):
    """The t-th of the blocks [partial, last) from the last, then [first, full): those near the diagonal hold high scores,
    and the sooner these are seen, the fewer blocks look near enough to the best."""
    return tl.where(t < last - partial, last - 1 - t, first + t - (last - partial))


@triton.jit
def collect(
    marks_at, list_at, blocks, granules, first, full, partial, last, mark, GRANULES: tl.constexpr
):
    """List the blocks that have this mark: (how many lie in [full, partial), from the front of the list; how many
    outside, from its back)."""
    tl.debug_barrier()  # other threads made the marks
    inner = 0
    outer = 0
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        inside = block < last
        hit = tl.load(marks_at + block, mask=inside, other=0) == mark
        for g in tl.static_range(1, GRANULES):
            more = tl.load(marks_at + g * blocks.to(tl.int64) + block, mask=inside & (g < granules), other=0)
            hit = hit | (more == mark)
        within = (block >= full) & (block < partial)
        a = (hit & within).to(tl.int32)
        b = (hit & (block < last) & ((block < full) | (block >= partial))).to(tl.int32)
        tl.store(list_at + inner + tl.cumsum(a, 0) - 1, block, mask=a > 0)
        tl.store(list_at + blocks - outer - tl.cumsum(b, 0), block, mask=b > 0)
        inner += tl.sum(a, 0)
        outer += tl.sum(b, 0)
    tl.debug_barrier()
    return inner, outer


@triton.jit
def descend(peak, total, lower, R: tl.constexpr):
    """One step of Newton's method on the R-norm of e / R, from total = sum e^R and lower = sum e^(R - 1)."""
    if R == 1:
        norm = total
        slope = lower
    elif R == 2:
        norm = tl.sqrt(total) * 0.5
        slope = lower * 0.5 / norm
    else:
        norm = cube_root(total) * (1.0 / 3.0)
        slope = lower * (1.0 / 9.0) / (norm * norm)
    return tl.where(total > 0, peak - (norm - 1) / slope, peak)


@triton.jit
def first_peak(tops, best, factor, R: tl.constexpr):
    """The peak of a few keys of each row, whose q.k are `tops` [R, K] with the largest, `best`, among them."""
    z = tops * factor[:, None]
    top = best * factor
    peak = tl.full(best.shape, 1.0, tl.float32)
    for _ in range(START):
        e = tl.maximum(z - (top - R * peak)[:, None], 0.0)
        new = descend(peak, tl.sum(power(e, R), 1), tl.sum(lower_power(e, R), 1), R)
        peak = tl.where(new < peak, new, peak)  # false for the NaN of a row without a key
    return peak


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def search(
    q_ptr, k_ptr, v_ptr, factor_ptr, given_ptr, low_ptr, high_ptr, mask_ptr,
    out_ptr, floats_ptr, flags_ptr, index_ptr, tilt_ptr, marks_ptr, list_ptr,
    scale, number, tolerance, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, range_batch, mask_batch, mask_head,
    RULE: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr, MASK: tl.constexpr,
    KEEP: tl.constexpr, COUNTED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GRANULE: tl.constexpr,
):  # fmt: skip
    GRANULES: tl.constexpr = ROWS // GRANULE
    row_blocks = (queries + ROWS - 1) // ROWS
    blocks = (keys + KEYS - 1) // KEYS
    head = tl.program_id(0) // row_blocks  # of all batches
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks  # where order is causal, the longest begin
    batch = (head // heads).to(tl.int64)
    own = (head % heads).to(tl.int64)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    real = rows < queries
    rows = tl.minimum(rows, queries - 1)  # rows beyond the last repeat it, and are not stored
    flat = head.to(tl.int64) * queries + rows
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    factor = tl.load(factor_ptr + flat) if FACTOR else tl.full((ROWS,), 1.0, tl.float32) * scale
    margin = tl.load(given_ptr + flat) if GIVEN else tl.full((ROWS,), 1.0, tl.float32) * number
    q = load_block(q_ptr + batch * q_batch + own * q_head, rows, q_row, queries, DIM, WIDTH, False)
    k_at = k_ptr + batch * k_batch + own // group * k_head
    v_at = v_ptr + batch * v_batch + own // group * v_head
    mask_at = mask_ptr + batch * mask_batch + own * mask_head
    most = ((queries + GRANULE - 1) // GRANULE).to(tl.int64)
    granules = tl.minimum(most - row_block * GRANULES, GRANULES)
    marks_at = marks_ptr + (head * most + row_block * GRANULES) * blocks
    row_marks = marks_at + (tl.arange(0, ROWS) // GRANULE).to(tl.int64) * blocks
    list_at = list_ptr + (head.to(tl.int64) * row_blocks + row_block) * blocks
    first, full, partial, last = key_blocks(low, high, MASK, KEYS)

    # First pass: the largest score of each row.
    best = tl.full((ROWS,), -float("inf"), tl.float32)
    tops = tl.full((ROWS, KEYS), -float("inf"), tl.float32)
    within = tl.full((ROWS,), 1.0, tl.float32) * R if RULE == ADAPTIVE else margin
    for side in tl.static_range(2):
        for t in range((full - first + last - partial) if side == 0 else (partial - full)):
            block = edge_block(t, first, full, partial, last) if side == 0 else partial - 1 - t
            dot, columns = scores(q, k_at, block, k_row, keys, DIM, WIDTH, KEYS, side == 0)
            if side == 0:
                dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
            if RULE == ADAPTIVE:
                tops = tl.maximum(tops, dot)
            here = tl.max(dot, 1)
            best = tl.maximum(best, here)
            tl.store(row_marks + block, 1, mask=real & (here * factor > best * factor - within))
    empty = best == -float("inf")
    top = tl.where(empty, 0.0, best * factor)
    finest = tl.abs(top) * FINEST  # below it rounding alone says which keys are near enough
    inner, outer = collect(marks_at, list_at, blocks, granules, first, full, partial, last, 1, GRANULES)

    # Threshold passes.
    reach = tl.maximum(margin, finest)
    status = tl.zeros((ROWS,), tl.int32)
    if RULE == ADAPTIVE:
        peak = first_peak(tops, best, factor, R)
        active = real & (best > -float("inf"))
        step = 0
        while (tl.max(active.to(tl.int32), 0) > 0) & (step < STEPS):
            theta = top - tl.maximum(R * peak, finest)
            total = tl.zeros((ROWS,), tl.float32)
            lower = tl.zeros((ROWS,), tl.float32)
            for side in tl.static_range(2):
                for t in range(outer if side == 0 else inner):
                    block = tl.load(list_at + ((blocks - 1 - t) if side == 0 else t))
                    dot, columns = scores(q, k_at, block, k_row, keys, DIM, WIDTH, KEYS, side == 0)
                    e = excess(dot, factor[:, None], theta[:, None])
                    if side == 0:
                        e = tl.where(seen(columns, low, high, mask_at, keys, MASK), e, 0.0)
                    part = tl.sum(lower_power(e, R), 1)
                    lower += part
                    total += tl.sum(power(e, R), 1)
                    tl.store(row_marks + block, step + 2, mask=real & (part > 0))
            new = descend(peak, total, lower, R)
            moved = active & (new < peak)
            active = moved & (peak - new > tolerance * new)
            peak = tl.where(moved, new, peak)
            step += 1
            inner, outer = collect(
                marks_at, list_at, blocks, granules, first, full, partial, last, step + 1, GRANULES
            )
        reach = tl.maximum(R * peak, finest)
        status = active.to(tl.int32)

    # Output pass.
    reach = tl.where(empty, 1.0, reach)
    theta = top - reach
    g = 1.0 / reach
    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    if KEEP and RULE == ADAPTIVE:
        tilt = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
        tilt_mass = tl.zeros((ROWS,), tl.float32)
    if KEEP and RULE == ANCHORED:
        least_top = best - tl.abs(best) * (FINEST * 0.25)
        first_tie = tl.full((ROWS,), BEYOND, tl.int32)
        last_tie = tl.full((ROWS,), -1, tl.int32)
        ties = tl.zeros((ROWS,), tl.int32)
    if COUNTED:
        support = tl.zeros((ROWS,), tl.float32)
        square = tl.zeros((ROWS,), tl.float32)
    for side in tl.static_range(2):
        for t in range(outer if side == 0 else inner):
            block = tl.load(list_at + ((blocks - 1 - t) if side == 0 else t))
            dot, columns = scores(q, k_at, block, k_row, keys, DIM, WIDTH, KEYS, side == 0)
            e = excess(dot, factor[:, None], theta[:, None])
            if side == 0:
                e = tl.where(seen(columns, low, high, mask_at, keys, MASK), e, 0.0)
            u = e * g[:, None]
            v = load_block(v_at, columns, v_row, keys, VALUES, VALUE_WIDTH, side == 0)
            p = power(u, R).to(v.dtype)
            w = p.to(tl.float32)  # summed as they are applied, so that they sum to one
            acc = tl.dot(p, v, acc, input_precision=PV)
            part = tl.sum(w, 1)
            mass += part
            if KEEP:
                tl.store(row_marks + block, OUTPUT, mask=real & (part > 0))
            if KEEP and RULE == ADAPTIVE:
                b = lower_power(u, R).to(v.dtype)
                tilt = tl.dot(b, v, tilt, input_precision=PV)
                tilt_mass += tl.sum(b.to(tl.float32), 1)
            if KEEP and RULE == ANCHORED:
                tie = (e > 0) & (dot >= least_top[:, None])
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
    if KEEP and RULE == ADAPTIVE:
        tl.store(tilt_ptr + place, tilt / tl.where(tilt_mass > 0, tilt_mass, 1.0)[:, None], mask=stored)
    if KEEP and RULE == ANCHORED:
        tl.store(index_ptr + flat * 3, tl.where(ties > 0, first_tie, 0), mask=real)
        tl.store(index_ptr + flat * 3 + 1, tl.where(ties > 0, last_tie, 0), mask=real)
        tl.store(index_ptr + flat * 3 + 2, ties, mask=real)
    tl.store(floats_ptr + flat * 6, top, mask=real)
    tl.store(floats_ptr + flat * 6 + 1, theta, mask=real)
    tl.store(floats_ptr + flat * 6 + 2, reach, mask=real)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    zero = tl.zeros((ROWS,), tl.float32)
    tl.store(floats_ptr + flat * 6 + 4, support if COUNTED else zero, mask=real)
    tl.store(floats_ptr + flat * 6 + 5, (mass * mass / tl.where(some, square, 1.0)) if COUNTED else zero, mask=real)
    tl.store(flags_ptr + flat * 3, empty.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 1, tl.zeros((ROWS,), tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 2, status, mask=real)
    if KEEP:
        tl.debug_barrier()
        for start in range(0, blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            for i in tl.static_range(GRANULES):
                at = marks_at + i * blocks.to(tl.int64) + block
                inside = (block < blocks) & (i < granules)
                mark = tl.load(at, mask=inside, other=0)
                tl.store(at, (mark == OUTPUT).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def stream(
    q_ptr, k_ptr, v_ptr, factor_ptr, given_ptr, low_ptr, high_ptr, mask_ptr,
    out_ptr, floats_ptr, flags_ptr, index_ptr, marks_ptr,
    scale, number, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, range_batch, mask_batch, mask_head,
    RULE: tl.constexpr, R: tl.constexpr, STAND: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr,
    MASK: tl.constexpr, KEEP: tl.constexpr, COUNTED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GRANULE: tl.constexpr,
):  # fmt: skip
    row_blocks = (queries + ROWS - 1) // ROWS
    blocks = (keys + KEYS - 1) // KEYS
    head = tl.program_id(0) // row_blocks  # of all batches
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    batch = (head // heads).to(tl.int64)
    own = (head % heads).to(tl.int64)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    real = rows < queries
    rows = tl.minimum(rows, queries - 1)
    flat = head.to(tl.int64) * queries + rows
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    factor = tl.load(factor_ptr + flat) if FACTOR else tl.full((ROWS,), 1.0, tl.float32) * scale
    q = load_block(q_ptr + batch * q_batch + own * q_head, rows, q_row, queries, DIM, WIDTH, False)
    k_at = k_ptr + batch * k_batch + own // group * k_head
    v_at = v_ptr + batch * v_batch + own // group * v_head
    mask_at = mask_ptr + batch * mask_batch + own * mask_head
    most = (queries + GRANULE - 1) // GRANULE
    row_marks = marks_ptr + (head.to(tl.int64) * most + rows // GRANULE) * blocks
    first, full, partial, last = key_blocks(low, high, MASK, KEYS)
    bias = tl.full((ROWS,), 0.0, tl.float32)
    if RULE == SOFTMAX:
        factor = factor * LOG2E
    else:
        bias = tl.load(given_ptr + flat) if GIVEN else bias + number

    best = tl.full((ROWS,), -float("inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for side in tl.static_range(2):
        for t in range((full - first + last - partial) if side == 0 else (partial - full)):
            block = edge_block(t, first, full, partial, last) if side == 0 else partial - 1 - t
            dot, columns = scores(q, k_at, block, k_row, keys, DIM, WIDTH, KEYS, side == 0)
            if side == 0:
                dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
            before = best
            best = tl.maximum(best, tl.max(dot, 1))
            w, kept = relative(dot, before, best, factor, bias, RULE, R)
            v = load_block(v_at, columns, v_row, keys, VALUES, VALUE_WIDTH, side == 0)
            p = w.to(v.dtype)
            part = tl.sum(p.to(tl.float32), 1)
            mass = mass * kept + part
            acc = tl.dot(p, v, acc * kept[:, None], input_precision=PV)
            if KEEP and RULE != SOFTMAX:
                tl.store(row_marks + block, 1, mask=real & (part > 0))
    empty = best == -float("inf")
    lost = (mass == 0) & (best > -float("inf"))  # keys are seen, but none lies inside

    support = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    if COUNTED:
        for t in range(last - first):
            block = first + t
            dot, columns = scores(q, k_at, block, k_row, keys, DIM, WIDTH, KEYS, True)
            dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
            w, kept = relative(dot, best, best, factor, bias, RULE, R)
            support += tl.sum(tl.where(w > 0, 1.0, 0.0), 1)
            square += tl.sum(w * w, 1)
    divisor = tl.where(mass > 0, mass, 1.0)
    ess = tl.where(square > 0, mass * mass / tl.where(square > 0, square, 1.0), 0.0)
    if RULE != SOFTMAX and STAND == UNIFORM:
        number_seen = tl.zeros((ROWS,), tl.int32)
        if tl.max((real & lost).to(tl.int32), 0) > 0:
            for t in range(last - first):
                columns = (first + t) * KEYS + tl.arange(0, KEYS)
                taken = seen(columns, low, high, mask_at, keys, MASK) & lost[:, None]
                v = load_block(v_at, columns, v_row, keys, VALUES, VALUE_WIDTH, True)
                acc = tl.dot(taken.to(v.dtype), v, acc, input_precision=PV)
                part_seen = tl.sum(taken.to(tl.int32), 1)
                number_seen += part_seen
                if KEEP:
                    tl.store(row_marks + first + t, 1, mask=real & (part_seen > 0))
        count = number_seen.to(tl.float32)
        divisor = tl.where(lost, tl.maximum(count, 1.0), divisor)
        support = tl.where(lost, count, support)
        ess = tl.where(lost, count, ess)
        if KEEP:
            tl.store(index_ptr + flat, tl.where(lost, number_seen, -1), mask=real)
    if RULE != SOFTMAX and STAND == NEAREST:
        nearest = tl.full((ROWS,), BEYOND, tl.int32)
        if tl.max((real & lost).to(tl.int32), 0) > 0:
            for t in range(last - first):
                dot, columns = scores(q, k_at, first + t, k_row, keys, DIM, WIDTH, KEYS, True)
                same = seen(columns, low, high, mask_at, keys, MASK) & (dot >= best[:, None])
                nearest = tl.minimum(nearest, tl.min(tl.where(same, columns[None, :], BEYOND), 1))
            nearest = tl.where(lost & (nearest < keys), nearest, -1)
            alone = load_block(v_at, tl.maximum(nearest, 0), v_row, keys, VALUES, VALUE_WIDTH, False)
            acc = tl.where((nearest >= 0)[:, None], alone.to(tl.float32), acc)
            if KEEP:
                tl.store(row_marks + tl.maximum(nearest, 0) // KEYS, 1, mask=real & (nearest >= 0))
        support = tl.where(lost, 1.0, support)
        ess = tl.where(lost, 1.0, ess)
        if KEEP:
            tl.store(index_ptr + flat, tl.where(lost, nearest, -1), mask=real)

    columns = tl.arange(0, VALUE_WIDTH)
    stored = real[:, None] & (columns < VALUES)[None, :]
    place = flat[:, None] * VALUES + columns[None, :]
    tl.store(out_ptr + place, (acc / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    if RULE == SOFTMAX:
        top = best * (factor * (1.0 / LOG2E))
        theta = tl.full((ROWS,), -float("inf"), tl.float32)
        reach = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = best * factor
        theta = -bias
        reach = tl.where(mass > 0, top + bias, 1.0)
    tl.store(floats_ptr + flat * 6, tl.where(empty, 0.0, top), mask=real)
    tl.store(floats_ptr + flat * 6 + 1, tl.where(empty, -1.0, theta), mask=real)
    tl.store(floats_ptr + flat * 6 + 2, reach, mask=real)
    tl.store(floats_ptr + flat * 6 + 3, tl.where(mass > 0, mass, 1.0), mask=real)
    tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
    tl.store(floats_ptr + flat * 6 + 5, ess, mask=real)
    tl.store(flags_ptr + flat * 3, empty.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 1, lost.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 2, tl.zeros((ROWS,), tl.int32), mask=real)


@triton.jit
def relative(dot, before, best, factor, bias, RULE: tl.constexpr, R: tl.constexpr):
    """(weights [R, K] over the weight at the best score so far, what weights over that at the best `before` are to be
    multiplied with)."""
    if RULE == SOFTMAX:
        level = tl.where(best == -float("inf"), 0.0, best * factor)
        w = tl.exp2(dot * factor[:, None] - level[:, None])
        kept = tl.exp2(before * factor - level)
    else:
        reach = best * factor + bias
        g = tl.where(reach > SMALLEST, 1.0 / reach, 0.0)
        w = power(tl.maximum(dot * factor[:, None] + bias[:, None], 0.0) * g[:, None], R)
        kept = power(tl.maximum(before * factor + bias, 0.0) * g, R)
    return w, kept


# Host ---------------------------------------------------------------------------------------------------------


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | float,
    given: Tensor | float,
    span: Span,
    found: tuple[Tensor, ...],
    rule: int,
    r: int,
    stand: int,
    granule: tuple[int, int],
    keep: bool,
    counted: bool,
) -> None:
    """Fill `found`: out, floats, flags, index, tilt and live as `compact.forward` returns them."""
    batch, heads, queries, dim = q.shape
    keys, width = k.shape[2], v.shape[3]
    streamed = rule in (compact.SOFTMAX, compact.FIXED)
    out, floats, flags, index, tilt, live = found
    mask = span.mask
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], batch_stride(span.low))
    strides += (0, 0) if mask is None else tuple(mask.stride(i) if mask.shape[i] > 1 else 0 for i in (0, 1))
    numbers = [x if isinstance(x, float) else 1.0 for x in (factor, given)]
    tensors = [x if isinstance(x, Tensor) else floats for x in (factor, given)]
    inputs = (q, k, v, *tensors, span.low, span.high, live if mask is None else mask)
    constants = {
        "RULE": rule, "R": r, "FACTOR": isinstance(factor, Tensor), "GIVEN": isinstance(given, Tensor),
        "MASK": mask is not None, "KEEP": keep, "COUNTED": counted, "DIM": dim, "WIDTH": _block(dim), "VALUES": width,
        "VALUE_WIDTH": _block(width), "GRANULE": granule[0],
    }  # fmt: skip
    sizes = (heads, heads // k.shape[1], queries, keys)

    def run(tiles: Tiles) -> None:
        blocks = triton.cdiv(keys, tiles.keys)
        grid = (batch * heads * triton.cdiv(queries, tiles.rows),)
        shapes = {"ROWS": tiles.rows, "KEYS": tiles.keys}
        if streamed:
            launch(
                stream, grid, *inputs, out, floats, flags, index, live, *numbers, *sizes, *strides,
                tiles=tiles, STAND=stand, **shapes, **constants,
            )  # fmt: skip
            return
        marks = live if keep else live.new_zeros(batch, heads, triton.cdiv(queries, granule[0]), blocks)
        lists = torch.empty(grid[0], blocks, dtype=torch.int32, device=q.device)
        tolerance = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-12
        launch(
            search, grid, *inputs, out, floats, flags, index, tilt, marks, lists, *numbers, tolerance, *sizes,
            *strides, tiles=tiles, **shapes, **constants,
        )  # fmt: skip

    table = compact.STREAM if streamed else compact.SEARCH
    run(table.pick(max(dim, width), q.dtype, run, (rule, r, keep, counted, mask is not None)))


def _block(dim: int) -> int:
    """Columns of a tile that holds rows of so many features."""
    return max(16, triton.next_power_of_2(dim))
