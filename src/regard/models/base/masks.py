"""Masks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def all_real(mask: Tensor | None) -> bool:
    """Whether a mask can be seen, at no device's waiting and in no graph, to hide nothing: then it is not needed."""
    if mask is None:
        return True
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())
