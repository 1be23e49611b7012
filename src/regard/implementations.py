"""Imports the built-in implementations of attention and stores of slot values; loaded by their registries."""

from .memory.stores import overlay
from .pairwise import reference, sdpa
from .pairwise.blocked import implementation as blocked
from .pairwise.cpu import implementation as cpu
from .recurrent import implementation as linear
from .triton import attention as triton_attention
from .triton.memory import values as triton_memory

__all__ = ["blocked", "cpu", "linear", "overlay", "reference", "sdpa", "triton_attention", "triton_memory"]
