"""The threshold of the adaptive rule: the peak b = a_max of a row whose weights [b - d/r]_+^r sum to one.

With d = max z - z, the threshold is tau = max z / r - b, and b lies in [n^(-1/r), 1] for n keys. For r >= 1 the r-norm
||[b - d/r]_+||_r is convex in b and at least 1 at b = 1. Newton's method from b = 1 therefore descends to the root
without a bracket, in 3 to 8 steps for r = 2, 3 and in 3 to 13 for r = 1 (where it ends exactly). For r < 1 the norm is
not convex, and b is found by bisection.

A row is masked once it has converged, so that no row depends on the others. With `fast` the loop ends when all have.

For r < 1 the weight a^r has infinite slope at the threshold: an error of eps in b becomes eps^r in a weight. The
threshold is then measured from the lowest key with weight, the pivot: theta = pivot - gap. The differences z_j - pivot
are exact near the threshold. The pivot's weight t = (gap/r)^r is the root of an increasing convex function,
sum_j ((z_j - pivot)/r + t^(1/r))^r = 1, to which Newton's method descends from the right.

Legend: z scores [..., n], -inf at hidden keys; d [..., n], +inf at hidden keys; b, r [..., 1] or r a number.
"""

import torch
from torch import Tensor

from .kernels import Number, least_reach

NEWTON_STEPS = 16
FAST_STEPS = 64
BISECTIONS = 64
CROSSINGS = 2
"""Number of scores that rounding may put on the wrong side of a threshold found by bisection."""


def solve_peak(d: Tensor, r: Number, *, fast: bool = False) -> tuple[Tensor, Tensor]:
    """Return (b, converged), both [..., 1], without gradient; (1, True) for rows without a visible key."""
    if isinstance(r, float) and r >= 1:
        b = _newton(d, r, FAST_STEPS if fast else NEWTON_STEPS, early_exit=fast)
    else:
        b = _bisect(d, r, early_exit=fast)
    total = (_excess(d, r, b) ** r).sum(-1, keepdim=True)
    # The slope of the sum multiplies the rounding error of b; it is infinite at the edge for r < 1.
    eps = torch.finfo(d.dtype).eps
    tolerance = 512 * eps * r if isinstance(r, float) and r >= 1 else 4 * eps**0.5
    empty = total == 0
    return torch.where(empty, 1, b), empty | ((total - 1).abs() <= tolerance) | total.isnan()


def solve_gap(z: Tensor, peak: Tensor, top: Tensor, r: Number, *, fast: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pivot, gap, converged), each [..., 1], without gradient, for r < 1 and the `peak` of `solve_peak`. Sums
    are in float64, since a rounding error decides whether the lowest key has weight at all."""
    wide, top, peak = widest(z), widest(top), widest(peak)
    r = widest(r) if isinstance(r, Tensor) else r
    pivot, below = _pivot(wide, top - peak * r, top, r)
    away = (wide - pivot).relu() / r
    inside = wide >= pivot
    ties = (wide == pivot).sum(-1, keepdim=True).clamp(min=1)
    t = (1 - torch.where(inside, away**r, 0).sum(-1, keepdim=True)) / ties
    total = torch.ones_like(t)
    for _ in range(FAST_STEPS if fast else NEWTON_STEPS):
        a = away + t ** (1 / r)
        total = torch.where(inside, a**r, 0).sum(-1, keepdim=True)
        slope = torch.where(inside, (t ** (1 / r) / a) ** (1 - r), 0).sum(-1, keepdim=True)
        new = t - (total - 1) / slope
        active = (new < t) & (new > 0)
        t = torch.where(active, new, t)
        if fast and not bool(active.any()):
            break
    gap = torch.minimum(r * t ** (1 / r), pivot - below) + 0 * top  # 0 * keeps a row's NaN
    exact = (total - 1).abs() <= 512 * torch.finfo(z.dtype).eps
    return pivot.to(z.dtype), gap.to(z.dtype).clamp(min=least_reach(z.dtype)), exact


def widest(x: Tensor) -> Tensor:
    """Return x in float64 if the device has it."""
    return x if x.device.type == "mps" else x.double()


def _pivot(z: Tensor, theta: Tensor, top: Tensor, r: Number) -> tuple[Tensor, Tensor]:
    """Return (the lowest score with weight, the next score below it), from a threshold with rounding errors. A score
    has weight if the sum of weights for a threshold at that score is below one."""

    def above(edge: Tensor) -> Tensor:
        return torch.where(z > edge, z, torch.inf).amin(-1, keepdim=True)

    def under(edge: Tensor) -> Tensor:
        return torch.where(z < edge, z, -torch.inf).amax(-1, keepdim=True)

    def has_weight(edge: Tensor) -> Tensor:
        finite = edge > -torch.inf
        return finite & (((z - torch.where(finite, edge, 0)).relu() / r) ** r).sum(-1, keepdim=True).lt(1)

    pivot = torch.minimum(above(theta), top)
    for _ in range(CROSSINGS):
        pivot = torch.where(has_weight(pivot), pivot, torch.minimum(above(pivot), top))
    for _ in range(CROSSINGS):
        lower = under(pivot)
        pivot = torch.where(has_weight(lower), lower, pivot)
    return pivot, under(pivot)


def implicit_reach(d: Tensor, r: Number, reach: Tensor) -> Tensor:
    """Return `reach` with its derivatives by d and r, where sum [(reach - d)/r]_+^r = 1. Two Newton steps of value zero
    carry the first and the second derivative."""
    refined = reach
    for _ in range(2):
        refined = refined - _newton_step(d, r, refined)
    return refined


def _newton_step(d: Tensor, r: Number, reach: Tensor) -> Tensor:
    """Return Newton's step at the root of sum u^r = (r / fixed)^r, u = [reach - d]_+ / fixed: a zero that carries
    derivatives. In units of `fixed`, the reach as a constant, no power overflows."""
    fixed = reach.detach()
    inside = d < fixed
    u = torch.where(inside, (reach - torch.where(inside, d, 0)) / fixed, 1)  # > 0 inside despite rounding
    over = torch.where(inside, u**r, 0).sum(-1, keepdim=True)
    if isinstance(r, Tensor):
        over = over - (r / fixed) ** r
    slope = torch.where(inside, u ** (r - 1), 0).sum(-1, keepdim=True) * r
    some = slope > 0
    # The rounding error of the sum is subtracted: for r < 1 the second derivative that multiplies it is unbounded.
    return torch.where(some, fixed * (over - over.detach()) / torch.where(some, slope, 1), 0)


def _newton(d: Tensor, r: float, steps: int, *, early_exit: bool) -> Tensor:
    h = d if r == 1.0 else d / r
    b = torch.ones_like(d[..., :1])
    active = torch.ones_like(b, dtype=torch.bool)
    limit = 1 + 2 * torch.finfo(d.dtype).eps
    for _ in range(steps):
        norm, lower = _norms((b - h).relu_(), r)
        new = b - (norm - 1) * norm ** (r - 1) / lower
        # Descent only: once rounding would raise b, the row has converged.
        active = active & (new < b) & (norm > limit)
        b = torch.where(active, new, b)
        if early_exit and not bool(active.any()):
            break
    return b


def _norms(a: Tensor, r: float) -> tuple[Tensor, Tensor]:
    """Return (||a||_r, sum a^(r-1) over the support)."""
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
