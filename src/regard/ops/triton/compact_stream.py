"""Compact attention, forward, for rules that need no search: softmax, and a fixed threshold. One pass over the keys of
a block of queries, rescaled as better keys turn up; and under a fixed threshold what stands in where no key is near
enough.

Legend: R = ROWS queries of a program, K = KEYS keys of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .compact_math import (
    LOG2E,
    SOFTMAX,
    UNIFORM,
    block_of_rows,
    edge_block,
    factors,
    key_blocks,
    key_scores,
    load_block,
    load_rows,
    own_rows,
    power,
    row_number,
    seen,
    store_row,
)

SMALLEST = tl.constexpr(2.0**-100)
BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def relative(dot, before, best, factor, bias, RULE: tl.constexpr, R: tl.constexpr):
    """(weights [R, K] over the weight at the best score so far, what weights over that at the best `before` are to be
    multiplied with). The factor of softmax holds log2 e."""
    if RULE == SOFTMAX:
        level = tl.where(best == -float("inf"), 0.0, best * factor)
        w = tl.exp2(dot * factor[:, None] - level[:, None])
        kept = tl.exp2(before * factor - level)
    else:
        reach = best * factor + bias
        inside = reach > SMALLEST
        g = tl.where(inside, 1.0 / tl.where(inside, reach, 1.0), 0.0)
        w = power(tl.maximum(dot * factor[:, None] + bias[:, None], 0.0) * g[:, None], R)
        kept = power(tl.maximum(before * factor + bias, 0.0) * g, R)
    return w, kept


@triton.jit
def count_weights(
    q, k_at, mask_at, best, factor, by, bias, low, high, first, last, k_row, keys, FACTOR: tl.constexpr,
    RULE: tl.constexpr, R: tl.constexpr, MASK: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """(how many weights are not 0, sum of their squares), over the weight at the best score."""
    support = tl.zeros(best.shape, tl.float32)
    square = tl.zeros(best.shape, tl.float32)
    for t in range(last - first):
        block = first + t
        dot, columns = key_scores(q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, True, WIDE)
        dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
        w, _ = relative(dot, best, best, by, bias, RULE, R)
        support += tl.sum(tl.where(w > 0, 1.0, 0.0), 1)
        square += tl.sum(w * w, 1)
    return support, square


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_stream_kernel(
    q_ptr, k_ptr, v_ptr, factor_ptr, given_ptr, low_ptr, high_ptr, mask_ptr,
    out_ptr, floats_ptr, flags_ptr, marks_ptr,
    scale, number, heads, group, queries, keys,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, range_batch, mask_batch, mask_head,
    RULE: tl.constexpr, R: tl.constexpr, FACTOR: tl.constexpr, GIVEN: tl.constexpr,
    MASK: tl.constexpr, KEEP: tl.constexpr, COUNTED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GRANULE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The output and the statistics of rows; for a backward pass, under a fixed threshold, marks of the key blocks with
    weight. Rows that no key is near enough to are flagged, and get 0."""
    blocks = (keys + KEYS - 1) // KEYS
    head, row_block, batch, own = block_of_rows(queries, heads, ROWS)
    rows, real = own_rows(row_block, queries, ROWS)
    flat = head.to(tl.int64) * queries + rows
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    factor, by = factors(factor_ptr, flat, scale, ROWS, FACTOR)
    bias = row_number(given_ptr, flat, number, ROWS, GIVEN)
    q = load_rows(q_ptr + batch * q_batch + own * q_head, rows, q_row, DIM, WIDTH)
    k_at = k_ptr + batch * k_batch + own // group * k_head
    v_at = v_ptr + batch * v_batch + own // group * v_head
    mask_at = mask_ptr + batch * mask_batch + own * mask_head
    row_marks = marks_ptr + (head.to(tl.int64) * ((queries + GRANULE - 1) // GRANULE) + rows // GRANULE) * blocks
    first, full, partial, last = key_blocks(low, high, MASK, KEYS)
    if RULE == SOFTMAX:
        by = by * LOG2E

    best = tl.full((ROWS,), -float("inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    for side in tl.static_range(2):
        for t in range((full - first + last - partial) if side == 0 else (partial - full)):
            block = edge_block(t, first, full, partial, last) if side == 0 else partial - 1 - t
            dot, columns = key_scores(q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, side == 0, WIDE)
            if side == 0:
                dot = tl.where(seen(columns, low, high, mask_at, keys, MASK), dot, -float("inf"))
            before = best
            best = tl.maximum(best, tl.max(dot, 1))
            w, kept = relative(dot, before, best, by, bias, RULE, R)
            v = load_block(v_at, block, v_row, keys, VALUES, VALUE_WIDTH, KEYS, side == 0, WIDE)
            p = w.to(v.dtype)
            part = tl.sum(p.to(tl.float32), 1)
            mass = mass * kept + part
            acc = tl.dot(p, v, acc * kept[:, None], input_precision="ieee")
            if KEEP and RULE != SOFTMAX:
                tl.store(row_marks + block, 1, mask=real & (part > 0))
    empty = best == -float("inf")
    lost = real & (mass == 0) & (best > -float("inf"))  # keys are seen, but none lies inside

    support = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    if COUNTED:
        support, square = count_weights(
            q,
            k_at,
            mask_at,
            best,
            factor,
            by,
            bias,
            low,
            high,
            first,
            last,
            k_row,
            keys,
            FACTOR,
            RULE,
            R,
            MASK,
            DIM,
            WIDTH,
            KEYS,
            WIDE,
        )
    ess = tl.where(square > 0, mass * mass / tl.where(square > 0, square, 1.0), 0.0)
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    columns = tl.arange(0, VALUE_WIDTH)
    stored = real[:, None] & (columns < VALUES)[None, :]
    place = flat[:, None] * VALUES + columns[None, :]
    tl.store(out_ptr + place, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    if RULE == SOFTMAX:
        top = best if FACTOR else best * factor
        theta = tl.full((ROWS,), -float("inf"), tl.float32)
        reach = tl.full((ROWS,), 1.0, tl.float32)
    else:
        top = best * by
        theta = -bias
        reach = tl.where(some, top + bias, 1.0)
    top = tl.where(empty, 0.0, top)
    theta = tl.where(empty, -1.0, theta)
    status = tl.zeros((ROWS,), tl.int32)
    store_row(floats_ptr, flags_ptr, flat, real, top, theta, reach, mass, support, ess, empty, lost, status)


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys"])
def compact_stand_in_kernel(
    q_ptr, k_ptr, v_ptr, factor_ptr, low_ptr, high_ptr, mask_ptr, out_ptr, floats_ptr, flags_ptr, index_ptr, marks_ptr,
    scale, heads, group, queries, keys, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    range_batch, mask_batch, mask_head, STAND: tl.constexpr, FACTOR: tl.constexpr, MASK: tl.constexpr,
    KEEP: tl.constexpr, COUNTED: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, GRANULE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The output of rows that are flagged: the mean of the values that they see, or the value of the best key alone;
    and for a backward pass how many they see or which is the best, and marks of those blocks."""
    blocks = (keys + KEYS - 1) // KEYS
    head, row_block, batch, own = block_of_rows(queries, heads, ROWS)
    rows, real = own_rows(row_block, queries, ROWS)
    flat = head.to(tl.int64) * queries + rows
    lost = real & (tl.load(flags_ptr + flat * 3 + 1) != 0)
    if KEEP:
        tl.store(index_ptr + flat, tl.full((ROWS,), -1, tl.int32), mask=real)
    if tl.max(lost.to(tl.int32), 0) > 0:
        low = tl.load(low_ptr + batch * range_batch + rows)
        high = tl.load(high_ptr + batch * range_batch + rows)
        k_at = k_ptr + batch * k_batch + own // group * k_head
        v_at = v_ptr + batch * v_batch + own // group * v_head
        mask_at = mask_ptr + batch * mask_batch + own * mask_head
        row_marks = marks_ptr + (head.to(tl.int64) * ((queries + GRANULE - 1) // GRANULE) + rows // GRANULE) * blocks
        first, _, _, last = key_blocks(low, high, MASK, KEYS)
        if STAND == UNIFORM:
            acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
            stand_in = tl.zeros((ROWS,), tl.int32)
            for t in range(last - first):
                block = first + t
                taken = seen(block * KEYS + tl.arange(0, KEYS), low, high, mask_at, keys, MASK) & lost[:, None]
                v = load_block(v_at, block, v_row, keys, VALUES, VALUE_WIDTH, KEYS, True, WIDE)
                acc = tl.dot(taken.to(v.dtype), v, acc, input_precision="ieee")
                part = tl.sum(taken.to(tl.int32), 1)
                stand_in += part
                if KEEP:
                    tl.store(row_marks + block, 1, mask=part > 0)
            count = tl.maximum(stand_in, 1).to(tl.float32)
        else:
            factor, by = factors(factor_ptr, flat, scale, ROWS, FACTOR)
            top = tl.load(floats_ptr + flat * 6)
            q = load_rows(q_ptr + batch * q_batch + own * q_head, rows, q_row, DIM, WIDTH)
            stand_in = tl.full((ROWS,), BEYOND, tl.int32)
            for t in range(last - first):
                block = first + t
                dot, columns = key_scores(q, k_at, block, k_row, keys, factor, FACTOR, DIM, WIDTH, KEYS, True, WIDE)
                same = seen(columns, low, high, mask_at, keys, MASK) & (dot * by[:, None] >= top[:, None])
                stand_in = tl.minimum(stand_in, tl.min(tl.where(same, columns[None, :], BEYOND), 1))
            stand_in = tl.minimum(stand_in, keys - 1)
            acc = load_rows(v_at, stand_in, v_row, VALUES, VALUE_WIDTH).to(tl.float32)
            count = tl.full((ROWS,), 1.0, tl.float32)
            if KEEP:
                tl.store(row_marks + stand_in // KEYS, 1, mask=lost)
        columns = tl.arange(0, VALUE_WIDTH)
        place = flat[:, None] * VALUES + columns[None, :]
        mean = (acc / count[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + place, mean, mask=lost[:, None] & (columns < VALUES)[None, :])
        if KEEP:
            tl.store(index_ptr + flat, stand_in, mask=lost)
        if COUNTED:
            tl.store(floats_ptr + flat * 6 + 4, count, mask=lost)
            tl.store(floats_ptr + flat * 6 + 5, count, mask=lost)
