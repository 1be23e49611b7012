"""Weights of a row of scores by their formulas, dense, in the dtype of the scores (float64 for an expected value), with
derivatives by autograd. Nothing here calls regard; thresholds are found by bisection and differentiated as what they
are, the zero of a function.

Legend: z [..., n] scores, -inf where hidden; p weights; numbers (r, number) floats or [..., 1]; `number` is the margin
of the anchored rule or the bias of the fixed one.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = float | Tensor
LIVE = 640
"""Best scores among which an adaptive threshold is searched; the others are checked to be out of its reach."""


def weights(
    z: Tensor, rule: str, kernel: str = "polynomial", r: Number = 1.0, number: Number = 0.0, k: int = 1,
    empty: str = "uniform",
) -> Tensor:  # fmt: skip
    """p; 0 in rows without a score."""
    lost = (z == -torch.inf).all(-1, keepdim=True)
    z = torch.where(lost, 0.0, z)
    if rule == "nearest":
        p = _nearest(z, kernel, r, k)
    elif rule == "adaptive":
        p = _powers(z, _threshold(z, r), r, r)
    elif rule == "anchored":
        p = _share(_kernel(z, z.amax(-1, keepdim=True) - number, kernel, r))
    else:
        p = _fixed(z, kernel, r, number, empty)
    return torch.where(lost, 0.0, p)


def _share(w: Tensor) -> Tensor:
    return w / w.sum(-1, keepdim=True)


def _powers(z: Tensor, theta: Number, width: Number, exponent: Number) -> Tensor:
    """[(z - theta)/width]_+^exponent."""
    inside = z > theta
    above = torch.where(inside, z, theta + width) - theta  # no infinity may meet a derivative, not even a zero one
    return torch.where(inside, (above / width) ** exponent, 0.0)


def _kernel(z: Tensor, theta: Number, kernel: str, r: Number) -> Tensor:
    if kernel == "polynomial":
        return _powers(z, theta, 1.0, r)
    inside = z > theta
    if kernel == "uniform":
        return inside.to(z.dtype)
    return torch.where(inside, torch.where(inside, z - z.detach().amax(-1, keepdim=True), 0.0).exp(), 0.0)


def _threshold(z: Tensor, r: Number) -> Tensor:
    """theta with sum [(z - theta)/r]_+^r = 1."""
    with torch.no_grad():
        live = z.sort(-1, descending=True).values
        high, rest = live[..., :1], live[..., LIVE:]
        live = live[..., :LIVE] if bool((rest <= high - r).all()) else live
        low = high - r
        for _ in range(70):
            middle = (low + high) / 2
            enough = _powers(live, middle, r, r).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    excess = _powers(z, low, r, r).sum(-1, keepdim=True) - 1
    step = excess / _powers(z, low, r, r - 1).sum(-1, keepdim=True).detach()
    return low + step - step.detach()


def _fixed(z: Tensor, kernel: str, r: Number, bias: Number, empty: str) -> Tensor:
    seen = z > -torch.inf
    w = _kernel(z, 0.0 * torch.where(seen, z, 0.0) - bias, kernel, r)
    total = w.sum(-1, keepdim=True)
    lost = total == 0
    stand = torch.zeros_like(z)
    if empty == "uniform":
        stand = _share(seen.to(z.dtype))
    elif empty == "nearest":
        first = (z == z.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
        stand = stand.scatter(-1, first, 1.0)
    return torch.where(lost, stand, w / torch.where(lost, 1.0, total))


def _nearest(z: Tensor, kernel: str, r: Number, k: int) -> Tensor:
    """The k best, the lowest index first among ties; polynomials reach down to the next one, or 1 below the last."""
    n = z.shape[-1]
    order = z.detach().sort(dim=-1, descending=True, stable=True).indices
    count = (z > -torch.inf).sum(-1, keepdim=True)
    kept = torch.zeros_like(z, dtype=torch.bool).scatter(-1, order[..., :k], True) & (z > -torch.inf)
    if kernel == "uniform":
        return _share(kept.to(z.dtype))
    if kernel == "gaussian":
        return _share(_kernel(torch.where(kept, z, -torch.inf), -torch.inf, kernel, r))
    more = count > k
    last = torch.where(z > -torch.inf, z, torch.inf).argmin(-1, keepdim=True)
    at = torch.where(more, order[..., min(k, n - 1) : min(k, n - 1) + 1], last)
    w = torch.where(kept, _powers(z, z.gather(-1, at) - (~more).to(z.dtype), 1.0, r), 0.0)
    tied = w.sum(-1, keepdim=True) == 0
    return torch.where(tied, _share(kept.to(z.dtype)), w / torch.where(tied, 1.0, w.sum(-1, keepdim=True)))


def visible(
    queries: int, keys: int, *, is_causal: bool = False, exclude_self: bool = False, window: int | None = None,
    query_offset: int | Tensor | None = None, attn_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Which pairs count, as `regard.attention` words it: boolean [B or 1, H or 1, Tq, Tk]."""
    offset = torch.as_tensor(keys - queries if query_offset is None else query_offset).reshape(-1, 1, 1, 1)
    at = torch.arange(queries)[:, None] + offset
    key = torch.arange(keys)
    newest = at - 1 if exclude_self else at
    if is_causal or exclude_self:
        seen = (key <= newest) & (key > newest - window if window is not None else key > -1)
    else:
        seen = (key - at).abs() < window if window is not None else (key > -1).expand(at.shape[0], 1, queries, keys)
    return seen if attn_mask is None else seen & attn_mask


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """|actual - expected| <= tolerance * max(1, max |expected|), NaN nowhere."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} != {tuple(expected.shape)}"
    if actual.numel() == 0:
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    gap = float((actual - expected).abs().max())
    size = max(1.0, float(expected.abs().max()))
    assert gap <= tolerance * size, f"{what}: differs by {gap:.3g} (size {size:.3g})"  # false for NaN
