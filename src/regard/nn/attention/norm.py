"""Normalisation layers: of queries and keys per head, and of a residual stream."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

QK_NORMS = (None, "rms", "l2")
NORMS = ("rms", "layer")


class HeadRMSNorm(nn.RMSNorm):
    """x / sqrt(mean x^2 + eps) over the channels of a head, times a learned gain [D]; computed at least in float32.
    With `unit`, vectors get length 1 instead of mean square 1, without a gain."""

    def __init__(self, dim: int, eps: float, *, unit: bool = False) -> None:
        super().__init__(dim, eps=eps, elementwise_affine=not unit)
        self.unit = unit

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gain = None if self.weight is None else self.weight.to(wide)
        out = rms_norm(x.to(wide), self.normalized_shape, gain, self.eps)
        return (out * x.shape[-1] ** -0.5 if self.unit else out).to(x.dtype)


def make_norm(kind: str, size: int, eps: float) -> nn.Module:
    """Return the norm of a residual stream: "rms" (RMSNorm, a gain) or "layer" (LayerNorm, a gain and a bias)."""
    return nn.RMSNorm(size, eps=eps) if kind == "rms" else nn.LayerNorm(size, eps=eps)
