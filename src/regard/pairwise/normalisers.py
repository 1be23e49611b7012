"""Softmax-like functions of score tensors: entmax, sparsemax, ReLUmax, normalised ReLU and top-k.

All are twice differentiable in the scores and in every parameter. Masked scores and scores of -inf have weight 0. Rows
without a score are 0 with gradient 0. Rows that contain NaN are NaN; other rows never are. Sums and thresholds are
computed in float32 or more.

impl="cpu" uses numba loops (the extra `cpu`) at one to three times the cost of softmax (docs/results.md). It needs one
more tensor of the scores' size in each pass. impl="reference" is plain torch on any device, and supports forward mode,
torch.func transforms and export; entmax then takes at most 16 passes over the scores (64 for alpha > 2 and for alpha as
a tensor). impl="auto" chooses "cpu" if numba is installed, the scores are on the CPU, no such transform is active and
the function has a numba loop (straight-through and soft top-k have none), else "reference". Second derivatives are
always those of "reference".
"""

from typing import Any, get_args

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, choice, in_range, require, shape
from ..grammar import Spec
from ..grammar.bandwidths.fixed import Empty
from ..grammar.bandwidths.nearest import Gradient
from ..grammar.threshold import widest
from .cpu import implementation as cpu

MANY = 2**48
"""More than the length of any row."""
IMPLS = ("auto", "cpu", "reference")


def entmax(
    scores: Tensor, alpha: float | Tensor = 1.5, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """Compute alpha-entmax: p = [(alpha - 1) z - tau]_+^(1 / (alpha - 1)) with tau such that sum p = 1.

    alpha = 1 is softmax, 1.5 the biweight, 2 sparsemax; larger is sparser. It is the adaptive rule with the kernel
    of power r = 1 / (alpha - 1) (sparse-attention paper, section 2.3 and Proposition 1).

    Args:
        scores: any shape.
        alpha: a number from 1 to 1001, or a tensor of such values broadcastable to `scores` with length 1 along `dim`.
            A row whose alpha is below 1 is NaN; `regard.checks.debug()` makes that an error.
        dim: the axis along which weights sum to one.
        mask: boolean, broadcastable to `scores`; True where a score counts.
        impl: "auto", "cpu" or "reference"; see the module docstring.

    Returns:
        Weights of the shape and dtype of `scores`. In float32, for alpha up to 5, the error of weights is at most
        1e-6, that of gradients at most 1e-3 of the largest in their row. If alpha < 2 and only one score is above the
        threshold, the gradient of the row is nearly 0, with an error of 1e-7 of the upstream gradient.

    Raises:
        ArgumentError: alpha out of range, a mask that is not boolean, integer scores, shapes that do not fit.
    """
    in_range("entmax", "alpha", alpha, low=1.0, high=1001.0, strict=False)
    if isinstance(alpha, Tensor):
        return _normalise("entmax", "sparsemax", scores, dim, mask, {"alpha": alpha}, impl)
    alpha = float(alpha)
    if alpha == 1 and impl == "cpu":
        raise ArgumentError("entmax: alpha=1 is softmax, which impl='cpu' does not compute; impl='reference' can.")
    text = "softmax" if alpha - 1 < 1e-12 else f"polynomial(r={_power(alpha)!r})"
    return _normalise("entmax", text, scores, dim, mask, {}, impl)


def _power(alpha: float) -> float:
    """Return r = 1 / (alpha - 1), as an integer if only rounding of alpha makes a difference: 4/3 is the triweight."""
    r = 1 / (alpha - 1)
    return float(round(r)) if abs(r - round(r)) <= 4e-16 * r * alpha / (alpha - 1) else r


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None, impl: str = "auto") -> Tensor:
    """Project onto the simplex: `entmax` with alpha = 2, the adaptive Epanechnikov kernel."""
    return _normalise("sparsemax", "sparsemax", scores, dim, mask, {}, impl)


def relumax(
    scores: Tensor, margin: float | Tensor = 1.0, dim: int = -1, mask: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """Compute [z - max z + margin]_+ / sum (sparse-attention paper, equations 20 and 21; its b is the margin).

    Scores that tie for the maximum share its gradient equally. Other arguments as in `entmax`.

    Raises:
        ArgumentError: as `entmax`; margin <= 0.
    """
    number, rows = _number("relumax", "margin", margin, low=0.0, strict=True)
    return _normalise("relumax", f"epanechnikov*anchored({number})", scores, dim, mask, rows, impl)


def normrelu(
    scores: Tensor,
    bias: float | Tensor = 0.0,
    dim: int = -1,
    mask: Tensor | None = None,
    empty: Empty = "uniform",
    impl: str = "auto",
) -> Tensor:
    """Compute [z + bias]_+ / sum: the Epanechnikov kernel under the fixed rule (sparse-attention paper, equations 11
    and 12).

    Args:
        empty: weights of rows with scores but none above -bias: "uniform", "zero" or "nearest"; without gradient.

    Other arguments and errors as in `entmax`.
    """
    number, rows = _number("normrelu", "bias", bias)
    choice("normrelu", "empty", empty, get_args(Empty))
    text = f"epanechnikov*fixed({number}{',' if number else ''}empty={empty})"
    return _normalise("normrelu", text, scores, dim, mask, rows, impl)


def topk_softmax(
    scores: Tensor, k: int, dim: int = -1, mask: Tensor | None = None, gradient: Gradient = "hard", impl: str = "auto"
) -> Tensor:
    """Compute softmax over the min(k, valid) largest scores, the lowest index first among ties.

    Args:
        gradient: "hard", "straight-through" or "soft"; see `regard.grammar.bandwidths.nearest.Nearest`.

    Raises:
        ArgumentError: as `entmax`; k < 1, an unknown gradient mode.
    """
    return _normalise("topk_softmax", f"gaussian*{_nearest('topk_softmax', k, gradient)}", scores, dim, mask, {}, impl)


def topk_uniform(
    scores: Tensor, k: int, dim: int = -1, mask: Tensor | None = None, gradient: Gradient = "hard", impl: str = "auto"
) -> Tensor:
    """Give weight 1 / min(k, valid) to the k largest scores (k-nearest neighbours). Arguments as in `topk_softmax`.

    With gradient="hard" the scores have no gradient.
    """
    return _normalise("topk_uniform", f"uniform*{_nearest('topk_uniform', k, gradient)}", scores, dim, mask, {}, impl)


def _number(
    call: str, name: str, value: Any, low: float | None = None, strict: bool = False
) -> tuple[str, dict[str, Tensor]]:
    """Return a parameter of a rule as text of its spec if it is a number, or as a row parameter if it is a tensor."""
    if isinstance(value, Tensor):
        return "", {name: value}
    in_range(call, name, value, low=low, strict=strict)
    return f"{name}={float(value)!r}", {}  # float(): a traced number becomes a constant


def _nearest(call: str, k: Any, gradient: str) -> str:
    k = min(checks.whole(call, "k", k, 1), MANY)
    return f"nearest(k={k},gradient={choice(call, 'gradient', gradient, get_args(Gradient))})"


def _normalise(
    call: str, text: str, scores: Tensor, dim: int, mask: Tensor | None, params: dict[str, Tensor], impl: str
) -> Tensor:
    spec = Spec.parse(text)
    choice(call, "impl", impl, IMPLS)
    checks.floating(call, "scores", scores)
    require(scores.dim() > 0, call, "scores is a scalar, expected at least one axis.")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -scores.dim() <= dim < scores.dim():
        raise ArgumentError(f"{call}: dim is {checks.shown(dim)}, but scores has shape {shape(scores)}.")
    if checks.debugging():
        checks.finite(call, "scores", torch.where(scores == -torch.inf, 0, scores))  # -inf masks a score
    if mask is not None:
        checks.boolean_mask(call, "mask", mask)
        checks.broadcastable(call, "mask", mask, tuple(scores.shape))
        checks.on_device(call, "mask", mask, scores.device)
        scores = torch.where(mask, scores, -torch.inf)
    if scores.numel() == 0:
        return scores.clone()
    z = scores.movedim(dim, -1)
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    rows = {name: _rows(call, name, value, scores, dim).to(z.dtype) for name, value in params.items()}
    for name, value in rows.items():
        info = spec.params[name]
        in_range(call, name, value, low=info.low, strict=info.strict)
    reason = None if impl == "reference" else cpu.unable(spec, z)
    require(impl != "cpu" or reason is None, call, f"impl='cpu' {reason}. impl='reference' can.")
    if impl != "reference" and reason is None:
        p = cpu.normalise(spec, z, rows)
    else:
        if "alpha" in rows and rows["alpha"].requires_grad:  # dL/dalpha is r^2 times a cancelling sum
            z, rows = widest(z), {"alpha": widest(rows["alpha"])}
        p = spec.weighting.weights(z, spec.weighting.fit(z, rows), rows)
    return p.to(scores.dtype).movedim(-1, dim)


def _rows(call: str, name: str, value: Tensor, scores: Tensor, dim: int) -> Tensor:
    """Return a row parameter [..., 1] with `dim` moved last."""
    checks.floating(call, name, value)
    checks.broadcastable(call, name, value, tuple(scores.shape))
    checks.on_device(call, name, value, scores.device)
    value = value.reshape((1,) * (scores.dim() - value.dim()) + tuple(value.shape))
    if value.shape[dim] != 1:
        raise ArgumentError(
            f"{call}: {name} has shape {shape(value)}, but rows run along dim {dim} of scores {shape(scores)}; its "
            f"length there must be 1."
        )
    return value.movedim(dim, -1)
