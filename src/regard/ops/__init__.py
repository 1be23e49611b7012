"""The mathematics made fast, and the choice of what runs."""

from . import blocked, reference, sdpa
from .attention import attention, explain
from .dispatch import Explanation, implementations, implementations_registry, register_impl

__all__ = [
    "Explanation",
    "attention",
    "blocked",
    "explain",
    "implementations",
    "implementations_registry",
    "reference",
    "register_impl",
    "sdpa",
]
