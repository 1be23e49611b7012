"""regard: attention as regression at test time.

Keys and values are the training data, the query is the test point, and the output is the prediction. `Spec` names the
parts of that regression, and `attention` computes it. Importing this package does not import torch; the first use of a
name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from . import checks as checks
    from .public import AssociativeMemory as AssociativeMemory
    from .public import DeltaState as DeltaState
    from .public import Diagnostics as Diagnostics
    from .public import FastWeightState as FastWeightState
    from .public import LinearState as LinearState
    from .public import MesaState as MesaState
    from .public import Spec as Spec
    from .public import WriteRule as WriteRule
    from .public import attention as attention
    from .public import delta_rule as delta_rule
    from .public import entmax as entmax
    from .public import explain as explain
    from .public import fast_weight_memory as fast_weight_memory
    from .public import interpolated_attention as interpolated_attention
    from .public import linear_attention as linear_attention
    from .public import local_linear_attention as local_linear_attention
    from .public import mesa_attention as mesa_attention
    from .public import normrelu as normrelu
    from .public import presets as presets
    from .public import registries as registries
    from .public import relumax as relumax
    from .public import sparsemax as sparsemax
    from .public import topk_softmax as topk_softmax
    from .public import topk_uniform as topk_uniform

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


def __getattr__(name: str) -> Any:
    """Load all public names when the first is used, and subpackages on use."""
    if name in __all__ and name != "checks":
        public = import_module(".public", __name__)
        globals().update({key: getattr(public, key) for key in public.__all__})
        return globals()[name]
    if not name.startswith("_"):
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
