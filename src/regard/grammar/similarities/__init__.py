"""Similarities of queries and keys. One file per similarity; every file of this folder is imported."""

from ...registry import import_all
from .base import Similarity, similarities
from .cosine import Cosine
from .dot import Dot
from .elu import ELU
from .euclidean import Euclidean
from .relu import ReLU
from .relu2 import ReLU2

__all__ = ["ELU", "Cosine", "Dot", "Euclidean", "ReLU", "ReLU2", "Similarity", "similarities"]

import_all(__name__)
