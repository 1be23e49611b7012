"""The dual form of the local linear model: systems in the space of the keys, which is smaller if a row has fewer
weighted keys than coordinates. With Z_i = sqrt(p_ij) (y_j - m_i) ridge^-1/2 over the s keys with weight and
b = ridge^-1/2 (x - m_i),

    w = (Z Z^T + 1)^-1 Z b,   sqrt(p_ij) (y_j - m_i) . t_i = w_j,   t_i = ridge^-1/2 (b - Z^T w)

which gives slopes without the part of t outside the span of the keys, which can be as long as 1 / ridge. `grouped` does
it with torch, and `cpu.rows.local_linear` with numba.

Legend: R = n x q rows of at most s keys; otherwise as in `weighted_rows`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MANY = 16
"""From this number times D keys, a product with all keys costs more than a system of 2 D keys."""
LEAST = 16
"""Keys of the smallest systems; larger systems double it. Only the row's own count decides."""
NUMBERS = 2**21
"""Maximum number of gathered coordinates in memory."""


class ByRow(NamedTuple):
    """t [R, D], p_ij (y_j - m_i) . t_i [R, w], the relative residual [R] (0 if not wanted), the rows [R] that are left
    to the caller, whose numbers are undefined: those with too many keys, and those with a singular system; and the
    mean of |y_j|^2 [R], or more if coordinates have their own ridges.

    `solve` returns it for s keys instead of w, with the mean of |y_j - m_i|^2."""

    value: Tensor
    corrections: Tensor
    residual: Tensor
    left: Tensor
    squares: Tensor


def grouped(system: Any, right: Tensor, source: Tensor | None) -> ByRow:
    """Solve the rows of a `WeightedRows` that have few weighted keys, in groups of about equal numbers of keys, for
    right sides [R, D]; `source` [R, w] as in `solve`."""
    p, means = system.p.flatten(0, 1), system.mean.flatten(0, 1)
    count, width = p.shape
    value, corrections = torch.zeros_like(right), torch.zeros_like(p)
    residual, squares = right.new_zeros(2, count)
    left = torch.ones(count, dtype=torch.bool, device=p.device)
    for rows, index, weights in groups(p, right.shape[1]):
        away = system.keys_of(rows, index) - means[rows, None]
        given = None if source is None else source[rows].gather(1, index)
        some = solve(weights, away, right[rows], system.ridge_of(rows), given, system.counted)
        value[rows], residual[rows], left[rows] = some.value, some.residual, some.left
        squares[rows] = some.squares + means[rows].square().sum(-1)
        values = corrections.new_zeros(rows.shape[0], width)
        corrections[rows] = values.scatter_add_(1, index, some.corrections)  # padding adds 0
    return ByRow(value, corrections, residual, left, squares)


def groups(p: Tensor, dim: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the rows [R] of p [n q, w] with few weighted keys, grouped by the size of their systems, with positions
    [R, s] and weights [R, s] of these keys, padded with 0."""
    alive, most = p > 0, 2 * dim if p.shape[-1] >= MANY * dim else dim
    count = alive.sum(-1)
    low, high = (int(x) for x in count.aminmax())
    above, size = -1, LEAST
    while above < min(most, high):
        if low <= min(size, most):
            rows = ((count > above) & (count <= min(size, most))).nonzero()[:, 0]
            for part in parts(rows, size * dim):
                row, column = alive[part].nonzero(as_tuple=True)
                counts = count[part]
                rank = torch.arange(row.shape[0], device=row.device) - (counts.cumsum(0) - counts)[row]
                index, weights = row.new_zeros(part.shape[0], size), p.new_zeros(part.shape[0], size)
                index[row, rank], weights[row, rank] = column, p[part[row], column]
                yield part, index, weights
        above, size = size, 2 * size


def parts(rows: Tensor, numbers: int) -> Iterator[Tensor]:
    """Yield parts of `rows` within NUMBERS, with `numbers` per row. A single row is repeated, since torch computes a
    batch of one by other routines, which round differently."""
    most = max(2, NUMBERS // max(1, numbers))
    for part in rows.split(most) if rows.shape[0] > most else (rows,):
        if part.shape[0]:
            yield part if part.shape[0] > 1 else part.repeat(2)


def solve(
    weights: Tensor, away: Tensor, right: Tensor, ridge: Tensor, source: Tensor | None = None, checked: bool = True
) -> ByRow:
    """Solve rows with weights [R, s], y_j - m_i [R, s, D], right sides [R, D] and ridge [R, 1 or D]. For right sides
    sum_j p_ij source_ij (y_j - m_i), `source` [R, s] avoids a difference of terms as long as 1 / ridge."""
    root, share = weights.sqrt(), ridge.rsqrt()
    z = away * root[..., None] * share[:, None]
    gram = z @ z.transpose(-1, -2)
    gram.diagonal(dim1=-2, dim2=-1).add_(1)
    factor, info = torch.linalg.cholesky_ex(gram)
    if source is None:
        b = right * share
        w = torch.cholesky_solve(z @ b[..., None], factor)
        value, corrections = share * (b - (z.transpose(-1, -2) @ w)[..., 0]), root * w[..., 0]
    else:
        s = (root * source)[..., None]
        w = torch.cholesky_solve(s, factor)
        value, corrections = share * (z.transpose(-1, -2) @ w)[..., 0], root * (s - w)[..., 0]
    residual = torch.zeros_like(value[:, 0])
    if checked:
        rest = right - (away.transpose(-1, -2) @ corrections[..., None])[..., 0] - ridge * value
        size = torch.linalg.vector_norm(right, dim=-1)
        residual = torch.linalg.vector_norm(rest, dim=-1) / torch.where(size > 0, size, 1)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    most = torch.finfo(gram.dtype).eps ** -0.5
    sound = (info == 0) & (pivots.amax(-1) < most) & (value.abs().amax(-1) < torch.inf)
    return ByRow(value, corrections, residual, ~sound, (weights * away.square().sum(-1)).sum(-1))
