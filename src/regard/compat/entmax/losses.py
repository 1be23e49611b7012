"""`entmax.losses`: Fenchel-Young losses, which are to their map p what cross entropy is to softmax.

    L(X, y) = Omega(p) + (p - e_y) . X,    dL/dX = p - e_y

Omega(p) is (1 - sum p^alpha) / (alpha (alpha - 1)) for alpha-entmax and 1 - (sum p^alpha)^(1 / alpha) for normmax.
Source: arXiv 1905.05702, section 3. Legend: n rows, C classes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...checks import integers, on_device, one_of, require, tensor
from .activations import FunctionModule, entmax15, sparsemax
from .root_finding import entmax_bisect, normmax_bisect, sparsemax_bisect

REDUCTIONS = ("elementwise_mean", "sum", "none")


def sparsemax_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """Return the sparsemax loss of every row.

    Args:
        X: scores [n, C]; -inf hides a class.
        target: the true classes, integers [n] below C.
        k: as in `sparsemax`.

    Returns:
        Losses [n] >= 0, in the dtype of X; 0 where the true class has weight 1.

    Raises:
        ArgumentError: shapes or dtypes that do not fit.
    """
    return _loss("sparsemax_loss", X, target, lambda z: sparsemax(z, -1, k), 2.0)


def sparsemax_bisect_loss(X: Tensor, target: Tensor, n_iter: int = 50) -> Tensor:
    """Return the sparsemax loss of every row. As `sparsemax_loss`; `n_iter` as in `sparsemax_bisect`."""
    return _loss("sparsemax_bisect_loss", X, target, lambda z: sparsemax_bisect(z, -1, n_iter), 2.0)


def entmax15_loss(X: Tensor, target: Tensor, k: int | None = None) -> Tensor:
    """Return the 1.5-entmax loss of every row. As `sparsemax_loss`; `k` as in `entmax15`."""
    return _loss("entmax15_loss", X, target, lambda z: entmax15(z, -1, k), 1.5)


def entmax_bisect_loss(X: Tensor, target: Tensor, alpha: float | Tensor = 1.5, n_iter: int = 50) -> Tensor:
    """Return the alpha-entmax loss of every row.

    As `sparsemax_loss`; `alpha` (a number, or a tensor that expands to [n, 1]) and `n_iter` as in `entmax_bisect`. At
    alpha = 1 the loss is torch's cross entropy, which this function does not compute: a number raises an error, and
    rows of a tensor are NaN.
    """
    call = "entmax_bisect_loss"
    fits = isinstance(alpha, Tensor) or alpha != 1
    require(fits, call, "alpha is 1, where the loss is torch.nn.functional.cross_entropy; use that.")
    return _loss(call, X, target, lambda z: entmax_bisect(z, alpha, -1, n_iter), alpha)


def normmax_bisect_loss(X: Tensor, target: Tensor, alpha: float | Tensor = 2, n_iter: int = 50) -> Tensor:
    """Return the alpha-normmax loss of every row. As `sparsemax_loss`; `alpha` and `n_iter` as in `normmax_bisect`."""
    return _loss("normmax_bisect_loss", X, target, lambda z: normmax_bisect(z, alpha, -1, n_iter), alpha, norm=True)


def _loss(
    call: str, X: Tensor, target: Tensor, weights: Callable[[Tensor], Tensor], alpha: float | Tensor, norm: bool = False
) -> Tensor:
    """Return the losses [n] of the weights of the scores X [n, C]."""
    tensor(call, "X", X, "n", "C")
    integers(call, "target", target, X.shape[0])
    on_device(call, "target", target, X.device, "X")
    z = X.to(torch.promote_types(X.dtype, torch.float32))
    p = weights(z)
    alpha = alpha.to(p.dtype).expand(len(X), 1) if isinstance(alpha, Tensor) else float(alpha)
    some = p > 0
    power = torch.where(some, torch.where(some, p, 1) ** alpha, 0).sum(1, keepdim=True)
    omega = 1 - power ** (1 / alpha) if norm else (1 - power) / (alpha * (alpha - 1))
    z = z - z.detach().amax(1, keepdim=True)  # the same loss, more precisely
    mean = (p * torch.where(some, z, 0)).sum(1)
    return (omega[:, 0] + mean - z.gather(1, target[:, None].long())[:, 0]).to(X.dtype)


class _Loss(FunctionModule):
    """A loss of scores [n, C] and classes [n]: its mean, its sum or every row.

    Args:
        ignore_index: rows with this class count as 0 and not for the mean.
        reduction: "elementwise_mean", "sum" or "none".
    """

    def __init__(self, loss: Callable[..., Tensor], ignore_index: int, reduction: str, **arguments: Any) -> None:
        super().__init__(loss, **arguments)
        self.ignore_index = ignore_index
        self.reduction = one_of(type(self).__name__, "reduction", reduction, REDUCTIONS)

    def loss(self, X: Tensor, target: Tensor) -> Tensor:
        """Return the loss of every row."""
        return super().forward(X, target)

    def forward(self, X: Tensor, target: Tensor) -> Tensor:
        ignored = target == self.ignore_index
        losses = torch.where(ignored, 0, self.loss(X, torch.where(ignored, 0, target)))
        if self.reduction == "none":
            return losses
        return losses.sum() if self.reduction == "sum" else losses.sum() / (~ignored).sum()


class SparsemaxLoss(_Loss):
    """The module of `sparsemax_loss`: `k`, then the arguments of all losses."""

    def __init__(self, k: int | None = None, ignore_index: int = -100, reduction: str = "elementwise_mean") -> None:
        super().__init__(sparsemax_loss, ignore_index, reduction, k=k)


class SparsemaxBisectLoss(_Loss):
    """The module of `sparsemax_bisect_loss`: `n_iter`, then the arguments of all losses."""

    def __init__(self, n_iter: int = 50, ignore_index: int = -100, reduction: str = "elementwise_mean") -> None:
        super().__init__(sparsemax_bisect_loss, ignore_index, reduction, n_iter=n_iter)


class Entmax15Loss(_Loss):
    """The module of `entmax15_loss`: `k`, then the arguments of all losses."""

    def __init__(self, k: int | None = 100, ignore_index: int = -100, reduction: str = "elementwise_mean") -> None:
        super().__init__(entmax15_loss, ignore_index, reduction, k=k)


class EntmaxBisectLoss(_Loss):
    """The module of `entmax_bisect_loss`: `alpha` and `n_iter`, then the arguments of all losses."""

    def __init__(
        self,
        alpha: float | Tensor = 1.5,
        n_iter: int = 50,
        ignore_index: int = -100,
        reduction: str = "elementwise_mean",
    ) -> None:
        super().__init__(entmax_bisect_loss, ignore_index, reduction, alpha=alpha, n_iter=n_iter)


class NormmaxBisectLoss(_Loss):
    """The module of `normmax_bisect_loss`: `alpha` and `n_iter`, then the arguments of all losses."""

    def __init__(
        self, alpha: float | Tensor = 2, n_iter: int = 50, ignore_index: int = -100, reduction: str = "elementwise_mean"
    ) -> None:
        super().__init__(normmax_bisect_loss, ignore_index, reduction, alpha=alpha, n_iter=n_iter)
