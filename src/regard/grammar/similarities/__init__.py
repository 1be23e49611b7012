"""Similarities of queries and keys. One file per similarity or family; every file of this folder is imported."""

from ...registry import import_all
from .base import Similarity, similarities
from .built_in import ELU, Cosine, Dot, Euclidean, ReLU, ReLU2

__all__ = ["ELU", "Cosine", "Dot", "Euclidean", "ReLU", "ReLU2", "Similarity", "similarities"]

import_all(__name__)
