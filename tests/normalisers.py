"""The softmax-like functions of `regard` on plain scores, and their weights by the formulas of `contracts.oracle`."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import regard

Call = Callable[..., Tensor]
ALPHAS = (1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)
IMPLS = ("reference", "cpu") if find_spec("numba") else ("reference",)

GAUSSIAN, UNIFORM = ({"rule": "nearest", "kernel": kernel} for kernel in ("gaussian", "uniform"))
Row = tuple[Call, dict[str, Any], dict[str, Any]]
BOTH: dict[str, Row] = {
    **{f"entmax-{a:.3g}": (regard.entmax, {"alpha": a}, {"rule": "adaptive", "r": 1 / (a - 1)}) for a in ALPHAS},
    "entmax-tensor": (
        regard.entmax, {"alpha": torch.tensor(1.3, dtype=torch.float64)}, {"rule": "adaptive", "r": 1 / 0.3},
    ),
    "sparsemax": (regard.sparsemax, {}, {"rule": "adaptive"}),
    "relumax": (regard.relumax, {"margin": 0.9}, {"rule": "anchored"}),
    "normrelu": (regard.normrelu, {"bias": 0.3}, {"rule": "fixed"}),
    "normrelu-zero": (regard.normrelu, {"bias": 0.3, "empty": "zero"}, {"rule": "fixed"}),
    "normrelu-nearest": (regard.normrelu, {"bias": 0.3, "empty": "nearest"}, {"rule": "fixed"}),
    "topk_softmax": (regard.topk_softmax, {"k": 3}, GAUSSIAN),
    "topk_uniform": (regard.topk_uniform, {"k": 3}, UNIFORM),
}  # fmt: skip
"""What both implementations compute: (function, arguments, other arguments of `oracle.of_scores`)."""
PLAIN: dict[str, Row] = {
    "softmax": (regard.entmax, {"alpha": 1.0}, {**GAUSSIAN, "k": 10**9}),
    "topk_softmax-soft": (regard.topk_softmax, {"k": 3, "gradient": "soft"}, GAUSSIAN),
    "topk_uniform-soft": (regard.topk_uniform, {"k": 3, "gradient": "soft"}, UNIFORM),
    "topk_uniform-straight-through": (regard.topk_uniform, {"k": 3, "gradient": "straight-through"}, UNIFORM),
}
"""What has no numba kernel."""
CALLS, REFERENCE = ({name: partial(call, **how) for name, (call, how, _) in table.items()} for table in (BOTH, PLAIN))
PAIRS = [(name, impl) for name in CALLS for impl in IMPLS] + [(name, "reference") for name in REFERENCE]
HOW = {
    name: {**{key: x for key, x in how.items() if key != "alpha"}, **rule}
    for name, (_, how, rule) in {**BOTH, **PLAIN}.items()
}
"""Arguments of `oracle.of_scores` that give the same weights and gradients."""


def function(name: str, impl: str) -> Call:
    call = {**CALLS, **REFERENCE}[name]
    return lambda z, **how: call(z, impl=impl, **how)


def normal(*shape: int, spread: float = 1.0, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=make, dtype=torch.float64) * spread).to(dtype)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


LEARNED: dict[str, tuple[Call, Tensor]] = {
    "alpha": (regard.entmax, column(1.5, 1.2)),
    "alpha-above-2": (regard.entmax, column(2.6, 3.1)),
    "alpha-at-2": (regard.entmax, column(2.0, 2.0)),
    "alpha-shared": (regard.entmax, torch.tensor(1.4, dtype=torch.float64)),
    "margin": (regard.relumax, column(0.9, 1.6)),
    "bias": (regard.normrelu, column(0.3, -0.5)),
    "bias-shared": (regard.normrelu, torch.tensor(0.25, dtype=torch.float64)),
}
"""Functions with a learned parameter: the function and a value for each of two rows, or one for both."""
