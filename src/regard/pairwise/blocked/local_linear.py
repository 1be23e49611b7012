"""Degree 1 by blocks of queries: Local Linear Attention in the covariance form, with any weighting, in Theta(n d)
memory.

Forward, for the weights p of a block and coordinates y of the keys. The origin of y is the mean of the keys that all
queries of the block see, which keeps the products small and depends only on keys that every query sees:

    m_i = sum_j p_ij y_j,   A_i t_i = x_i - m_i,   a_ij = 1 + (y_j - m_i) . t_i,   o_i = sum_j p_ij a_ij v_j

Backward, for g_i = dL/do_i, gamma_ij = g_i . v_j and gammabar_i = sum_j p_ij gamma_ij, with one more solve (and that
for t again where a stored t would be too inaccurate, see `_effect`):

    A_i u_i = sum_j p_ij (gamma_ij - gammabar_i) y_j,   b_ij = gamma_ij - gammabar_i - (y_j - m_i) . u_i
    dL/dp_ij = a_ij b_ij up to a constant of the row,   dL/dx = u,   dL/dridge_i = -t_i u_i
    dL/dy_j = sum_i p_ij (b_ij t_i - a_ij u_i),   dL/dv_j = sum_i p_ij a_ij g_i

and from dL/dp to scores by the derivative of the weighting. An absolute ridge, divided by the kernel weight M_i, adds
dL/dlog M_i = ridge_i t_i . u_i. If t is given (the solver `Learned`), u is 0.

Rows whose slopes float32 would round too much (`grammar.systems.LIMIT`) are computed again in float64, in both passes.

Legend: as in `block_rows`; x, y [.., D] coordinates of queries and keys.
"""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...grammar import SolveStatus, Spec
from ...grammar.systems import Solved, lost, power_of_two_above, relative, rounded
from ..diagnostics import negative_part
from .block_rows import FLAGS, FLOATS, Kept, flat, unpack
from .blocks import Block
from .weighted_rows import FEW, FewRows, WeightedRows

STATISTICS = ("iterations", "residual", "jitter")
"""Statistics of the solver per row, kept behind FLOATS. The negative mass of the row's weights and t follow them."""
SLOPE = FLOATS + len(STATISTICS) + 1
"""Where t begins."""


class Tensors(NamedTuple):
    """Inputs of both passes, with B x H flattened: `ridge` a number or [N, Tq, 1 or D]; at degree 0 without x and y."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Any
    y: Any
    ridge: float | Tensor
    probe: Tensor | None
    given: Tensor | None

    def relative_ridge(self, block: Block, kept: Kept) -> float | Tensor:
        """Return the ridge relative to the kernel weight: a number or [n, q, 1 or D]."""
        ridge = block.rows(self.ridge) if isinstance(self.ridge, Tensor) else self.ridge
        if block.work.spec.ridge_mode == "relative":
            return ridge
        weighting: Any = block.work.spec.weighting
        return relative(ridge, weighting.log_mass(unpack(*kept), block.params(self.given)))

    def fit(self, block: Block, p: Tensor, ridge: float | Tensor, exact: bool = False) -> tuple[WeightedRows, Tensor]:
        """Return the systems of the rows, in float64 if `exact`, and their right sides."""
        spec, y, common = block.work.spec, block.columns(self.y), block.common(p.device)
        few = p.shape[1] <= FEW and spec.solver.name in ("auto", "cholesky")
        fewest, most = _seen(block, y)
        # If a row sees fewer keys than coordinates, the part of q - m outside their span makes t as long as 1 / ridge.
        # float32 would then round away the rest, which is all that matters for the output.
        fewest = 0 if exact else fewest  # `auto` then solves directly
        wide = torch.float64 if fewest < y.shape[-1] or y.shape[-2] <= 2 * y.shape[-1] else p.dtype
        probe = None if self.probe is None else block.rows(self.probe).to(wide)
        ridge = ridge.to(wide) if isinstance(ridge, Tensor) else ridge
        some_are_zero = getattr(spec.kernel, "compact", False) or spec.bandwidth.name != "fixed"
        sparse = some_are_zero or most <= y.shape[-1]
        if wide != p.dtype:  # otherwise rounding moves the mean out of the span, which 1 / ridge amplifies
            p = p.to(wide)
            total = p.sum(-1, keepdim=True)
            p = p / torch.where(total > 0, total, 1)
        system = (FewRows if few else WeightedRows)(p, y.to(wide), common, ridge, probe, fewest, sparse)
        system.rows_solver = block.work.rows.by_row
        if spec.ridge_mode == "absolute" and probe is None:
            system.raise_ridge()
        return system, block.rows(self.x).to(wide) - system.origin - system.mean


def _solve(spec: Spec, system: WeightedRows, right: Tensor) -> tuple[Solved, Tensor]:
    """Solve for right sides divided by powers of two [n, q, 1], which are returned too."""
    size = power_of_two_above(right) if system.probe is None else torch.ones_like(right[..., :1])
    return spec.solver.solve(system, right / size), size


def _seen(block: Block, y: Tensor) -> tuple[int, int]:
    """Return the fewest and the most keys that positions allow a query of the block to see, empty rows left out."""
    if not block.work.visible.positional:
        return y.shape[-2], y.shape[-2]
    low, high = block.bounds(y.device)
    count = high - low
    return int(torch.where(count > 0, count, y.shape[-2]).amin()), int(count.amax())


def flattened(number: float, *given: Any) -> Tensors:
    """Return the inputs of an operator, or their gradients, with B x H flattened; `number` is the ridge without one."""
    *tensors, params = given
    q, k, v, x, y, ridge, probe = (None if z is None else flat(z) for z in tensors)
    ridge, params = number if ridge is None else ridge, None if params is None else params.flatten(1, 2)
    return Tensors(q, k, v, x, y, ridge, probe, params)


def effective(
    block: Block, tensors: Tensors, p: Tensor, kept: Kept, floats: Tensor, flags: Tensor
) -> tuple[Tensor, bool]:
    """Return the weights of the values, and whether a system was not solved. Write statistics of the solver and t
    behind the other statistics of the rows, and behind the flags the status and whether the row needs float64."""
    ridge = tensors.relative_ridge(block, kept)
    rows = block.rows(floats)[..., FLOATS:], block.rows(flags)[..., FLAGS:]
    weights, again = _solved_rows(block, *tensors.fit(block, p, ridge), *rows)
    if again is not None and bool(again.any()):
        first = [x.clone() for x in rows]
        exact, _ = _solved_rows(block, *tensors.fit(block, torch.where(again, p, 0), ridge, exact=True), *rows)
        weights = torch.where(again, exact, weights)
        for row, old in zip(rows, first, strict=True):
            row.copy_(torch.where(again, row, old))
        rows[1][..., 1:].copy_(again)
    return weights, _unsolved(rows[1][..., 0])


def _solved_rows(
    block: Block, system: WeightedRows, right: Tensor, floats: Tensor, flags: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the weights of the values and, in float32, which rows need float64 [n, q, 1]. Write statistics and t to
    `floats`, the status to `flags`."""
    system.counted = block.work.counted
    solved, size = _solve(block.work.spec, system, right)
    t, status = solved.value * size, solved.status
    if system.probe is None:
        status = rounded(status, t, system.squares()[..., 0])
    floats[..., SLOPE - FLOATS :].copy_(t)
    flags[..., 0].copy_(status)
    if system.raised is not None:
        flags[..., 0].masked_fill_(system.raised.any(-1) & (status == 0), int(SolveStatus.JITTER))
    weights = torch.addcmul(system.p, system.corrections(solved.value), size).to(floats.dtype)
    if system.counted:
        columns = [*(solved.statistics[name] for name in STATISTICS), negative_part(weights)]
        floats[..., : SLOPE - FLOATS].copy_(torch.stack(columns, -1))
    wide = system.probe is not None or t.dtype == torch.float64
    return weights, None if wide else lost(status)[..., None]


def _unsolved(status: Tensor) -> bool:
    return bool((status >= int(SolveStatus.UNCONVERGED)).any())


def warn(when: str, spec: Spec) -> None:
    if getattr(spec.solver, "max_iter", None) == 0:
        return  # the caller wants the local constant model
    warnings.warn(
        f"local linear attention: some systems did not converge or are inaccurate in the {when} pass ({spec}); "
        f"return_diagnostics=True says which; use a larger ridge, max_iter or tol, solver=cholesky or float64.",
        RuntimeWarning,
        stacklevel=2,
    )


def weight_gradient(
    block: Block, tensors: Tensors, d: Tensors, p: Tensor, kept: Kept, g: Tensor, t: Tensor, again: Tensor
) -> tuple[Tensor, Tensor | None, bool]:
    """Return dL/dp [n, q, w], the derivative by the logarithm of the kernel weight [n, q, 1] or None, and whether a
    system was not solved. Add the gradients of v, x, y, ridge and probe to `d`. Rows `again` [n, q, 1] are computed
    in float64."""
    if not bool(again.any()):
        return _gradient(block, tensors, d, p, kept, g, t)
    # A row without weights adds nothing to `d`.
    dp, share, failed = _gradient(block, tensors, d, p.masked_fill(again, 0), kept, g, t.masked_fill(again, 0))
    exact = _gradient(block, tensors, d, p.masked_fill(~again, 0), kept, g, t, exact=True)
    share = None if share is None else share + exact[1]
    return torch.where(again, exact[0], dp), share, failed or exact[2]


def _gradient(
    block: Block, tensors: Tensors, d: Tensors, p: Tensor, kept: Kept, g: Tensor, t: Tensor, exact: bool = False
) -> tuple[Tensor, Tensor | None, bool]:
    """Do the work of `weight_gradient`, in float64 if `exact`."""
    spec, failed = block.work.spec, False
    system, away = tensors.fit(block, p, tensors.relative_ridge(block, kept), exact)
    system.counted = False
    g, weights = g.to(system.p.dtype), system.p
    gamma = g @ block.columns(tensors.v).to(g.dtype).transpose(-1, -2)
    gamma -= (weights * gamma).sum(-1, keepdim=True)
    right = (weights * gamma) @ system.y
    t, a = _effect(spec, system, away, t)
    block.add_columns(d.v, g, a * weights)
    if d.probe is None:
        # one value per pair, for `by_row` alone
        system.source = gamma / power_of_two_above(right) if system.sparse else None
        solved, size = _solve(spec, system, right)
        failed, u = _unsolved(solved.status), solved.value * size
        block.rows(d.x).add_(u)
    else:
        u = torch.zeros_like(t)
        block.rows(d.probe).sub_(right)
    dp = _plain_gradient(block, system, t, u, a, gamma, d.y).to(p.dtype)
    dp = block.hide(dp, fill=0.0)  # a large masked key can make it infinite, and infinity times a slope of 0 is NaN
    loss, share = t * u, None
    if spec.ridge_mode == "absolute":
        loss = loss if system.raised is None else torch.where(system.raised, 0, loss)
        share = (system.ridge * loss).sum(-1, keepdim=True).to(p.dtype)
        log_mass = spec.weighting.log_mass(unpack(*kept), block.params(tensors.given))  # type: ignore[attr-defined]
        loss = relative(loss, log_mass)
    if isinstance(d.ridge, Tensor):
        block.rows(d.ridge).sub_(loss if d.ridge.shape[-1] > 1 else loss.sum(-1, keepdim=True))
    return dp, share, failed


def _effect(spec: Spec, system: WeightedRows, away: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return t and a = 1 + (y - m) . t, given t as the forward pass stored it and its right side `away`. Rows with
    sparse weights, and those solved in float64, are solved again: outside the span of their keys t is as long as
    1 / ridge, and the rounding errors of the stored t would hide the slopes."""
    again = t.dtype != system.p.dtype or (system.sparse and spec.solver.name == "auto")
    if system.probe is not None or not again:
        t = t.to(system.p.dtype)
        return t, system.slopes(t).add_(1)
    solved, size = _solve(spec, system, away)
    effect = (system.corrections(solved.value) * size).div_(system.p)
    return solved.value * size, effect.masked_fill_(system.p == 0, 0).add_(1)


def _plain_gradient(
    block: Block, system: WeightedRows, t: Tensor, u: Tensor, a: Tensor, gamma: Tensor, dy: Tensor
) -> Tensor:
    """Return dL/dp [n, q, w] up to a constant per row, and add dL/dy to `dy`. Overwrite a and gamma - gammabar."""
    p, solver = system.p, block.work.spec.solver
    blocks = solver.blocks if solver.name == "block-diagonal" else 1
    if system.probe is not None:
        block.add_columns(dy, t, gamma * p)
        return a.mul_(gamma)
    if blocks == 1:
        gamma -= system.slopes(u)  # b
        block.add_columns(dy, t, gamma * p)
        block.add_columns(dy, u, (a * p).neg_())
        return a.mul_(gamma)
    cross, by_keys = system.cross(t, u, blocks or t.shape[-1])
    block.add_columns(dy, t, gamma * p)
    block.add_columns(dy, u, -p)
    block.add_rows(dy, by_keys.neg_())
    return a.mul_(gamma).sub_(system.slopes(u)).sub_(cross)
