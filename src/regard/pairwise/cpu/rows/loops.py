"""Loops over a span of columns: weights, their derivatives, and the sums of both.

Every function has one loop, since these take most of the time. Functions that write keep the order of operations: at
the threshold reach - (top - z) must be 0 and not a rounding error. Functions that sum may reorder.

Legend: x scores, w weights, s derivatives, g = dL/dp of a span; `share` multiplies all that is written.
"""

import math
from typing import Any

import numpy as np

from .base import GAUSSIAN, OWN, POWER1, POWER2, POWER3, UNIFORM, jit, sums
from .own import relative
from .search import chosen


@jit
def weigh_one(z, kernel, r, top, reach, one):
    """Return (K, dK/dz) of one score, for the kernels that are not a product of u."""
    d = top - z
    if not d < reach:
        return one - one, one - one
    if kernel == UNIFORM:
        return one, one - one
    if kernel == GAUSSIAN:
        w = math.exp(-d)
        return w, w
    if kernel == OWN:
        return relative(d, reach)
    log_u = math.log1p(-d / reach)
    return math.exp(r * log_u), math.exp((r - one) * log_u) * r / reach


@jit
def _inverse(x, reach):
    """Return 1 / reach, bounded; weights are later divided by their sum."""
    return x.dtype.type(1) / max(reach, x.dtype.type(np.finfo(x.dtype).tiny))


def _weigh(power: int) -> Any:
    """Return the loop that writes share u^power to w, u = 1 - d / reach."""

    @jit
    def loop(x, w, top, reach, share):
        zero, inverse = x.dtype.type(0), _inverse(x, reach)
        for j in range(x.shape[0]):
            u = (reach - (top - x[j])) * inverse
            u = u if u > zero else zero
            w[j] = (u if power == 1 else u * u if power == 2 else u * u * u) * share

    return loop


_weigh1, _weigh2, _weigh3 = _weigh(1), _weigh(2), _weigh(3)


@jit
def weigh(x, w, kernel, r, top, reach, share, start, theta, cut):
    """Write share K of scores to w, K relative to its value at the top. If cut >= 0, only chosen keys have weight;
    column 0 is key `start`. reach is infinite without a threshold."""
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
            if cut < 0 or chosen(x[j], start + j, theta, cut):
                w[j] = weigh_one(x[j], kernel, r, top, reach, one)[0] * share


@sums
def sum_up(w):
    total = w.dtype.type(0)
    for j in range(w.shape[0]):
        total += w[j]
    return total


def _slope(power: int) -> Any:
    """Return the loop that writes the weights of `_weigh` to w, and their derivatives times g - base - rho to s."""

    @jit
    def loop(x, g, w, s, top, reach, share, rho, base):
        zero, inverse = x.dtype.type(0), _inverse(x, reach)
        steep = (share if power == 1 else share + share if power == 2 else share + share + share) * inverse
        for j in range(x.shape[0]):
            u = (reach - (top - x[j])) * inverse
            w[j] = (u if power == 1 else u * u if power == 2 else u * u * u) * share if u > zero else zero
            slope = steep if power == 1 else steep * u if power == 2 else steep * u * u
            s[j] = slope * ((g[j] - base) - rho) if u > zero else zero

    return loop


_slope1, _slope2, _slope3 = _slope(1), _slope(2), _slope(3)


@jit
def weigh_and_slope(x, g, w, s, kernel, r, top, reach, share, rho, start, theta, cut, base):
    """Write share K to w as `weigh`, and share dK/dz (g - base - rho) to s; 0 where dK/dz is 0, for any g."""
    if kernel == POWER1:
        _slope1(x, g, w, s, top, reach, share, rho, base)
    elif kernel == POWER2:
        _slope2(x, g, w, s, top, reach, share, rho, base)
    elif kernel == POWER3:
        _slope3(x, g, w, s, top, reach, share, rho, base)
    else:
        zero, one = x.dtype.type(0), x.dtype.type(1)
        for j in range(x.shape[0]):
            value, slope = zero, zero
            if cut < 0 or chosen(x[j], start + j, theta, cut):
                value, slope = weigh_one(x[j], kernel, r, top, reach, one)
            w[j] = value * share
            s[j] = slope * share * ((g[j] - base) - rho) if slope > zero else zero


@sums
def _dots1(u, g, base):
    zero = u.dtype.type(0)
    inside, slope_g, weight_g = np.int32(0), zero, zero
    for j in range(u.shape[0]):
        inside += np.int32(u[j] > zero)
        slope_g += g[j] - base if u[j] > zero else zero
        weight_g += u[j] * (g[j] - base) if u[j] > zero else zero
    return inside, slope_g, weight_g


def _dots(power: int) -> Any:
    """Return the loop that sums u^(power - 1), that times g - base, and u^power (g - base)."""

    @sums
    def loop(u, g, base):
        zero = u.dtype.type(0)
        slope, slope_g, weight_g = zero, zero, zero
        for j in range(u.shape[0]):
            lower = u[j] if power == 2 else u[j] * u[j]
            ug = lower * (g[j] - base) if u[j] > zero else zero
            slope += lower
            slope_g += ug
            weight_g += u[j] * ug if u[j] > zero else zero
        return slope, slope_g, weight_g

    return loop


_dots2, _dots3 = _dots(2), _dots(3)


@jit
def _moments_one_by_one(x, g, kernel, r, top, reach, start, theta, cut, base):
    zero, one = x.dtype.type(0), x.dtype.type(1)
    live, slope, slope_g, weight_g = False, 0.0, 0.0, 0.0
    for j in range(x.shape[0]):
        if cut < 0 or chosen(x[j], start + j, theta, cut):
            value, steep = weigh_one(x[j], kernel, r, top, reach, one)
            if value > zero:
                live = True
                slope += steep
                slope_g += steep * (g[j] - base)
                weight_g += value * (g[j] - base)
    return live, (slope, slope_g, weight_g)


@jit
def moments(x, g, u, kernel, r, top, reach, start, theta, cut, base):
    """Return whether a span has weight, and (sum dK/dz, sum g dK/dz, sum g K) in float64, with K relative to its value
    at the top and g minus `base`. Keys without weight are left out, for any g. u is work space."""
    if kernel != POWER1 and kernel != POWER2 and kernel != POWER3:
        return _moments_one_by_one(x, g, kernel, r, top, reach, start, theta, cut, base)
    _weigh1(x, u, top, reach, x.dtype.type(1))
    if not sum_up(u) > 0:
        return False, (0.0, 0.0, 0.0)
    if kernel == POWER1:
        slope, slope_g, weight_g = _dots1(u, g, base)
    elif kernel == POWER2:
        slope, slope_g, weight_g = _dots2(u, g, base)
    else:
        slope, slope_g, weight_g = _dots3(u, g, base)
    steep = np.float64(r) * np.float64(_inverse(x, reach))
    return True, (np.float64(slope) * steep, slope_g * steep, np.float64(weight_g))
