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

from ..runtime.blocks import load_rows
from .math import ADAPTIVE, ANCHORED, cube_root, excess, lower_power, power
from .rows import (
    applied,
    block_of,
    count_of,
    counted,
    factors,
    key_blocks,
    key_scores,
    load_values,
    marks_of,
    own_rows,
    place_of,
    row_marks,
    row_number,
    sight_of,
    store_row,
    store_values,
)

STEPS = tl.constexpr(24)  # passes at most, each marking with its number
START = tl.constexpr(5)  # steps of the search among a few keys
CHUNK = tl.constexpr(256)  # marks that are looked at in one go
FINEST = tl.constexpr(2.0**-20)
BEYOND = tl.constexpr(2**31 - 1)


# Marks ----------------------------------------------------------------------------------------------------------


@triton.jit
def lists_of(marks_at, list_ptr, place, queries, keys, FORM: tl.constexpr):
    """Of a program: (its first mark, its list of key blocks, how many key blocks there are, how many granules of rows
    it has)."""
    GRANULES: tl.constexpr = FORM.rows // FORM.granule
    blocks = tl.cdiv(keys, FORM.keys)
    list_at = list_ptr + (place[0].to(tl.int64) * tl.cdiv(queries, FORM.rows) + place[1]) * blocks
    return marks_at, list_at, blocks, tl.minimum(tl.cdiv(queries, FORM.granule) - place[1] * GRANULES, GRANULES)


@triton.jit
def collect(marks, run, mark, FORM: tl.constexpr):
    """List the blocks that have this mark: (how many lie in [full, partial), at the front of the list; how many
    outside, at its back)."""
    marks_at, list_at, blocks, granules = marks
    first, full, partial, last = run
    tl.debug_barrier()  # other threads made the marks
    inner = 0
    outer = 0
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        hit = tl.load(marks_at + block, mask=block < last, other=0) == mark
        for i in tl.static_range(1, FORM.rows // FORM.granule):
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
def listed(marks, t, EDGE: tl.constexpr):
    """The t-th block from the front of the list or, EDGE, from its back."""
    return tl.load(marks[1] + (marks[2] - 1 - t if EDGE else t))


@triton.jit
def leave(marks, run, mark, FORM: tl.constexpr):
    """Put 1 where this mark is, and 0 elsewhere."""
    marks_at, _, blocks, granules = marks
    first, _, _, last = run
    tl.debug_barrier()
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        for i in tl.static_range(FORM.rows // FORM.granule):
            at = marks_at + i * blocks.to(tl.int64) + block
            inside = block < tl.where(granules > i, last, first)
            tl.store(at, (tl.load(at, mask=inside, other=0) == mark).to(tl.uint8), mask=inside)


# The search -----------------------------------------------------------------------------------------------------


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


@triton.jit
def look(q, k, run, sight, scales, within, marked, real, FORM: tl.constexpr):
    """(the best q.k of each row, for the adaptive rule that in every K-th place [R, K]). Marks 1 where a block has a
    key that is not further than `within` below the best so far: further below, it has no weight."""
    factor, by = scales
    best = tl.full((FORM.rows,), -float("inf"), tl.float32)
    tops = tl.full((FORM.rows, FORM.keys), -float("inf"), tl.float32)
    for side in tl.static_range(2):
        for t in range(count_of(run, side == 0)):
            block = block_of(run, t, side == 0)
            dot, _ = key_scores(q, k, block, factor, sight, side == 0, FORM)
            if FORM.rule == ADAPTIVE:
                tops = tl.maximum(tops, dot)
            here = tl.max(dot, 1)
            best = tl.maximum(best, here)
            near = tl.maximum(within, tl.abs(best * by) * FINEST)
            tl.store(marked + block, 1, mask=real & (here * by > best * by - near))
    return best, tops


@triton.jit
def sums_above(q, k, theta, counts, sight, scales, marks, marked, mark, FORM: tl.constexpr):
    """(sum of e^r, sum of e^(r - 1)) [R] over the listed blocks, with a mark where there is any."""
    factor, by = scales
    total = tl.full((FORM.rows,), 0.0, tl.float32)
    lower = tl.full((FORM.rows,), 0.0, tl.float32)
    for side in tl.static_range(2):
        for t in range(counts[1 - side]):
            block = listed(marks, t, side == 0)
            dot, _ = key_scores(q, k, block, factor, sight, side == 0, FORM)
            e = excess(dot, by[:, None], theta[:, None])
            part = tl.sum(lower_power(e, FORM.r), 1)
            lower += part
            total += tl.sum(power(e, FORM.r), 1)
            tl.store(marked[0] + block, mark, mask=marked[1] & (part > 0))
    return total, lower


@triton.jit
def settle(q, k, run, sight, scales, marks, counts, marked, state, tolerance, FORM: tl.constexpr):
    """Newton's method from state (top, a peak that is too high if anything, the least peak, which rows to solve): (the
    peak, which rows have not converged). Of the listed blocks those stay marked, by 1, that the last pass found above
    the threshold. `marked`: the marks of rows, and which rows mark."""
    top, peak, least, active = state
    step = 0
    while (tl.max(active.to(tl.int32), 0) > 0) & (step < STEPS):
        theta = top - FORM.r * peak
        total, lower = sums_above(q, k, theta, counts, sight, scales, marks, marked, step + 2, FORM)
        new = tl.maximum(descend(peak, total, lower, FORM.r), least)
        moved = active & (new < peak)
        active = moved & (peak - new > tolerance * new)
        peak = tl.where(moved, new, peak)
        step += 1
        counts = collect(marks, run, step + 1, FORM)
    leave(marks, run, step + 1, FORM)
    return peak, active


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_search_kernel(
    q_ptr, k_ptr, factor_ptr, given_ptr, low_ptr, high_ptr, mask_ptr, floats_ptr, flags_ptr, marks_ptr, list_ptr,
    scale, number, tolerance, heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row,
    range_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Top, theta, reach and status of the rows, and marks: 1 where a block can have weight."""
    place = place_of(queries, heads, FORM)
    rows, real, flat = own_rows(place, queries, FORM)
    sight = sight_of(low_ptr, high_ptr, mask_ptr, place, rows, range_batch, mask_batch, mask_head)
    scales = factors(factor_ptr, flat, scale, FORM)
    q = load_rows(q_ptr + place[2] * q_batch + place[3] * q_head, rows, q_row, FORM.dim, FORM.wide)
    k = k_ptr + place[2] * k_batch + place[3] // group * k_head, k_row, keys
    marks_at = marks_of(marks_ptr, place, queries, keys, FORM)
    marked = row_marks(marks_at, keys, FORM)
    run = key_blocks(sight, FORM)

    within = row_number(given_ptr, flat, number, FORM.given, FORM)
    if FORM.rule == ADAPTIVE:
        within = within * 0 + FORM.r
    best, tops = look(q, k, run, sight, scales, within, marked, real, FORM)
    empty = best == -float("inf")
    best = tl.where(empty, 0.0, best)
    top = best * scales[1]
    finest = tl.abs(top) * FINEST  # below it rounding alone says which keys are near enough
    reach = tl.where(empty, 1.0, tl.maximum(within, finest))
    one, none = tl.full((FORM.rows,), 1.0, tl.float32), tl.full((FORM.rows,), 0.0, tl.float32)
    store_row(floats_ptr, flags_ptr, flat, real, top, top - reach, reach, one, none, none, empty, empty & False)
    if FORM.rule == ADAPTIVE:
        marks = lists_of(marks_at, list_ptr, place, queries, keys, FORM)
        counts = collect(marks, run, 1, FORM)
        least = finest * (1.0 / FORM.r)
        peak = tl.maximum(first_peak(tops, best, scales[1], FORM.r), least)
        solved = real & (empty == 0)
        state = top, peak, least, solved & (least < 1)  # beyond, rounding alone sets the peak
        peak, active = settle(q, k, run, sight, scales, marks, counts, (marked, solved), state, tolerance, FORM)
        tl.store(floats_ptr + flat * 6 + 1, top - FORM.r * peak, mask=solved)
        tl.store(floats_ptr + flat * 6 + 2, FORM.r * peak, mask=solved)
        tl.store(flags_ptr + flat * 3 + 2, active.to(tl.int32), mask=solved)


# The output -----------------------------------------------------------------------------------------------------


@triton.jit
def tied(ties, z, e, nearly, columns):
    """(first key with the best score of a row, last, how many), with those of a block of scores z [R, K]."""
    first, last, count = ties
    tie = (e > 0) & (z >= nearly[:, None])
    count += tl.sum(tie.to(tl.int32), 1)
    first = tl.minimum(first, tl.min(tl.where(tie, columns[None, :], BEYOND), 1))
    last = tl.maximum(last, tl.max(tl.where(tie, columns[None, :], -1), 1))
    return first, last, count


@triton.jit
def store_ties(index_ptr, flat, ties, real):
    """Key 0 where there is none."""
    first, last, count = ties
    tl.store(index_ptr + flat * 3, tl.where(count > 0, first, 0), mask=real)
    tl.store(index_ptr + flat * 3 + 1, tl.where(count > 0, last, 0), mask=real)
    tl.store(index_ptr + flat * 3 + 2, count, mask=real)


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_weigh_kernel(
    q_ptr, k_ptr, v_ptr, factor_ptr, low_ptr, high_ptr, mask_ptr, floats_ptr, flags_ptr, marks_ptr, list_ptr,
    out_ptr, index_ptr, tilt_ptr, scale, heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head,
    k_row, v_batch, v_head, v_row, range_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """The output, the mass of the rows, and for a backward pass tilt or index. Of marks that are 1 those of blocks that
    have weight become 2, where the rule is anchored: its marks were made before the best scores were known."""
    TILT: tl.constexpr = FORM.keep and FORM.rule == ADAPTIVE
    TIES: tl.constexpr = FORM.keep and FORM.rule == ANCHORED
    place = place_of(queries, heads, FORM)
    rows, real, flat = own_rows(place, queries, FORM)
    sight = sight_of(low_ptr, high_ptr, mask_ptr, place, rows, range_batch, mask_batch, mask_head)
    factor, by = factors(factor_ptr, flat, scale, FORM)
    q = load_rows(q_ptr + place[2] * q_batch + place[3] * q_head, rows, q_row, FORM.dim, FORM.wide)
    k = k_ptr + place[2] * k_batch + place[3] // group * k_head, k_row, keys
    v = v_ptr + place[2] * v_batch + place[3] // group * v_head, v_row, keys
    marks_at = marks_of(marks_ptr, place, queries, keys, FORM)
    marked, marks = row_marks(marks_at, keys, FORM), lists_of(marks_at, list_ptr, place, queries, keys, FORM)
    run = key_blocks(sight, FORM)
    counts = collect(marks, run, 1, FORM)
    theta = tl.load(floats_ptr + flat * 6 + 1)
    g = 1.0 / tl.load(floats_ptr + flat * 6 + 2)

    acc = tl.full((FORM.rows, FORM.value_wide), 0.0, tl.float32)
    mass = tl.full((FORM.rows,), 0.0, tl.float32)
    if TILT:
        tilt = tl.full((FORM.rows, FORM.value_wide), 0.0, tl.float32)
        tilt_mass = tl.full((FORM.rows,), 0.0, tl.float32)
    if TIES:
        top = tl.load(floats_ptr + flat * 6)
        nearly = top - tl.abs(top) * (FINEST * 0.25)
        none = tl.full((FORM.rows,), 0, tl.int32)
        ties = none + BEYOND, none - 1, none
    seen_weights = tl.full((FORM.rows,), 0.0, tl.float32), tl.full((FORM.rows,), 0.0, tl.float32)
    for side in tl.static_range(2):
        for t in range(counts[1 - side]):
            block = listed(marks, t, side == 0)
            dot, columns = key_scores(q, k, block, factor, sight, side == 0, FORM)
            e = excess(dot, by[:, None], theta[:, None])
            u = e * g[:, None]
            x = load_values(v, block, side == 0, FORM)
            acc, part, w = applied(acc, power(u, FORM.r), x)
            mass += part
            if TILT:
                tilt, slope, _ = applied(tilt, lower_power(u, FORM.r), x)
                tilt_mass += slope
            if TIES:
                tl.store(marked + block, 2, mask=real & (part > 0))
                ties = tied(ties, dot * by[:, None], e, nearly, columns)
            if FORM.counted:
                seen_weights = counted(seen_weights, w)

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    store_values(out_ptr, flat, acc / mass[:, None], real, FORM)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    if FORM.counted:
        support, square = seen_weights
        tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
        tl.store(floats_ptr + flat * 6 + 5, tl.where(some, mass * mass / tl.where(some, square, 1.0), 0.0), mask=real)
    if TILT:
        store_values(tilt_ptr, flat, tilt / tl.where(tilt_mass > 0, tilt_mass, 1.0)[:, None], real, FORM)
    if TIES:
        store_ties(index_ptr, flat, ties, real)
        leave(marks, run, 2, FORM)
