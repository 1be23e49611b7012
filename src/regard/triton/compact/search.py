"""Forward pass of compact attention for rules relative to the best key (adaptive, anchored): a search for every row's
threshold and for the key blocks that can have weight, then the output from those blocks.

A program serves a block of queries of one head. The first pass finds the largest score of every row and marks the key
blocks that come near enough to it; each later pass visits the marked blocks and marks again. Newton's method
(`grammar.threshold`) starts from the threshold of a few keys of each row, the best of those in every K-th place: fewer
keys have a lower threshold, so that the peak descends monotonically, and most of the descent needs no further pass. A
converged row does not change while other rows of its block continue.

Legend: R = FORM.own queries of a program, K = FORM.tile keys of a block; e excess; marks: uint8 [mask tiles of rows,
key blocks] of one head, each the number of the pass that made it.
"""

import triton
import triton.language as tl

from ..runtime.blocks import FAR, store_numbers, store_rows
from . import rows
from .math import ADAPTIVE, ANCHORED, SMALLEST, excess, lower_power, power, root, value_of

STEPS = tl.constexpr(24)  # maximum number of passes; each marks with its number
START = tl.constexpr(5)  # steps among a few keys
CHUNK = tl.constexpr(256)  # marks that are read at once
FINEST = tl.constexpr(2.0**-20)
ONCE = tl.constexpr(2.0**20)  # larger than every number of a key block; counts a key whose block is added to it


# Marks ----------------------------------------------------------------------------------------------------------


@triton.jit
def lists_of(blocks, ids, queries, keys, FORM: tl.constexpr):
    """Return (first mark, list of key blocks, number of key blocks, number of mask tiles of rows) of a program."""
    MASK_TILES: tl.constexpr = FORM.own // FORM.mask_tile
    number = tl.cdiv(keys, FORM.tile)
    list_at = blocks[1] + (ids[0].to(tl.int64) * tl.cdiv(queries, FORM.own) + ids[1]) * number
    marks_at = rows.marks_of(blocks[0], ids, queries, keys, FORM)
    return marks_at, list_at, number, tl.minimum(tl.cdiv(queries, FORM.mask_tile) - ids[1] * MASK_TILES, MASK_TILES)


@triton.jit
def collect(marks, run, mark, FORM: tl.constexpr):
    """List blocks with this mark; return how many lie in [full, partial) (front) and outside (back)."""
    marks_at, list_at, blocks, mask_tiles = marks
    first, full, partial, last = run
    tl.debug_barrier()  # wait for marks of other threads
    inner = 0
    outer = 0
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        hit = tl.load(marks_at + block, mask=block < last, other=0) == mark
        for i in tl.static_range(1, FORM.own // FORM.mask_tile):
            inside = block < tl.where(mask_tiles > i, last, first)
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
    """Return the t-th block from the front of the list, or from its back with EDGE."""
    return tl.load(marks[1] + (marks[2] - 1 - t if EDGE else t))


@triton.jit
def leave(marks, run, mark, FORM: tl.constexpr):
    """Set marks equal to `mark` to 1 and all others to 0."""
    marks_at, _, blocks, mask_tiles = marks
    first, _, _, last = run
    tl.debug_barrier()
    for start in range(first, last, CHUNK):
        block = start + tl.arange(0, CHUNK)
        for i in tl.static_range(FORM.own // FORM.mask_tile):
            at = marks_at + i * blocks.to(tl.int64) + block
            inside = block < tl.where(mask_tiles > i, last, first)
            tl.store(at, (tl.load(at, mask=inside, other=0) == mark).to(tl.uint8), mask=inside)


# The search -----------------------------------------------------------------------------------------------------


@triton.jit
def descend(peak, total, lower, R: tl.constexpr):
    """Take one step of Newton's method on the R-norm of e / R, from total = sum e^R and lower = sum e^(R - 1)."""
    some = total > 0
    total = tl.where(some, total, 1.0)
    lower = tl.where(some, lower, 1.0)
    norm = root(total, R) * (1.0 / R)
    step = norm - 1
    for _ in tl.static_range(R - 1):
        step = step * norm
    step = step / (lower * (1.0 / R ** (R - 1)))
    return tl.where(some, peak - step, peak)


@triton.jit
def first_peak(tops, best, factor, R: tl.constexpr):
    """Return the peak of a few keys of each row, whose q.k are `tops` [R, K], the largest, `best`, among them."""
    d = (tops - best[:, None]) * factor[:, None]
    peak = tl.full(best.shape, 1.0, tl.float32)
    for _ in range(START):
        e = tl.maximum(d + R * peak[:, None], 0.0)
        new = descend(peak, tl.sum(power(e, R), 1), tl.sum(lower_power(e, R), 1), R)
        peak = tl.where(new < peak, new, peak)
    return peak


@triton.jit
def look(q, k, run, sight, scales, within, marked, real, FORM: tl.constexpr):
    """Return the best q.k of each row and, for the adaptive rule, the best of every K-th place [R, K]. Mark 1 each
    block with a key at most `within` below the best so far; keys further below have no weight."""
    factor, by = scales
    best = tl.full((FORM.own,), -float("inf"), tl.float32)
    tops = tl.full((FORM.own, FORM.tile), -float("inf"), tl.float32)
    for side in tl.static_range(2):
        for t in range(rows.count_of(run, side == 0)):
            block = rows.block_of(run, t, side == 0)
            dot, _ = rows.key_scores(q, k, block, factor, sight, side == 0, FORM)
            if FORM.rule == ADAPTIVE:
                tops = tl.maximum(tops, dot)
            here = tl.max(dot, 1)
            best = tl.maximum(best, here)
            near = tl.maximum(within, tl.abs(best * by) * FINEST)
            tl.store(marked + block, 1, mask=real & (here * by > best * by - near))
    return best, tops


@triton.jit
def settle(q, k, run, sight, scales, marks, counts, marked, state, tolerance, FORM: tl.constexpr):
    """Run Newton's method from state (top, a peak that is not too low, the least peak, which rows to solve). Return
    (the peak, which rows have not converged); listed blocks above the threshold keep mark 1. `marked`: marks, rows."""
    top, peak, least, active = state
    step = 0
    while (tl.max(active.to(tl.int32), 0) > 0) & (step < STEPS):
        theta = top - FORM.r * peak
        total, lower = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
        mark = step + 2
        for side in tl.static_range(2):
            for t in range(counts[1 - side]):
                block = listed(marks, t, side == 0)
                dot, _ = rows.key_scores(q, k, block, scales[0], sight, side == 0, FORM)
                e = excess(dot, scales[1][:, None], theta[:, None])
                part = tl.sum(lower_power(e, FORM.r), 1)
                lower += part
                total += tl.sum(power(e, FORM.r), 1)
                tl.store(marked[0] + block, mark, mask=marked[1] & (part > 0))
        new = tl.maximum(descend(peak, total, lower, FORM.r), least)
        moved = active & (new < peak)
        active = moved & (peak - new > tolerance * new)
        peak = tl.where(moved, new, peak)
        step += 1
        counts = collect(marks, run, step + 1, FORM)
    leave(marks, run, step + 1, FORM)
    return peak, active


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_search_kernel(qkv, factor, given, visible, outs, blocks, heads, group, queries, keys, FORM: tl.constexpr):
    """Store top, theta, reach and status of the rows, and marks: 1 if a block can have weight."""
    sizes = heads, group, queries, keys
    ids, real, flat, sight, scales, q, k, _v, marked, run = rows.opened(qkv, factor, visible, blocks[0], sizes, FORM)
    floats_ptr, flags_ptr = outs[1], outs[2]
    within = rows.row_number(given[0], flat, given[1], FORM.given, FORM)
    if FORM.rule == ADAPTIVE:
        within = within * 0 + FORM.r
    best, tops = look(q, k, run, sight, scales, within, marked, real, FORM)
    empty = best == -float("inf")
    best = tl.where(empty, 0.0, best)
    top = best * scales[1]
    finest = tl.abs(top) * FINEST  # below it rounding decides which keys are near enough
    reach = tl.where(empty, 1.0, tl.maximum(within, finest))
    one, none = tl.full((FORM.own,), 1.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    store_numbers(floats_ptr, flat, (top, top - reach, reach, one, none, none), real)
    store_numbers(flags_ptr, flat, (empty, 0, 0), real)  # status 0
    if FORM.rule == ADAPTIVE:
        marks = lists_of(blocks, ids, queries, keys, FORM)
        counts = collect(marks, run, 1, FORM)
        least = finest * (1.0 / FORM.r)
        peak = tl.maximum(first_peak(tops, best, scales[1], FORM.r), least)
        solved = real & (empty == 0)
        state = top, peak, least, solved & (least < 1)  # from 1 on rounding sets the peak
        peak, active = settle(q, k, run, sight, scales, marks, counts, (marked, solved), state, given[2], FORM)
        tl.store(floats_ptr + flat * 6 + 1, top - FORM.r * peak, mask=solved)
        tl.store(floats_ptr + flat * 6 + 2, FORM.r * peak, mask=solved)
        tl.store(flags_ptr + flat * 3 + 2, active.to(tl.int32), mask=solved)


# The output -----------------------------------------------------------------------------------------------------


@triton.jit
def tied(places, q, k, sight, scales, theta, level, marks, counts, FORM: tl.constexpr):
    """Return (first key with the best score of a row, last, how many) from the sums [R, K] of ONCE + the number of the
    block of each such key. If a row has several, which is rare, go through the blocks again."""
    held = (places > 0).to(tl.int32)
    count = tl.sum(held, 1)
    key = (places - ONCE).to(tl.int32) * FORM.tile + tl.arange(0, FORM.tile)[None, :]
    first = tl.max(held * key, 1)
    last = first
    if tl.max(tl.maximum(count, (tl.max(places, 1) >= 2 * ONCE).to(tl.int32) * 2), 0) > 1:
        count = tl.full((FORM.own,), 0, tl.int32)
        first, last = count + FAR, count
        for side in tl.static_range(2):
            for t in range(counts[1 - side]):
                block = listed(marks, t, side == 0)
                dot, columns = rows.key_scores(q, k, block, scales[0], sight, side == 0, FORM)
                tie = excess(dot, scales[1][:, None], theta[:, None]) >= level[:, None]
                count += tl.sum(tie.to(tl.int32), 1)
                first = tl.minimum(first, tl.min(tl.where(tie, columns[None, :], FAR), 1))
                last = tl.maximum(last, tl.max(tl.where(tie, columns[None, :], 0), 1))
        first = tl.where(count > 0, first, 0)
    return first, last, count


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_weigh_kernel(qkv, factor, given, visible, outs, blocks, heads, group, queries, keys, FORM: tl.constexpr):
    """Store output and mass of the rows, and for a backward pass slope_mean, or index and the marks of live blocks."""
    KEEPS_MEAN: tl.constexpr = FORM.keep and FORM.rule == ADAPTIVE
    TIES: tl.constexpr = FORM.keep and FORM.rule == ANCHORED
    sizes = heads, group, queries, keys
    ids, real, flat, sight, scales, q, k, v, marked, run = rows.opened(qkv, factor, visible, blocks[0], sizes, FORM)
    out_ptr, floats_ptr, index_ptr, slope_mean_ptr = outs[0], outs[1], outs[3], outs[4]
    factor, by = scales
    marks = lists_of(blocks, ids, queries, keys, FORM)
    counts = collect(marks, run, 1, FORM)
    theta, reach = tl.load(floats_ptr + flat * 6 + 1), tl.load(floats_ptr + flat * 6 + 2)
    g = 1.0 / reach
    acc, mass = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    slope_sum, slope_mass = acc, mass
    if TIES:
        top = tl.load(floats_ptr + flat * 6)
        level = tl.maximum(top - tl.abs(top) * (FINEST * 0.25) - theta, SMALLEST)  # least excess of a tie
        places = tl.full((FORM.own, FORM.tile), 0.0, tl.float32)
    seen_weights = mass, mass
    for side in tl.static_range(2):
        for t in range(counts[1 - side]):
            block = listed(marks, t, side == 0)
            dot, _ = rows.key_scores(q, k, block, factor, sight, side == 0, FORM)
            e = excess(dot, by[:, None], theta[:, None])
            x = rows.load_keys(v, block, FORM.value_dim, FORM.value_wide, side == 0, FORM)
            acc, part, w = rows.applied(acc, value_of(e, reach[:, None], g[:, None], FORM), x)
            mass += part
            if KEEPS_MEAN:
                slope_sum, slope, _ = rows.applied(slope_sum, lower_power(e * g[:, None], FORM.r), x)
                slope_mass += slope
            if TIES:
                tl.store(marked + block, 2, mask=real & (part > 0))
                places += tl.where(e >= level[:, None], 1.0, 0.0) * (ONCE + block)
            if FORM.counted:
                seen_weights = rows.counted(seen_weights, w)

    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    store_rows(out_ptr, flat, acc / mass[:, None], real, FORM.value_dim, FORM.value_wide)
    if FORM.counted:
        size = tl.where(some, mass * mass / tl.where(some, seen_weights[1], 1.0), 0.0)
        tl.store(floats_ptr + flat * 6 + 4, seen_weights[0], mask=real)
        tl.store(floats_ptr + flat * 6 + 5, size, mask=real)
    if KEEPS_MEAN:
        slope_mass = tl.where(slope_mass > 0, slope_mass, 1.0)
        store_rows(slope_mean_ptr, flat, slope_sum / slope_mass[:, None], real, FORM.value_dim, FORM.value_wide)
    if TIES:
        ties = tied(places, q, k, sight, scales, theta, level, marks, counts, FORM)
        store_numbers(index_ptr, flat, ties, real)  # key 0 if there is none
        leave(marks, run, 2, FORM)
