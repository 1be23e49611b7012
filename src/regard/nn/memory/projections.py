"""Projections from the residual stream into a fast-weight memory and back, and the gate between.

Shapes: B batch, T tokens, C model width, Dq width of the queries (all heads), Dv width of a value.

Of token t with the hidden state h_t (Fast-weight Product Key Memory, arXiv:2601.00671, section 3; the gate as in the
released program, a sigmoid of the mean of eight numbers):

    q = W_q rms(h),   v = z(W_v rms(h)),   g = sigmoid(mean(W_g rms(h))),
    out = W_o rms(g read + (1 - g) v)      without a gate: W_o rms(read + v)

z(x) = (x - mean x) / (std x + 1e-6) over the Dv features, with the unbiased standard deviation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...checks import ArgumentError, boolean_mask, finite, flags, floating, number, on_device, require, shape
from ...memory.slot_memory import mixed
from ...precision import clean
from ..arguments import positive_int
from ..attention.norm import HeadRMSNorm

GATES = 8
"""Number of features whose mean, after a sigmoid, is the gate."""


class Tokens(NamedTuple):
    """Finite hidden states."""

    hidden: Tensor  # [B, T, C], float32 at least; 0 where not `counted`
    counted: Tensor  # boolean [B, T], tokens that read and may be written
    non_finite: Tensor  # boolean [B, T], tokens that are real but not finite

    def shown(self, out: Tensor) -> Tensor:
        """Return `out` [B, T, ...] with NaN for tokens that are not finite and 0 for padding."""
        more = (...,) + (None,) * (out.dim() - 2)
        return torch.where(self.counted[more], out, torch.where(self.non_finite[more], torch.nan, 0.0).to(out.dtype))


def clean_tokens(call: str, hidden: Tensor, mask: Tensor | None, hidden_size: int) -> Tokens:
    """Set masked and non-finite tokens of `hidden` [B, T, C] to 0 (NaN, infinite, or beyond 2^56 in float32).

    Raises:
        ArgumentError: a wrong rank, width or dtype, or a mask that is not boolean [B, T]; under `regard.checks.debug`
            also a token that is not finite.
    """
    floating(call, "hidden", hidden)
    if hidden.dim() != 3 or hidden.shape[1] == 0 or hidden.shape[2] != hidden_size:
        raise ArgumentError(f"{call}: hidden has shape {shape(hidden)}, expected [B, T, {hidden_size}] with T >= 1.")
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    else:
        boolean_mask(call, "mask", mask)
        on_device(call, "mask", mask, hidden.device, "hidden")
        if mask.shape != hidden.shape[:2]:
            raise ArgumentError(
                f"{call}: mask has shape {shape(mask)}, expected [{hidden.shape[0]}, {hidden.shape[1]}], True for the "
                f"tokens of hidden {shape(hidden)} that are not padding."
            )
        hidden = torch.where(mask[..., None], hidden, 0)
    finite(call, "hidden", hidden)
    wide, bad = clean(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
    return Tokens(wide, mask, torch.zeros_like(mask)) if bad is None else Tokens(wide, mask & ~bad, mask & bad)


class Projected(NamedTuple):
    """Projections of tokens, float32 at least: query [B, T, Dq], value [B, T, Dv] (z-scored), gate [B, T] or None."""

    query: Tensor
    value: Tensor
    gate: Tensor | None


class MemoryProjections(nn.Module):
    """Queries, values and gates of tokens, and the output projection.

    Args:
        hidden_size: C.
        query_dim: Dq.
        value_dim: Dv, >= 2 with `value_norm`.
        value_norm: z-score the values.
        gating: mix what was read and the token's own value by a gate; otherwise add them.
        norm_eps: added to the mean square in the four RMS norms.

    With C = 768 and Dq = Dv = 512 these are 1,190,408 parameters (paper, Table 2, beside the fast weights).
    Matrices start N(0, 0.02^2), biases at 0.

    Raises:
        ArgumentError: a size that is not a positive integer, or a z-score of a single number.
    """

    def __init__(
        self,
        hidden_size: int,
        query_dim: int,
        value_dim: int,
        *,
        value_norm: bool = True,
        gating: bool = True,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        call = "nn.MemoryProjections"
        for name, size in {"hidden_size": hidden_size, "query_dim": query_dim, "value_dim": value_dim}.items():
            positive_int(call, name, size)
        require(
            value_dim >= 2 or not value_norm, call, "the z-score needs value_dim >= 2; widen it, or value_norm=False."
        )
        number(call, "norm_eps", norm_eps, low=0.0, strict=True)
        flags(call, value_norm=value_norm, gating=gating)
        self.value_norm, self.gating = value_norm, gating
        self.q_norm = HeadRMSNorm(hidden_size, norm_eps)
        self.q_proj = nn.Linear(hidden_size, query_dim)
        self.v_norm = HeadRMSNorm(hidden_size, norm_eps)
        self.v_proj = nn.Linear(hidden_size, value_dim)
        if gating:
            self.gate_norm = HeadRMSNorm(hidden_size, norm_eps)
            self.gate_proj = nn.Linear(hidden_size, GATES)
        self.out_norm = HeadRMSNorm(value_dim, norm_eps)
        self.out_proj = nn.Linear(value_dim, hidden_size)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, hidden: Tensor) -> Projected:
        """Project hidden states [B, T, C], float32 at least."""
        wide = hidden.dtype
        query = _linear(self.q_proj, self.q_norm(hidden)).to(wide)
        value = _linear(self.v_proj, self.v_norm(hidden)).to(wide)
        gate = None
        if self.gating:
            gate = _linear(self.gate_proj, self.gate_norm(hidden)).to(wide).mean(-1).sigmoid()
        return Projected(query, z_score(value) if self.value_norm else value, gate)

    def output(self, read: Tensor, own: Projected) -> Tensor:
        """Mix what was read [B, T, Dv] with the tokens' own values, and project it to [B, T, C]."""
        return self.back(mixed(read, own.value, own.gate))

    def back(self, mixed: Tensor) -> Tensor:
        """Project mixes [B, T, Dv] to [B, T, C]."""
        return _linear(self.out_proj, self.out_norm(mixed))


def z_score(x: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-6) over the last axis, with the unbiased standard deviation."""
    if x.shape[0] == 0:  # torch would warn about a standard deviation of no numbers
        return x
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply `layer` to x, cast to the dtype of its matrix."""
    return layer(x.to(layer.weight.dtype))
