"""Local regression at the query in plain PyTorch, against which fast implementations are tested.

Degree 0 (Nadaraya-Watson; softmax attention is its Gaussian case):

    o_i = sum_j p_ij v_j

Degree 1 (Local Linear Attention, equations 6-8) in the equivalent covariance form, which does not divide by a number
that can be 0: with C_i = sum_j p_ij (k_j - kbar_i)(k_j - kbar_i)^T and kbar_i = sum_j p_ij k_j,

    t_i = (C_i + ridge_i)^-1 (q_i - kbar_i),   e_ij = (k_j - kbar_i) . t_i,   o_i = sum_j p_ij (1 + e_ij) v_j

(in the paper's terms rho = -t delta / omega). The ridge is relative to the total kernel weight; an absolute one, as in
equation 7, is divided by that weight first.

Legend: q [B, H, Tq, F] and k [B, H, Tk, F] features whose dot product is the score; v [B, H, Tk, Dv]; x [B, H, Tq, D]
and y [B, H, Tk, D] the coordinates in which degree 1 is linear; p [B, H, Tq, Tk]; ridge a number, [B, H, Tq, 1] or, one
for every coordinate, [B, H, Tq, D].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grammar import Dense, RowStats, Solved, Weighting
from ..grammar.systems import unit
from ..grammar.weighting import fit_weights
from .visibility import Visibility


class Estimate(NamedTuple):
    """An estimate and its intermediate results. `weights` are p. `effective`, None at degree 0, are p (1 + e), which
    can be negative."""

    output: Tensor
    weights: Tensor
    stats: RowStats
    solver: dict[str, Tensor] | None
    effective: Tensor | None = None


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for every query head of its group: [B, Hkv, ...] -> [B, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def scores(q: Tensor, k: Tensor, visible: Visibility) -> Tensor:
    """Return z = q . k, -inf where a key is not visible. Masking after the product keeps masked content out."""
    z = q @ k.transpose(-1, -2)
    seen = visible.block(0, visible.queries, 0, visible.keys, z.device)
    return z if seen is None else torch.where(seen, z, -torch.inf)


def constant(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, weighting: Weighting, params: Any) -> Estimate:
    """Compute degree 0. Allocates [B, H, Tq, Tk]; twice differentiable."""
    z = scores(q, k, visible)
    stats, p = fit_weights(weighting, z, params)
    return Estimate(p @ v, p, stats, None)


class Local(NamedTuple):
    """Extra inputs of the local linear model: coordinates x and y of queries and keys, a ridge (a number or
    [B, H, Tq, 1 or D]; `absolute` or relative to the total kernel weight), and -t as `probe` for `Learned`."""

    x: Tensor
    y: Tensor
    ridge: float | Tensor
    absolute: bool
    solver: Any
    probe: Tensor | None = None


LEAST, MOST = -80.0, 80.0
"""Limits of the logarithm of 1 / total kernel weight, which keep a relative ridge finite."""
LARGEST = 1e36
"""Largest ridge: sums of it over coordinates are finite in float32."""


def relative(ridge: float | Tensor, log_mass: Tensor) -> Tensor:
    """Divide an absolute ridge by the total kernel weight, given as logarithm [B, H, Tq, 1]."""
    return (ridge * (-log_mass).clamp(LEAST, MOST).exp()).clamp(-LARGEST, LARGEST)


def linear(
    q: Tensor, k: Tensor, v: Tensor, visible: Visibility, weighting: Weighting, params: Any, local: Local
) -> Estimate:
    """Compute degree 1. Allocates [B, H, Tq, Tk, D]; twice differentiable, also with an iterative solver."""
    fit = constant(q, k, v, visible, weighting, params)
    p, ridge = fit.weights, local.ridge
    if local.absolute:
        ridge = relative(ridge, weighting.log_mass(fit.stats, params))  # type: ignore[attr-defined]
    mean = p @ local.y
    away = local.y[..., None, :, :] - mean[..., :, None, :]  # [B, H, Tq, Tk, D]
    seen = visible.block(0, visible.queries, 0, visible.keys, away.device)
    if seen is not None:  # a large masked key can have infinite derivatives, and infinity times a weight of 0 is NaN
        away = torch.where(seen[..., None], away, 0)
    spread = (p[..., None] * away).transpose(-1, -2) @ away
    solved = solve(local.solver, spread, ridge, local.x - mean, local.probe)
    slope = (away @ solved.value[..., None])[..., 0]
    signed = p * (1 + slope)
    return Estimate(signed @ v, p, fit.stats, {"status": solved.status, **solved.statistics}, signed)


def solve(solver: Any, spread: Tensor, ridge: float | Tensor, right: Tensor, probe: Tensor | None = None) -> Solved:
    """Solve (spread + ridge) t = right. Gradients are those of the exact solution for every solver."""
    eye = torch.eye(right.shape[-1], dtype=right.dtype, device=right.device)
    matrix = spread + (ridge[..., None] if isinstance(ridge, Tensor) else ridge) * eye
    if solver.exact:
        found: Solved = solver.solve(Dense(matrix, ridge, probe), right)
        return found
    with torch.no_grad():
        size = unit(right)
        found = solver.solve(Dense(matrix, ridge, probe), right / size)
        value = found.value * size
    return found._replace(value=_Implicit.apply(matrix, right, solver, value))


class _Implicit(torch.autograd.Function):
    """The solution of A t = b from a solver, with dL/db = A^-1 g and dL/dA = -(A^-1 g) t^T."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor, solver: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(matrix, right, value)
        ctx.solver = solver
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        matrix, right, value = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives: the solution as a function of A and b
            value = _Implicit.apply(matrix, right, ctx.solver, value)
        with torch.no_grad():
            size = unit(grad)
            found = ctx.solver.solve(Dense(matrix), grad / size).value * size
        back = _Implicit.apply(matrix, grad, ctx.solver, found) if torch.is_grad_enabled() else found
        return -back[..., :, None] * value[..., None, :], back, None, None
