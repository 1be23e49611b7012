"""The adaptive threshold: the peak b = a_max of a row whose weights [b - d/r]_+^r sum to one.

With d = max z - z the threshold is tau = max z / r - b, and b lies in [n^(-1/r), 1] for n keys. For r >= 1 the
r-norm ||[b - d/r]_+||_r is convex in b and at least 1 at b = 1, so that Newton's method from b = 1 descends to
the root without a bracket, in 3 to 8 steps for r = 2, 3 and 3 to 13 for r = 1 (where it ends exactly). For r < 1
the norm is not convex and b is bracketed.

Every row is masked once it has converged, so that no row depends on the others; `fast` ends the loop when all
have.

Legend: d [..., n], +inf at hidden keys; b, r [..., 1] or r a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import Number

NEWTON_STEPS = 16
FAST_STEPS = 64
BISECTIONS = 64


def solve_peak(d: Tensor, r: Number, *, fast: bool = False) -> tuple[Tensor, Tensor]:
    """(b, converged), both [..., 1]; rows without a visible key give (1, True). No gradient."""
    if isinstance(r, float) and r >= 1:
        b = _newton(d, r, FAST_STEPS if fast else NEWTON_STEPS, early_exit=fast)
    else:
        b = _bisect(d, r, early_exit=fast)
    total = (_excess(d, r, b) ** r).sum(-1, keepdim=True)
    # Rounding of b is multiplied with the slope of the sum, which is infinite at the edge for r < 1.
    eps = torch.finfo(d.dtype).eps
    tolerance = 512 * eps * r if isinstance(r, float) and r >= 1 else 4 * eps**0.5
    empty = total == 0
    return torch.where(empty, 1, b), empty | ((total - 1).abs() <= tolerance) | total.isnan()


def implicit_peak(d: Tensor, r: Number, peak: Tensor) -> Tensor:
    """`peak` with its derivatives by d and r: Newton steps whose value is pinned to zero. The first step
    carries the first derivative, the second the second."""
    b = peak
    for _ in range(2):
        step = _newton_step(d, r, b)
        b = b - (step - step.detach())
    return b


def _newton_step(d: Tensor, r: Number, b: Tensor) -> Tensor:
    """(sum a^r - 1) / (r sum a^(r-1)), differentiable, with a = [b - d/r]_+."""
    reach = r * b
    inside = d < reach.detach()
    a = torch.where(inside, (reach - torch.where(inside, d, 0)) / r, 1)  # > 0 inside, whatever the rounding
    total = torch.where(inside, a**r, 0).sum(-1, keepdim=True)
    slope = torch.where(inside, a ** (r - 1), 0).sum(-1, keepdim=True) * r
    some = slope > 0
    return torch.where(some, (total - 1) / torch.where(some, slope, 1), 0)


def _newton(d: Tensor, r: float, steps: int, *, early_exit: bool) -> Tensor:
    h = d if r == 1.0 else d / r
    b = torch.ones_like(d[..., :1])
    active = torch.ones_like(b, dtype=torch.bool)
    limit = 1 + 2 * torch.finfo(d.dtype).eps
    for _ in range(steps):
        norm, lower = _norms((b - h).relu_(), r)
        new = b - (norm - 1) * norm ** (r - 1) / lower
        # Descent only: once rounding would raise b the row is as good as it gets, and stays.
        active = active & (new < b) & (norm > limit)
        b = torch.where(active, new, b)
        if early_exit and not bool(active.any()):
            break
    return b


def _norms(a: Tensor, r: float) -> tuple[Tensor, Tensor]:
    """(||a||_r, sum a^(r-1) over the support) with as few passes as r allows."""
    if r == 1.0:
        return a.sum(-1, keepdim=True), (a > 0).sum(-1, keepdim=True).to(a.dtype)
    if r == 2.0:
        return torch.linalg.vector_norm(a, dim=-1, keepdim=True), a.sum(-1, keepdim=True)
    if r == 3.0:
        square = a * a
        return (square * a).sum(-1, keepdim=True) ** (1 / 3), square.sum(-1, keepdim=True)
    lower = a ** (r - 1)
    return (lower * a).sum(-1, keepdim=True) ** (1 / r), lower.sum(-1, keepdim=True)


def _bisect(d: Tensor, r: Number, *, early_exit: bool) -> Tensor:
    visible = (d < torch.inf).sum(-1, keepdim=True).clamp(min=1).to(d.dtype)
    exponent = -1 / r
    low, high = visible**exponent, torch.ones_like(visible)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_much = (_excess(d, r, middle) ** r).sum(-1, keepdim=True) >= 1
        high = torch.where(too_much, middle, high)
        low = torch.where(too_much, low, middle)
        if early_exit and bool((torch.nextafter(low, high) >= high).all()):
            break
    return high


def _excess(d: Tensor, r: Number, b: Tensor) -> Tensor:
    return (b - d / r).relu_()
