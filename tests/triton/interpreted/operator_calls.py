"""Which operators a call runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators of regard that were called, with copies of their first arguments: some write into these."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard" and func not in self.made:
            copied = tuple(
                x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args
            )
            self.made[func] = (copied, kwargs or {})
        return func(*args, **(kwargs or {}))
