"""Functions that are one node of an exported graph, and derivatives of custom operators.

A function that works in chunks has axes and loops of ceil(T / c) chunks, which an exported graph of dynamic length T
cannot hold. One node from T positions to T positions can; it runs the function itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from .checks import ArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])


def one_node(name: str, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that makes calls of a function the operator `regard::name` while `torch.export` traces.

    The function must be annotated, take and return tensors, None and numbers, and change none of them.

    Args:
        name: name of the operator.
        like: returns empty tensors with the shapes and dtypes of the results, from the same arguments.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def owned(*args: Any) -> Any:
            """Copy the results: an operator must not return its inputs or views of them."""
            results = function(*args)
            return own(results) if isinstance(results, Tensor) else tuple(map(own, results))

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
    ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in inputs))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]


def _derivative(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that runs the function again under autograd."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [x if other is None else other for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]
            if not again:
                real = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs]
                inputs = [x.detach().requires_grad_() if leaf else x for x, leaf in zip(inputs, real, strict=True)]
            results = function(*inputs)
            outputs = (results,) if isinstance(results, Tensor) else results
            leaves = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
            slopes = torch.autograd.grad(outputs, [*leaves.values()], grads, create_graph=again, allow_unused=True)
        found = dict(zip(leaves, slopes, strict=True))
        return tuple(found.get(i) for i in range(len(inputs)))

    return backward


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a function, which changes no argument, the operator `regard::name`."""
    return torch.library.custom_op(f"regard::{name}", mutates_args=(), schema=schema)


Keep = Callable[[tuple[Any, ...], tuple[Tensor, ...]], tuple[tuple[Tensor | None, ...], tuple[Any, ...]]]


def differentiable(forward: Any, backward: Any, gradients: Callable[..., tuple[Tensor, ...]], keep: Keep) -> None:
    """Register `backward` as the derivative of `forward`. Only the first output is differentiable; second derivatives
    raise an error.

    Args:
        gradients: calls `backward` with the gradient and what is kept; returns gradients of the first arguments, which
            are ignored for those that are None.
        keep: returns the tensors, beginning with these arguments, and the numbers to keep of (inputs, outputs)."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, ctx.numbers = keep(inputs, output)
        ctx.save_for_backward(*tensors)
        ctx.count = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * ctx.count
        saved = ctx.saved_tensors
        slopes = gradients(grad, *saved, *ctx.numbers)
        given = [None if x is None else dx for x, dx in zip(saved, slopes, strict=False)]
        return *given, *(None,) * (ctx.count - len(given))

    forward.register_autograd(differentiate, setup_context=save)
    # the caller may have no argument `impl`
    second = "regard.attention or regard.local_linear_attention with impl='reference'"
    backward.register_autograd(once("attention: fast forms are", second))


def once(what: str, second: str) -> Callable[..., Any]:
    """Return a backward pass that says that `what` has no second derivatives, and what to call for them."""

    def refuse(ctx: Any, *_: Any) -> None:
        raise ArgumentError(f"{what} differentiable once; for second derivatives call {second}.")

    return refuse
