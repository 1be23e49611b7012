"""Associative memories: pairs that are written, read by content and forgotten."""

from .associative import AssociativeMemory, Retrieval
from .energy import energies

__all__ = ["AssociativeMemory", "Retrieval", "energies"]
