"""The mathematics as plain PyTorch on any device: what every fast form is tested against."""

from .delta import DeltaState, delta_rule
from .diagnostics import Diagnostics
from .linear import LinearState, linear_attention
from .mesa import MesaState, mesa_attention
from .visibility import Visibility

__all__ = [
    "DeltaState",
    "Diagnostics",
    "LinearState",
    "MesaState",
    "Visibility",
    "delta_rule",
    "linear_attention",
    "mesa_attention",
]
