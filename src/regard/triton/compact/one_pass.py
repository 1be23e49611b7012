"""Forward pass of compact attention without a search: softmax and a fixed threshold. One pass over the keys of a block
of queries rescales sums when better keys appear; a second kernel gives rows without a near enough key their fallback.

Legend: R = FORM.own queries of a program, K = FORM.tile keys of a block.
"""

import triton
import triton.language as tl

from ..runtime.blocks import FAR, load_rows, seen, store_numbers, store_rows
from . import rows
from .math import LOG2E, SMALLEST, SOFTMAX, UNIFORM, value_of


@triton.jit
def reach_of(best, factor, bias):
    """Return by how much the best score exceeds the threshold -bias, at least so much that its inverse is finite."""
    return tl.maximum(best * factor + bias, SMALLEST)


@triton.jit
def weights_of(dot, before, best, factor, bias, FORM: tl.constexpr):
    """Return (weights [R, K] over that of the best score, the factor of sums relative to the best `before`)."""
    if FORM.rule == SOFTMAX:
        level = tl.where(best == -float("inf"), 0.0, best * factor)
        w = tl.exp2(dot * factor[:, None] - level[:, None])
        kept = tl.exp2(before * factor - level)
    else:
        reach = reach_of(best, factor, bias)
        g = 1.0 / reach
        w = value_of(tl.maximum(dot * factor[:, None] + bias[:, None], 0.0), reach[:, None], g[:, None], FORM)
        kept = value_of(reach_of(before, factor, bias), reach, g, FORM)
    return w, kept


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_stream_kernel(qkv, factor, given, visible, outs, blocks, heads, group, queries, keys, FORM: tl.constexpr):
    """Store the output and statistics of rows and, for the backward pass of a fixed threshold, marks of key blocks with
    weight. Rows without a near enough key are flagged and get 0."""
    out_ptr, floats_ptr, flags_ptr = outs[0], outs[1], outs[2]
    sizes = heads, group, queries, keys
    _place, real, flat, sight, scales, q, k, v, marked, run = rows.opened(qkv, factor, visible, blocks[0], sizes, FORM)
    factor, by = scales
    bias = rows.row_number(given[0], flat, given[1], FORM.given, FORM)
    if FORM.rule == SOFTMAX:
        by = by * LOG2E

    best, mass = tl.full((FORM.own,), -float("inf"), tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    acc = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for side in tl.static_range(2):
        for t in range(rows.count_of(run, side == 0)):
            block = rows.block_of(run, t, side == 0)
            dot, _ = rows.key_scores(q, k, block, factor, sight, side == 0, FORM)
            before = best
            best = tl.maximum(best, tl.max(dot, 1))
            w, kept = weights_of(dot, before, best, by, bias, FORM)
            x = rows.load_keys(v, block, FORM.value_dim, FORM.value_wide, side == 0, FORM)
            acc, part, _ = rows.applied(acc * kept[:, None], w, x)
            mass = mass * kept + part
            if FORM.keep and FORM.rule != SOFTMAX:
                tl.store(marked + block, 1, mask=real & (part > 0))
    empty = best == -float("inf")
    lost = real & (mass == 0) & (best > -float("inf"))  # keys are visible, but none is near enough

    support, square = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own,), 0.0, tl.float32)
    if FORM.counted:
        for block in range(run[0], run[3]):
            dot, _ = rows.key_scores(q, k, block, factor, sight, True, FORM)
            w, _ = weights_of(dot, best, best, by, bias, FORM)
            support, square = rows.counted((support, square), w)
    ess = tl.where(square > 0, mass * mass / tl.where(square > 0, square, 1.0), 0.0)
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    store_rows(out_ptr, flat, acc / mass[:, None], real, FORM.value_dim, FORM.value_wide)
    if FORM.rule == SOFTMAX:
        top = best if FORM.factors else best * factor
        theta, reach = tl.full((FORM.own,), -float("inf"), tl.float32), tl.full((FORM.own,), 1.0, tl.float32)
    else:
        top = best * by
        theta = -bias
        reach = tl.where(some, reach_of(best, by, bias), 1.0)
    top = tl.where(empty, 0.0, top)
    theta = tl.where(empty, -1.0, theta)
    store_numbers(floats_ptr, flat, (top, theta, reach, mass, support, ess), real)
    store_numbers(flags_ptr, flat, (empty, lost, 0), real)  # status 0


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_stand_in_kernel(qkv, factor, given, visible, outs, blocks, heads, group, queries, keys, FORM: tl.constexpr):
    """Store the fallback output of flagged rows: the mean of the values they see, or the value of the best key. For a
    backward pass, also store how many they see or which key is best, and mark those blocks."""
    out_ptr, floats_ptr, flags_ptr, index_ptr = outs[0], outs[1], outs[2], outs[3]
    ids = rows.place_of(queries, heads, FORM)
    _rows, real, flat = rows.own_rows(ids, queries, FORM)
    lost = real & (tl.load(flags_ptr + flat * 3 + 1) != 0)
    if FORM.keep:
        tl.store(index_ptr + flat, tl.full((FORM.own,), -1, tl.int32), mask=real)
    if tl.max(lost.to(tl.int32), 0) > 0:
        sizes = heads, group, queries, keys
        _, _, _, sight, scales, q, k, v, marked, run = rows.opened(qkv, factor, visible, blocks[0], sizes, FORM)
        acc = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
        best, fallback = tl.full((FORM.own,), -float("inf"), tl.float32), tl.full((FORM.own,), 0, tl.int32)
        for block in range(run[0], run[3]):
            if FORM.stand == UNIFORM:
                columns = block * FORM.tile + tl.arange(0, FORM.tile)
                taken = seen(columns, sight[0], sight[1], sight[2], keys, FORM.masked) & lost[:, None]
                x = rows.load_keys(v, block, FORM.value_dim, FORM.value_wide, True, FORM)
                acc = tl.dot(taken.to(x.dtype), x, acc, input_precision="ieee")
                part = tl.sum(taken.to(tl.int32), 1)
                fallback += part
                if FORM.keep:
                    tl.store(marked + block, 1, mask=part > 0)
            else:
                dot, columns = rows.key_scores(q, k, block, scales[0], sight, True, FORM)
                here = tl.max(dot, 1)
                at = tl.min(tl.where(dot == here[:, None], columns[None, :], FAR), 1)
                fallback = tl.where(here > best, at, fallback)
                best = tl.maximum(best, here)
        if FORM.stand == UNIFORM:
            count = tl.maximum(fallback, 1).to(tl.float32)
        else:
            acc = load_rows(v[0], fallback, v[1], None, FORM.value_dim, FORM.value_wide).to(tl.float32)
            count = tl.full((FORM.own,), 1.0, tl.float32)
            if FORM.keep:
                tl.store(marked + fallback // FORM.tile, 1, mask=lost)
        store_rows(out_ptr, flat, acc / count[:, None], lost, FORM.value_dim, FORM.value_wide)
        if FORM.keep:
            tl.store(index_ptr + flat, fallback, mask=lost)
        if FORM.counted:
            tl.store(floats_ptr + flat * 6 + 4, count, mask=lost)
            tl.store(floats_ptr + flat * 6 + 5, count, mask=lost)
