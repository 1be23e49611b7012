"""The mathematics made fast, and the choice of what runs."""

from . import blocked, cpu, interpolated, linear, overlay, reference, sdpa
from .attention import attention, diagnosed_attention, explain
from .dispatch import Explanation, implementations, implementations_registry, register_impl
from .triton import attention as triton_attention
from .triton import memory_values as triton_memory

__all__ = [
    "Explanation",
    "attention",
    "blocked",
    "cpu",
    "diagnosed_attention",
    "explain",
    "implementations",
    "implementations_registry",
    "interpolated",
    "linear",
    "overlay",
    "reference",
    "register_impl",
    "sdpa",
    "triton_attention",
    "triton_memory",
]
