"""The local linear model's systems for a block of weighted rows, applied without being formed, or formed by products
over all rows at once:

    A_i = sum_j p_ij (y_j - m_i)(y_j - m_i)^T + ridge_i,   m_i = sum_j p_ij y_j

Legend: n heads, q queries, w keys of a block; D coordinates; g diagonal blocks of s = D / g coordinates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...grammar.systems import Solved, SolveStatus
from . import live_rows

NUMBERS = 2**21
"""Of products of coordinates, made at a time."""
FEW = 2**20
"""Numbers up to which every row gets keys of its own, centred at its own mean."""


class WeightedRows:
    """The systems of one block.

    Args:
        p: weights [n, q, w], each row's sum 1 or 0.
        y: coordinates of the keys [n, w, D].
        common: boolean [n, w], the keys that every row sees. Their mean is made the origin.
        ridge: a number, or [n, q, 1 or D].
        probe: [n, q, D] or None.
        fewest: keys that position lets a row see that sees any.
        sparse: whether weights vanish, so that rows may have few keys.

    Attributes:
        origin: [n, 1, D].
        y: from the origin, as `mean` = p y [n, q, D] is.
        source: [n, q, w], where the right sides are sum_j p_ij source_ij y_j with sum_j p_ij source_ij = 0.
    """

    counted = True
    """Whether residuals are asked for."""

    def __init__(
        self,
        p: Tensor,
        y: Tensor,
        common: Tensor,
        ridge: float | Tensor,
        probe: Tensor | None = None,
        fewest: int = 0,
        sparse: bool = False,
    ) -> None:
        self.p, self.ridge, self.probe = p, ridge, probe
        self.fewest, self.sparse = fewest, sparse
        self.raised: Tensor | None = None
        self.share = common / common.sum(-1, keepdim=True).clamp(min=1).to(p.dtype)
        self.origin = self.share[:, None] @ y
        self.y = y - self.origin
        self.mean = p @ self.y
        self._last: tuple[Tensor, Tensor] | None = None
        self.source: Tensor | None = None

    def slopes(self, x: Tensor) -> Tensor:
        """(y_j - m_i) . x_i [n, q, w]."""
        away = (self.mean * x).sum(-1, keepdim=True)
        return torch.baddbmm(away, x, self.y.transpose(-1, -2), beta=-1)

    def apply(self, x: Tensor) -> Tensor:
        # The mean is taken off before the second product, where it would cancel anyway: weights times slopes sum to 0.
        tilted = self.slopes(x).mul_(self.p)
        self._last = (x, tilted)
        image = torch.bmm(tilted, self.y)
        return image.add_(x, alpha=self.ridge) if isinstance(self.ridge, float) else image.addcmul_(self.ridge, x)

    def tilted(self, x: Tensor) -> Tensor:
        """p_ij (y_j - m_i) . x_i [n, q, w] for the solution x of the last solve, as that left it where it did."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is x else self.slopes(x).mul_(self.p)

    def by_row(self, right: Tensor) -> Solved:
        """Every row by itself (`live_rows`); `tilted` then knows the slopes."""
        n, q, w = self.p.shape
        flat, means = right.flatten(0, 1), self.mean.flatten(0, 1)
        sources = None if self.source is None else self.source.flatten(0, 1)
        p, value, tilted = self.p.flatten(0, 1), torch.zeros_like(flat), self.p.new_zeros(n * q, w)
        residual, jitter = flat.new_zeros(n * q), flat.new_zeros(n * q)
        status, left = torch.zeros_like(residual, dtype=torch.int32), torch.ones_like(residual, dtype=torch.bool)
        dim = flat.shape[-1]
        for rows, index, weights in live_rows.groups(p, dim):
            away = self._keys((rows // q)[:, None] * w + index) - means[rows, None]
            source = None if sources is None else sources[rows].gather(1, index)
            found = live_rows.solve(weights, away, flat[rows], self._ridge_of(rows), source, self.counted)
            value[rows], left[rows] = found.value, ~found.sound
            if found.residual is not None:
                residual[rows] = found.residual
            tilted[rows] = tilted.new_zeros(rows.shape[0], w).scatter_add_(1, index, found.tilted)  # padding adds 0
        for rows in live_rows.parts(left.nonzero()[:, 0], w * dim):
            away = self._keys((rows // q)[:, None] * w + torch.arange(w, device=rows.device)) - means[rows, None]
            found_here = live_rows.alone(p[rows], away, flat[rows], self._ridge_of(rows))
            value[rows], status[rows] = found_here.value, found_here.status
            residual[rows], jitter[rows] = (found_here.statistics[name] for name in ("residual", "jitter"))
            tilted[rows] = (away @ found_here.value[..., None])[..., 0] * p[rows]
        solution = value.view_as(right)
        self._last = (solution, tilted.view(n, q, w))
        statistics = {"iterations": torch.zeros_like(residual), "residual": residual, "jitter": jitter}
        return Solved(solution, status.view(n, q), {name: x.view(n, q) for name, x in statistics.items()})

    def _keys(self, at: Tensor) -> Tensor:
        """Coordinates of keys at flat positions among [n w]."""
        return self.y.flatten(0, 1)[at]

    def _ridge_of(self, rows: Tensor) -> Tensor:
        """[R, 1 or D]."""
        if isinstance(self.ridge, Tensor):
            return self.ridge.expand(*self.mean.shape[:2], self.ridge.shape[-1]).flatten(0, 1)[rows]
        return self.mean.new_full((rows.shape[0], 1), self.ridge)

    def raise_ridge(self) -> None:
        """A ridge below what rounding leaves of the covariance is raised to it: an absolute one may be nothing beside
        the kernel weight, and slopes in units of 1 / ridge would then be made of rounding errors."""
        floor = 4 * torch.finfo(self.p.dtype).eps * (self.p @ self.y.square().sum(-1, keepdim=True))
        self.raised = floor > self.ridge
        self.ridge = torch.where(self.raised, floor, self.ridge)

    def told(self, status: Tensor) -> Tensor:
        """The status [n, q] of a solution, JITTER where a ridge was raised."""
        if self.raised is None:
            return status
        return torch.where(self.raised.any(-1) & (status == 0), int(SolveStatus.JITTER), status)

    def terms(self) -> Tensor:
        ridge = self.ridge if isinstance(self.ridge, float) else self.ridge.amax(-1, keepdim=True)
        return self.p @ self.y.square().sum(-1, keepdim=True) + ridge

    def matrix(self) -> Tensor:
        n, q, w = self.p.shape
        dim = self.y.shape[-1]
        if n * q * w * dim <= FEW:
            away = self.y[:, None] - self.mean[:, :, None]
            spread = (away * self.p[..., None]).transpose(-1, -2) @ away
        else:
            first, second = torch.tril_indices(dim, dim, device=self.p.device)
            half = self._moments(first, second)
            place = torch.zeros(dim, dim, dtype=torch.int64, device=self.p.device)
            place[first, second] = place[second, first] = torch.arange(first.shape[0], device=self.p.device)
            spread = half[..., place.flatten()].unflatten(-1, (dim, dim))
        spread.diagonal(dim1=-2, dim2=-1).add_(self.ridge)
        return spread

    def diagonal(self, blocks: int) -> Tensor:
        dim = self.y.shape[-1]
        found = self._moments(*self._pairs(blocks)).unflatten(-1, (blocks, dim // blocks, dim // blocks))
        ridge = self.ridge
        if isinstance(ridge, Tensor):
            ridge = ridge.expand(self.mean.shape).unflatten(-1, (blocks, dim // blocks))
        found.diagonal(dim1=-2, dim2=-1).clamp_(min=0).add_(ridge)
        return found

    def _pairs(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Both coordinates of all entries [g s s] of the diagonal blocks."""
        at = torch.arange(self.y.shape[-1], device=self.p.device).unflatten(0, (blocks, -1))
        first, second = torch.broadcast_tensors(at[:, :, None], at[:, None, :])
        return first.flatten(), second.flatten()

    def cross(self, t: Tensor, u: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """What the covariance's diagonal blocks hand back of L, given dL/dC = -u t^T: with the slopes e and f of t and
        u in the coordinates of a block b, (sum_b e_b f_b [n, q, w], sum_i p_ij sum_b (f_b t_b + e_b u_b) [n, w, D])."""
        first, second = self._pairs(blocks)
        size = t.shape[-1] // blocks
        both = t[..., first] * u[..., second] + t[..., second] * u[..., first]  # [n, q, g s s], symmetric in a block
        parts = both.unflatten(-1, (blocks, size, size))
        moved = (parts @ self.mean.unflatten(-1, (blocks, size))[..., None]).flatten(-3)
        cross = 0.5 * (self.mean * moved).sum(-1, keepdim=True) - moved @ self.y.transpose(-1, -2)
        pulled = -(self.p.transpose(-1, -2) @ moved)
        n, _, w = self.p.shape
        chunk = max(64, NUMBERS // (n * first.shape[0]))
        for start in range(0, w, chunk):
            at = slice(start, start + chunk)
            y = self.y[:, at]
            cross[..., at].add_(both @ (y[..., first] * y[..., second]).transpose(-1, -2), alpha=0.5)
            sums = (self.p[..., at].transpose(-1, -2) @ both).unflatten(-1, (blocks, size, size))
            pulled[:, at] += (sums @ y.unflatten(-1, (blocks, size))[..., None]).flatten(-3)
        return cross, pulled

    def _moments(self, first: Tensor, second: Tensor) -> Tensor:
        """Covariances of coordinates `first` and `second` [n, q, pairs], by products over chunks of keys."""
        n, _, w = self.p.shape
        found = self.mean[..., first].mul_(self.mean[..., second]).neg_()
        chunk = max(64, NUMBERS // (n * first.shape[0]))
        for start in range(0, w, chunk):
            y = self.y[:, start : start + chunk]
            found.baddbmm_(self.p[..., start : start + chunk], y[..., first].mul_(y[..., second]))
        return found

    def near(self) -> Tensor:
        """The covariance of the keys that every row sees, each counting the same, with the ridge, or where rows have
        their own, which are nobody else's matter, a hundredth of the mean variance."""
        away = self.y - self.share[:, None] @ self.y
        spread = (away * self.share[..., None]).transpose(-1, -2) @ away
        diagonal = spread.diagonal(dim1=-2, dim2=-1)
        if isinstance(self.ridge, Tensor):
            diagonal.add_(0.01 * diagonal.mean(-1, keepdim=True))
        else:
            diagonal.add_(self.ridge)
        return spread
