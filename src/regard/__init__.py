"""regard: attention is regression done at test time.

Keys and values are the training data, the query is the test point, the output is the prediction. `Spec` names the
parts of that regression; `attention` computes it. Importing this package imports torch and nothing else.
"""

from . import checks
from ._version import __version__
from .estimators import Diagnostics
from .estimators.normalisers import entmax, normrelu, relumax, sparsemax, topk_softmax, topk_uniform
from .grammar import Spec, presets
from .ops import attention, explain
from .registries import registries

__all__ = [
    "Diagnostics",
    "Spec",
    "__version__",
    "attention",
    "checks",
    "entmax",
    "explain",
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
