"""Degree 1 by blocks of queries: Local Linear Attention in the covariance form, with any weighting, in Theta(n d)
memory.

Forward, for the weights p of a block and coordinates y of the keys. The origin of y is the mean of the keys that all
queries of the block see, which keeps the products small and depends only on keys that every query sees:

    m_i = sum_j p_ij y_j,   A_i t_i = x_i - m_i,   a_ij = 1 + (y_j - m_i) . t_i,   o_i = sum_j p_ij a_ij v_j

Backward, for g_i = dL/do_i, gamma_ij = g_i . v_j and gammabar_i = sum_j p_ij gamma_ij, with one more solve:

    A_i u_i = sum_j p_ij (gamma_ij - gammabar_i) y_j,   b_ij = gamma_ij - gammabar_i - (y_j - m_i) . u_i
    dL/dp_ij = a_ij b_ij up to a constant of the row,   dL/dx = u,   dL/dridge_i = -t_i u_i
    dL/dy_j = sum_i p_ij (b_ij t_i - a_ij u_i),   dL/dv_j = sum_i p_ij a_ij g_i

and from dL/dp to scores by the derivative of the weighting. An absolute ridge, divided by the kernel weight M_i, adds
dL/dlog M_i = ridge_i t_i . u_i. If t is given (the solver `Learned`), u is 0.

Legend: as in `block_rows`; x, y [.., D] coordinates of queries and keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...grammar import SolveStatus, Spec
from ...grammar.systems import Solved, relative, unit
from ...precision import full_precision
from ..diagnostics import negative_part
from . import block_rows
from .block_rows import FLAGS, Kept, Rows, flat, flat_params, placed, register_derivative, rows_of, unpack, work_from
from .blocks import COLUMNS, Block, Work
from .few_rows import ROWS, FewRows
from .weighted_rows import WeightedRows

ELEMENTS = 2**19
"""Query-key pairs of a block: two heads at 2048 keys, since threads split heads better than products of 128 rows."""
STATISTICS = ("iterations", "residual", "jitter")
"""Statistics of the solver per row. The negative mass of the row's weights follows them."""


class Tensors(NamedTuple):
    """Inputs of both passes, with B x H flattened: x, y coordinates; `ridge` a number or [N, Tq, 1 or D]; `probe` or
    None."""

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor
    y: Tensor
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

    def fit(self, block: Block, p: Tensor, ridge: float | Tensor) -> tuple[WeightedRows, Tensor]:
        """Return the systems of the rows, and their right sides."""
        spec, y, common = block.work.spec, block.columns(self.y), block.common(p.device)
        probe = None if self.probe is None else block.rows(self.probe)
        few = p.shape[1] <= ROWS and spec.solver.name in ("auto", "cholesky")
        fewest, most = _seen(block, y)
        # If a row sees fewer keys than coordinates, the part of q - m outside their span makes t as long as 1 / ridge.
        # float32 would then round away the rest, which is all that matters for the output.
        wide = torch.float64 if fewest < y.shape[-1] or y.shape[-2] <= 2 * y.shape[-1] else p.dtype
        probe = None if probe is None else probe.to(wide)
        ridge = ridge.to(wide) if isinstance(ridge, Tensor) else ridge
        some_are_zero = getattr(spec.kernel, "compact", False) or spec.bandwidth.name != "fixed"
        sparse = some_are_zero or most <= y.shape[-1]
        if wide != p.dtype:  # else rounding moves the mean out of the span, which 1 / ridge amplifies
            p = p.to(wide)
            total = p.sum(-1, keepdim=True)
            p = p / torch.where(total > 0, total, 1)
        system = (FewRows if few else WeightedRows)(p, y.to(wide), common, ridge, probe, fewest, sparse)
        if spec.ridge_mode == "absolute" and probe is None:
            system.raise_ridge()
        return system, block.rows(self.x).to(wide) - system.origin - system.mean


def _solve(spec: Spec, system: WeightedRows, right: Tensor) -> tuple[Solved, Tensor]:
    """Solve for right sides divided by powers of two [n, q, 1], which are returned too."""
    size = unit(right) if system.probe is None else torch.ones_like(right[..., :1])
    return spec.solver.solve(system, right / size), size


def _blocks(work: Work) -> Iterator[Block]:
    return work.blocks(max(work.rows.elements, min(ELEMENTS, 2 * work.rows.elements)))


def _seen(block: Block, y: Tensor) -> tuple[int, int]:
    """Return the fewest and the most keys that positions allow a query of the block to see, empty rows left out."""
    if not block.work.visible.positional:
        return y.shape[-2], y.shape[-2]
    low, high = block.bounds(y.device)
    count = high - low
    return int(torch.where(count > 0, count, y.shape[-2]).amin()), int(count.amax())


TENSORS = "Tensor q, Tensor k, Tensor v, Tensor x, Tensor y, Tensor? ridge, Tensor? probe, Tensor? given"
"""`Tensors` in the schema of an operator."""


@torch.library.custom_op(
    "regard::local_linear_forward",
    mutates_args=(),
    schema=f"({TENSORS}, float number, bool counted, {block_rows.DESCRIBED}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (output [B, H, Tq, Dv], t [B, H, Tq, D], STATISTICS and the negative mass [B, H, Tq, 4], floats, flags
    with the solver's status as the last, index)."""
    return run(work_from(*arguments[:2], *arguments[10:]), *arguments[:10])


@torch.no_grad()
def run(work: Work, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `forward` for a call given as `Work`."""
    *given, counted = arguments
    found, tensors = _outputs(given[0], given[2], given[3], work.rows), _flattened(*given)
    out, slope, statistics, floats, flags, index = (flat(z) for z in found)
    flags[..., 0] = 1  # rows of blocks that see no key are skipped
    rows, failed = work.rows, False
    for block in _blocks(work):
        marks = torch.zeros(block.heads, -(-work.visible.keys // COLUMNS), dtype=torch.bool, device=out.device)
        z = block.scores(tensors.q, tensors.k)
        p, kept = rows.weigh(block, z, block.params(tensors.given), counted, marks)
        for whole, part in zip((floats, flags[..., :FLAGS], index), kept, strict=True):
            block.rows(whole).copy_(part)
        system, right = tensors.fit(block, p, tensors.relative_ridge(block, kept))
        system.counted = counted
        solved, size = _solve(work.spec, system, right)
        block.rows(slope).copy_(solved.value * size)
        block.rows(flags)[..., FLAGS].copy_(system.reported_status(solved.status))
        failed = failed or _unconverged(solved.status)
        weights = torch.addcmul(system.p, system.corrections(solved.value), size).to(p.dtype)
        if counted:
            kept_here = [*(solved.statistics[name] for name in STATISTICS), negative_part(weights)]
            block.rows(statistics).copy_(torch.stack(kept_here, -1))
        block.rows(out).copy_(weights @ block.columns(tensors.v))
    if failed:
        _warn("forward", work.spec)
    return found


def _flattened(*given: Any) -> Tensors:
    *tensors, ridge, probe, params, number = given
    ridge = number if ridge is None else flat(ridge)
    probe = None if probe is None else flat(probe)
    return Tensors(*map(flat, tensors), ridge, probe, flat_params(params))  # type: ignore[call-arg]


def _outputs(q: Tensor, v: Tensor, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(*shape, x.shape[-1]),
        q.new_zeros(*shape, len(STATISTICS) + 1),
        q.new_zeros(*shape, block_rows.FLOATS),
        q.new_zeros(*shape, FLAGS + 1, dtype=torch.int32),
        q.new_zeros(*shape, rows.indices, dtype=torch.int64),
    )


def _unconverged(status: Tensor) -> bool:
    return bool((status == int(SolveStatus.UNCONVERGED)).any())


def _warn(when: str, spec: Spec) -> None:
    if getattr(spec.solver, "max_iter", None) == 0:
        return  # the caller wants the local constant model
    warnings.warn(
        f"local linear attention: some systems did not converge in the {when} pass ({spec}); return_diagnostics=True "
        f"says which; use a larger ridge, max_iter or tol, or solver=cholesky.",
        RuntimeWarning,
        stacklevel=2,
    )


@forward.register_fake
def _(q, k, v, x, y, ridge, probe, given, number, counted, mask, moved, runs, solver, spec, *_):  # type: ignore[no-untyped-def]
    return _outputs(q, v, x, rows_of(solver, spec))


@torch.library.custom_op(
    "regard::local_linear_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {TENSORS}, Tensor slope, Tensor floats, Tensor flags, Tensor index, float number, "
    f"{block_rows.DESCRIBED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, x, y, ridge [.., 1 or D], probe, and of the row parameters [P, B, H, Tq]."""
    with torch.no_grad(), full_precision(grad.device.type):  # backward() may run under autocast
        (q, k, v, x, y, ridge, probe, _), (slope, floats, flags, index, number) = arguments[:8], arguments[8:13]
        work = work_from(q, k, *arguments[13:])
        tensors = _flattened(*arguments[:8], number)
        kept = (flat(floats), flat(flags[..., :FLAGS]), flat(index))
        turned = [z.new_zeros(z.transpose(-1, -2).shape) for z in (k, v, y)]
        found = _gradients(q, x, ridge, probe, len(work.names))
        _backward_blocks(work, tensors, flat(grad), flat(slope), kept, found, [flat(z) for z in turned])
    dk, dv, dy = (z.transpose(-1, -2).contiguous() for z in turned)
    return found[0], dk, dv, found[1], dy, *found[2:]


def _gradients(
    q: Tensor, x: Tensor, ridge: Tensor | None, probe: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return zeros for the gradients of q, x, ridge, probe and row parameters."""
    rows = q.shape[:3]
    return (
        torch.zeros_like(q, memory_format=torch.contiguous_format),
        torch.zeros_like(x, memory_format=torch.contiguous_format),
        q.new_zeros(*rows, 0 if ridge is None else ridge.shape[-1]),
        q.new_zeros(*rows, 0 if probe is None else probe.shape[-1]),
        q.new_zeros(count, *rows),
    )


def _backward_blocks(
    work: Work, tensors: Tensors, grad: Tensor, slope: Tensor, kept: Kept, found: tuple[Tensor, ...],
    turned: list[Tensor],
) -> None:  # fmt: skip
    dq, dx, dridge, dprobe = (flat(z) for z in found[:4])
    dgiven, (dk, dv, dy) = found[4].flatten(1, 2), turned
    rows, spec, failed = work.rows, work.spec, False
    for block in _blocks(work):
        own = tuple(block.rows(z) for z in kept)
        params, g, t = block.params(tensors.given), block.rows(grad), block.rows(slope)
        z = block.scores(tensors.q, tensors.k)
        p = rows.again(block, z, own, params)
        system = tensors.fit(block, p, tensors.relative_ridge(block, own))[0]
        system.counted = False
        g, t, weights = g.to(system.p.dtype), t.to(system.p.dtype), system.p
        gamma = g @ block.columns(tensors.v).to(g.dtype).transpose(-1, -2)
        gamma -= (weights * gamma).sum(-1, keepdim=True)
        right = (weights * gamma) @ system.y
        a = system.slopes(t).add_(1)
        block.add_columns(dv, g, a * weights)
        if tensors.probe is None:
            system.source = gamma / unit(right) if system.sparse else None  # one value per pair, for `by_row` alone
            solved, size = _solve(spec, system, right)
            failed = failed or _unconverged(solved.status)
            u = solved.value * size
            block.rows(dx).copy_(u)
        else:
            u = torch.zeros_like(t)
            block.rows(dprobe).copy_(-right)
        dp = _weight_gradient(block, system, (t, u), (a, gamma), dy).to(p.dtype)
        dp = block.hide(dp, fill=0.0)  # a large masked key can make it infinite, and infinity times a slope of 0 is NaN
        lost, share = t * u, None
        if spec.ridge_mode == "absolute":
            lost = lost if system.raised is None else torch.where(system.raised, 0, lost)
            share = (system.ridge * lost).sum(-1, keepdim=True).to(p.dtype)
            lost = relative(lost, spec.weighting.log_mass(unpack(*own), params))  # type: ignore[attr-defined]
        if dridge.shape[-1]:
            block.rows(dridge).copy_(-lost if dridge.shape[-1] > 1 else -lost.sum(-1, keepdim=True))
        del system, weights, a, gamma
        _, dz, dparams = rows.derive(block, z, dp, placed(block, own), params, share, p)
        for row, part in zip(dgiven, dparams, strict=True):
            block.rows(row).copy_(part)
        block.rows(dq).copy_(dz @ block.columns(tensors.k))
        block.add_columns(dk, block.rows(tensors.q), dz)
    if failed:
        _warn("backward", spec)


def _weight_gradient(
    block: Block, system: WeightedRows, solved: tuple[Tensor, Tensor], pairs: tuple[Tensor, Tensor],
    dy: Tensor,
) -> Tensor:  # fmt: skip
    """Return dL/dp [n, q, w] up to a constant per row, and add dL/dy to `dy`. `solved` holds t and u; `pairs` holds a
    and gamma - gammabar, which are overwritten."""
    (t, u), (a, gamma), p = solved, pairs, system.p
    solver = block.work.spec.solver
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


@backward.register_fake
def _(grad, q, k, v, x, y, ridge, probe, given, *_):  # type: ignore[no-untyped-def]
    new = lambda z: z.new_empty(z.shape)  # noqa: E731
    dq, dx, dridge, dprobe, dgiven = _gradients(q, x, ridge, probe, 0 if given is None else given.shape[0])
    return dq, new(k), new(v), dx, new(y), dridge, dprobe, dgiven


register_derivative(forward, backward, 8, lambda output: (output[1], *output[3:]))
