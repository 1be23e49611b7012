"""Torch custom operators that launch kernels: their arguments, registration and derivatives."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...precision import PLAIN, transformed

FARTHEST = 2**31 // 256  # rows with larger strides are copied, so that 256 rows of a tile have 32-bit offsets


def rows_together(x: Tensor, farthest: int | None = None) -> Tensor:
    """Return x with a contiguous last axis, as kernels load it, copied also if rows are `farthest` numbers apart."""
    together = x.stride(-1) == 1 or x.shape[-1] == 1
    near = farthest is None or x.stride(-2) < farthest
    return x if together and near else x.contiguous()


def empty_gradients(given: Iterable[Tensor], numbers: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return contiguous tensors for gradients: like those `given`, and float32 for numbers of rows, [0] for None."""
    first, *_ = same = [x.new_empty(x.shape) for x in given]
    return *same, *(first.new_empty((0,) if x is None else x.shape, dtype=torch.float32) for x in numbers)


def tensor_or_number(x: Any, default: float = 1.0) -> tuple[Tensor | None, float]:
    """Return (numbers of rows, float32 and contiguous, default), or (None, one number for all rows)."""
    if isinstance(x, Tensor):
        return x.to(torch.float32).contiguous(), default
    return None, default if x is None else float(x)


def later(package: str) -> Callable[..., Any]:
    """Return `backward` of the module `backward` of a package, which is imported, with triton, at the first call."""
    return lambda *args: import_module(f"{package}.backward").backward(*args)


def operator(name: str, run: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Any:
    """Register the operator regard::triton_<name>. A `plain` call goes to `run`, which saves tens of microseconds."""
    made = torch.library.custom_op(f"regard::triton_{name}", run, mutates_args=(), schema=schema)
    made.register_fake(fake)
    numbers = [i for i, x in enumerate(made._opoverload._schema.arguments) if str(x.type) == "float"]

    def call(*args: Any) -> Any:
        if not plain(args):
            return made(*args)
        for i in numbers:  # as an operator does with integers: kernels are compiled for them otherwise
            if type(args[i]) is not float:
                args = (*args[:i], float(args[i]), *args[i + 1 :])
        return run(*args)

    call.register_autograd = made.register_autograd  # type: ignore[attr-defined]
    return call


def plain(args: Sequence[Any]) -> bool:
    """Return whether a call needs no derivative and nothing traces, transforms or intercepts it."""
    if torch.compiler.is_compiling() or transformed():  # first: the checks below cannot be traced
        return False
    if torch._C._len_torch_dispatch_stack() or torch._ops._len_torch_dispatch_stack_pre_dispatch():
        return False
    every = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(x, Tensor)]
    return all(_plain(x, torch.is_grad_enabled()) for x in every)


def _plain(x: Tensor, graded: bool) -> bool:
    """Return whether a tensor's memory holds its numbers: no subclass, sign to be applied, or vectorised batch."""
    special = type(x) not in PLAIN or x.is_neg() or torch._C._functorch.is_legacy_batchedtensor(x)
    return not special and not (graded and x.requires_grad)


class _Unrecorded:
    """Stands in for the `ctx` of an autograd function's `forward` if no backward pass follows."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""

    mark_non_differentiable = set_materialize_grads = save_for_backward


def applied(function: Any, *args: Any) -> Any:
    """Apply an autograd function, or only its forward pass where the call is `plain`."""
    return function.forward(_Unrecorded(), *args) if plain(args) else function.apply(*args)
