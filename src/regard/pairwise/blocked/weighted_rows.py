"""The systems of the local linear model for a block of rows, applied without forming matrices, or formed by products
over all rows at once:

    A_i = sum_j p_ij (y_j - m_i)(y_j - m_i)^T + ridge_i,   m_i = sum_j p_ij y_j

Legend: n heads, q queries, w keys of a block; D coordinates; g diagonal blocks of s = D / g coordinates.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...grammar.solvers import Cholesky
from ...grammar.systems import Solved, System
from . import live_rows

NUMBERS = 2**21
"""Maximum number of products of coordinates in memory."""
SMALL = 2**20
"""Up to this size, keys are centred at the mean of every row."""
FEW = 8
"""Maximum number of rows of `FewRows`."""
CHUNK = 2**17
"""Numbers in a chunk of keys of `FewRows`."""
NEAREST = 256
"""Maximum number of keys whose mean is the origin of `FewRows`: the last that every row sees."""


class WeightedRows(System):
    """The systems of one block, for weights p [n, q, w], whose rows sum to 1 or 0, and coordinates y [n, w, D].

    `common` [n, w] are the keys that every row sees; their mean becomes the `origin` [n, 1, D] of y and `mean` = p y.
    `ridge` is a number or [n, q, 1 or D], `probe` [n, q, D] or None. Positions allow a non-empty row at least `fewest`
    keys, and weights can be zero if `sparse`. The caller sets `counted`, whether residuals are wanted, `source`
    [n, q, w] for right sides sum_j p_ij source_ij y_j with sum_j p_ij source_ij = 0, and `rows_solver`, a function such
    as `live_rows.grouped`. `raised`: where `raise_ridge` did.
    """

    def __init__(
        self, p: Tensor, y: Tensor, common: Tensor, ridge: float | Tensor, probe: Tensor | None = None,
        fewest: int = 0, sparse: bool = False,
    ) -> None:  # fmt: skip
        self.p, self.ridge, self.probe = p, ridge, probe
        self.fewest, self.sparse, self.counted = fewest, sparse, True
        self.raised: Tensor | None = None
        self.source: Tensor | None = None
        self.rows_solver: Callable[[Any, Tensor, Tensor | None], live_rows.ByRow] = live_rows.grouped
        self._last: tuple[Tensor, Tensor] | None = None
        self._squares: Tensor | None = None
        self._set_keys(y, common)

    def _set_keys(self, y: Tensor, common: Tensor) -> None:
        p = self.p
        self.share = common / common.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)
        self.origin = self.share[:, None] @ y
        self.y = y - self.origin
        self.mean = p @ self.y

    def slopes(self, x: Tensor) -> Tensor:
        """Return (y_j - m_i) . x_i [n, q, w]."""
        away = (self.mean * x).sum(-1, keepdim=True)
        return torch.baddbmm(away, x, self.y.transpose(-1, -2), beta=-1)

    def apply(self, x: Tensor) -> Tensor:
        # No mean in the second product: it would cancel, since weights times slopes sum to 0.
        corrections = self.slopes(x).mul_(self.p)
        self._last = (x, corrections)
        image = torch.bmm(corrections, self.y)
        return image.add_(x, alpha=self.ridge) if isinstance(self.ridge, float) else image.addcmul_(self.ridge, x)

    def corrections(self, x: Tensor) -> Tensor:
        """Return p_ij (y_j - m_i) . x_i [n, q, w] for the solution x of the last solve, cached if available."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is x else self.slopes(x).mul_(self.p)

    def by_row(self, right: Tensor) -> Solved:
        """Solve every row separately: in the dual form (`live_rows`), else by a Cholesky factor of its own."""
        n, q, w = self.p.shape
        flat, source = right.flatten(0, 1), None if self.source is None else self.source.flatten(0, 1)
        value, corrections, residual, left, squares = self.rows_solver(self, flat, source)
        status, jitter = torch.zeros_like(residual, dtype=torch.int32), torch.zeros_like(residual)
        for rows in live_rows.parts(left.nonzero()[:, 0], w * flat.shape[-1]):
            p, mean = (x.flatten(0, 1)[rows] for x in (self.p, self.mean))
            away = self.keys_of(rows, torch.arange(w, device=rows.device)[None]) - mean[:, None]
            squares[rows] = (p * away.square().sum(-1)).sum(-1) + mean.square().sum(-1)
            spread, ridge = (away * p[..., None]).transpose(-1, -2) @ away, self.ridge_of(rows)
            spread.diagonal(dim1=-2, dim2=-1).add_(ridge)
            alone = Cholesky().factor(spread, flat[rows], ridge)
            value[rows], status[rows] = alone.value, alone.status
            residual[rows], jitter[rows] = (alone.statistics[name] for name in ("residual", "jitter"))
            corrections[rows] = (away @ alone.value[..., None])[..., 0] * p
        solution = value.view_as(right)
        self._last = (solution, corrections.view(n, q, w))
        self._squares = squares.view(n, q, 1)
        statistics = {"iterations": torch.zeros_like(residual), "residual": residual, "jitter": jitter}
        return Solved(solution, status.view(n, q), {name: x.view(n, q) for name, x in statistics.items()})

    def points(self) -> tuple[Tensor, Tensor | None]:
        """Return coordinates of the keys [n, w, D], and an origin [n, 1, D] that must still be subtracted, or None."""
        return self.y, None

    def keys_of(self, rows: Tensor, at: Tensor) -> Tensor:
        """Return the coordinates [R, s, D] of the keys of rows [R] of n x q at positions [R or 1, s]."""
        head, (y, origin) = rows.div(self.p.shape[1], rounding_mode="floor"), self.points()
        return y[head[:, None], at] if origin is None else y[head[:, None], at] - origin[head]

    def ridge_of(self, rows: Tensor) -> Tensor:
        """Return the ridge of rows [R] of n x q: [R, 1 or D]."""
        if isinstance(self.ridge, Tensor):
            return self.ridge.expand(*self.mean.shape[:2], self.ridge.shape[-1]).flatten(0, 1)[rows]
        return self.mean.new_full((rows.shape[0], 1), self.ridge)

    def raise_ridge(self) -> None:
        """Raise the ridge to the rounding error of the covariance. An absolute ridge can be negligible compared with
        the kernel weight, and slopes in units of 1 / ridge would then be rounding errors."""
        floor = 4 * torch.finfo(self.p.dtype).eps * self.squares()
        self.raised = floor > self.ridge
        self.ridge = torch.where(self.raised, floor, self.ridge)

    def squares(self) -> Tensor:
        """Return the weighted mean of |y_j|^2 [n, q, 1]."""
        if self._squares is None:
            self._squares = self.p @ self.y.square().sum(-1, keepdim=True)
        return self._squares

    def terms(self) -> Tensor:
        ridge = self.ridge if isinstance(self.ridge, float) else self.ridge.amax(-1, keepdim=True)
        return self.squares() + ridge

    def matrix(self) -> Tensor:
        n, q, w = self.p.shape
        dim = self.y.shape[-1]
        if n * q * w * dim <= SMALL:
            away = self.y[:, None] - self.mean[:, :, None]
            spread = (away * self.p[..., None]).transpose(-1, -2) @ away
        else:
            first, second = torch.tril_indices(dim, dim, device=self.p.device)
            half = self._moments(first, second)
            entry = torch.zeros(dim, dim, dtype=torch.int64, device=self.p.device)
            entry[first, second] = entry[second, first] = torch.arange(first.shape[0], device=self.p.device)
            spread = half[..., entry.flatten()].unflatten(-1, (dim, dim))
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return spread

    def diagonal(self, blocks: int) -> Tensor:
        dim = self.y.shape[-1]
        matrices = self._moments(*self._pairs(blocks)).unflatten(-1, (blocks, dim // blocks, dim // blocks))
        ridge = self.ridge
        if isinstance(ridge, Tensor):
            ridge = ridge.expand(self.mean.shape).unflatten(-1, (blocks, dim // blocks))
        matrices.diagonal(dim1=-2, dim2=-1).clamp_(min=0).add_(ridge)
        return matrices

    def _pairs(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Return both coordinates of all entries [g s s] of the diagonal blocks."""
        at = torch.arange(self.y.shape[-1], device=self.p.device).unflatten(0, (blocks, -1))
        first, second = torch.broadcast_tensors(at[:, :, None], at[:, None, :])
        return first.flatten(), second.flatten()

    def cross(self, t: Tensor, u: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return the derivatives through the diagonal blocks of the covariance, for dL/dC = -u t^T: by p sum_b e_b f_b
        [n, q, w], and by y sum_i p_ij sum_b (f_b t_b + e_b u_b) [n, w, D]; e_b, f_b slopes of t and u in block b."""
        first, second = self._pairs(blocks)
        size = t.shape[-1] // blocks
        both = t[..., first] * u[..., second] + t[..., second] * u[..., first]  # [n, q, g s s], symmetric in a block
        parts = both.unflatten(-1, (blocks, size, size))
        moved = (parts @ self.mean.unflatten(-1, (blocks, size))[..., None]).flatten(-3)
        cross = 0.5 * (self.mean * moved).sum(-1, keepdim=True) - moved @ self.y.transpose(-1, -2)
        by_keys = -(self.p.transpose(-1, -2) @ moved)
        n, _, w = self.p.shape
        chunk = max(64, NUMBERS // (n * first.shape[0]))
        for start in range(0, w, chunk):
            at = slice(start, start + chunk)
            y = self.y[:, at]
            cross[..., at].add_(both @ (y[..., first] * y[..., second]).transpose(-1, -2), alpha=0.5)
            sums = (self.p[..., at].transpose(-1, -2) @ both).unflatten(-1, (blocks, size, size))
            by_keys[:, at] += (sums @ y.unflatten(-1, (blocks, size))[..., None]).flatten(-3)
        return cross, by_keys

    def _moments(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the covariances of coordinates `first` and `second` [n, q, pairs], by products over chunks of keys."""
        n, _, w = self.p.shape
        moments = self.mean[..., first].mul_(self.mean[..., second]).neg_()
        chunk = max(64, NUMBERS // (n * first.shape[0]))
        for start in range(0, w, chunk):
            y = self.y[:, start : start + chunk]
            moments.baddbmm_(self.p[..., start : start + chunk], y[..., first].mul_(y[..., second]))
        return moments

    def near(self) -> Tensor:
        """Return the unweighted covariance of the keys that every row sees, plus the ridge. If rows have their own
        ridges, add a hundredth of the mean variance instead, since rows must not depend on each other."""
        away = self.y - self.share[:, None] @ self.y
        spread = (away * self.share[..., None]).transpose(-1, -2) @ away
        diagonal = spread.diagonal(dim1=-2, dim2=-1)
        if isinstance(self.ridge, Tensor):
            diagonal.add_(0.01 * diagonal.mean(-1, keepdim=True))
        else:
            diagonal.add_(self.ridge)
        return spread


class FewRows(WeightedRows):
    """The systems of a few rows that see many keys, as in decoding, without a copy of the keys. One pass over chunks
    that fit a core's cache gives means and second moments, a second pass the slopes."""

    def _set_keys(self, y: Tensor, common: Tensor) -> None:
        self.raw, p = y, self.p
        near, first = common, 0
        if common.shape[-1] > NEAREST:
            near = common & (common.flip(-1).cumsum(-1).flip(-1) <= NEAREST)
            first = int(near.any(0).int().argmax())  # no head has an earlier share
        self.share = near / near.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)
        self.origin = self._origin(first)
        self.mean = p.new_zeros(p.shape[0], p.shape[1], y.shape[-1])
        if self._moved:
            for at, part in self._chunks():
                self.mean.baddbmm_(p[..., at], part)
        if not self._all_moved:
            self.mean = torch.where(self._far, self.mean, p @ y)

    def _origin(self, first: int) -> Tensor:
        """Return the mean [n, 1, D] of the near keys, all from `first` on; 0 if they spread wider than its length."""
        share, y = self.share[:, None, first:], self.raw[:, first:]
        origin = share @ y
        far = origin.square().sum(-1, keepdim=True) > 0.5 * (share @ y.square().sum(-1, keepdim=True))
        # Heads that need no move are computed without one, so that results do not depend on other heads.
        count = int(far.sum())
        self._far, self._moved, self._all_moved = far, count > 0, count == far.numel()
        return torch.where(far, origin, 0)

    def _chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of keys and their coordinates from the origin [n, chunk, D], valid until the next."""
        n, width, dim = self.raw.shape
        size = max(64, CHUNK // (n * dim))
        room = self.raw.new_empty(n, min(size, width), dim)
        for start in range(0, width, size):
            at = slice(start, min(start + size, width))
            part = self.raw[:, at]
            yield at, torch.sub(part, self.origin, out=room[:, : at.stop - start]) if self._moved else part

    @property
    def y(self) -> Tensor:
        """A copy, for methods without a form for few rows."""
        return self.raw - self.origin

    def slopes(self, x: Tensor) -> Tensor:
        s = torch.empty_like(self.p)
        if self._moved:
            for at, part in self._chunks():
                s[..., at] = x @ part.transpose(-1, -2)
        if not self._all_moved:
            plain = x @ self.raw.transpose(-1, -2)
            s = torch.where(self._far, s, plain) if self._moved else plain
        return s.sub_((self.mean * x).sum(-1, keepdim=True))

    def matrix(self) -> Tensor:
        n, q, _ = self.p.shape
        dim = self.raw.shape[-1]
        spread = self.mean[..., :, None] * -self.mean[..., None, :]
        flat, room = spread.flatten(0, 1), self.p.new_empty(0)
        for at, part in self._chunks():
            weighted = torch.mul(part[:, None], self.p[..., at, None], out=room.resize_(n, q, part.shape[1], dim))
            flat.baddbmm_(weighted.flatten(0, 1).transpose(-1, -2), part.repeat_interleave(q, 0) if q > 1 else part)
        spread_of_rows = spread.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
        self._squares = (spread_of_rows + self.mean.square().sum(-1, keepdim=True)).clamp(min=0)  # not another pass
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return spread

    def points(self) -> tuple[Tensor, Tensor | None]:
        return self.raw, self.origin
