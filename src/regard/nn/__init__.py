"""Layers. They import torch only."""

from .attention import Attention
from .rotary import rotary_angles, rotate

__all__ = ["Attention", "rotary_angles", "rotate"]
