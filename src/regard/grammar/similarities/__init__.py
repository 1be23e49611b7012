"""Similarities of queries and keys. One file per similarity or family; every file of this folder is imported."""

from ...registry import import_all
from .base import Similarity, similarities
from .cosine import Cosine
from .dot import Dot
from .euclidean import Euclidean
from .feature_maps import ELU, ReLU, ReLU2

__all__ = ["ELU", "Cosine", "Dot", "Euclidean", "ReLU", "ReLU2", "Similarity", "similarities"]

import_all(__name__)
