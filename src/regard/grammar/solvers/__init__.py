"""Solvers of the local linear model. One file per solver; every file of this folder is imported."""

from ...registry import import_all
from .auto import Auto
from .base import Solver, solvers
from .conjugate_gradient import ConjugateGradient
from .direct import BlockDiagonal, Cholesky, Learned

__all__ = ["Auto", "BlockDiagonal", "Cholesky", "ConjugateGradient", "Learned", "Solver", "solvers"]

import_all(__name__)
