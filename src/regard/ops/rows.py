"""Row solvers in numba: scores to weights and back, one row of scores at a time, in parallel over rows.

Imported only where `impl="cpu"` runs (numba is the extra `cpu`). The mathematics is that of `regard.grammar`: with
top = max z, d = top - z and reach = top - theta, a key weighs

    p = K(1 - d / reach) / mass,        K(u) = [u]_+^r, or 1 where u > 0, or exp(-d),

and the rules differ in reach alone. The forward pass takes the largest score of every tile of a row. The adaptive
rule first solves for those alone: fewer keys need a larger peak, so that this one bounds the row's from above; it
tells which tiles can still count, and Newton's descent on those begins from it. The backward pass needs the row's
statistics only. Neither looks again at tiles out of reach.

Legend: z, p, g, dz [R, n] rows of scores, weights, dL/dp, dL/dz; row i sees columns [lo[i], hi[i]), and -inf hides a
key inside. `bits` is z read as integers. `floats` [R, 6] top, theta, reach, mass, support, effective sample size;
`flags` [R, 3] empty, fallback, status; `index` [R, 3] positions as the rules note them; `power`, `number` [R] the
kernel's r and the rule's margin or bias. Both passes can work in place (p is z, dz is g): a span of columns is read
before it is written.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

ADAPTIVE, ANCHORED, FIXED, NEAREST = 0, 1, 2, 3
UNIFORM, POWER1, POWER2, POWER3, POWER, GAUSSIAN = 0, 1, 2, 3, 4, 5
STAND_UNIFORM, STAND_ZERO, STAND_NEAREST = 0, 1, 2

TILE = 64
"""Columns that are in reach or out of it together."""
GAP = 2
"""Tiles out of reach that are not worth a span of their own."""
SPAN = 512
"""Columns worked on at once, and terms of a sum taken in the dtype of the scores before they join it in float64."""
MARK = 128
"""Columns to one mark of `active`."""
NEWTON_STEPS = 64
BISECTIONS = 64
CLOSE = 0.25
"""The distance from the root, in square roots of the rounding error, from which one Newton step ends at the root."""
UNCONVERGED = 1

# Sums may be taken in any order, which is what lets them use whole registers; NaN and infinity keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}


@njit(cache=True)
def _tops(bits: Any, tops: Any) -> bool:
    """The bits of the largest score of every tile into `tops`, then those of the row's; whether all are numbers.

    Read as integers, with negative ones turned about, floats compare as they do, and integers are compared many at
    a time. They are moved down so that -inf becomes the least integer: what lies below it, a NaN with a sign, comes
    out on top with the others."""
    kind = tops.dtype.type  # numba would widen every operation
    flip = kind(0x7FFFFFFF if tops.itemsize == 4 else 0x7FFFFFFFFFFFFFFF)
    infinity = kind(0x7F800000 if tops.itemsize == 4 else 0x7FF0000000000000)
    shift = kind(31 if tops.itemsize == 4 else 63)
    down = kind(flip - infinity)
    most = kind(~flip)
    tiles = (bits.shape[0] + TILE - 1) // TILE
    for t in range(tiles):
        tile = bits[t * TILE : (t + 1) * TILE]
        high = kind(~flip)
        for j in range(tile.shape[0]):
            key = kind(kind(tile[j] ^ kind(kind(tile[j] >> shift) & flip)) - down)
            high = key if key > high else high
        key = kind(high + down)
        tops[t] = kind(key ^ kind(kind(key >> shift) & flip))
        most = high if high > most else most
    key = kind(most + down)
    tops[tiles] = kind(key ^ kind(kind(key >> shift) & flip))
    return most < kind(infinity - down)


@njit(cache=True)
def _run(tops: Any, columns: int, first: int, top: Any, reach: Any, every: bool) -> Any:
    """(end, live) of the run of tiles from `first` that are in reach, gaps of a few included, or out of it; a live run
    fits SPAN. A row that fits it whole is one run: looking what to leave out would cost as much."""
    tiles = (columns + TILE - 1) // TILE
    if every or columns <= SPAN:
        return min(tiles, first + SPAN // TILE), True
    live = top - tops[first] < reach
    last = min(tiles, first + SPAN // TILE) if live else tiles
    end = first + 1
    for t in range(first + 1, last):
        if top - tops[t] < reach:
            if not live:
                return t, live
            end = t + 1
        elif live and t - end >= GAP:
            return end, live
    return (end if live else tiles), live


# The adaptive threshold --------------------------------------------------------------------------------------


@njit(cache=True, fastmath=_SUMS)
def _collect(x: Any, tops: Any, top: Any, reach: Any, kept: Any) -> int:
    """Distances of the tiles in reach into `kept`; their number."""
    count, first, tiles = 0, 0, (x.shape[0] + TILE - 1) // TILE
    while first < tiles:
        end, live = _run(tops, x.shape[0], first, top, reach, False)
        if live:
            part = x[first * TILE : end * TILE]
            into = kept[count : count + part.shape[0]]
            for j in range(part.shape[0]):
                into[j] = top - part[j]
            count += part.shape[0]
        first = end
    return count


# One loop a function, for these are what the time goes into: several in one are not unrolled.


@njit(cache=True, fastmath=_SUMS)
def _sums1(d: Any, b: Any) -> Any:
    zero = d.dtype.type(0)
    upper, inside = zero, np.int32(0)
    for j in range(d.shape[0]):
        a = b - d[j]
        upper += a if a > zero else zero
        inside += np.int32(a > zero)
    return upper, inside


@njit(cache=True, fastmath=_SUMS)
def _sums2(d: Any, b: Any, inverse: Any) -> Any:
    zero = d.dtype.type(0)
    upper, lower = zero, zero
    for j in range(d.shape[0]):
        a = b - d[j] * inverse
        a = a if a > zero else zero
        upper += a * a
        lower += a
    return upper, lower


@njit(cache=True, fastmath=_SUMS)
def _sums3(d: Any, b: Any, inverse: Any) -> Any:
    zero = d.dtype.type(0)
    upper, lower = zero, zero
    for j in range(d.shape[0]):
        a = b - d[j] * inverse
        a = a if a > zero else zero
        upper += a * a * a
        lower += a * a
    return upper, lower


@njit(cache=True)
def _sums_any(d: Any, b: Any, r: Any) -> Any:
    zero, one = d.dtype.type(0), d.dtype.type(1)
    upper, lower = zero, zero
    for j in range(d.shape[0]):
        a = b - d[j] / r
        if a > zero:
            w = a ** (r - one)
            upper += w * a
            lower += w
    return upper, lower


@njit(cache=True)
def _sums(d: Any, kernel: int, r: Any, b: Any) -> Any:
    """(sum a^r, sum a^(r-1)) over the support, a = [b - d/r]_+."""
    upper, lower = 0.0, 0.0
    inverse = d.dtype.type(1) / r
    if kernel == POWER1:
        for start in range(0, d.shape[0], SPAN):
            up, inside = _sums1(d[start : start + SPAN], b)
            upper += up
            lower += inside
    elif kernel == POWER2:
        for start in range(0, d.shape[0], SPAN):
            up, low = _sums2(d[start : start + SPAN], b, inverse)
            upper += up
            lower += low
    elif kernel == POWER3:
        for start in range(0, d.shape[0], SPAN):
            up, low = _sums3(d[start : start + SPAN], b, inverse)
            upper += up
            lower += low
    else:
        for start in range(0, d.shape[0], SPAN):
            up, low = _sums_any(d[start : start + SPAN], b, r)
            upper += up
            lower += low
    return upper, lower


@njit(cache=True)
def _newton(d: Any, kernel: int, r: Any, b: Any) -> Any:
    """The peak b with ||[b - d/r]_+||_r = 1 for r >= 1: the norm is convex and at least 1 at the b given, so that
    Newton's method descends to the root without a bracket."""
    limit = 1.0 + 2.0 * np.finfo(d.dtype).eps
    close = 1.0 + CLOSE * math.sqrt(np.finfo(d.dtype).eps)
    power = np.float64(r)
    for _ in range(NEWTON_STEPS):
        upper, lower = _sums(d, kernel, r, b)
        if kernel == POWER1:
            norm = upper
            step = (norm - 1.0) / lower
        elif kernel == POWER2:
            norm = math.sqrt(upper)
            step = (norm - 1.0) * norm / lower
        elif kernel == POWER3:
            norm = np.cbrt(upper)
            step = (norm - 1.0) * norm * norm / lower
        else:
            norm = upper ** (1.0 / power)
            step = (norm - 1.0) * norm ** (power - 1.0) / lower
        new = d.dtype.type(b - step)
        if not (norm > limit and new < b):  # rounding ends the descent
            break
        b = new
        if norm < close:  # the descent is quadratic: this step was the last that changes anything
            break
    return b


@njit(cache=True)
def _bisect(d: Any, r: Any) -> Any:
    """The peak for r < 1, whose norm is not convex: between n^(-1/r) and 1."""
    low, high = d.dtype.type(np.float64(d.shape[0]) ** (-1.0 / np.float64(r))), d.dtype.type(1)
    for _ in range(BISECTIONS):
        middle = (low + high) / d.dtype.type(2)
        if not low < middle < high:
            break
        upper, _ = _sums(d, POWER, r, middle)
        if upper >= 1:
            high = middle
        else:
            low = middle
    return high


@njit(cache=True)
def _peak(x: Any, kernel: int, r: Any, tops: Any, top: Any, kept: Any, flags: Any) -> Any:
    """(b, sum [b - d/r]_+^r) of a row."""
    tiles = (x.shape[0] + TILE - 1) // TILE
    epsilon = np.finfo(x.dtype).eps
    b = x.dtype.type(1)
    if r >= 1:
        if x.shape[0] > SPAN:
            for t in range(tiles):
                kept[t] = top - tops[t]
            b = _newton(kept[:tiles], kernel, r, b)
        count = _collect(x, tops, top, r * b, kept)
        b = _newton(kept[:count], kernel, r, b)
        tolerance = 512 * epsilon * r
    else:
        count = _collect(x, tops, top, r * b, kept)
        b = _bisect(kept[:count], r)
        tolerance = 4 * math.sqrt(epsilon)
    total, _ = _sums(kept[:count], kernel, r, b)
    if not abs(total - 1.0) <= tolerance:
        flags[2] = UNCONVERGED
    return b, total


# The nearest keys --------------------------------------------------------------------------------------------


@njit(cache=True)
def _sift(heap: Any, size: int, x: Any) -> None:
    """Put x in the place of the smallest of heap[:size], and mend the order."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= x:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = x


@njit(cache=True)
def _largest(x: Any, size: int, tops: Any, heap: Any) -> None:
    """A heap of the `size` largest scores, smallest first, filled up with -inf."""
    heap[:size] = -np.inf
    for t in range((x.shape[0] + TILE - 1) // TILE):
        if tops[t] > heap[0]:
            tile = x[t * TILE : (t + 1) * TILE]
            for j in range(tile.shape[0]):
                if tile[j] > heap[0]:
                    _sift(heap, size, tile[j])


@njit(cache=True)
def _chosen(z: Any, at: int, kth: Any, cut: int) -> bool:
    return z > kth or (z == kth and at <= cut)


@njit(cache=True)
def _first(x: Any, score: Any, after: int) -> int:
    """The first place beyond `after` with that score, or -1."""
    for j in range(after + 1, x.shape[0]):
        if x[j] == score:
            return j
    return -1


@njit(cache=True)
def _nearest(x: Any, k: int, vanishes: bool, tops: Any, top: Any, heap: Any, found: Any) -> Any:
    """(theta, reach) of a row; its last kept tie, its (k+1)-th key and the number kept go into `found`."""
    _largest(x, k + 1, tops, heap)
    following, kth, visible = heap[0], x.dtype.type(np.inf), 0
    for h in range(k + 1):
        if heap[h] > -np.inf:
            visible += 1
            if h > 0 or following == -np.inf:
                kth = min(kth, heap[h])
    kept = min(k, visible)
    greater = 0
    for j in range(x.shape[0]):
        greater += x[j] > kth
    cut = -1
    for _ in range(kept - greater):
        cut = _first(x, kth, cut)
    found[0], found[1], found[2] = cut, cut, kept
    one = x.dtype.type(1)
    if not vanishes:
        return kth, one
    if visible <= k:
        found[1] = _first(x, kth, -1)
        return kth - one, (top - kth) + one
    found[1] = _first(x, following, cut if following == kth else -1)
    return following, top - following


# Weights and slopes of a span --------------------------------------------------------------------------------


@njit(cache=True)
def _one(z: Any, kernel: int, r: Any, top: Any, reach: Any, one: Any) -> Any:
    """(K, dK/dz) of one score, for the kernels that are no plain product of u."""
    d = top - z
    if not d < reach:
        return one - one, one - one
    if kernel == UNIFORM:
        return one, one - one
    if kernel == GAUSSIAN:
        w = math.exp(-d)
        return w, w
    log_u = math.log1p(-d / reach)
    return math.exp(r * log_u), math.exp((r - one) * log_u) * r / reach


# The loops that write must not be reordered: at the threshold reach - (top - z) is 0, and not a rounding error that
# would count as weight. Those that sum may.


@njit(cache=True)
def _weigh1(x: Any, w: Any, top: Any, reach: Any, share: Any) -> None:
    zero, inverse = x.dtype.type(0), share / reach
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        w[j] = u if u > zero else zero


@njit(cache=True)
def _weigh2(x: Any, w: Any, top: Any, reach: Any, share: Any) -> None:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        u = u if u > zero else zero
        w[j] = u * u * share


@njit(cache=True)
def _weigh3(x: Any, w: Any, top: Any, reach: Any, share: Any) -> None:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        u = u if u > zero else zero
        w[j] = u * u * u * share


@njit(cache=True)
def _weigh(
    x: Any, w: Any, kernel: int, r: Any, top: Any, reach: Any, share: Any, start: int, theta: Any, cut: int
) -> None:
    """share K of scores into w, K relative to its value at the top; of the chosen keys alone where cut >= 0, column 0
    being number `start`. reach is infinite without an edge."""
    if kernel == POWER1:
        _weigh1(x, w, top, reach, share)
    elif kernel == POWER2:
        _weigh2(x, w, top, reach, share)
    elif kernel == POWER3:
        _weigh3(x, w, top, reach, share)
    else:
        one = x.dtype.type(1)
        for j in range(x.shape[0]):
            w[j] = 0
            if cut < 0 or _chosen(x[j], start + j, theta, cut):
                w[j] = _one(x[j], kernel, r, top, reach, one)[0] * share


@njit(cache=True, fastmath=_SUMS)
def _total(w: Any) -> Any:
    total = w.dtype.type(0)
    for j in range(w.shape[0]):
        total += w[j]
    return total


@njit(cache=True)
def _slope1(x: Any, g: Any, w: Any, s: Any, top: Any, reach: Any, share: Any, rho: Any) -> None:
    zero, inverse = x.dtype.type(0), share / reach
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        w[j] = u if u > zero else zero
        s[j] = inverse * (g[j] - rho) if u > zero else zero


@njit(cache=True)
def _slope2(x: Any, g: Any, w: Any, s: Any, top: Any, reach: Any, share: Any, rho: Any) -> None:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    steep = (share + share) * inverse
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        w[j] = u * u * share if u > zero else zero
        s[j] = steep * u * (g[j] - rho) if u > zero else zero


@njit(cache=True)
def _slope3(x: Any, g: Any, w: Any, s: Any, top: Any, reach: Any, share: Any, rho: Any) -> None:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    steep = (share + share + share) * inverse
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        w[j] = u * u * u * share if u > zero else zero
        s[j] = steep * u * u * (g[j] - rho) if u > zero else zero


@njit(cache=True)
def _slope(
    x: Any, g: Any, w: Any, s: Any, kernel: int, r: Any, top: Any, reach: Any, share: Any, rho: Any, start: int,
    theta: Any, cut: int,
) -> None:  # fmt: skip
    """share K into w as `_weigh`, and share dK/dz (g - rho) into s; where that is 0, whatever g."""
    if kernel == POWER1:
        _slope1(x, g, w, s, top, reach, share, rho)
    elif kernel == POWER2:
        _slope2(x, g, w, s, top, reach, share, rho)
    elif kernel == POWER3:
        _slope3(x, g, w, s, top, reach, share, rho)
    else:
        zero, one = x.dtype.type(0), x.dtype.type(1)
        for j in range(x.shape[0]):
            value, slope = zero, zero
            if cut < 0 or _chosen(x[j], start + j, theta, cut):
                value, slope = _one(x[j], kernel, r, top, reach, one)
            w[j] = value * share
            s[j] = slope * share * (g[j] - rho) if slope > zero else zero


@njit(cache=True, fastmath=_SUMS)
def _dots1(x: Any, g: Any, top: Any, reach: Any) -> Any:
    zero = x.dtype.type(0)
    inside, slope_g, weight_g = np.int32(0), zero, zero
    for j in range(x.shape[0]):
        d = top - x[j]  # compared as it is: here a key at the threshold would count like any other
        inside += np.int32(d < reach)
        slope_g += g[j] if d < reach else zero
        weight_g += (reach - d) * g[j] if d < reach else zero
    inverse = x.dtype.type(1) / reach
    return inside * inverse, slope_g * inverse, weight_g * inverse


@njit(cache=True, fastmath=_SUMS)
def _dots2(x: Any, g: Any, top: Any, reach: Any) -> Any:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    slope, slope_g, weight_g = zero, zero, zero
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        slope += u if u > zero else zero
        ug = u * g[j] if u > zero else zero
        slope_g += ug
        weight_g += u * ug if u > zero else zero
    steep = inverse + inverse
    return slope * steep, slope_g * steep, weight_g


@njit(cache=True, fastmath=_SUMS)
def _dots3(x: Any, g: Any, top: Any, reach: Any) -> Any:
    zero, inverse = x.dtype.type(0), x.dtype.type(1) / reach
    slope, slope_g, weight_g = zero, zero, zero
    for j in range(x.shape[0]):
        u = (reach - (top - x[j])) * inverse
        u2 = u * u if u > zero else zero
        ug = u2 * g[j] if u > zero else zero
        slope += u2
        slope_g += ug
        weight_g += u * ug if u > zero else zero
    steep = inverse + inverse + inverse
    return slope * steep, slope_g * steep, weight_g


@njit(cache=True)
def _dots(x: Any, g: Any, kernel: int, r: Any, top: Any, reach: Any, start: int, theta: Any, cut: int) -> Any:
    """(sum dK/dz, sum g dK/dz, sum g K) of scores, K relative to its value at the top, in float64."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    slope, slope_g, weight_g = zero, zero, zero
    if kernel == POWER1:
        slope, slope_g, weight_g = _dots1(x, g, top, reach)
    elif kernel == POWER2:
        slope, slope_g, weight_g = _dots2(x, g, top, reach)
    elif kernel == POWER3:
        slope, slope_g, weight_g = _dots3(x, g, top, reach)
    else:
        for j in range(x.shape[0]):
            if cut < 0 or _chosen(x[j], start + j, theta, cut):
                value, steep = _one(x[j], kernel, r, top, reach, one)
                if value > zero:
                    slope += steep
                    slope_g += steep * g[j]
                    weight_g += value * g[j]
    return np.float64(slope), np.float64(slope_g), np.float64(weight_g)


# Forward -----------------------------------------------------------------------------------------------------


@njit(cache=True)
def _stand_in(x: Any, p: Any, rule: int, stand: int, theta: Any, found: Any) -> None:
    """The weights of a row that sees keys, none of which lies inside."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    share = one / x.dtype.type(max(found[2], 1))
    for j in range(p.shape[0]):
        if rule == NEAREST:
            inside = _chosen(x[j], j, theta, found[0])
        elif stand == STAND_UNIFORM:
            inside = x[j] > -np.inf
        else:
            inside = stand == STAND_NEAREST and j == found[0]
        p[j] = share if inside else zero


@njit(cache=True)
def _note_stand_in(x: Any, stand: int, top: Any, found: Any) -> None:
    """What `_stand_in` needs of a row that the fixed rule left empty: its visible keys, or the best of them."""
    found[0], found[2] = _first(x, top, -1), 1
    if stand == STAND_UNIFORM:
        found[2] = 0
        for j in range(x.shape[0]):
            found[2] += x[j] > -np.inf


@njit(cache=True)
def _mass(x: Any, kernel: int, r: Any, tops: Any, top: Any, reach: Any, local: Any, theta: Any, cut: int) -> Any:
    """The sum of the kernel's values, relative to the top."""
    total, first, tiles, one = 0.0, 0, (x.shape[0] + TILE - 1) // TILE, x.dtype.type(1)
    while first < tiles:
        end, live = _run(tops, x.shape[0], first, top, reach, cut >= 0)
        if live:
            part = x[first * TILE : end * TILE]
            _weigh(part, local, kernel, r, top, reach, one, first * TILE, theta, cut)
            total += _total(local[: part.shape[0]])
        first = end
    return x.dtype.type(total)


@njit(cache=True)
def _fill(
    x: Any, p: Any, kernel: int, r: Any, tops: Any, top: Any, reach: Any, local: Any, theta: Any, cut: int, share: Any,
    place: bool,
) -> None:  # fmt: skip
    """p = share K over a row, which may be x itself (`place`)."""
    first, tiles = 0, (x.shape[0] + TILE - 1) // TILE
    while first < tiles:
        end, live = _run(tops, x.shape[0], first, top, reach, cut >= 0)
        out = p[first * TILE : end * TILE]
        if live:
            part = x[first * TILE : end * TILE]
            into = local[: part.shape[0]] if place else out
            _weigh(part, into, kernel, r, top, reach, share, first * TILE, theta, cut)
            if place:
                out[:] = into
        else:
            out[:] = 0
        first = end


@njit(cache=True)
def _forward_row(
    x: Any, bits: Any, p: Any, kernel: int, rule: int, r: Any, number: Any, k: int, stand: int, place: bool,
    tops: Any, top_bits: Any, kept: Any, local: Any, floats: Any, flags: Any, found: Any,
) -> None:  # fmt: skip
    one = x.dtype.type(1)
    top = -x.dtype.type(np.inf)
    floats[0], floats[1], floats[2], floats[3], floats[4], floats[5] = 0, -1, 1, 1, 0, 0
    flags[:] = 0
    found[:] = 0
    if x.shape[0] > 0:
        if not _tops(bits, top_bits):
            floats[:4] = np.nan
            p[:] = np.nan
            return
        top = tops[(x.shape[0] + TILE - 1) // TILE]
    if top == -np.inf:
        flags[0] = 1
        p[:] = 0
        return
    floats[0] = top
    cut, mass = -1, x.dtype.type(0)
    if rule == ADAPTIVE:
        b, total = _peak(x, kernel, r, tops, top, kept, flags)
        reach = r * b
        theta = top - reach
        if kernel != POWER:  # whose sum and whose weights round differently where r is large
            mass = x.dtype.type(total / np.float64(b) ** np.float64(r))
    elif rule == ANCHORED:
        reach = number
        theta = top - number
    elif rule == FIXED:
        reach = top + number
        theta = -number
    else:
        vanishes = kernel != UNIFORM and kernel != GAUSSIAN
        theta, reach = _nearest(x, k, vanishes, tops, top, kept, found)
        cut = -1 if vanishes else found[0]
    floats[1] = theta
    if not reach > 0:
        flags[1] = 1
        if rule == FIXED:
            _note_stand_in(x, stand, top, found)
        _stand_in(x, p, rule, stand, theta, found)
        return
    edge = reach if cut < 0 else x.dtype.type(np.inf)
    if mass == 0:
        mass = _mass(x, kernel, r, tops, top, edge, local, theta, cut)
    floats[2], floats[3] = reach, mass
    _fill(x, p, kernel, r, tops, top, edge, local, theta, cut, one / mass, place)


@njit(cache=True)
def _count(p: Any, floats: Any) -> None:
    """Support size and effective sample size of a row of weights."""
    support, total, square = 0, 0.0, 0.0
    for j in range(p.shape[0]):
        support += p[j] > 0
        total += p[j]
        square += p[j] * p[j]
    floats[4] = support
    floats[5] = total * total / square if square > 0 else 0


@njit(cache=True, fastmath=_SUMS)
def _mark(p: Any, start: int, pivot: int, active: Any) -> None:
    """Mark the blocks of columns in which a row has weight, or the key that its threshold hangs on."""
    first = 0
    while first < p.shape[0]:
        block = (start + first) // MARK
        end = min(p.shape[0], (block + 1) * MARK - start)
        if active[block] == 0:
            total = p.dtype.type(0)
            for j in range(first, end):
                total += p[j]
            if total > 0:
                active[block] = 1
        first = end
    if pivot >= 0:
        active[(start + pivot) // MARK] = 1


@njit(cache=True, parallel=True)
def forward(
    z: Any, bits: Any, p: Any, lo: Any, hi: Any, start: int, kernel: int, rule: int, power: Any, number: Any, k: int,
    stand: int, place: bool, counted: bool, floats: Any, flags: Any, index: Any, active: Any, group: int, chunks: int,
) -> None:  # fmt: skip
    """Weights and statistics of every row, in place where p is z (`place`). `start` is the place of column 0 among all
    keys, and row i marks active[i // group]; an `active` without columns is not marked."""
    rows, n = z.shape
    for chunk in prange(chunks):
        top_bits = np.empty((n + TILE - 1) // TILE + 1, bits.dtype)
        tops = top_bits.view(z.dtype)
        kept = np.empty(max(n, k + 1), z.dtype)
        local = np.empty(SPAN, z.dtype)
        for i in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            a, b = lo[i], hi[i]
            out, found = p[i], index[i]
            out[:a] = 0
            out[b:] = 0
            _forward_row(
                z[i, a:b], bits[i, a:b], out[a:b], kernel, rule, power[i], number[i], k, stand, place,
                tops, top_bits, kept, local, floats[i], flags[i], found,
            )  # fmt: skip
            found[0] += a
            found[1] += a
            if counted:
                _count(out, floats[i])
            if active.shape[1] > 0:
                vanishes = kernel != UNIFORM and kernel != GAUSSIAN
                _mark(out, start, found[1] if rule == NEAREST and vanishes else -1, active[i // group])


# Backward ----------------------------------------------------------------------------------------------------


@njit(cache=True)
def _power_grad(x: Any, g: Any, rule: int, r: Any, top: Any, reach: Any, share: Any, rho: Any) -> Any:
    """dL/dr, or dL/dalpha for the adaptive rule (`power_grads` of the bandwidth rules)."""
    total = 0.0
    shift = math.log(reach / r)
    for j in range(x.shape[0]):
        d = top - x[j]
        if d < reach:
            log_u = math.log1p(-d / reach)
            drift = math.exp(r * log_u) * share * (g[j] - rho)
            if rule == ADAPTIVE:
                log_a = log_u + shift
                total -= r * r * (math.expm1(-log_a) + log_a) * drift
            else:
                total += log_u * drift
    return total


@njit(cache=True, fastmath=_SUMS)
def _ties(x: Any, top: Any) -> int:
    count = 0
    for j in range(x.shape[0]):
        count += x[j] == top
    return count


@njit(cache=True)
def _backward_row(
    x: Any, bits: Any, g: Any, p: Any, dz: Any, kernel: int, rule: int, r: Any, stand: int, learned: bool, place: bool,
    tops: Any, top_bits: Any, w: Any, s: Any, floats: Any, flags: Any, found: Any, grads: Any,
) -> None:  # fmt: skip
    grads[:] = 0
    top, theta, reach, mass = floats[0], floats[1], floats[2], floats[3]
    if flags[0] != 0 or mass != mass:
        p[:] = mass - mass  # 0, or NaN
        dz[:] = mass - mass
        return
    if flags[1] != 0:
        _stand_in(x, p, rule, stand, theta, found)
        dz[:] = 0
        return
    vanishes = kernel != UNIFORM and kernel != GAUSSIAN
    zero, one = x.dtype.type(0), x.dtype.type(1)
    cut = found[0] if rule == NEAREST and not vanishes else -1
    edge = reach if cut < 0 else x.dtype.type(np.inf)
    tiles = (x.shape[0] + TILE - 1) // TILE
    every = cut >= 0
    if not every and x.shape[0] > SPAN:
        _tops(bits, top_bits)
    slope, slope_g, weight_g, first = 0.0, 0.0, 0.0, 0
    while first < tiles:
        end, live = _run(tops, x.shape[0], first, top, reach, every)
        a, b = first * TILE, end * TILE
        if live:
            sums = _dots(x[a:b], g[a:b], kernel, r, top, edge, a, theta, cut)
            slope += sums[0]
            slope_g += sums[1]
            weight_g += sums[2]
        first = end
    share = one / mass
    rho = x.dtype.type(weight_g / mass)
    if rule == ADAPTIVE:
        rho = x.dtype.type(slope_g / slope) if slope > 0 else zero
    total = x.dtype.type((slope_g - rho * slope) * share)
    grads[1] = total
    if learned:
        grads[0] = _power_grad(x, g, rule, r, top, reach, share, rho)
    pull = total / x.dtype.type(_ties(x, top)) if vanishes and rule == ANCHORED else zero
    first = 0
    while first < tiles:
        end, live = _run(tops, x.shape[0], first, top, reach, every)
        a, b = first * TILE, end * TILE
        if live:
            part = x[a:b]
            weights = p[a:b] if p.shape[0] > 0 and not place else w[: part.shape[0]]
            slopes = s[: part.shape[0]] if place else dz[a:b]
            _slope(part, g[a:b], weights, slopes, kernel, r, top, edge, share, rho, a, theta, cut)
            if pull != zero:
                _pull(part, slopes, top, pull)
            if place:
                p[a:b] = weights
                dz[a:b] = slopes
        else:
            p[a:b] = 0
            dz[a:b] = 0
        first = end
    if vanishes and rule == NEAREST:
        dz[found[1]] -= total


@njit(cache=True)
def _pull(x: Any, s: Any, top: Any, pull: Any) -> None:
    """Take `pull` from the slopes of the keys that tie for the top, on which the threshold hangs."""
    for j in range(x.shape[0]):
        if x[j] == top:
            s[j] -= pull


@njit(cache=True, parallel=True)
def backward(
    z: Any, bits: Any, g: Any, p: Any, dz: Any, lo: Any, hi: Any, kernel: int, rule: int, power: Any, stand: int,
    learned: bool, place: bool, floats: Any, flags: Any, index: Any, grads: Any, chunks: int,
) -> None:  # fmt: skip
    """Weights and dL/dz of every row from its statistics, in place where p is z and dz is g (`place`), and `grads`
    [R, 2]: dL/dpower (dL/dalpha) where `learned`, and dL/dnumber. A p without columns is left out."""
    rows, n = z.shape
    for chunk in prange(chunks):
        top_bits = np.empty((n + TILE - 1) // TILE + 1, bits.dtype)
        tops = top_bits.view(z.dtype)
        w, s = np.empty(SPAN, z.dtype), np.empty(SPAN, z.dtype)
        found: Any = np.empty(3, np.int64)
        for i in range(chunk * rows // chunks, (chunk + 1) * rows // chunks):
            a, b = lo[i], hi[i]
            found[0], found[1], found[2] = index[i, 0] - a, index[i, 1] - a, index[i, 2]
            weights, slopes = p[i], dz[i]
            weights[:a] = 0
            weights[b:] = 0
            slopes[:a] = 0
            slopes[b:] = 0
            _backward_row(
                z[i, a:b], bits[i, a:b], g[i, a:b], weights[a:b], slopes[a:b], kernel, rule, power[i], stand,
                learned, place, tops, top_bits, w, s, floats[i], flags[i], found, grads[i],
            )  # fmt: skip
