"""The kernels of `decode.local_linear`.

A solved t takes two passes over the keys: `moments_kernel` gathers mean and covariance of the weighted keys,
`solve_kernel` solves, and `tilted_kernel` weights the values by p (1 + e). If t is given (Parallax), `probed_kernel` is
one pass: for any number s of a row, with s_j = k_j . t,

    o = sum_j p_j v_j + sum_j p_j (s_j - s) v_j - (sum_j p_j (s_j - s)) sum_j p_j v_j.

Legend: as in `compact_kernels`; scores in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.math import LOG2E
from ..runtime.blocks import LENGTHS, load, row_scale
from ..runtime.finite_kernel import broken
from .math import (
    add_weighted,
    fine_products,
    guarded,
    load_queries,
    load_tile,
    part_of,
    place_of,
    products,
    seen_keys,
    store_part,
)

SINGULAR = tl.constexpr(2.0**-20)
"""A pivot below this share of its diagonal is rounding error; its coordinate is dropped."""
RESTARTS = tl.constexpr(2)
"""How often conjugate gradients restart from the true residual."""


@triton.jit(do_not_specialize=LENGTHS)
def moments_kernel(
    q, k, factor, low, high, mask, moment, mean, state, heads, group, queries, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_low, stride_mb, stride_mh, total_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MOST: tl.constexpr, GIVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store for one row and a program's tiles covariance [splits, N, D, D] and mean [splits, N, D] of the weighted
    keys, and state [splits, N, 2] = (m, sum w). Keys are shifted by the mean o of the first visible ones, which changes
    no result: sum w (k - o)(k - o)' = sum a k' - (sum a) o' with a = w (k - o) as multiplied, in two terms."""
    count = group * queries
    batch, head, rows, there, row, start, to, origin, first, last, _ = part_of(
        low, high, heads, group, queries, stride_low, 1, KEYS, MOST
    )
    place = batch * stride_mb + (head * group + tl.max(rows, 0) // queries).to(tl.int64) * stride_mh
    ONE: tl.constexpr = min(MASKED, 1)  # one row has one mask
    a = load_queries(q + batch * stride_qb, head * group, rows, count, queries, stride_qh, stride_qt, D, WIDTH)
    by = tl.max(row_scale(factor, scale, row, there, GIVEN), 0) * LOG2E
    k += batch * stride_kb + head * stride_kh
    top, mass = float("-inf"), 0.0
    centre, first_sum = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    second, used = tl.zeros((WIDTH, WIDTH), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for n in range(first, last):
        j = (origin + n) * KEYS
        seen = seen_keys(j, start, to, mask, place, rows, count, queries, stride_mh, KEYS, ONE)
        held = tl.reshape(seen, (KEYS,))
        keys = load_tile(k, j, held, stride_kt, D, WIDTH, KEYS)
        exact = keys.to(tl.float32)
        score = tl.where(held, tl.sum(a.to(tl.float32) * exact, 1) * by, float("-inf"))
        new = tl.maximum(top, tl.max(score, 0))
        level = tl.where(new == float("-inf"), 0.0, new)
        w, fade = tl.exp2(score - level), tl.exp2(top - level)
        middle = tl.sum(exact, 0) / tl.maximum(tl.sum(held.to(tl.float32), 0), 1.0)
        centre = tl.where(mass > 0, centre, middle)
        apart = tl.where(held[:, None], exact - centre[None, :], 0.0) * w[:, None]
        first_sum = first_sum * fade + tl.sum(apart, 0)
        second = second * fade
        large = apart.to(keys.dtype)
        multiplied = large.to(tl.float32)
        if keys.dtype == tl.float32:
            second = tl.dot(tl.trans(large), keys, second, input_precision="ieee")
        else:
            small = (apart - multiplied).to(keys.dtype)
            multiplied += small.to(tl.float32)
            second = tl.dot(tl.trans(small), keys, tl.dot(tl.trans(large), keys, second))
        used = used * fade + tl.sum(multiplied, 0)
        mass = mass * fade + tl.sum(w, 0)
        top = new
    whole = tl.where(mass > 0, mass, 1.0)
    shift = first_sum / whole
    spread = (second - used[:, None] * centre[None, :]) / whole - shift[:, None] * shift[None, :]
    own = tl.program_id(1).to(tl.int64) * total_rows + tl.program_id(0)
    i, columns = tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    inside = (i < D)[:, None] & (columns < D)[None, :]
    tl.store(moment + own * D * D + i[:, None] * D + columns[None, :], spread, mask=inside)
    tl.store(mean + own * D + columns, centre + shift, mask=columns < D)
    tl.store(state + own * 2, top)
    tl.store(state + own * 2 + 1, mass)


@triton.jit(do_not_specialize=LENGTHS)
def merge_moments_kernel(
    moment, mean, state, spread, centre, merged, splits, total_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr,
):  # fmt: skip
    """Merge PANEL rows of the covariance of one row from its splits (Chan, Golub and LeVeque): spread [N, D, D], centre
    [N, D] and merged [N, 2], as a single split would give them."""
    row = tl.program_id(0).to(tl.int64)
    i, columns = tl.program_id(1) * PANEL + tl.arange(0, PANEL), tl.arange(0, WIDTH)
    top = float("-inf")
    for s in range(splits):
        top = tl.maximum(top, tl.load(state + (tl.cast(s, tl.int64) * total_rows + row) * 2))
    level = tl.where(top == float("-inf"), 0.0, top)
    mass, middle, part = 0.0, tl.zeros((WIDTH,), tl.float32), tl.zeros((PANEL,), tl.float32)
    for s in range(splits):
        own = tl.cast(s, tl.int64) * total_rows + row
        w = tl.exp2(tl.load(state + own * 2) - level) * tl.load(state + own * 2 + 1)
        mass += w
        middle += w * tl.load(mean + own * D + columns, mask=columns < D, other=0.0)
        part += w * tl.load(mean + own * D + i, mask=i < D, other=0.0)
    whole = tl.where(mass > 0, mass, 1.0)
    middle, part = middle / whole, part / whole
    inside = (i < D)[:, None] & (columns < D)[None, :]
    tl.store(centre + row * D + columns, middle, mask=columns < D)
    found = tl.zeros((PANEL, WIDTH), tl.float32)
    for s in range(splits):
        own = tl.cast(s, tl.int64) * total_rows + row
        w = tl.exp2(tl.load(state + own * 2) - level) * tl.load(state + own * 2 + 1) / whole
        away = tl.load(mean + own * D + columns, mask=columns < D, other=0.0) - middle
        mine = tl.load(mean + own * D + i, mask=i < D, other=0.0) - part
        own_spread = tl.load(moment + own * D * D + i[:, None] * D + columns[None, :], mask=inside, other=0.0)
        found += w * (own_spread + mine[:, None] * away[None, :])
    tl.store(spread + row * D * D + i[:, None] * D + columns[None, :], found, mask=inside)
    tl.store(merged + row * 2, top)
    tl.store(merged + row * 2 + 1, mass)


@triton.jit
def apply(matrix, x):
    """Return matrix x."""
    return tl.sum(matrix * x[None, :], 1)


@triton.jit
def gradients(matrix, b, tol, limit):
    """Return (x, |b - A x|^2) by conjugate gradients, until the true residual is tol |b| or `limit` steps are done."""
    x = tl.zeros_like(b)
    goal = tol * tol * tl.sum(b * b, 0)
    r, left = b, tl.sum(b * b, 0)
    step, begun = 0, 0
    while (left > goal) & (begun <= RESTARTS) & (step < limit):
        p, rest, sound = r, left, True
        while (rest > goal) & (step < limit) & sound:
            ap = apply(matrix, p)
            curve = tl.sum(p * ap, 0)
            sound = curve > 0
            size = tl.where(sound, rest / tl.where(sound, curve, 1.0), 0.0)
            x += size * p
            r -= size * ap
            new = tl.sum(r * r, 0)
            p = r + (new / rest) * p
            rest = new
            step += 1
        r = b - apply(matrix, x)
        left = tl.sum(r * r, 0)
        begun += 1
    return x, left


@triton.jit
def eliminated(matrix, b, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return x of matrix x = b, the matrix symmetric and positive, by elimination above and below each pivot."""
    at = tl.arange(0, WIDTH)
    own = tl.sum(tl.where(at[:, None] == at[None, :], matrix, 0.0), 1)
    pivots = tl.full((WIDTH,), 1.0, tl.float32)
    for j in range(D):
        column = tl.sum(tl.where(at[None, :] == j, matrix, 0.0), 1)
        row = tl.sum(tl.where(at[:, None] == j, matrix, 0.0), 0)
        pivot, right = tl.sum(tl.where(at == j, column, 0.0), 0), tl.sum(tl.where(at == j, b, 0.0), 0)
        sound = pivot > SINGULAR * tl.sum(tl.where(at == j, own, 0.0), 0)
        by = tl.where(sound, 1 / tl.where(sound, pivot, 1.0), 0.0)
        share_of = tl.where(at == j, 0.0, column * by)
        matrix -= share_of[:, None] * row[None, :]
        b -= share_of * right
        pivots = tl.where(at == j, tl.where(sound, pivot, float("inf")), pivots)
    return b / pivots


@triton.jit(do_not_specialize=LENGTHS)
def solve_kernel(
    q, spread, mean, ridge, slope, heads, group, queries, number, tol, limit, stride_b, stride_h, stride_t,
    D: tl.constexpr, WIDTH: tl.constexpr, RIDGE: tl.constexpr, GRADIENTS: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store t [N, D] of one row: (spread + ridge) t = q - mean. RIDGE: numbers a row, 0 for one `number`. GRADIENTS:
    try conjugate gradients; DIRECT: use elimination instead, or if they do not converge."""
    count = group * queries
    _, batch, head, rows = place_of(heads, count, 1)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = (i < D)[:, None] & (i < D)[None, :]
    place = spread + row * D * D
    matrix = tl.load(place + i[:, None] * D + i[None, :], mask=inside, other=0.0)
    matrix = 0.5 * (matrix + tl.load(place + i[None, :] * D + i[:, None], mask=inside, other=0.0))
    if RIDGE == 0:
        added = tl.zeros((WIDTH,), tl.float32) + number
    elif RIDGE == 1:
        added = tl.zeros((WIDTH,), tl.float32) + tl.load(ridge + row)
    else:
        added = tl.load(ridge + row * D + i, mask=i < D, other=0.0)
    added = tl.where(i < D, added, 1.0)
    matrix += tl.where(i[:, None] == i[None, :], added[None, :], 0.0)
    x = load_queries(q + batch * stride_b, head * group, rows, count, queries, stride_h, stride_t, D, WIDTH)
    b = tl.sum(x.to(tl.float32), 0) - tl.load(mean + row * D + i, mask=i < D, other=0.0)
    unit = tl.sum(tl.where(i[:, None] == i[None, :], matrix, 0.0), 1)
    unit = tl.where(unit > 0, 1 / tl.sqrt(tl.where(unit > 0, unit, 1.0)), 1.0)
    matrix = matrix * unit[:, None] * unit[None, :]  # makes results independent of the scale of coordinates
    b = b * unit
    size = tl.max(tl.abs(b), 0)  # keeps squares in range
    size = tl.where(size > 0, size, 1.0)
    b = b / size
    t, left = b, 1.0
    if GRADIENTS:
        t, left = gradients(matrix, b, tol, limit)
    if DIRECT:  # noqa: SIM102 (known when the kernel is compiled, the next is not)
        if (left > tol * tol * tl.sum(b * b, 0)) | (left != left):
            t = eliminated(matrix, b, D, WIDTH)
    tl.store(slope + row * D + i, t * (size * unit), mask=i < D)


@triton.jit
def load_vectors(x, own, held, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load float32 vectors [ROWS, WIDTH] of the rows with these numbers, from [N, D]."""
    return load(x + own[:, None] * D + tl.arange(0, WIDTH)[None, :], held, D, WIDTH, True)


@triton.jit(do_not_specialize=LENGTHS)
def tilted_kernel(
    q, k, v, factor, low, high, mask, slope, mean, state, part, heads, group, queries, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_low, stride_mb, stride_mh, stride_part,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MOST: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Store sums of p (1 + (k - mean) . t) v over a program's tiles: part [splits, N, DV]. The product of the mean is
    taken with t as it was multiplied. RAW: NaN in rows that see a non-finite number."""
    count = group * queries
    batch, head, rows, held, own, start, to, origin, first, last, _ = part_of(
        low, high, heads, group, queries, stride_low, ROWS, KEYS, MOST
    )
    place = batch * stride_mb + head * group * stride_mh
    a = load_queries(q + batch * stride_qb, head * group, rows, count, queries, stride_qh, stride_qt, D, WIDTH)
    by = row_scale(factor, scale, own, held, GIVEN) * LOG2E
    t, middle = load_vectors(slope, own, held, D, WIDTH), load_vectors(mean, own, held, D, WIDTH)
    mass = tl.load(state + own * 2 + 1, mask=held, other=1.0)
    lse = tl.load(state + own * 2, mask=held, other=0.0) + tl.log2(tl.where(mass > 0, mass, 1.0))
    lse = tl.where(mass > 0, lse, 0.0)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    wrong = broken(a)
    total = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for n in range(first, last):
        j = (origin + n) * KEYS
        seen = seen_keys(j, start, to, mask, place, rows, count, queries, stride_mh, KEYS, MASKED)
        some = tl.max(seen.to(tl.int32), 0) != 0
        keys = load_tile(k, j, some, stride_kt, D, WIDTH, KEYS)
        lost = broken(keys)
        values = load_tile(v, j, some, stride_vt, DV, WIDTH_V, KEYS)
        p = tl.exp2(products(a, keys, ROWS) * by[:, None] - lse[:, None])
        e, multiplied = fine_products(t, keys, ROWS)
        w = tl.where(seen, p * (1 + (e - tl.sum(middle * multiplied, 1)[:, None])), 0.0)
        if RAW:
            w, values = guarded(w, lost, values, seen, wrong, MOST == 1 and MASKED != 2)
        total = add_weighted(total, w, values, ROWS)
    store_part(part, stride_part, own, held, total, DV, WIDTH_V)


@triton.jit(do_not_specialize=LENGTHS)
def probed_kernel(
    q, k, v, factor, low, high, mask, probe, part, state, heads, group, queries, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_low, stride_mb, stride_mh, total_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, MOST: tl.constexpr, GIVEN: tl.constexpr, MASKED: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """Store over a program's tiles, for t = -probe: part [splits, N, 2, DV] = (sum w v, sum w (s_j - s) v) and state
    [splits, N, 4] = (m, sum w, sum w (s_j - s), s). RAW: all NaN in rows that see a non-finite number."""
    count = group * queries
    batch, head, rows, held, own, start, to, origin, first, last, _ = part_of(
        low, high, heads, group, queries, stride_low, ROWS, KEYS, MOST
    )
    place = batch * stride_mb + head * group * stride_mh
    a = load_queries(q + batch * stride_qb, head * group, rows, count, queries, stride_qh, stride_qt, D, WIDTH)
    by = row_scale(factor, scale, own, held, GIVEN) * LOG2E
    t = -load_vectors(probe, own, held, D, WIDTH)
    k += batch * stride_kb + head * stride_kh
    v += batch * stride_vb + head * stride_vh
    columns, wrong = tl.arange(0, WIDTH_V), broken(a)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass, tilt, level_s = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    plain, tilted = tl.zeros((ROWS, WIDTH_V), tl.float32), tl.zeros((ROWS, WIDTH_V), tl.float32)
    for n in range(first, last):
        j = (origin + n) * KEYS
        seen = seen_keys(j, start, to, mask, place, rows, count, queries, stride_mh, KEYS, MASKED)
        some = tl.max(seen.to(tl.int32), 0) != 0
        keys = load_tile(k, j, some, stride_kt, D, WIDTH, KEYS)
        lost = broken(keys)
        values = load_tile(v, j, some, stride_vt, DV, WIDTH_V, KEYS)
        score = tl.where(seen, products(a, keys, ROWS) * by[:, None], float("-inf"))
        s, _used = fine_products(t, keys, ROWS)
        new = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        w, fade = tl.exp2(score - level[:, None]), tl.exp2(top - level)
        number = tl.sum(seen.to(tl.float32), 1)
        near = tl.sum(tl.where(seen, s, 0.0), 1) / tl.maximum(number, 1.0)
        level_s = tl.where(mass > 0, level_s, near)
        ws = w * tl.where(seen, s - level_s[:, None], 0.0)
        if RAW:
            w, values = guarded(w, lost, values, seen, wrong, MOST == 1 and MASKED != 2)
        plain = add_weighted(plain * fade[:, None], w, values, ROWS)
        tilted = add_weighted(tilted * fade[:, None], ws, values, ROWS)
        mass, tilt = mass * fade + tl.sum(w, 1), tilt * fade + tl.sum(ws, 1)
        top = new
    split = tl.program_id(1).to(tl.int64) * total_rows + own
    inside = held[:, None] & (columns < DV)[None, :]
    tl.store(part + split[:, None] * 2 * DV + columns[None, :], plain, mask=inside)
    tl.store(part + split[:, None] * 2 * DV + DV + columns[None, :], tilted, mask=inside)
    tl.store(state + split * 4, top, mask=held)
    tl.store(state + split * 4 + 1, mass, mask=held)
    tl.store(state + split * 4 + 2, tilt, mask=held)
    tl.store(state + split * 4 + 3, level_s, mask=held)


@triton.jit(do_not_specialize=LENGTHS)
def merge_probed_kernel(part, state, out, splits, total_rows, DV: tl.constexpr, WIDTH: tl.constexpr):
    """Merge one row of the output from its splits. The common s is the mean of the slopes, so that the term subtracted
    at the end is nearly 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    top = float("-inf")
    for s in range(splits):
        top = tl.maximum(top, tl.load(state + (tl.cast(s, tl.int64) * total_rows + row) * 4))
    level = tl.where(top == float("-inf"), 0.0, top)
    mass, slopes = 0.0, 0.0
    for s in range(splits):
        own = state + (tl.cast(s, tl.int64) * total_rows + row) * 4
        w, m = tl.exp2(tl.load(own) - level), tl.load(own + 1)
        mass += w * m
        slopes += w * (tl.load(own + 2) + tl.load(own + 3) * m)
    whole = tl.where(mass > 0, mass, 1.0)
    mean = slopes / whole
    rest, plain, tilted = 0.0, tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for s in range(splits):
        at = tl.cast(s, tl.int64) * total_rows + row
        w = tl.exp2(tl.load(state + at * 4) - level)
        moved = tl.load(state + at * 4 + 3) - mean
        rest += w * (tl.load(state + at * 4 + 2) + moved * tl.load(state + at * 4 + 1))
        own = tl.load(part + at * 2 * DV + columns, mask=columns < DV, other=0.0)
        plain += w * own
        tilted += w * (tl.load(part + at * 2 * DV + DV + columns, mask=columns < DV, other=0.0) + moved * own)
    found = (plain + tilted - (rest / whole) * plain) / whole
    tl.store(out + row * DV + columns, found.to(out.dtype.element_ty), mask=columns < DV)
