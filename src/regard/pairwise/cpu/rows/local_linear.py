"""The local linear model, one row at a time: in the dual form of `blocked.live_rows` if the row has at most as many
weighted keys as coordinates, else by a Cholesky factor of its covariance.

Legend: s weighted keys of the row, at positions `index`; D coordinates; z [s, D] scaled coordinates; a [n, n] a
symmetric matrix, of which the upper half is used, n = s or D; v, b and share vectors of up to D numbers; `wide`
[D, D] sums over many keys in float64.
"""

import math

import numpy as np

from .base import SPAN, jit, sums


@sums
def _dot(x, y):
    total = x.dtype.type(0)
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@jit
def _add(x, factor, y):
    """Add factor y to x."""
    for j in range(x.shape[0]):
        x[j] += factor * y[j]


@sums
def _add_four(x, first, y, second, z, third, v, fourth, w):
    for j in range(x.shape[0]):
        x[j] += first * y[j] + second * z[j] + third * v[j] + fourth * w[j]


@jit
def _add_products(a, x):
    """Add x^T x to the upper half of a, for x [rows, n]."""
    rows = x.shape[0]
    for i in range(a.shape[0]):
        out, at = a[i, i:], 0
        while at + 4 <= rows:
            _add_four(
                out, x[at, i], x[at, i:], x[at + 1, i], x[at + 1, i:], x[at + 2, i], x[at + 2, i:], x[at + 3, i],
                x[at + 3, i:],
            )  # fmt: skip
            at += 4
        for k in range(at, rows):
            _add(out, x[k, i], x[k, i:])


@jit
def _factorise(a):
    """Replace the upper half of a by its Cholesky factor. Return the largest pivot, infinity if there is none."""
    most = a.dtype.type(0)
    for k in range(a.shape[0]):
        if not a[k, k] > 0:
            return a.dtype.type(np.inf)
        row, pivot = a[k], math.sqrt(a[k, k])
        most = max(most, pivot)
        for j in range(k, a.shape[0]):
            row[j] /= pivot
        for i in range(k + 1, a.shape[0]):
            _add(a[i, i:], -row[i], row[i:])
    return most


@jit
def _substitute(a, v):
    """Solve for the right side v, in place, with the factor in a."""
    n = a.shape[0]
    for i in range(n):
        v[i] /= a[i, i]
        _add(v[i + 1 :], -v[i], a[i, i + 1 :])
    for i in range(n - 1, -1, -1):
        v[i] = (v[i] - _dot(a[i, i + 1 :], v[i + 1 :])) / a[i, i]


@jit
def _residual(y, center, index, corrections, right, ridge, value, b):
    """Return the residual relative to the right side. b, in float64, is work space."""
    for d in range(right.shape[0]):
        b[d] = right[d] - ridge[d % ridge.shape[0]] * value[d]
    for j in index:
        for d in range(right.shape[0]):
            b[d] -= corrections[j] * (y[j, d] - center[0, d] - center[1, d])
    size = math.sqrt(_dot(right, right))
    return math.sqrt(_dot(b, b)) / (size if size > 0 else 1)


@jit
def _solve_dual(p, y, center, right, ridge, source, index, value, corrections, z, a, v, b, share):
    """Solve in the space of the weighted keys. Return whether that failed, and the variance sum_j p_j |y_j - m|^2, or
    more if coordinates have their own ridges. An empty source means none; the last five arguments are work
    space."""
    zero, one, s, dim = p.dtype.type(0), p.dtype.type(1), index.shape[0], right.shape[0]
    z, a, v, plain = z[:s], a[:s, :s], v[:s], source.shape[0] == 0
    sign, spread = one if plain else -one, zero
    for d in range(dim):
        share[d] = one / math.sqrt(ridge[d % ridge.shape[0]])
        b[d] = right[d] * share[d] if plain else zero
    for i in range(s):
        key, root = y[index[i]], math.sqrt(p[index[i]])
        for d in range(dim):
            z[i, d] = (key[d] - center[0, d] - center[1, d]) * root * share[d]
    for i in range(s):
        for j in range(i, s):
            a[i, j] = _dot(z[i], z[j])
        spread += a[i, i]
        a[i, i] += one
        v[i] = _dot(z[i], b) if plain else math.sqrt(p[index[i]]) * source[index[i]]
        corrections[index[i]] = 0 if plain else -v[i]
    most = _factorise(a)
    _substitute(a, v)
    for i in range(s):
        corrections[index[i]] = sign * math.sqrt(p[index[i]]) * (corrections[index[i]] + v[i])
        _add(b, -sign * v[i], z[i])
    for d in range(dim):
        value[d] = share[d] * b[d]
    return not most * most * np.finfo(p.dtype).eps < one, spread * ridge.max()


@jit
def _covariance(p, y, center, index, z, a):
    """Write the sum of p_j (y_j - m) (y_j - m)^T over the keys `index` to the upper half of a."""
    dim, rows = a.shape[0], 0
    a[:] = 0
    for i in range(index.shape[0]):
        root = math.sqrt(p[index[i]])
        for d in range(dim):
            z[rows, d] = (y[index[i], d] - center[0, d] - center[1, d]) * root
        rows += 1
        if rows == dim or i == index.shape[0] - 1:
            _add_products(a, z[:rows])
            rows = 0


@jit
def _solve_primal(p, y, center, right, ridge, index, value, corrections, z, a, wide, diagonal, b):
    """Solve in the space of the coordinates, as the solver `cholesky`. Return as `_solve_dual`."""
    dim, spread = right.shape[0], p.dtype.type(0)
    _covariance(p, y, center, index[:SPAN], z, a)
    if index.shape[0] > SPAN:
        wide[:] = a
        for first in range(SPAN, index.shape[0], SPAN):
            _covariance(p, y, center, index[first : first + SPAN], z, a)
            wide += a
        a[:] = wide
    for d in range(dim):
        spread += a[d, d]
        a[d, d] += ridge[d % ridge.shape[0]]
        diagonal[d] = a[d, d]
        value[d] = right[d]
    failed = not _factorise(a) < np.inf
    for d in range(dim):  # the limit of the solver `cholesky` for pivots that are rounding errors
        failed = failed or not a[d, d] * a[d, d] > diagonal[d] * (10 * dim * np.finfo(p.dtype).eps)
    if failed:
        return True, spread
    _substitute(a, value)
    for j in index:
        for d in range(dim):
            b[d] = y[j, d] - center[0, d] - center[1, d]
        corrections[j] = p[j] * _dot(b, value)
    return False, spread


@jit
def solve_row(p, y, center, right, ridge, source, counted, value, corrections, index, z, a, wide, v, b, share):
    """Write t and p_j (y_j - m) . t of one row, where m is the sum of the two rows of `center`. Return whether that
    failed, which leaves them undefined, the relative residual if `counted`, and the mean of |y_j|^2. The last seven
    arguments are work space."""
    zero, s, failed = p.dtype.type(0), 0, False
    corrections[:] = 0
    for j in range(p.shape[0]):
        if p[j] > 0:
            index[s] = j
            s += 1
    index = index[:s]
    for d in range(ridge.shape[0]):
        failed = failed or not ridge[d] > 0
    if failed:
        return True, zero, zero
    if s > right.shape[0]:
        failed, spread = _solve_primal(p, y, center, right, ridge, index, value, corrections, z, a, wide, v, b)
    else:
        failed, spread = _solve_dual(p, y, center, right, ridge, source, index, value, corrections, z, a, v, b, share)
    largest = zero
    for d in range(right.shape[0]):
        largest += abs(value[d])
    failed = failed or not largest < np.inf
    squares = spread + _dot(center[1], center[1])
    if failed or not counted:
        return failed, zero, squares
    return failed, _residual(y, center, index, corrections, right, ridge, value, wide[0]), squares
