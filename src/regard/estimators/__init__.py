"""The mathematics as plain PyTorch on any device: what every fast form is tested against."""

from .delta import DeltaState, delta_rule
from .diagnostics import Diagnostics
from .fast_weights import FastWeightState, WriteRule, fast_weight_memory
from .linear import LinearState, linear_attention
from .mesa import MesaState, mesa_attention
from .visibility import Visibility

__all__ = [
    "DeltaState",
    "Diagnostics",
    "FastWeightState",
    "LinearState",
    "MesaState",
    "Visibility",
    "WriteRule",
    "delta_rule",
    "fast_weight_memory",
    "linear_attention",
    "mesa_attention",
]
