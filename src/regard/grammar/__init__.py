"""Attention specs: one module or folder per axis, and `Spec`, which joins the axes."""

from .bandwidths import bandwidths
from .kernels import ParamInfo, kernels
from .similarities import similarities
from .solvers import Solver, solvers
from .spec import Spec, as_spec, local_linear, presets, presets_registry
from .systems import Dense, Solved, SolveStatus, System
from .weighting import RowStats, Status, Weighting

__all__ = [
    "Dense", "ParamInfo", "RowStats", "SolveStatus", "Solved", "Solver", "Spec", "Status", "System", "Weighting",
    "as_spec", "bandwidths", "kernels", "local_linear", "presets", "presets_registry", "similarities", "solvers",
]  # fmt: skip
