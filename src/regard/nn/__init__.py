"""Layers. They import torch only."""

from .attention import Attention
from .ridge import Ridge, as_ridge, ridges
from .rotary import rotary_angles, rotate
from .temperature import Temperature, as_temperature, temperatures

__all__ = [
    "Attention",
    "Ridge",
    "Temperature",
    "as_ridge",
    "as_temperature",
    "ridges",
    "rotary_angles",
    "rotate",
    "temperatures",
]
