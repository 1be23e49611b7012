"""Similarities: how near a query is to a key. One file each; all files of this folder are imported."""

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
