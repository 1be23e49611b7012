"""The mathematics as plain PyTorch on any device: what every fast form is tested against."""

from .diagnostics import Diagnostics
from .linear import LinearState, linear_attention
from .visibility import Visibility

__all__ = ["Diagnostics", "LinearState", "Visibility", "linear_attention"]
