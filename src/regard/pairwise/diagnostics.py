"""Diagnostics of rows of weights, from the row statistics of the weighting."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..grammar import RowStats


@dataclass(frozen=True)
class Diagnostics:
    """Diagnostics per row [B, H, Tq], without gradient.

    Attributes:
        tau: the threshold: theta / r for the adaptive rule (entmax's tau), else theta, on the scores z; -inf without a
            threshold; 0 in empty rows.
        bandwidth: the distance H at which weight becomes 0, of unit vectors for the dot product and the cosine:
            sqrt(2 (1 - theta / scale)). For a Gaussian without a threshold, the standard deviation 1/sqrt(scale).
            Infinite for kernels of the score itself; 0 in empty rows.
        support: number of keys with nonzero weight.
        effective_sample_size: (sum |p|)^2 / sum p^2, between 1 and `support`; 0 in empty rows.
        density: `support` / number of visible keys; 0 in empty rows.
        empty: no key is visible.
        fallback: keys are visible, but none is above the threshold (or all kept keys tie).
        status: a `regard.grammar.Status` per row, int32.
        weights: [B, H, Tq, Tk], from the reference implementation only; None elsewhere.
        solver: statistics of the solver of the local linear model by name, each [B, H, Tq]: "status" (a
            `regard.grammar.SolveStatus`, int32), "iterations", "residual" (|b - A t| / |b|) and "jitter"; None at
            degree 0.
        effective_weights: [B, H, Tq, Tk], the weights of the values in a local linear model, p (1 + e). They sum to one
            and can be negative. From the reference implementation only; None elsewhere and at degree 0.
        negative_mass: sum of |w| over the negative weights of the values; 0 if no weight can be negative. None if the
            implementation does not compute it for a kernel with signed weights.
    """

    tau: Tensor
    bandwidth: Tensor
    support: Tensor
    effective_sample_size: Tensor
    density: Tensor
    empty: Tensor
    fallback: Tensor
    status: Tensor
    weights: Tensor | None = None
    solver: dict[str, Tensor] | None = None
    effective_weights: Tensor | None = None
    negative_mass: Tensor | None = None

    def detached(self) -> "Diagnostics":
        """Return the same without the gradients that an implementation leaves on the weights."""
        named = {"weights": self.weights, "effective_weights": self.effective_weights}
        return replace(self, **{name: None if x is None else x.detach() for name, x in named.items()})


def negative_part(w: Tensor) -> Tensor:
    """Return the sum of |w| over the negative entries of rows [..., n]: [...]."""
    return w.clamp(max=0).sum(-1).neg()


def counts(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return (support size, effective sample size) of rows of weights, each [..., 1]."""
    size = p.abs()
    support = (size > 0).sum(-1, keepdim=True).to(p.dtype)
    total, square = size.sum(-1, keepdim=True), (size * size).sum(-1, keepdim=True)
    return support, torch.where(square > 0, total * total / torch.where(square > 0, square, 1), 0)


@torch.no_grad()
def diagnose(
    inputs: Any, stats: RowStats, support: Tensor, ess: Tensor, *, weights: Tensor | None = None,
    effective: Tensor | None = None, negative: Tensor | None = None, solver: dict[str, Tensor] | None = None,
) -> Diagnostics:  # fmt: skip
    """Compute the diagnostics of a call from its `Inputs` and row statistics [B, H, Tq, 1]. The negative mass
    [B, H, Tq] is computed from the weights unless given."""
    spec, scale, params, theta = inputs.spec, inputs.scale, inputs.row_params(), stats.theta
    tau = theta / spec.bandwidth.power(spec.kernel, params) if spec.bandwidth.name == "adaptive" else theta
    per_row = scale[..., None] if isinstance(scale, Tensor) else scale
    edge = spec.similarity.squared_distance(theta / per_row).clamp(min=0).sqrt()
    if not spec.kernel.ranked:
        edge = torch.full_like(theta, torch.inf)
    elif not spec.kernel.compact:
        edge = torch.where(theta == -torch.inf, torch.as_tensor(per_row, dtype=theta.dtype) ** -0.5, edge)
    blank = lambda x: torch.where(stats.empty, 0, x)[..., 0]  # noqa: E731
    signed = weights if effective is None else effective
    if negative is None and signed is not None:
        negative = negative_part(signed)
    elif negative is None and spec.weighting.nonnegative and (spec.kernel.nonnegative or "bias" not in params):
        negative = torch.zeros_like(theta[..., 0])
    seen = inputs.visible.counts(theta.device)[..., None].clamp(min=1)
    tau, edge, support, ess, density = map(blank, (tau, edge, support, ess, support / seen))
    empty, fallback, status = (x[..., 0] for x in (stats.empty, stats.fallback, stats.status))
    rows = (tau, edge, support, ess, density, empty, fallback, status)
    return Diagnostics(*rows, weights, solver, effective, negative)
