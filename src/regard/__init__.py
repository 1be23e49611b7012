"""regard: attention is regression done at test time.

Keys and values are the training data, the query is the test point, the output is the prediction. `Spec` names the
parts of that regression; `attention` computes it. Importing this package imports torch and nothing else.
"""

from . import checks
from ._version import __version__
from .estimators import (
    DeltaState,
    Diagnostics,
    FastWeightState,
    LinearState,
    MesaState,
    WriteRule,
    delta_rule,
    fast_weight_memory,
    linear_attention,
    mesa_attention,
)
from .grammar import Spec, presets
from .memory import AssociativeMemory
from .ops import attention, explain
from .ops.interpolated import interpolated_attention
from .ops.local_linear_attention import local_linear_attention
from .ops.normalisers import entmax, normrelu, relumax, sparsemax, topk_softmax, topk_uniform
from .registries import registries

__all__ = [
    "AssociativeMemory",
    "DeltaState",
    "Diagnostics",
    "FastWeightState",
    "LinearState",
    "MesaState",
    "Spec",
    "WriteRule",
    "__version__",
    "attention",
    "checks",
    "delta_rule",
    "entmax",
    "explain",
    "fast_weight_memory",
    "interpolated_attention",
    "linear_attention",
    "local_linear_attention",
    "mesa_attention",
    "normrelu",
    "presets",
    "registries",
    "relumax",
    "sparsemax",
    "topk_softmax",
    "topk_uniform",
]

for _registry in registries().values():  # now, since what is being compiled cannot search for entry points
    _registry.names()
