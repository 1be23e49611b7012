"""`entmax.activations`: sparsemax and 1.5-entmax.

Sources: sparsemax, arXiv 1602.02068; entmax, arXiv 1905.05702.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...checks import floating, optional_whole, within
from ...public import entmax


def sparsemax(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    """Project scores onto the simplex: the p >= 0 of sum 1 that is nearest to them (`regard.sparsemax`).

    Args:
        X: any shape; -inf hides a score.
        dim: the axis along which p sums to one.
        k: how many scores the package entmax sorts at first; it changes nothing here.

    Returns:
        p, of the shape and dtype of X. Rows in which every score is -inf are 0.

    Raises:
        ArgumentError: scores that are not floating-point, a `dim` that X does not have, k < 1.
    """
    return _weights("sparsemax", X, 2.0, dim, k)


def entmax15(X: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    """Compute 1.5-entmax: p = [X / 2 - tau]_+^2 with tau such that p sums to one (`regard.entmax`).

    Arguments, result and errors as in `sparsemax`.
    """
    return _weights("entmax15", X, 1.5, dim, k)


def _weights(call: str, X: Tensor, alpha: float, dim: int, k: int | None) -> Tensor:
    floating(call, "X", X)
    optional_whole(call, "k", k, 1)
    return within(call, None, entmax, X, alpha, dim)


def _sparsemax_threshold_and_support(X: Tensor, dim: int = -1, k: int | None = None) -> tuple[Tensor, Tensor]:
    """Return tau with sparsemax(X) = [X - tau]_+, and the number of weights above 0, both with length 1 along `dim`."""
    p = sparsemax(X, dim, k)
    return X.amax(dim, keepdim=True) - p.amax(dim, keepdim=True), (p > 0).sum(dim, keepdim=True)


def _entmax_threshold_and_support(X: Tensor, dim: int = -1, k: int | None = None) -> tuple[Tensor, Tensor]:
    """Return tau with entmax15(2 X) = [X - tau]_+^2, and the number of weights above 0, as above."""
    p = entmax15(2 * X, dim, k)
    return X.amax(dim, keepdim=True) - p.amax(dim, keepdim=True).sqrt(), (p > 0).sum(dim, keepdim=True)


class FunctionModule(nn.Module):
    """A function of scores as a module, whose attributes are the function's arguments."""

    def __init__(self, function: Callable[..., Tensor], **arguments: Any) -> None:
        super().__init__()
        self._function, self._names = function, tuple(arguments)
        for name, value in arguments.items():
            setattr(self, name, value)

    def forward(self, X: Tensor, *target: Tensor) -> Tensor:
        return self._function(X, *target, **{name: getattr(self, name) for name in self._names})


class Sparsemax(FunctionModule):
    """The module of `sparsemax`, with its arguments `dim` and `k`."""

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__(sparsemax, dim=dim, k=k)


class Entmax15(FunctionModule):
    """The module of `entmax15`, with its arguments `dim` and `k`."""

    def __init__(self, dim: int = -1, k: int | None = None) -> None:
        super().__init__(entmax15, dim=dim, k=k)
