"""Layers. They import torch only."""

from .attention import Attention
from .contextual_memory import ContextualMemory
from .feed_forward import feed_forwards
from .functional_gradient import FunctionalGradient, expected_embedding
from .hooks import HookPoint
from .persistent_memory import PersistentMemory
from .ridge import Ridge, as_ridge, ridges
from .rotary import rotary_angles, rotate
from .temperature import Temperature, as_temperature, temperatures

__all__ = [
    "Attention",
    "ContextualMemory",
    "FunctionalGradient",
    "HookPoint",
    "PersistentMemory",
    "Ridge",
    "Temperature",
    "as_ridge",
    "as_temperature",
    "expected_embedding",
    "feed_forwards",
    "ridges",
    "rotary_angles",
    "rotate",
    "temperatures",
]
