# ruff: noqa: F403, F405
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
    from .public import *

__all__ = [
    "AssociativeMemory", "DeltaState", "Diagnostics", "FastWeightState", "LinearState", "MesaState", "Spec",
    "WriteRule", "__version__", "attention", "checks", "delta_rule", "entmax", "explain", "fast_weight_memory",
    "interpolated_attention", "linear_attention", "local_linear_attention", "mesa_attention", "normrelu", "presets",
    "registries", "relumax", "segment_ids", "sparsemax", "topk_softmax", "topk_uniform", "varlen_attention",
]  # fmt: skip


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
