"""The threshold of a row: the largest score of every tile, the adaptive peak, the nearest keys.

Legend: x scores of a row, `bits` the same read as integers, `tops` the largest of each tile and, last, of the row; d
distances below it; b the peak.
"""

import math
from typing import Any

import numpy as np

from .base import GAP, POWER, POWER1, POWER2, POWER3, SPAN, TILE, jit, sums

NEWTON_STEPS = 64
BISECTIONS = 64
CLOSE = 0.25
"""Distance from the root, in square roots of the rounding error, from which one Newton step suffices."""
UNCONVERGED = 1


@jit
def find_tops(bits, tops):
    """Write the bits of the largest score of every tile, then of the row, to `tops`. Return whether no score is NaN.

    Floats compare as their bits do if the bits of negative numbers are flipped, and integer comparisons use vector
    instructions. The integers are shifted so that -inf is the least; NaN of either sign is then above infinity."""
    kind = tops.dtype.type  # numba would widen every operation
    flip = kind(np.iinfo(tops.dtype).max)
    infinity = kind(0x7F800000 if tops.itemsize == 4 else 0x7FF0000000000000)
    down = kind(flip - infinity)
    most = kind(~flip)
    tiles = (bits.shape[0] + TILE - 1) // TILE
    for t in range(tiles):
        tile = bits[t * TILE : (t + 1) * TILE]
        high = kind(~flip)
        for j in range(tile.shape[0]):
            key = kind((kind(tile[j] ^ flip) if tile[j] < 0 else tile[j]) - down)
            high = key if key > high else high
        key = kind(high + down)
        tops[t] = kind(key ^ flip) if key < 0 else key
        most = high if high > most else most
    key = kind(most + down)
    tops[tiles] = kind(key ^ flip) if key < 0 else key
    return most < kind(infinity - down)


@jit
def next_run(tops, columns, first, top, reach, every):
    """Return (end, live) of the run of tiles from `first` that are above the threshold, short gaps included, or below.
    A run above fits SPAN. A row that fits SPAN is one run, since skipping tiles would save nothing."""
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


@sums
def _collect(x, tops, top, reach, kept):
    """Write the distances of tiles above the threshold to `kept`. Return their number."""
    count, first, tiles = 0, 0, (x.shape[0] + TILE - 1) // TILE
    while first < tiles:
        end, live = next_run(tops, x.shape[0], first, top, reach, False)
        if live:
            part = x[first * TILE : end * TILE]
            into = kept[count : count + part.shape[0]]
            for j in range(part.shape[0]):
                into[j] = top - part[j]
            count += part.shape[0]
        first = end
    return count


# Every function has one loop, since several loops in one function are not unrolled.


@sums
def _sums1(d, b):
    zero = d.dtype.type(0)
    upper, inside = zero, np.int32(0)
    for j in range(d.shape[0]):
        a = b - d[j]
        upper += a if a > zero else zero
        inside += np.int32(a > zero)
    return upper, d.dtype.type(inside)


def _powers(power: int) -> Any:
    """Return the loop that sums a^power and a^(power - 1), a = [b - d/power]_+."""

    @sums
    def loop(d, b, inverse):
        zero = d.dtype.type(0)
        upper, lower = zero, zero
        for j in range(d.shape[0]):
            a = b - d[j] * inverse
            a = a if a > zero else zero
            below = a if power == 2 else a * a
            upper += below * a
            lower += below
        return upper, lower

    return loop


_sums2, _sums3 = _powers(2), _powers(3)


@jit
def _sums_any(d, b, r):
    zero, one = d.dtype.type(0), d.dtype.type(1)
    upper, lower = zero, zero
    for j in range(d.shape[0]):
        a = b - d[j] / r
        if a > zero:
            w = a ** (r - one)
            upper += w * a
            lower += w
    return upper, lower


@jit
def _sums(d, kernel, r, b):
    """Return (sum a^r, sum a^(r-1)) over the support, a = [b - d/r]_+."""
    upper, lower = 0.0, 0.0
    inverse = d.dtype.type(1) / r
    for start in range(0, d.shape[0], SPAN):
        part = d[start : start + SPAN]
        if kernel == POWER1:
            sums = _sums1(part, b)
        elif kernel == POWER2:
            sums = _sums2(part, b, inverse)
        elif kernel == POWER3:
            sums = _sums3(part, b, inverse)
        else:
            sums = _sums_any(part, b, r)
        upper += sums[0]
        lower += sums[1]
    return upper, lower


@jit
def _newton(d, kernel, r, b):
    """Return the peak b with ||[b - d/r]_+||_r = 1 for r >= 1. The norm is convex and at least 1 at the given b, so
    that Newton's method descends to the root without a bracket."""
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
        if norm < close:  # convergence is quadratic: this was the last step that changes b
            break
    return b


@jit
def _bisect(d, r):
    """Return the peak for r < 1, where the norm is not convex, by bisection between n^(-1/r) and 1."""
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


@jit
def find_peak(x, kernel, r, tops, top, kept, flags):
    """Return (b, sum [b - d/r]_+^r) of a row."""
    tiles = (x.shape[0] + TILE - 1) // TILE
    epsilon = np.finfo(x.dtype).eps
    b = x.dtype.type(1)
    if r >= 1:
        if tiles >= 8:  # enough tiles for a first solution
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


# The threshold from the lowest key with weight, for r < 1 (`grammar.threshold`) ---------------------------------


@jit
def _sum_above(z, r, edge):
    """Return the sum of weights for the threshold `edge`."""
    total = 0.0
    for j in range(z.shape[0]):
        a = np.float64(z[j]) - edge
        if a > 0:
            total += (a / r) ** r
    return total


@jit
def _neighbour(z, edge, up):
    """Return the next score above or below `edge`; infinite if there is none."""
    nearest = np.inf if up else -np.inf
    for j in range(z.shape[0]):
        if up and z[j] > edge:
            nearest = min(nearest, np.float64(z[j]))
        elif not up and z[j] < edge:
            nearest = max(nearest, np.float64(z[j]))
    return nearest


@jit
def _find_pivot(z, r, theta, top):
    """Return the lowest score with weight, from a threshold with rounding errors."""
    pivot = min(_neighbour(z, theta, True), top)
    while pivot < top and not _sum_above(z, r, pivot) < 1:
        pivot = _neighbour(z, pivot, True)
    while True:
        lower = _neighbour(z, pivot, False)
        if not (lower > -np.inf and _sum_above(z, r, lower) < 1):
            return pivot
        pivot = lower


@jit
def _pivot_weight(z, r, pivot):
    """Return (t, sum of weights): the weight of the pivot, by Newton's descent."""
    ties, total = 0, 1.0
    for j in range(z.shape[0]):
        ties += z[j] == pivot
    t = (1.0 - _sum_above(z, r, pivot)) / ties
    for _ in range(NEWTON_STEPS):
        gap, total, slope = t ** (1.0 / r), 0.0, 0.0
        for j in range(z.shape[0]):
            if z[j] >= pivot:
                a = (np.float64(z[j]) - pivot) / r + gap
                total += a**r
                slope += (gap / a) ** (1.0 - r)
        new = t - (total - 1.0) / slope
        if not (0 < new < t):
            break
        t = new
    return t, total


@jit
def find_gap(x, r, top, b, kept, flags):
    """Return (the lowest score with weight, how far the threshold lies below it) for the peak b of `find_peak`."""
    kind, info, power = x.dtype.type, np.finfo(x.dtype), np.float64(r)
    theta = np.float64(top) - power * np.float64(b)
    slack = 64 * info.eps * (abs(np.float64(top)) + power)
    count, below = 0, -np.inf
    for j in range(x.shape[0]):
        if x[j] > theta - slack:
            kept[count] = x[j]
            count += 1
        elif x[j] > below:
            below = np.float64(x[j])
    pivot = _find_pivot(kept[:count], power, theta, np.float64(top))
    t, total = _pivot_weight(kept[:count], power, pivot)
    flags[2] = 0 if abs(total - 1.0) <= 512 * info.eps else UNCONVERGED
    gap = min(power * t ** (1.0 / power), pivot - max(below, _neighbour(kept[:count], pivot, False)))
    return kind(pivot), kind(max(gap, np.float64(info.tiny) / np.float64(info.eps)))


# The nearest keys --------------------------------------------------------------------------------------------


@jit
def _sift(heap, size, x):
    """Replace the smallest of heap[:size] by x, and restore the heap."""
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


@jit
def _largest(x, size, tops, heap):
    """Make a heap of the `size` largest scores, smallest first, padded with -inf."""
    heap[:size] = -np.inf
    for t in range((x.shape[0] + TILE - 1) // TILE):
        if tops[t] > heap[0]:
            tile = x[t * TILE : (t + 1) * TILE]
            for j in range(tile.shape[0]):
                if tile[j] > heap[0]:
                    _sift(heap, size, tile[j])


@jit
def chosen(z, at, kth, cut):
    return z > kth or (z == kth and at <= cut)


@jit
def find_first(x, score, after):
    """Return the first position after `after` with that score, or -1."""
    for j in range(after + 1, x.shape[0]):
        if x[j] == score:
            return j
    return -1


@jit
def find_nearest(x, k, vanishes, tops, top, heap, indices):
    """Return (theta, reach) of a row. Write the last kept tie, the (k+1)-th key and the number kept to `indices`."""
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
        cut = find_first(x, kth, cut)
    indices[0], indices[1], indices[2] = cut, cut, kept
    one = x.dtype.type(1)
    if not vanishes:
        return kth, one
    if visible <= k:
        indices[1] = find_first(x, kth, -1)
        return kth - one, (top - kth) + one
    indices[1] = find_first(x, following, cut if following == kth else -1)
    return following, top - following
