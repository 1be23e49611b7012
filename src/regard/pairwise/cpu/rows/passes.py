"""The functions that Python calls, for many rows at once, with compiled code cached on disk.

numba's cache key covers only the function's own file. These functions inline all that they call, so they close over a
digest of all sources, which makes it part of the key. (A closed-over function would give a new key in every process.)
"""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, prange

from .base import NEAREST, SPAN, TILE
from .local_linear import solve_row
from .own import SOURCE
from .row import backward_row, count_support, forward_row, mark, vanishes


def _entry(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles, and caches on disk if a folder can be written."""

    def compiled(function: Any) -> Any:
        try:
            return njit(cache=True, error_model="numpy", **options)(function)
        except RuntimeError:  # no folder for the cache can be written
            return njit(error_model="numpy", **options)(function)

    return compiled


def _parts(sources: str) -> tuple[Any, Any]:
    @_entry(nogil=True)
    def forward_part(
        first, last, z, bits, p, lo, hi, start, kernel, rule, power, number, k, fallback, in_place, counted, floats,
        flags, index, active, group,
    ):  # fmt: skip
        """Run `forward` on rows [first, last)."""
        sources  # noqa: B018
        n = z.shape[1]
        top_bits = np.empty((n + TILE - 1) // TILE + 1, bits.dtype)
        tops = top_bits.view(z.dtype)
        k = min(k, n)
        kept = np.empty(n + 1, z.dtype)
        local = np.empty(SPAN, z.dtype)
        for i in range(first, last):
            a, b = lo[i], hi[i]
            out, indices = p[i], index[i]
            out[:a] = 0
            out[b:] = 0
            forward_row(
                z[i, a:b], bits[i, a:b], out[a:b], kernel, rule, power[i], number[i], k, fallback, in_place,
                tops, top_bits, kept, local, floats[i], flags[i], indices,
            )  # fmt: skip
            indices[0] += a
            indices[1] += a
            if counted:
                count_support(out, floats[i])
            if active.shape[1] > 0 and flags[i, 0] == 0:
                mark(out, start, indices[1] if rule == NEAREST and vanishes(kernel) else -1, active[i // group])

    @_entry(nogil=True)
    def backward_part(
        first, last, z, bits, g, p, dz, lo, hi, kernel, rule, power, fallback, learned, in_place, floats, flags, index,
        grads,
    ):  # fmt: skip
        """Run `backward` on rows [first, last)."""
        sources  # noqa: B018
        n = z.shape[1]
        top_bits = np.empty((n + TILE - 1) // TILE + 1, bits.dtype)
        tops = top_bits.view(z.dtype)
        live = np.empty((n + SPAN - 1) // SPAN, np.bool_)
        w, s = np.empty(SPAN, z.dtype), np.empty(SPAN, z.dtype)
        indices: Any = np.empty(3, np.int64)
        for i in range(first, last):
            a, b = lo[i], hi[i]
            indices[0], indices[1], indices[2] = index[i, 0] - a, index[i, 1] - a, index[i, 2]
            weights, slopes = p[i], dz[i]
            weights[:a] = 0
            weights[b:] = 0
            slopes[:a] = 0
            slopes[b:] = 0
            backward_row(
                z[i, a:b], bits[i, a:b], g[i, a:b], weights[a:b], slopes[a:b], kernel, rule, power[i], fallback,
                learned, in_place, tops, top_bits, live, w, s, floats[i], flags[i], indices, grads[i],
            )  # fmt: skip

    return forward_part, backward_part


def _whole(sources: str) -> tuple[Any, Any]:
    @_entry(parallel=True)
    def forward(chunks, z, *rest):
        """Compute the weights and statistics of every row, in place if p is z (`in_place`). `start` is the position of
        column 0 among all keys. Row i marks active[i // group], unless `active` has no columns."""
        sources  # noqa: B018
        rows = z.shape[0]
        for chunk in prange(chunks):
            forward_part(chunk * rows // chunks, (chunk + 1) * rows // chunks, z, *rest)

    @_entry(parallel=True)
    def backward(chunks, z, *rest):
        """Compute the weights and dL/dz of every row from its statistics, in place if p is z and dz is g (`in_place`),
        and `grads` [R, 2]: dL/dpower (dL/dalpha) if `learned`, and dL/dnumber. A p without columns is not written."""
        sources  # noqa: B018
        rows = z.shape[0]
        for chunk in prange(chunks):
            backward_part(chunk * rows // chunks, (chunk + 1) * rows // chunks, z, *rest)

    return forward, backward


def _local_linear(sources: str) -> tuple[Any, Any]:
    @_entry(nogil=True)
    def local_linear_part(
        first, last, p, y, origin, mean, right, ridge, source, counted, value, corrections, residual, left, squares
    ):
        """Run `local_linear` on rows [first, last)."""
        sources  # noqa: B018
        width, dim, group = p.shape[1], y.shape[2], p.shape[0] // y.shape[0]
        index, z, a = np.empty(width, np.int64), np.empty((dim, dim), p.dtype), np.empty((dim, dim), p.dtype)
        v, b, share = np.empty(dim, p.dtype), np.empty(dim, p.dtype), np.empty(dim, p.dtype)
        center, wide = np.empty((2, dim), p.dtype), np.empty((dim, dim), np.float64)
        for i in range(first, last):
            head = i // group
            center[0], center[1] = origin[head], mean[i]
            left[i], residual[i], squares[i] = solve_row(
                p[i], y[head], center, right[i], ridge[i % ridge.shape[0]], source[i % source.shape[0]], counted,
                value[i], corrections[i], index, z, a, wide, v, b, share,
            )  # fmt: skip

    @_entry(parallel=True)
    def local_linear(chunks, p, *rest):
        """Solve the local linear model of every row for weights p [R, w], keys y [n, w, D] less an origin [n, D], means
        and right sides [R, D], ridge [R or 1, D or 1], and a source [R, w], or [1, 0] for none. Write a `ByRow`."""
        sources  # noqa: B018
        rows = p.shape[0]
        for chunk in prange(chunks):
            local_linear_part(chunk * rows // chunks, (chunk + 1) * rows // chunks, p, *rest)

    return local_linear, local_linear_part


def _sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files) + SOURCE).hexdigest()


_SOURCES = _sources()
forward_part, backward_part = _parts(_SOURCES)
forward, backward = _whole(_SOURCES)
local_linear, local_linear_part = _local_linear(_SOURCES)
