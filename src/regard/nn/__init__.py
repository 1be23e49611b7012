"""Layers. They import torch only."""

from .attention import Attention
from .contextual_memory import ContextualMemory
from .fast_weight_mlp import FastWeightMLP
from .fast_weight_product_key_memory import FastWeightProductKeyMemory
from .feed_forward import feed_forwards
from .functional_gradient import FunctionalGradient, expected_embedding
from .hooks import HookPoint
from .large_chunk_ttt import LargeChunkTTT
from .optimizer_groups import OptimizerGroups, optimizer_groups
from .persistent_memory import PersistentMemory
from .product_key_memory import ProductKeyMemory
from .ridge import Ridge, as_ridge, ridges
from .rotary import rotary_angles, rotate
from .temperature import Temperature, as_temperature, temperatures

__all__ = [
    "Attention",
    "ContextualMemory",
    "FastWeightMLP",
    "FastWeightProductKeyMemory",
    "FunctionalGradient",
    "HookPoint",
    "LargeChunkTTT",
    "OptimizerGroups",
    "PersistentMemory",
    "ProductKeyMemory",
    "Ridge",
    "Temperature",
    "as_ridge",
    "as_temperature",
    "expected_embedding",
    "feed_forwards",
    "optimizer_groups",
    "ridges",
    "rotary_angles",
    "rotate",
    "temperatures",
]
