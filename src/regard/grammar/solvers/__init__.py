"""Solvers of the local linear model. One file per solver; every file of this folder is imported."""

from ...registry import import_all
from .auto import Auto
from .base import Solver, solvers
from .block_diagonal import BlockDiagonal
from .cholesky import Cholesky
from .conjugate_gradient import ConjugateGradient
from .learned import Learned

__all__ = ["Auto", "BlockDiagonal", "Cholesky", "ConjugateGradient", "Learned", "Solver", "solvers"]

import_all(__name__)
