"""A drop-in for the package entmax (PyPI: entmax, release 1.3), computed by regard's adaptive weights.

Names, arguments and modules are those of that package. What differs:

- Rows in which every score is -inf are 0 with gradient 0 (there NaN or an error), and alpha = 1 is softmax (there
  uniform weights).
- Numbers that only steer the search for the threshold (`k`, `n_iter`, `ensure_sum_one`) change nothing: thresholds
  are found to the precision of the dtype.
- Derivatives exist to second order, also by alpha (all functions) and by the budget.
- float16 and bfloat16 are computed in float32.
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
