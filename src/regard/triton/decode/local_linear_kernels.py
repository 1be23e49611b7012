"""The kernels of `decode.local_linear`, which describes them. Legend: as in `compact_kernels`; scores in base 2."""

import triton
import triton.language as tl

from ..compact.math import LOG2E
from ..runtime.blocks import LENGTHS, load, load_rows, of_head, parts, places_of, store_numbers
from ..runtime.kernels import non_finite
from . import math as shared

SINGULAR = tl.constexpr(2.0**-20)
"""A pivot below this share of its diagonal is rounding error; its coordinate is dropped."""
RESTARTS = tl.constexpr(2)  # how often conjugate gradients restart from the true residual


@triton.jit
def seen_by_any(first, seen, sight, FORM: tl.constexpr):
    """Return which keys [KEYS] from `first` on some row sees; without a reduction if all rows see the same."""
    if FORM.masked or FORM.most > 1:
        return tl.max(seen.to(tl.int32), 0) != 0
    else:
        at = first + tl.arange(0, FORM.tile)
        return (at >= tl.max(sight[0], 0)) & (at < tl.max(sight[1], 0))


@triton.jit(do_not_specialize=LENGTHS)
def means_kernel(
    matrices, factor, span, z, part, state, heads, group, queries, stride_low, stride_mb, stride_mh, room, total_rows,
    BLOCK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store scores z [N, room], -inf where hidden, and over a program's tiles part [splits, N, D] = sum w k and state
    [splits, N, 2] = (m, sum w). The first of a row's scores is that of a multiple of BLOCK."""
    steps = stride_low, stride_mb, stride_mh
    _, held, row, tiles, sight, a, by, k, _v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    by *= LOG2E
    origin = tiles[0] * FORM.tile // BLOCK * BLOCK
    top, total = tl.full((FORM.own,), float("-inf"), tl.float32), tl.full((FORM.own, FORM.wide), 0.0, tl.float32)
    mass = tl.full((FORM.own, FORM.tile), 0.0, tl.float32)  # added up at the end
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        seen = shared.seen_keys(j, sight, FORM)
        some = seen_by_any(j, seen, sight, FORM)
        keys = shared.load_tile(k, j, some, FORM.dim, FORM.wide, FORM)
        if FORM.raw and (FORM.most > 1 or FORM.masked == 2):  # else all rows see the same keys
            keys = tl.where(non_finite(keys)[:, None], 0.0, keys)
        score = tl.where(seen, shared.products(a, keys, FORM.own) * by[:, None], float("-inf"))
        places = z + row[:, None] * room + (j - origin + tl.arange(0, FORM.tile))[None, :]
        tl.store(places, score, mask=held[:, None])
        new = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        w, fade = tl.exp2(score - level[:, None]), tl.exp2(top - level)
        if FORM.own > 1:  # as they are multiplied: their mean is within 2^-17 of the spread of the keys
            large, small = parts(w, keys, True)
            w = large.to(tl.float32) + small.to(tl.float32)
        total = shared.add_weighted(total * fade[:, None], w, keys, FORM.own)
        mass = mass * fade[:, None] + w
        top = new
    shared.store_part(part, total_rows * FORM.dim, row, held, total, FORM.dim, FORM.wide)
    store_numbers(state, tl.program_id(1).to(tl.int64) * total_rows + row, (top, tl.sum(mass, 1)), held)


@triton.jit(do_not_specialize=LENGTHS)
def weights_kernel(
    span, z, part, state, mean, heads, group, queries, stride_low, room, splits, total_rows,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Replace CHUNK scores of one row by weights p, 0 where hidden; a row's first program also merges mean [N, D]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, r = row // (heads * group * queries), (row % (group * queries)).to(tl.int32)
    low, high = span[0] + batch * stride_low, span[1] + batch * stride_low
    origin, _, _ = shared.extent(low, high, queries, BLOCK, FORM.most)
    begin, to = tl.load(low + r % queries), tl.load(high + r % queries)
    at = tl.arange(0, PARTS)
    top, mass = tl.full((PARTS,), float("-inf"), tl.float32), tl.zeros((PARTS,), tl.float32)
    for s in range(0, splits, PARTS):
        index, held = state + ((s + at).to(tl.int64) * total_rows + row) * 2, s + at < splits
        own_top, own_mass = tl.load(index, mask=held, other=float("-inf")), tl.load(index + 1, mask=held, other=0.0)
        new = tl.maximum(top, own_top)
        level = tl.where(new == float("-inf"), 0.0, new)
        mass = mass * tl.exp2(top - level) + own_mass * tl.exp2(own_top - level)
        top = new
    best = tl.max(top, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    whole = tl.sum(tl.exp2(top - best) * mass, 0)
    whole = tl.where(whole > 0, whole, 1.0)
    if chunk == 0:
        columns = tl.arange(0, FORM.wide)
        middle = tl.full((PARTS, FORM.wide), 0.0, tl.float32)
        for s in range(0, splits, PARTS):
            index, held = (s + at).to(tl.int64) * total_rows + row, s + at < splits
            w = tl.exp2(tl.load(state + index * 2, mask=held, other=float("-inf")) - best)
            inside = held[:, None] & (columns < FORM.dim)[None, :]
            sums = tl.load(part + index[:, None] * FORM.dim + columns[None, :], mask=inside, other=0.0)
            middle += w[:, None] * sums
        tl.store(mean + row * FORM.dim + columns, tl.sum(middle, 0) / whole, mask=columns < FORM.dim)
    keys = chunk * CHUNK + tl.arange(0, CHUNK)
    places = z + row * room + keys
    seen = (keys + origin * BLOCK >= begin) & (keys + origin * BLOCK < to)
    p = tl.exp2(tl.load(places, mask=seen, other=float("-inf")) - best) / whole
    tl.store(places, p, mask=keys < room)


@triton.jit
def weighted(keys, middle, p, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Return p (k - mean)' of a program's rows, [rows WIDTH, KEYS], in two terms of the dtype of the keys [KEYS,
    WIDTH], from means [rows, WIDTH] and weights [KEYS, rows]."""
    x = (keys.to(tl.float32)[:, None, :] - middle[None, :, :]) * p[:, :, None]
    large, small = x, x
    if keys.dtype != tl.float32:  # truncated, not rounded: a bit operation instead of a slow conversion
        large = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        small = x - large
    large, small = large.to(keys.dtype), small.to(keys.dtype)
    shape: tl.constexpr = (FORM.tile, FORM.own * WIDTH)
    return tl.trans(tl.reshape(large, shape)), tl.trans(tl.reshape(small, shape))


@triton.jit
def add_product(total, x, keys, middle):
    """Return total + x k for x in two terms; in float32 it has one, and keys are shifted by the mean."""
    if keys.dtype == tl.float32:
        return tl.dot(x[0], keys - middle, total, input_precision="ieee")
    else:
        return tl.dot(x[1], keys, tl.dot(x[0], keys, total))


@triton.jit
def half(x, j, held, FIRST: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """Load the columns [FIRST, FIRST + HALF) of a tile of keys."""
    places = places_of(x[0] + FIRST, j, x[1], FORM.tile, HALF, True)
    return load(places, held, min(FORM.dim - FIRST, HALF), HALF, True)


@triton.jit
def put_matrices(moment, s, rows, FROM: tl.constexpr, TO: tl.constexpr, HALF: tl.constexpr, FORM: tl.constexpr):
    """Store a block [rows, HALF, HALF] of the matrices [N, D, D] of these rows, from its row FROM and column TO on."""
    D: tl.constexpr = FORM.dim
    i, c = FROM + tl.arange(0, HALF), TO + tl.arange(0, HALF)
    places = rows[:, None, None] * D * D + i[None, :, None] * D + c[None, None, :]
    inside = (i < D)[None, :, None] & (c < D)[None, None, :] & (rows >= 0)[:, None, None]
    tl.store(moment + places, tl.reshape(s, (FORM.own, HALF, HALF)), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def moments_kernel(
    matrices, span, z, mean, moment, heads, group, queries, stride_low, room, total_rows,
    BLOCK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store for FORM.own rows and a program's tiles S = sum p (k - mean) k' in moment [splits, N, D, D], of which only
    the blocks on and above the diagonal are set. Added over the splits it is the covariance: sum p (k - mean) = 0."""
    HALF: tl.constexpr = min(FORM.wide, 64)
    steps = stride_low, 0, 0
    batch, head, owner, tiles, sight = shared.part_of(span, steps, heads, group, queries, FORM)
    start, to = tl.min(sight[0], 0), tl.max(sight[1], 0)  # rows of a program see the same keys but for a mask
    k, rows = of_head(matrices[1], batch, head), owner[2]
    i = tl.arange(0, HALF)
    from_mean = mean + rows[:, None] * FORM.dim + i[None, :]
    mean_0 = tl.load(from_mean, mask=(i < FORM.dim)[None, :], other=0.0)
    s_00 = tl.full((FORM.own * HALF, HALF), 0.0, tl.float32)
    if FORM.wide > HALF:
        mean_1 = tl.load(from_mean + HALF, mask=(HALF + i < FORM.dim)[None, :], other=0.0)
        s_01, s_11 = s_00, s_00
    first = z + tl.min(rows, 0) * room - tiles[0] * FORM.tile // BLOCK * BLOCK
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        at = first + j + tl.arange(0, FORM.tile)
        if FORM.own == 2:  # noqa: SIM108 (known when the kernel is compiled)
            p = tl.join(tl.load(at), tl.load(at + room))
        else:
            p = tl.load(at)[:, None]
        if FORM.masked:
            held = tl.max(p, 1) > 0
        else:
            keys = j + tl.arange(0, FORM.tile)
            held = (keys >= start) & (keys < to)
        k_0 = half(k, j, held, 0, HALF, FORM)
        x_0 = weighted(k_0, mean_0, p, HALF, FORM)
        s_00 = add_product(s_00, x_0, k_0, mean_0)
        if FORM.wide > HALF:
            k_1 = half(k, j, held, HALF, HALF, FORM)
            s_01 = add_product(s_01, x_0, k_1, mean_1)
            s_11 = add_product(s_11, weighted(k_1, mean_1, p, HALF, FORM), k_1, mean_1)
    rows += tl.program_id(1).to(tl.int64) * total_rows
    put_matrices(moment, s_00, rows, 0, 0, HALF, FORM)
    if FORM.wide > HALF:
        put_matrices(moment, s_01, rows, 0, HALF, HALF, FORM)
        put_matrices(moment, s_11, rows, HALF, HALF, HALF, FORM)


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
            ap = tl.sum(matrix * p[None, :], 1)
            curve = tl.sum(p * ap, 0)
            sound = curve > 0
            size = tl.where(sound, rest / tl.where(sound, curve, 1.0), 0.0)
            x += size * p
            r -= size * ap
            new = tl.sum(r * r, 0)
            p = r + (new / rest) * p
            rest = new
            step += 1
        r = b - tl.sum(matrix * x[None, :], 1)
        left = tl.sum(r * r, 0)
        begun += 1
    return x, left


@triton.jit
def eliminated(matrix, b, D: tl.constexpr, WIDTH: tl.constexpr):
    """Return x of matrix x = b, the matrix symmetric and positive, by elimination above and below each pivot."""
    at = tl.arange(0, WIDTH)
    diagonal = tl.sum(tl.where(at[:, None] == at[None, :], matrix, 0.0), 1)
    pivots = tl.full((WIDTH,), 1.0, tl.float32)
    for j in range(D):
        column = tl.sum(tl.where(at[None, :] == j, matrix, 0.0), 1)
        row = tl.sum(tl.where(at[:, None] == j, matrix, 0.0), 0)
        pivot, right = tl.sum(tl.where(at == j, column, 0.0), 0), tl.sum(tl.where(at == j, b, 0.0), 0)
        sound = pivot > SINGULAR * tl.sum(tl.where(at == j, diagonal, 0.0), 0)
        by = tl.where(sound, 1 / tl.where(sound, pivot, 1.0), 0.0)
        share_of = tl.where(at == j, 0.0, column * by)
        matrix -= share_of[:, None] * row[None, :]
        b -= share_of * right
        pivots = tl.where(at == j, tl.where(sound, pivot, float("inf")), pivots)
    return b / pivots


@triton.jit(do_not_specialize=LENGTHS)
def solve_kernel(
    q, moment, mean, ridge, slope, heads, group, queries, splits, total_rows, number, tol, limit,
    RIDGE: tl.constexpr, GRADIENTS: tl.constexpr, DIRECT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store t [N, D] of one row: (C + ridge) t = q - mean. RIDGE: numbers a row, 0 for one `number`. GRADIENTS: try
    conjugate gradients; DIRECT: use elimination instead, or if they do not converge."""
    D: tl.constexpr = FORM.dim
    WIDTH: tl.constexpr = FORM.wide
    _, batch, head, rows = shared.place_of(heads, group * queries, 1)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    above = i[:, None] <= i[None, :]
    inside = above & (i < D)[None, :]
    index = moment + row * D * D + i[:, None] * D + i[None, :]
    matrix = tl.zeros((WIDTH, WIDTH), tl.float32)
    for s in range(splits):
        matrix += tl.load(index + tl.cast(s, tl.int64) * total_rows * (D * D), mask=inside, other=0.0)
    matrix = tl.where(above, matrix, tl.trans(matrix))
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
    matrices, factor, span, z, slope, mean, part, heads, group, queries, stride_low, stride_mb, stride_mh, room,
    stride_part, BLOCK: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store sums of p (1 + (k - mean) . t) v over a program's tiles: part [splits, N, DV]. The product of the mean is
    taken with t as it was multiplied. FORM.raw: NaN in rows that see a non-finite number."""
    steps = stride_low, stride_mb, stride_mh
    _, held, row, tiles, sight, a, _by, k, v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    origin = tiles[0] * FORM.tile // BLOCK * BLOCK
    t = load_rows(slope, row, FORM.dim, held, FORM.dim, FORM.wide)
    middle = load_rows(mean, row, FORM.dim, held, FORM.dim, FORM.wide)
    bad = non_finite(a)
    total = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        seen = shared.seen_keys(j, sight, FORM)
        some = seen_by_any(j, seen, sight, FORM)
        keys = shared.load_tile(k, j, some, FORM.dim, FORM.wide, FORM)
        lost, values = non_finite(keys), shared.load_tile(v, j, some, FORM.value_dim, FORM.value_wide, FORM)
        places = z + row[:, None] * room + (j - origin + tl.arange(0, FORM.tile))[None, :]
        p = tl.load(places, mask=held[:, None], other=0.0)
        e, multiplied = shared.fine_products(t, keys, FORM.own)
        w = tl.where(seen, p * (1 + (e - tl.sum(middle * multiplied, 1)[:, None])), 0.0)
        if FORM.raw:
            w, values = shared.guarded(w, lost, values, seen, bad, FORM)
        total = shared.add_weighted(total, w, values, FORM.own)
    shared.store_part(part, stride_part, row, held, total, FORM.value_dim, FORM.value_wide)
