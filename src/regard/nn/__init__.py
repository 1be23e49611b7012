"""Layers; they depend on torch only."""

from .. import implementations as _implementations  # noqa: F401  (now: a graph being compiled cannot import)
from .attention.layer import Attention
from .attention.ridge import Ridge, as_ridge, ridges
from .attention.rotary import rotary_angles, rotate
from .attention.temperature import Temperature, as_temperature, temperatures
from .feed_forward import feed_forwards
from .functional_gradient import FunctionalGradient, expected_embedding
from .hooks import HookPoint
from .memory.fast_weight_config import FastWeightConfig
from .memory.fast_weight_mlp import FastWeightMLP
from .memory.fast_weight_product_key_memory import FastWeightProductKeyMemory
from .memory.large_chunk_ttt import LargeChunkTTT
from .memory.product_key_memory import ProductKeyMemory
from .mosaic.contextual_memory import ContextualMemory
from .mosaic.persistent_memory import PersistentMemory
from .optimizer_groups import OptimizerGroups, optimizer_groups

__all__ = [
    "Attention", "ContextualMemory", "FastWeightConfig", "FastWeightMLP", "FastWeightProductKeyMemory",
    "FunctionalGradient", "HookPoint", "LargeChunkTTT", "OptimizerGroups", "PersistentMemory", "ProductKeyMemory",
    "Ridge", "Temperature", "as_ridge", "as_temperature", "expected_embedding", "feed_forwards", "optimizer_groups",
    "ridges", "rotary_angles", "rotate", "temperatures",
]  # fmt: skip
