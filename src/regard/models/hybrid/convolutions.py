"""Causal convolutions, channel by channel: over the last few tokens, and over all.

Shapes: B batch, G channels, T tokens, W the convolution's width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import ArgumentError


def convolved(inputs: Tensor, weight: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Convolve [B, G, W - 1 + T] with [G, W], channel by channel, to [B, G, T]; no document sees the one before."""
    if segment_ids is None:
        return F.conv1d(inputs, weight[:, None], groups=len(weight))
    reach, tokens = weight.shape[1] - 1, segment_ids.shape[1]
    before = F.pad(segment_ids, (reach, 0))
    out = inputs[..., reach:] * weight[:, reach:]
    for lag in range(1, reach + 1):
        place = slice(reach - lag, reach - lag + tokens)
        same = (before[:, place] == segment_ids) & (torch.arange(tokens, device=before.device) >= lag)
        out = out + torch.where(same[:, None], inputs[..., place], 0) * weight[:, reach - lag, None]
    return out


def short_convolution(
    mixed: Tensor, weight: Tensor | None, before: Tensor | None, real: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return silu of the convolution of [B, G, T] with [G, W] (None: the inputs as they are), and its last inputs.

    `before` [B, G, W - 1] are the last inputs of earlier tokens (None: zeros); `real` as in `latest`.
    """
    reach = 0 if weight is None else weight.shape[1] - 1
    past = mixed.new_zeros(*mixed.shape[:2], reach) if before is None else before.to(mixed.dtype)
    if past.shape[0] != mixed.shape[0]:
        rows = f"the state has {past.shape[0]} sequences, but the input has {mixed.shape[0]}"
        raise ArgumentError(f"short_convolution: {rows}; use one cache per batch, or repeat its rows.")
    inputs = torch.cat((past, mixed), dim=-1)
    if weight is not None:
        mixed = F.silu(convolved(inputs, weight, segment_ids))
    return mixed, latest(inputs, real, reach)


def latest(inputs: Tensor, real: Tensor | None, reach: int) -> Tensor:
    """Return the last `reach` inputs [B, G, reach] of each row, of [B, G, reach + T] with the real ones first."""
    if real is None:
        return inputs[..., inputs.shape[-1] - reach :]
    first = real.sum(1)[:, None] + torch.arange(reach, device=inputs.device)
    return inputs.gather(2, first[:, None].expand(-1, inputs.shape[1], -1))


def long_convolution(inputs: Tensor, kernel: Tensor) -> Tensor:
    """Convolve [B, H, D, N] causally with a filter [H, D, N] for each channel: O(N^2) time, O(N) memory a channel.

    Sums are used, since Fourier transforms would spread rounding and non-finite values to earlier tokens.
    """
    x, weight = inputs.flatten(1, 2), kernel.flatten(0, 1).flip(-1)[:, None]
    return F.conv1d(F.pad(x, (kernel.shape[-1] - 1, 0)), weight, groups=len(weight)).view_as(inputs)
