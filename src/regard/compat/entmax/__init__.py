"""A drop-in for the package entmax (PyPI: entmax, release 1.3), computed by regard's adaptive weights.

Names, arguments and modules are those of that package; docs/compat.md lists what differs. Rows in which every score is
-inf are 0, and `k`, `n_iter` and `ensure_sum_one` have no effect.
"""

from .activations import Entmax15, Sparsemax, entmax15, sparsemax
from .losses import (
    Entmax15Loss,
    EntmaxBisectLoss,
    NormmaxBisectLoss,
    SparsemaxBisectLoss,
    SparsemaxLoss,
    entmax15_loss,
    entmax_bisect_loss,
    normmax_bisect_loss,
    sparsemax_bisect_loss,
    sparsemax_loss,
)
from .root_finding import (
    BudgetBisect,
    EntmaxBisect,
    NormmaxBisect,
    SparsemaxBisect,
    budget_bisect,
    entmax_bisect,
    normmax_bisect,
    sparsemax_bisect,
)

__all__ = [
    "BudgetBisect", "Entmax15", "Entmax15Loss", "EntmaxBisect", "EntmaxBisectLoss", "NormmaxBisect",
    "NormmaxBisectLoss", "Sparsemax", "SparsemaxBisect", "SparsemaxBisectLoss", "SparsemaxLoss", "budget_bisect",
    "entmax15", "entmax15_loss", "entmax_bisect", "entmax_bisect_loss", "normmax_bisect", "normmax_bisect_loss",
    "sparsemax", "sparsemax_bisect", "sparsemax_bisect_loss", "sparsemax_loss",
]  # fmt: skip
