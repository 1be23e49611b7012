"""Functions that an exported graph holds as one node.

What is cut into chunks has axes of ceil(T / c) chunks, and a loop over them has as many steps. An exported graph of a
dynamic length T can hold neither; a node from T positions to T positions has no such axis. The node runs the function
itself, so that it computes what the function computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])


def one_node(name: str, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator: while `torch.export` traces, calls of the function become the operator `regard::name`.

    The function takes and gives tensors, None and numbers, annotated; it changes none of them.

    Args:
        name: of the operator.
        like: from the same arguments to empty tensors of the shapes and dtypes that the function gives.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def owned(*args: Any) -> Any:
            """Own memory for every result, in the order that `like` promises."""
            found = function(*args)
            return own(found) if isinstance(found, Tensor) else tuple(map(own, found))

        operator = torch.library.custom_op(f"regard::{name}", owned, mutates_args=())
        operator.register_fake(like)
        operator.register_autograd(_derivative(function), setup_context=_keep)

        @wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_exporting() else function(*args)

        return call  # type: ignore[return-value]

    return decorate


def own(x: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def _derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass: the function once more, by autograd."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [next(saved) if other is None else other[0] for other in ctx.others]
            if not again:
                inputs = [_leaf(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
            found = function(*inputs)
            outputs = (found,) if isinstance(found, Tensor) else found
            moved = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
            slopes = torch.autograd.grad(
                outputs, [inputs[i] for i in moved], grads, create_graph=again, allow_unused=True
            )
        every: list[Tensor | None] = [None] * len(inputs)
        for i, slope in zip(moved, slopes, strict=True):
            every[i] = slope
        return tuple(every)

    return backward


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
