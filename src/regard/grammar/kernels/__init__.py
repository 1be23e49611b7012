"""Kernels: weight as a function of the score. One file per kernel or family; every file of this folder is imported."""

from ...registry import import_all
from .base import Kernel, Number, ParamInfo, Params, kernels, least_reach
from .gaussian import Gaussian
from .geometric import ClippedGeometric, Geometric
from .linear import Linear
from .polynomial import NAMED_POWERS, Polynomial
from .uniform import Uniform

__all__ = [
    "NAMED_POWERS", "ClippedGeometric", "Gaussian", "Geometric", "Kernel", "Linear", "Number", "ParamInfo",
    "Params", "Polynomial", "Uniform", "kernels", "least_reach",
]  # fmt: skip

import_all(__name__)
