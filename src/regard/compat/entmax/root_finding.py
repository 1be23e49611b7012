"""`entmax.root_finding`: alpha-entmax, alpha-normmax and budget-sparsemax, whose threshold has no closed form.

Sources: entmax and its derivative by alpha, arXiv 1905.05702 and 1909.00015; the others, the package entmax.
"""

from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, broadcastable, flags, floating, in_range, shape, tensor, whole, within
from ...grammar.threshold import widest
from ...public import entmax
from .activations import FunctionModule

NEAREST = 1e-6
"""Smallest 1 - alpha of heavy-tailed weights; they are those of softmax to that precision."""
STEPS = 24
"""Newton's steps for heavy-tailed weights; 12 are enough for a million scores at alpha = 0.01."""


def entmax_bisect(
    X: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, n_iter: int = 50, ensure_sum_one: bool = True
) -> Tensor:
    """Compute alpha-entmax: p = [(alpha - 1) X - tau]_+^(1 / (alpha - 1)) with tau such that p sums to one.

    `regard.entmax`, continued to alpha < 1, where every score has weight and far ones more than in softmax.

    Args:
        X: any shape; -inf hides a score.
        alpha: a number above 0 and at most 1001, or a tensor of such values that expands to the shape of X with length
            1 along `dim`. 1 is softmax. A tensor costs both cases, below and above 1. Gradients flow.
        dim: the axis along which p sums to one.
        n_iter, ensure_sum_one: change nothing here.

    Returns:
        p, of the shape and dtype of X. Rows in which every score is -inf are 0.

    Raises:
        ArgumentError: scores that are not floating-point, alpha out of range or of another shape.
    """
    call = "entmax_bisect"
    flags(call, ensure_sum_one=ensure_sum_one)
    number = _checked(call, X, dim, n_iter, "alpha", alpha, low=0.0, strict=True)
    if not isinstance(number, Tensor):
        if number < 1:
            return _heavy(X, X.new_tensor(number), dim)
        return within(call, None, entmax, X, number, dim)
    above = within(call, None, entmax, X, number.clamp(min=1), dim)
    return torch.where(number < 1, _heavy(X, number, dim), above)


def sparsemax_bisect(X: Tensor, dim: int = -1, n_iter: int | None = 50, ensure_sum_one: bool = True) -> Tensor:
    """Compute sparsemax: `entmax_bisect` with alpha = 2, with its arguments, result and errors."""
    return entmax_bisect(X, 2.0, dim, 50 if n_iter is None else n_iter, ensure_sum_one)


def normmax_bisect(X: Tensor, alpha: float | Tensor = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """Compute alpha-normmax: the p >= 0 of sum 1 with the largest <X, p> - (sum p^alpha)^(1 / alpha).

    With r = alpha / (alpha - 1), p is proportional to w^(1 / alpha), where w is (2 - 1 / alpha)-entmax of r X.
    Arguments, result and errors as in `entmax_bisect`, with alpha above 1.
    """
    call = "normmax_bisect"
    number = _checked(call, X, dim, n_iter, "alpha", alpha, low=1.0, strict=True)
    z = X.to(torch.promote_types(X.dtype, torch.float32))
    w = within(call, None, entmax, z * (number / (number - 1)), 2 - 1 / number, dim)
    some = w != 0
    root = torch.where(some, torch.where(some, w, 1) ** (1 / number), 0)
    total = root.sum(dim, keepdim=True)
    return (root / torch.where(total == 0, 1, total)).to(X.dtype)


def budget_bisect(X: Tensor, budget: float | Tensor = 2, dim: int = -1, n_iter: int = 50) -> Tensor:
    """Compute budget-sparsemax: the p nearest to X with 0 <= p <= 1 and the sum `budget`.

    p = X - tau, cut to [0, 1]. Bisection finds which entries are inside, and these give tau.

    Args:
        budget: from 0 to the number of scores, a number or a tensor like alpha in `entmax_bisect`. With a budget above
            the number of scores that are not -inf, these are 1.
        n_iter: steps of the bisection.

    Other arguments and errors as in `entmax_bisect`.
    """
    number = _checked("budget_bisect", X, dim, n_iter, "budget", budget, low=0.0, strict=False)
    z = X.to(torch.promote_types(X.dtype, torch.float32))
    seen = z != -torch.inf
    with torch.no_grad():
        high = z.amax(dim, keepdim=True)
        high = torch.where(high == -torch.inf, 0, high)
        low = torch.minimum(torch.where(seen, z, torch.inf).amin(dim, keepdim=True), high) - 1
        for _ in range(n_iter):
            middle = (low + high) / 2
            enough = (z - middle).clamp(0, 1).sum(dim, keepdim=True) >= number
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        p = (z - low).clamp(0, 1)
        inside, full = (p > 0) & (p < 1), (p == 1).sum(dim, keepdim=True)
        size = inside.sum(dim, keepdim=True)
    tau = (torch.where(inside, z, 0).sum(dim, keepdim=True) + full - number) / size.clamp(min=1)
    tau = torch.where(size > 0, tau, low)
    return torch.where(inside, z - tau, p).clamp(0, 1).to(X.dtype)


def _heavy(X: Tensor, alpha: Tensor, dim: int) -> Tensor:
    """Return alpha-entmax for alpha < 1: p_j = (1 + a (u + d_j))^(-1 / a) with a = 1 - alpha and d = max X - X.

    log sum p is convex and falls with u, so that Newton's method rises to its root from u = 0. Two more steps, whose
    value is zero, carry the first and the second derivative. Computed in float64, since d p / d alpha cancels.
    """
    z = widest(X)
    seen = z != -torch.inf
    top = z.detach().amax(dim, keepdim=True)
    d = torch.where(seen, top - z, 0)
    a = (1 - widest(alpha)).clamp(min=NEAREST)

    def weights(u: Tensor) -> Tensor:
        return torch.where(seen, torch.exp(-torch.log1p(a * (u + d)) / a), 0)

    def step(u: Tensor) -> Tensor:
        p = weights(u)
        total, slope = p.sum(dim, keepdim=True), (p / (1 + a * (u + d))).sum(dim, keepdim=True)
        some = total > 0
        total = torch.where(some, total, 1)
        return u + total.log() * total / torch.where(some, slope, 1)

    with torch.no_grad():
        u = torch.zeros_like(top)
        for _ in range(STEPS):
            u = step(u).clamp(min=0)
    return weights(step(step(u))).to(X.dtype)


def _checked(call: str, X: Tensor, dim: int, n_iter: int, name: str, value: Any, *, low: float, strict: bool) -> Any:
    """Check all arguments; return a float, or a tensor that expands to X, of length 1 along `dim`, float32 at least."""
    floating(call, "X", X)
    whole(call, "n_iter", n_iter, 1)
    if isinstance(dim, bool) or not isinstance(dim, int) or not -X.dim() <= dim < X.dim():
        raise ArgumentError(f"{call}: dim is {dim!r}, but X has shape {shape(X)}.")
    if isinstance(value, Tensor):
        tensor(call, name, value, like=X, of="X")
    in_range(call, name, value, low=low, strict=strict)
    if not isinstance(value, Tensor):
        return float(value)
    rows = [*X.shape]
    rows[dim] = 1
    broadcastable(call, name, value, tuple(rows))
    return value.to(torch.promote_types(X.dtype, torch.float32)).expand(rows)


class SparsemaxBisect(FunctionModule):
    """The module of `sparsemax_bisect`, with its arguments `dim` and `n_iter`."""

    def __init__(self, dim: int = -1, n_iter: int | None = None) -> None:
        super().__init__(sparsemax_bisect, dim=dim, n_iter=n_iter)


class EntmaxBisect(FunctionModule):
    """The module of `entmax_bisect`, with its arguments `alpha`, `dim` and `n_iter`."""

    def __init__(self, alpha: float | Tensor = 1.5, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__(entmax_bisect, alpha=alpha, dim=dim, n_iter=n_iter)


class NormmaxBisect(FunctionModule):
    """The module of `normmax_bisect`, with its arguments `alpha`, `dim` and `n_iter`."""

    def __init__(self, alpha: float | Tensor = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__(normmax_bisect, alpha=alpha, dim=dim, n_iter=n_iter)


class BudgetBisect(FunctionModule):
    """The module of `budget_bisect`, with its arguments `budget`, `dim` and `n_iter`."""

    def __init__(self, budget: float | Tensor = 2, dim: int = -1, n_iter: int = 50) -> None:
        super().__init__(budget_bisect, budget=budget, dim=dim, n_iter=n_iter)
