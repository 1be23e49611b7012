"""The kernels of `decode.compact`, and those of local linear attention with a given t (Parallax).

Softmax is one pass and a merge. So is a given t: for any number s of a row, with s_j = k_j . t,

    o = sum_j p_j v_j + sum_j p_j (s_j - s) v_j - (sum_j p_j (s_j - s)) sum_j p_j v_j.

Compact rules keep scores: `scores_kernel` writes them with the largest of every tile, `threshold_kernel` finds each
row's threshold among those that can have weight, and `output_kernel` reads the values that do.

Legend: heads Hkv of keys, each with `count` = group x queries rows; N = B x Hkv; tiles are counted from the first that
a query of the sequence sees, `room` of each row. In one pass scores are in base 2, and S = 2 with a given t, else 1.
"""

import triton
import triton.language as tl

from ..compact.math import ADAPTIVE, ANCHORED, FIXED, LOG2E, NEAREST, UNIFORM, lower_power, power, relative, root
from ..runtime.blocks import FAR, LENGTHS, load_rows, of_head, store_numbers
from ..runtime.kernels import non_finite
from . import math as shared

STEPS = tl.constexpr(24)  # maximum steps of Newton's method
EPS = tl.constexpr(2.0**-23)


# Scores and thresholds ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def scores_kernel(
    matrices, factor, span, z, tops, heads, group, queries, room, stride_low, stride_mb, stride_mh, FORM: tl.constexpr
):
    """Store scores z [N, count, room KEYS], -inf where hidden, and the largest of every tile, tops [N, count, room].
    FORM.raw: rows that see what is not finite, values too, get inf as the largest score of a tile."""
    ALIKE: tl.constexpr = FORM.most == 1 and FORM.masked == 0  # all rows see the same keys
    steps = stride_low, stride_mb, stride_mh
    _, held, row, tiles, sight, a, by, k, v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    bad = non_finite(a)
    if FORM.raw and ALIKE:
        worst = shared.largest(tl.full((FORM.tile, FORM.wide), 0.0, k[0].dtype.element_ty))
        worst_value = shared.largest(tl.full((FORM.tile, FORM.value_wide), 0.0, v[0].dtype.element_ty))
    for n in tl.range(tiles[1], tiles[2], num_stages=3 if FORM.raw and FORM.own > 1 else None):
        j = (tiles[0] + n) * FORM.tile
        real, keys, seen, score = shared.scored_keys(j, k, a, by, sight, FORM)
        if FORM.raw:
            values = shared.load_tile(v, j, real, FORM.value_dim, FORM.value_wide, FORM)
            if ALIKE:
                worst = tl.maximum(worst, shared.largest(keys))
                worst_value = tl.maximum(worst_value, shared.largest(values))
                score = tl.where(score < float("inf"), score, float("-inf"))  # NaN, too
            else:
                lost = non_finite(keys) | non_finite(values)
                score = tl.where(seen & (bad[:, None] | lost[None, :]), float("inf"), score)
        into = z + (row * room + n)[:, None] * FORM.tile + tl.arange(0, FORM.tile)[None, :]
        tl.store(into, score, mask=held[:, None])
        tl.store(tops + row * room + n, tl.max(score, 1), mask=held)
    if FORM.raw and ALIKE:
        lost = bad | shared.beyond(worst, k[0], row) | shared.beyond(worst_value, v[0], row)
        if tiles[1] < tiles[2]:
            tl.debug_barrier()  # wait for what other threads wrote
            largest = tl.full((FORM.own,), float("inf"), tl.float32)
            tl.store(tops + row * room + tiles[1], largest, mask=held & lost)


@triton.jit
def nearest_key(z, tops, top, tiles, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key with the best score."""
    first = tl.full((CHUNK,), FAR, tl.int32)
    for n in range(0, tiles * KEYS, CHUNK):
        at = n + tl.arange(0, CHUNK)
        largest = tl.load(tops + at // KEYS, mask=at < tiles * KEYS, other=float("-inf"))
        score = tl.load(z + at, mask=largest == top, other=float("-inf"))
        first = tl.minimum(first, tl.where((largest == top) & (score == top), at, FAR))
    return tl.min(first, 0)


@triton.jit
def gather_near(z, tops, near, top, reach, tiles, CHUNK: tl.constexpr, KEYS: tl.constexpr):
    """Store distances top - z below `reach` in `near`, in the order of the keys, and return how many."""
    count = 0
    for n in range(0, tiles * KEYS, CHUNK):
        at = n + tl.arange(0, CHUNK)
        nearest = top - tl.load(tops + at // KEYS, mask=at < tiles * KEYS, other=float("-inf"))
        if tl.min(nearest, 0) < reach:
            d = top - tl.load(z + at, mask=nearest < reach, other=float("-inf"))
            inside = ((nearest < reach) & (d < reach)).to(tl.int32)
            tl.store(near + count + tl.cumsum(inside, 0) - 1, d, mask=inside != 0)
            count += tl.sum(inside, 0)
    return count


@triton.jit
def solve_peak(near, count, R: tl.constexpr, CHUNK: tl.constexpr):
    """Return b with sum_j [b - d_j/R]_+^R = 1, by Newton's method on the R-norm from b = 1."""
    b, going, step = 1.0, count > 0, 0
    total = 1.0
    while going:
        totals, lowers = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        for n in range(0, count, CHUNK):
            at = n + tl.arange(0, CHUNK)
            a = tl.maximum(b - tl.load(near + at, mask=at < count, other=float("inf")) / R, 0.0)
            slope = lower_power(a, R)
            lowers += slope
            totals += slope * a
        total, lower = tl.sum(totals, 0), tl.sum(lowers, 0)
        norm = root(total, R)
        new = b - (norm - 1) * (total / norm) / lower
        step += 1
        going = (new < b) & (norm > 1 + 2 * EPS) & (step < STEPS)
        b = tl.where((new < b) & (norm > 1 + 2 * EPS), new, b)
    return b


@triton.jit
def value_at(d, reach, FORM: tl.constexpr):
    """Return K(reach - d) / K(reach), [1 - d/reach]_+^r for a power."""
    return power(tl.maximum(1 - d / reach, 0.0), FORM.r) if FORM.relative is None else relative(d, reach, FORM)[0]


@triton.jit(do_not_specialize=LENGTHS)
def threshold_kernel(
    z, tops, near, given, span, totals, best, heads, group, queries, room, number, stride_low, stride_mb, stride_mh,
    CHUNK: tl.constexpr, PARAMETER: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store of one row totals [N, count, 3] = (best score, how far below it weights end, or 0 for fallback weights, sum
    of weights) and best [N, count, 2] = (how many keys are visible, the nearest). `near`, shaped like z, is scratch."""
    row = tl.program_id(0).to(tl.int64)
    count = group * queries
    at, r = row // count, (row % count).to(tl.int32)
    batch, head = at // heads, at % heads
    KEYS: tl.constexpr = FORM.tile
    low, high = span[0] + batch * stride_low, span[1] + batch * stride_low
    origin, tiles, _ = shared.extent(low, high, queries, KEYS, FORM.most)
    begin, to = tl.load(low + r % queries), tl.load(high + r % queries)
    z, near, tops = z + row * room * KEYS, near + row * room * KEYS, tops + row * room
    largest = tl.full((CHUNK,), float("-inf"), tl.float32)
    for n in range(0, tiles, CHUNK):
        places = n + tl.arange(0, CHUNK)
        largest = tl.maximum(largest, tl.load(tops + places, mask=places < tiles, other=float("-inf")))
    top = tl.max(largest, 0)
    none, visible = top == float("-inf"), 0
    if FORM.rule == FIXED:
        at_mask = batch * stride_mb + (head * group + r // queries) * stride_mh
        visible = tl.maximum(to - begin, 0)
        if FORM.masked:
            part = tl.zeros((CHUNK,), tl.int32)
            for j in range(begin, to, CHUNK):
                at_key = j + tl.arange(0, CHUNK)
                part += (tl.load(span[2] + at_mask + at_key, mask=at_key < to, other=0) != 0).to(tl.int32)
            visible = tl.sum(part, 0)
    value = tl.load(given + row) if PARAMETER else number
    if FORM.rule == ADAPTIVE:
        reach = value * 0.0 + FORM.r  # the peak is at most one
    elif FORM.rule == ANCHORED:
        reach = value + 0.0
    else:
        reach = top + value
    lost = (reach <= 0) & ~none
    kept, nearest = 0, 0
    if ~(none | lost):
        kept = gather_near(z, tops, near, top, reach, tiles, CHUNK, KEYS)
        tl.debug_barrier()  # wait for what other threads wrote
        if FORM.rule == ADAPTIVE:
            reach = FORM.r * solve_peak(near, kept, FORM.r, CHUNK)
    if FORM.stand == NEAREST:  # noqa: SIM102 (known when the kernel is compiled, the next is not)
        if lost:
            nearest = origin * KEYS + nearest_key(z, tops, top, tiles, CHUNK, KEYS)
    weights = tl.zeros((CHUNK,), tl.float32)
    for n in range(0, kept, CHUNK):
        places = n + tl.arange(0, CHUNK)
        d = tl.load(near + places, mask=places < kept, other=float("inf"))
        weights += value_at(d, reach, FORM)
    mass = tl.sum(weights, 0)
    numbers = tl.where(none, 0.0, top), tl.where(lost, 0.0, tl.where(none, 1.0, reach))
    store_numbers(totals, row, (numbers[0], numbers[1], tl.where(none | lost, 1.0, mass)), None)
    store_numbers(best, row, (visible, nearest), None)


# Output ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def output_kernel(
    v, z, tops, span, totals, best, part, heads, group, queries, room, stride_low, stride_mb, stride_mh, stride_part,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store the sums of weighted values over a program's tiles: part [splits, N, count, DV], `stride_part` a split.
    Only values with weight in some row of the tile are read. A row whose best score is inf is NaN."""
    KEYS: tl.constexpr = FORM.tile
    steps = stride_low, stride_mb, stride_mh
    batch, head, rows, tiles, sight = shared.part_of(span, steps, heads, group, queries, FORM)
    held, row, start, to = rows[1], rows[2], sight[0], sight[1]
    top = tl.load(totals + row * 3, mask=held, other=0.0)
    reach = tl.load(totals + row * 3 + 1, mask=held, other=1.0)
    mass = tl.load(totals + row * 3 + 2, mask=held, other=1.0)
    lost = reach == 0
    visible, nearest = tl.load(best + row * 2, mask=held, other=1), tl.load(best + row * 2 + 1, mask=held, other=-1)
    v = of_head(v, batch, head)
    total = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * KEYS
        near = held & (top - tl.load(tops + row * room + n, mask=held, other=float("-inf")) < reach)
        stands = near
        if FORM.stand == UNIFORM:
            stands = lost & (start < j + KEYS) & (to > j)
        elif FORM.stand == NEAREST:
            stands = lost & (nearest >= j) & (nearest < j + KEYS)
        wanted = tl.sum((near | stands).to(tl.int32), 0) > 0
        if wanted:
            score = z + (row * room + n)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
            score = tl.load(score, mask=near[:, None], other=float("-inf"))
            p = value_at(top[:, None] - score, reach[:, None], FORM) / mass[:, None]
            p = tl.where(near[:, None], p, 0.0)
            if FORM.stand == UNIFORM:
                seen = shared.seen_keys(j, sight, FORM)
                p = tl.where(lost[:, None] & seen, 1 / tl.maximum(visible, 1).to(tl.float32)[:, None], p)
            elif FORM.stand == NEAREST:
                best_key = (lost & stands)[:, None] & (j + tl.arange(0, KEYS)[None, :] == nearest[:, None])
                p = tl.where(best_key, 1.0, p)
            values = shared.load_tile(v, j, tl.max(p, 0) > 0, FORM.value_dim, FORM.value_wide, FORM)
            total = shared.add_weighted(total, p, values, FORM.own)
    total = tl.where((top == float("inf"))[:, None], float("nan"), total)
    shared.store_part(part, stride_part, row, held, total, FORM.value_dim, FORM.value_wide)


@triton.jit(do_not_specialize=LENGTHS)
def sum_kernel(part, out, splits, stride_part, DV: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Add one row of the output over splits."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    total = tl.zeros((PARTS, WIDTH), tl.float32)
    for s in range(0, splits, PARTS):
        at = s + tl.arange(0, PARTS)
        held = (at < splits)[:, None] & (columns < DV)[None, :]
        index = part + at[:, None].to(tl.int64) * stride_part + row * DV + columns[None, :]
        total += tl.load(index, mask=held, other=0.0)
    tl.store(out + row * DV + columns, tl.sum(total, 0).to(out.dtype.element_ty), mask=columns < DV)


# One pass -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def online_kernel(
    matrices, factor, span, probe, part, state, heads, group, queries, stride_low, stride_mb, stride_mh, total_rows,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store over a program's tiles part [splits, N, S, DV] = (sum w v, and for t = -probe sum w (s_j - s) v) and state
    [splits, N, 2 S] = (m, sum w, and then sum w (s_j - s), s). FORM.raw: NaN in rows that see a non-finite number."""
    CORRECTED: tl.constexpr = probe is not None
    ALIKE: tl.constexpr = FORM.most == 1 and FORM.masked == 0  # all rows see the same keys
    steps = stride_low, stride_mb, stride_mh
    _, held, row, tiles, sight, a, by, k, v = shared.opened(matrices, factor, span, steps, heads, group, queries, FORM)
    by *= LOG2E
    bad = non_finite(a)
    top = tl.full((FORM.own,), float("-inf"), tl.float32)
    weights = tl.full((FORM.own, FORM.tile), 0.0, tl.float32)
    total = tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    if CORRECTED:
        t = -load_rows(probe, row, FORM.dim, held, FORM.dim, FORM.wide)
        level_s, slopes, correction = tl.full((FORM.own,), 0.0, tl.float32), weights, total
    if FORM.raw and ALIKE:
        worst = shared.largest(tl.full((FORM.tile, FORM.wide), 0.0, k[0].dtype.element_ty))
        worst_value = shared.largest(tl.full((FORM.tile, FORM.value_wide), 0.0, v[0].dtype.element_ty))
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        real, keys, seen, score = shared.scored_keys(j, k, a, by, sight, FORM)
        new = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        w, fade = tl.exp2(score - level[:, None]), tl.exp2(top - level)
        if CORRECTED:
            s = shared.fine_products(t, keys, FORM.own)[0]
            near = tl.sum(tl.where(seen, s, 0.0), 1) / tl.maximum(tl.sum(seen.to(tl.float32), 1), 1.0)
            level_s = tl.where(top == float("-inf"), near, level_s)
            ws = w * tl.where(seen, s - level_s[:, None], 0.0)
        if not ALIKE:
            real = tl.max(seen.to(tl.int32), 0) != 0
        values = shared.load_tile(v, j, real, FORM.value_dim, FORM.value_wide, FORM)
        if FORM.raw:
            if ALIKE:
                worst = tl.maximum(worst, shared.largest(keys))
                worst_value = tl.maximum(worst_value, shared.largest(values))
            else:
                w, values = shared.guarded(w, non_finite(keys), values, seen, bad, FORM)
        total = shared.add_weighted(total * fade[:, None], w, values, FORM.own)
        weights = weights * fade[:, None] + w
        if CORRECTED:
            correction = shared.add_weighted(correction * fade[:, None], ws, values, FORM.own)
            slopes = slopes * fade[:, None] + ws
        top = new
    if FORM.raw and ALIKE:
        lost = (bad & (tiles[1] < tiles[2])) | shared.beyond(worst, k[0], row) | shared.beyond(worst_value, v[0], row)
        total = tl.where(lost[:, None], float("nan"), total)
    DV: tl.constexpr = FORM.value_dim
    columns, split = tl.arange(0, FORM.value_wide), tl.program_id(1).to(tl.int64) * total_rows + row
    inside = held[:, None] & (columns < DV)[None, :]
    part += split[:, None] * ((1 + CORRECTED) * DV) + columns[None, :]
    tl.store(part, total, mask=inside)
    if CORRECTED:
        tl.store(part + DV, correction, mask=inside)
        store_numbers(state, split, (top, tl.sum(weights, 1), tl.sum(slopes, 1), level_s), held)
    else:
        store_numbers(state, split, (top, tl.sum(weights, 1)), held)


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    part, state, out, splits, total_rows,
    CORRECTED: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of the output from its splits, with the mean of the slopes as the common s."""
    row = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    STEP: tl.constexpr = 2 + 2 * CORRECTED
    largest = tl.full((PARTS,), float("-inf"), tl.float32)
    for s in range(0, splits, PARTS):
        ptr = state + ((s + places).to(tl.int64) * total_rows + row) * STEP
        largest = tl.maximum(largest, tl.load(ptr, mask=s + places < splits, other=float("-inf")))
    top = tl.max(largest, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    mean = 0.0
    if CORRECTED:
        mass, slopes = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS,), tl.float32)
        for s in range(0, splits, PARTS):
            ptr, held = state + ((s + places).to(tl.int64) * total_rows + row) * STEP, s + places < splits
            w, m = tl.exp2(tl.load(ptr, mask=held, other=float("-inf")) - level), tl.load(ptr + 1, mask=held, other=0.0)
            mass += w * m
            slopes += w * (tl.load(ptr + 2, mask=held, other=0.0) + tl.load(ptr + 3, mask=held, other=0.0) * m)
        whole = tl.sum(mass, 0)
        mean = tl.sum(slopes, 0) / tl.where(whole > 0, whole, 1.0)
    mass, total = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS, WIDTH), tl.float32)
    rest, correction = mass, total
    for s in range(0, splits, PARTS):
        at, held = (s + places).to(tl.int64) * total_rows + row, s + places < splits
        inside = held[:, None] & (columns < DV)[None, :]
        ptr, to = state + at * STEP, part + at[:, None] * ((1 + CORRECTED) * DV) + columns[None, :]
        w, m = tl.exp2(tl.load(ptr, mask=held, other=float("-inf")) - level), tl.load(ptr + 1, mask=held, other=0.0)
        x = tl.load(to, mask=inside, other=0.0)
        mass += w * m
        total += w[:, None] * x
        if CORRECTED:
            moved = tl.load(ptr + 3, mask=held, other=0.0) - mean
            rest += w * (tl.load(ptr + 2, mask=held, other=0.0) + moved * m)
            correction += w[:, None] * (tl.load(to + DV, mask=inside, other=0.0) + moved[:, None] * x)
    whole = tl.sum(mass, 0)
    whole = tl.where(top == float("-inf"), 1.0, whole)
    mean_value = tl.sum(total, 0)
    if CORRECTED:
        mean_value = mean_value + tl.sum(correction, 0) - (tl.sum(rest, 0) / whole) * mean_value
    tl.store(out + row * DV + columns, (mean_value / whole).to(out.dtype.element_ty), mask=columns < DV)
