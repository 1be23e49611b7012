"""One row, forward and backward.

Legend: x, g, p, dz scores, dL/dp, weights and dL/dz of the row; `tops`, `kept`, `local`, `w`, `s` work space.
"""

import math

import numpy as np

from . import base as codes
from .base import SPAN, TILE, jit, sums
from .loops import moments, sum_up, weigh, weigh_and_slope
from .search import chosen, find_first, find_gap, find_nearest, find_peak, find_tops, next_run

LARGE = 1e30
"""Upper limit of margins and biases, above which products overflow."""


@jit
def vanishes(kernel):
    """Return whether the kernel is continuous at the threshold."""
    return kernel != codes.UNIFORM and kernel != codes.GAUSSIAN


@jit
def _fill_fallback(x, p, rule, fallback, theta, indices):
    """Write the weights of a row with visible keys but none above the threshold."""
    zero, one = x.dtype.type(0), x.dtype.type(1)
    share = one / x.dtype.type(max(indices[2], 1))
    for j in range(p.shape[0]):
        if rule == codes.NEAREST:
            inside = chosen(x[j], j, theta, indices[0])
        elif fallback == codes.FALLBACK_UNIFORM:
            inside = x[j] > -np.inf
        else:
            inside = fallback == codes.FALLBACK_NEAREST and j == indices[0]
        p[j] = share if inside else zero


@jit
def _note_fallback(x, fallback, top, indices):
    """Store what `_fill_fallback` needs under the fixed rule: the number of visible keys, or the best of them."""
    indices[0], indices[2] = find_first(x, top, -1), 1
    if fallback == codes.FALLBACK_UNIFORM:
        indices[2] = 0
        for j in range(x.shape[0]):
            indices[2] += x[j] > -np.inf


@jit
def _mass(x, kernel, r, tops, top, reach, local, theta, cut):
    """Return the sum of the kernel's values, relative to the top."""
    total, first, tiles, one = 0.0, 0, (x.shape[0] + TILE - 1) // TILE, x.dtype.type(1)
    while first < tiles:
        end, live = next_run(tops, x.shape[0], first, top, reach, cut >= 0)
        if live:
            part = x[first * TILE : end * TILE]
            weigh(part, local, kernel, r, top, reach, one, first * TILE, theta, cut)
            total += sum_up(local[: part.shape[0]])
        first = end
    return x.dtype.type(total)


@jit
def _fill(x, p, kernel, r, tops, top, reach, local, theta, cut, share, in_place):
    """Write p = share K of a row; p may be x (`in_place`)."""
    first, tiles = 0, (x.shape[0] + TILE - 1) // TILE
    while first < tiles:
        end, live = next_run(tops, x.shape[0], first, top, reach, cut >= 0)
        out = p[first * TILE : end * TILE]
        if live:
            part = x[first * TILE : end * TILE]
            into = local[: part.shape[0]] if in_place else out
            weigh(part, into, kernel, r, top, reach, share, first * TILE, theta, cut)
            if in_place:
                out[:] = into
        else:
            out[:] = 0
        first = end


@jit
def _invalid(rule, r, number):
    return not (r > 0 and r < np.inf) or not (number > 0 or (rule != codes.ANCHORED and number == number))


@jit
def forward_row(
    x, bits, p, kernel, rule, r, number, k, fallback, in_place, tops, top_bits, kept, local, floats, flags, indices
):
    """Compute the weights and statistics of a row."""
    kind = x.dtype.type
    floats[0], floats[1], floats[2], floats[3], floats[4], floats[5] = 0, -1, 1, 1, 0, 0
    flags[:] = 0
    indices[:] = 0
    top = -kind(np.inf)
    if x.shape[0] > 0 and find_tops(bits, top_bits):
        top = tops[(x.shape[0] + TILE - 1) // TILE]
    elif x.shape[0] > 0:
        top = kind(np.nan)
    if top == -np.inf:
        flags[0] = 1
        p[:] = 0
        return
    if top != top or _invalid(rule, r, number):
        floats[:4] = np.nan
        p[:] = np.nan
        return
    cut, mass = -1, kind(0)
    number = min(max(number, kind(-LARGE)), kind(LARGE))
    if rule == codes.ADAPTIVE:
        b, total = find_peak(x, kernel, r, tops, top, kept, flags)
        reach = r * b
        if r < 1:
            top, reach = find_gap(x, r, top, b, kept, flags)
        theta = top - reach
        if kernel != codes.POWER:  # which rounds sum and weights differently for large r
            mass = kind(total / np.float64(b) ** np.float64(r))
    elif rule == codes.ANCHORED:
        reach = number
        theta = top - number
    elif rule == codes.FIXED:
        reach = top + number
        theta = -number
    else:
        theta, reach = find_nearest(x, k, vanishes(kernel), tops, top, kept, indices)
        cut = -1 if vanishes(kernel) else indices[0]
    floats[0], floats[1] = top, theta
    info = np.finfo(x.dtype)
    least = info.tiny / info.eps if rule in (codes.FIXED, codes.NEAREST) else 0  # `kernels.least_reach`
    if not (reach > 0 and reach >= least):
        flags[1] = 1
        if rule == codes.FIXED:
            _note_fallback(x, fallback, top, indices)
        _fill_fallback(x, p, rule, fallback, theta, indices)
        return
    edge = reach if cut < 0 else kind(np.inf)
    if mass == 0:
        mass = _mass(x, kernel, r, tops, top, edge, local, theta, cut)
    floats[2], floats[3] = reach, mass
    _fill(x, p, kernel, r, tops, top, edge, local, theta, cut, kind(1) / mass, in_place)


@jit
def count_support(p, floats):
    """Compute support size and effective sample size of a row of weights."""
    support, total, square = 0, 0.0, 0.0
    for j in range(p.shape[0]):
        support += p[j] > 0
        total += p[j]
        square += p[j] * p[j]
    floats[4] = support
    floats[5] = total * total / square if square > 0 else 0


@sums
def mark(p, start, pivot, active):
    """Mark the blocks of columns that contain weight, or the key that determines the threshold."""
    first = 0
    while first < p.shape[0]:
        block = (start + first) // codes.MARK
        end = min(p.shape[0], (block + 1) * codes.MARK - start)
        if active[block] == 0:
            total = p.dtype.type(0)
            for j in range(first, end):
                total += p[j]
            if total != 0:  # true for NaN, too
                active[block] = 1
        first = end
    if pivot >= 0:
        active[(start + pivot) // codes.MARK] = 1


@jit
def _log_slope(log_a, r):
    """Return d log p / dr of the adaptive rule at a fixed threshold, up to terms that cancel (`power_grads`)."""
    if r < 1:
        return log_a - 1.0
    if abs(log_a) < 1e-2:
        return log_a * log_a * (0.5 - log_a / 6.0 + log_a * log_a / 24.0)
    return math.expm1(-log_a) + log_a


@jit
def _power_grad(x, g, rule, r, top, reach, share, rho, base):
    """Return dL/dr, or dL/dalpha for the adaptive rule (`power_grads` of the rules)."""
    total, power = 0.0, np.float64(r)
    shift = math.log(np.float64(share)) / power
    for j in range(x.shape[0]):
        d = top - x[j]
        if d < reach:
            log_u = np.float64(math.log1p(-d / reach))
            drift = math.exp(power * log_u) * np.float64(share) * np.float64((g[j] - base) - rho)
            if rule == codes.ADAPTIVE:
                total -= power * power * _log_slope(log_u + shift, power) * drift
            else:
                total += log_u * drift
    return total


@sums
def _ties(x, top):
    count = 0
    for j in range(x.shape[0]):
        count += x[j] == top
    return count


@jit
def _subtract_at_best(x, s, best, part):
    """Subtract `part` from the slopes of the keys with the largest score, which determine the threshold."""
    zero = x.dtype.type(0)
    for j in range(x.shape[0]):
        s[j] -= part if x[j] == best else zero


@jit
def _row_moments(x, g, u, live, kernel, r, top, edge, theta, cut, base):
    """Return `moments` of a row; write which of its spans have weight to `live`."""
    slope, slope_g, weight_g = 0.0, 0.0, 0.0
    for t in range((x.shape[0] + SPAN - 1) // SPAN):
        a, b = t * SPAN, min(x.shape[0], (t + 1) * SPAN)
        live[t], sums = moments(x[a:b], g[a:b], u[: b - a], kernel, r, top, edge, a, theta, cut, base)
        slope += sums[0]
        slope_g += sums[1]
        weight_g += sums[2]
    return slope, slope_g, weight_g


@jit
def _fill_slopes(x, g, p, dz, live, kernel, r, top, edge, share, rho, theta, cut, best, moved, in_place, w, s, base):
    """Write p and dz of a row, which may be x and g (`in_place`)."""
    for t in range((x.shape[0] + SPAN - 1) // SPAN):
        a, b = t * SPAN, min(x.shape[0], (t + 1) * SPAN)
        if not live[t]:
            p[a:b] = 0
            dz[a:b] = 0
            continue
        part = x[a:b]
        weights = p[a:b] if p.shape[0] > 0 and not in_place else w[: b - a]
        slopes = s[: b - a] if in_place else dz[a:b]
        weigh_and_slope(part, g[a:b], weights, slopes, kernel, r, top, edge, share, rho, a, theta, cut, base)
        if moved != 0:
            _subtract_at_best(part, slopes, best, moved)
        if in_place:
            p[a:b] = weights
            dz[a:b] = slopes


@jit
def _best(x, bits, top, tops, top_bits):
    """Return (the largest score, the number of keys with it). Scores computed again from fewer keys can differ from
    those of the forward pass in the last bit, so that none equals `top`."""
    ties = _ties(x, top)
    if ties == 0:
        find_tops(bits, top_bits)
        top = tops[(x.shape[0] + TILE - 1) // TILE]
        ties = _ties(x, top)
    return top, ties


@jit
def backward_row(
    x, bits, g, p, dz, kernel, rule, r, fallback, learned, in_place, tops, top_bits, live, w, s, floats, flags, indices,
    grads,
):  # fmt: skip
    """Compute the weights, dL/dz and dL/dparameters of a row from its statistics."""
    kind = x.dtype.type
    grads[:] = 0
    top, theta, reach, mass = floats[0], floats[1], floats[2], floats[3]
    if flags[0] != 0 or mass != mass:
        p[:] = mass - mass  # 0, or NaN
        dz[:] = mass - mass
        grads[:] = mass - mass
        return
    if flags[1] != 0:
        _fill_fallback(x, p, rule, fallback, theta, indices)
        dz[:] = 0
        return
    cut = indices[0] if rule == codes.NEAREST and not vanishes(kernel) else -1
    edge = reach if cut < 0 else kind(np.inf)
    base = kind(0)
    if rule == codes.ADAPTIVE:  # G - rho must be exact at the key whose slope may be much larger than all others
        base = g[max(0, find_first(x, top, -1))]
    slope, slope_g, weight_g = _row_moments(x, g, w, live, kernel, r, top, edge, theta, cut, base)
    share = kind(1) / mass
    rho = kind(weight_g / mass)
    if rule == codes.ADAPTIVE:
        rho = kind(slope_g / slope) if slope > 0 else kind(0)
    total = kind((slope_g - rho * slope) * share)
    grads[1] = total
    if learned:
        grads[0] = _power_grad(x, g, rule, r, top, reach, share, rho, base)
    best, moved = top, kind(0)
    if rule == codes.ANCHORED and vanishes(kernel):
        best, ties = _best(x, bits, top, tops, top_bits)
        moved = total / kind(ties)
    _fill_slopes(x, g, p, dz, live, kernel, r, top, edge, share, rho, theta, cut, best, moved, in_place, w, s, base)
    if rule == codes.NEAREST and vanishes(kernel):
        dz[indices[1]] -= total
