"""Local regression at the query, in plain PyTorch: the truth the fast forms are tested against.

Degree 0 (Nadaraya-Watson; softmax attention is its Gaussian case):

    o_i = sum_j p_ij v_j

Degree 1 (Local Linear Attention, equations 6-8, in the covariance form: with A_i = C_i + ridge I,
C_i = sum_j p_ij (k_j - kbar_i)(k_j - kbar_i)^T and kbar_i = sum_j p_ij k_j):

    t_i = A_i^-1 (q_i - kbar_i),   o_i = sum_j p_ij (1 + (k_j - kbar_i) . t_i) v_j

Legend: q [B, H, Tq, F] and k [B, H, Tk, F] features whose dot product is the score; v [B, H, Tk, Dv]; x [B, H, Tq, D]
and y [B, H, Tk, D] the coordinates in which degree 1 is linear; p [B, H, Tq, Tk].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grammar import RowStats, Weighting
from .visibility import Visibility


class Estimate(NamedTuple):
    """An estimate with everything that led to it. `weights` are p; for degree 1 the values are weighted by
    p (1 + e), which may be negative."""

    output: Tensor
    weights: Tensor
    stats: RowStats
    solver: dict[str, Tensor] | None


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Each key head once for every query head of its group: [B, Hkv, ...] -> [B, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def scores(q: Tensor, k: Tensor, visible: Visibility) -> Tensor:
    """z = q . k, -inf where a key is not visible. The mask comes after the product, so that no hidden
    content can reach a score."""
    z = q @ k.transpose(-1, -2)
    seen = visible.block(0, visible.queries, 0, visible.keys, z.device)
    return z if seen is None else torch.where(seen, z, -torch.inf)


def constant(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, weighting: Weighting, params: Any) -> Estimate:
    """Degree 0. Materialises [B, H, Tq, Tk]; twice differentiable."""
    z = scores(q, k, visible)
    stats = weighting.fit(z, params)
    p = weighting.weights(z, stats, params)
    return Estimate(p @ v, p, stats, None)


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Visibility,
    weighting: Weighting,
    params: Any,
    x: Tensor,
    y: Tensor,
    ridge: float | Tensor,
    solver: Any,
) -> Estimate:
    """Degree 1. Materialises [B, H, Tq, Tk, D]."""
    p = (fit := constant(q, k, v, visible, weighting, params)).weights
    mean = p @ y
    away = y[..., None, :, :] - mean[..., :, None, :]  # [B, H, Tq, Tk, D]
    spread = (p[..., None] * away).transpose(-1, -2) @ away
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    amount = ridge[..., None] if isinstance(ridge, Tensor) else ridge
    solved = solver.solve(spread + amount * eye, x - mean)
    slope = (away @ solved.value[..., None])[..., 0]
    solver_stats = {"status": solved.status, **solved.statistics}
    return Estimate((p * (1 + slope)) @ v, p, fit.stats, solver_stats)
