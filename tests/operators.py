"""Calls of operators: what they allocate, and those of the package's own, for `torch.library.opcheck`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Every number of elements of a tensor with memory of its own that an operator gives."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor) and not x.is_sparse:
                self.sizes.append((x.untyped_storage().nbytes() // x.element_size(), str(func)))
        return out


class Recorder(TorchDispatchMode):
    """Records calls of operators in the namespace `regard`, with copies of the tensors: some are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            copies = (x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args)
            self.calls.append((func, tuple(copies)))
        return func(*args, **(kwargs or {}))


def check_operators(run: Callable[[], Tensor], name: str) -> None:
    """Check that a pass calls `regard::{name}_forward` and `_backward` alone, and that both pass opcheck."""
    with Recorder() as seen:
        run().square().sum().backward()
    assert [func.name() for func, _ in seen.calls] == [f"regard::{name}_forward", f"regard::{name}_backward"]
    for func, args in seen.calls:
        for x in args:
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_("forward" in func.name())  # the backward pass itself has no gradient
        torch.library.opcheck(func, args)
