"""Masks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def all_real(mask: Tensor | None) -> bool:
    """Return whether a mask is known to hide nothing; only CPU masks are read, and none in a compiled graph."""
    if mask is None:
        return True
    return mask.device.type == "cpu" and not torch.compiler.is_compiling() and bool(mask.all())
