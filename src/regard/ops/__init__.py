"""The mathematics made fast, and the choice of what runs."""

from . import blocked, cpu, interpolated, linear, reference, sdpa
from .attention import attention, explain
from .dispatch import Explanation, implementations, implementations_registry, register_impl

__all__ = [
    "Explanation",
    "attention",
    "blocked",
    "cpu",
    "explain",
    "implementations",
    "implementations_registry",
    "interpolated",
    "linear",
    "reference",
    "register_impl",
    "sdpa",
]
