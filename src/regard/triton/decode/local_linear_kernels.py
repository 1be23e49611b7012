"""The kernels of `decode.local_linear`.

A solved t takes two passes over the keys: `moments_kernel` gathers mean and covariance of the weighted keys,
`solve_kernel` solves, and `corrected_kernel` weights the values by p (1 + e). A given t takes one (`compact_kernels`).

Legend: as in `compact_kernels`; scores in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.math import LOG2E
from ..runtime.blocks import LENGTHS, store_numbers
from ..runtime.finite_kernel import non_finite
from . import math as shared

SINGULAR = tl.constexpr(2.0**-20)
"""A pivot below this share of its diagonal is rounding error; its coordinate is dropped."""
RESTARTS = tl.constexpr(2)  # how often conjugate gradients restart from the true residual


@triton.jit(do_not_specialize=LENGTHS)
def moments_kernel(
    matrices, factor, span, moment, mean, state, heads, group, queries, stride_low, stride_mb, stride_mh, total_rows,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store for one row and a program's tiles covariance [splits, N, D, D] and mean [splits, N, D] of the weighted
    keys, and state [splits, N, 2] = (m, sum w). Keys are shifted by the mean o of the first visible ones, which changes
    no result: sum w (k - o)(k - o)' = sum a k' - (sum a) o' with a = w (k - o) as multiplied, in two terms."""
    D: tl.constexpr = FORM.dim
    WIDTH: tl.constexpr = FORM.wide
    ONE: tl.constexpr = min(FORM.masked, 1)  # one row has one mask
    steps = stride_low, stride_mb, stride_mh
    rows, _, _, tiles, sight, a, by, k, _v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    mask = sight[2]
    if ONE:
        mask += (tl.max(rows, 0) // queries).to(tl.int64) * stride_mh
    sight = sight[0], sight[1], mask
    by = tl.max(by, 0) * LOG2E
    top, mass = float("-inf"), 0.0
    centre, first_sum = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    second, used = tl.zeros((WIDTH, WIDTH), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        held = tl.reshape(shared.seen_keys(j, sight, ONE, FORM), (FORM.tile,))
        keys = shared.load_tile(k, j, held, FORM.dim, FORM.wide, FORM)
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
    store_numbers(state, own, (top, mass), None)


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
    store_numbers(merged, row, (top, mass), None)


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
    q, spread, mean, ridge, slope, heads, group, queries, number, tol, limit,
    RIDGE: tl.constexpr, GRADIENTS: tl.constexpr, DIRECT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store t [N, D] of one row: (spread + ridge) t = q - mean. RIDGE: numbers a row, 0 for one `number`. GRADIENTS:
    try conjugate gradients; DIRECT: use elimination instead, or if they do not converge."""
    D: tl.constexpr = FORM.dim
    WIDTH: tl.constexpr = FORM.wide
    _, batch, head, rows = shared.place_of(heads, group * queries, 1)
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
    x = shared.load_queries(q, batch, head * group, rows, rows < group * queries, queries, FORM)
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


@triton.jit(do_not_specialize=LENGTHS)
def corrected_kernel(
    matrices, factor, span, slope, mean, state, part, heads, group, queries, stride_low, stride_mb, stride_mh,
    stride_part, FORM: tl.constexpr,
):  # fmt: skip
    """Store sums of p (1 + (k - mean) . t) v over a program's tiles: part [splits, N, DV]. The product of the mean is
    taken with t as it was multiplied. FORM.raw: NaN in rows that see a non-finite number."""
    steps = stride_low, stride_mb, stride_mh
    _, held, own, tiles, sight, a, by, k, v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    by *= LOG2E
    t = shared.load_vectors(slope, own, held, FORM.dim, FORM.wide)
    middle = shared.load_vectors(mean, own, held, FORM.dim, FORM.wide)
    mass = tl.load(state + own * 2 + 1, mask=held, other=1.0)
    lse = tl.load(state + own * 2, mask=held, other=0.0) + tl.log2(tl.where(mass > 0, mass, 1.0))
    lse = tl.where(mass > 0, lse, 0.0)
    wrong = non_finite(a)
    total = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        seen = shared.seen_keys(j, sight, FORM.masked, FORM)
        some = tl.max(seen.to(tl.int32), 0) != 0
        keys = shared.load_tile(k, j, some, FORM.dim, FORM.wide, FORM)
        lost, values = non_finite(keys), shared.load_tile(v, j, some, FORM.value_dim, FORM.value_wide, FORM)
        p = tl.exp2(shared.products(a, keys, FORM.own) * by[:, None] - lse[:, None])
        e, multiplied = shared.fine_products(t, keys, FORM.own)
        w = tl.where(seen, p * (1 + (e - tl.sum(middle * multiplied, 1)[:, None])), 0.0)
        if FORM.raw:
            w, values = shared.guarded(w, lost, values, seen, wrong, FORM)
        total = shared.add_weighted(total, w, values, FORM.own)
    shared.store_part(part, stride_part, own, held, total, FORM.value_dim, FORM.value_wide)
