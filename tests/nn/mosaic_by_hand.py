"""The features of the memories of Memory Mosaics, written out in float64."""

from __future__ import annotations

import torch

C, H = 24, 3
D = C // H


def tokens(batch=2, length=11, seed=1):
    return torch.randn(batch, length, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def split(x):
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def unit_keys(layer, x):
    """Unit keys [B, H, T, D] by equation 10."""
    at = torch.arange(x.shape[1], dtype=torch.float64)
    rate = (10 * layer.keys.rate).abs()
    decay = (-rate[:, None, None] * (at[:, None] - at).clamp(min=0)).exp().tril()
    keys = decay @ split(x @ layer.keys.proj.weight.T)
    return keys / keys.norm(dim=-1, keepdim=True)


def beta2(layer):
    return (20 * layer.sharpness.scale).clamp(max=10).exp()[:, None, None]
