"""Layers. They import torch only."""

from .attention import Attention
from .rotary import rotary_angles, rotate
from .temperature import Temperature, as_temperature, temperatures

__all__ = ["Attention", "Temperature", "as_temperature", "rotary_angles", "rotate", "temperatures"]
