"""Layers. They import torch only."""

from .attention import Attention
from .feed_forward import feed_forwards
from .hooks import HookPoint
from .ridge import Ridge, as_ridge, ridges
from .rotary import rotary_angles, rotate
from .temperature import Temperature, as_temperature, temperatures

__all__ = [
    "Attention",
    "HookPoint",
    "Ridge",
    "Temperature",
    "as_ridge",
    "as_temperature",
    "feed_forwards",
    "ridges",
    "rotary_angles",
    "rotate",
    "temperatures",
]
