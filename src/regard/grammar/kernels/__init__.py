"""Kernels: how weight falls with the score. One file a kernel; all files of this folder are imported."""

from ...registry import import_all
from .base import Kernel, Number, ParamInfo, Params, kernels, least_reach
from .clipped_geometric import ClippedGeometric
from .gaussian import Gaussian
from .geometric import Geometric
from .linear import Linear
from .polynomial import NAMED_POWERS, Polynomial
from .uniform import Uniform

__all__ = [
    "NAMED_POWERS",
    "ClippedGeometric",
    "Gaussian",
    "Geometric",
    "Kernel",
    "Linear",
    "Number",
    "ParamInfo",
    "Params",
    "Polynomial",
    "Uniform",
    "kernels",
    "least_reach",
]

import_all(__name__)
