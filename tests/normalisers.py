"""The softmax-like functions of `regard` on plain scores, and their weights by the formulas of `contracts.oracle`."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import regard

Call = Callable[..., Tensor]
ALPHAS = (1.1, 4 / 3, 1.5, 1.75, 2.0, 3.0)
IMPLS = ("reference", "cpu") if find_spec("numba") else ("reference",)

CALLS: dict[str, Call] = {
    **{f"entmax-{a:.3g}": (lambda z, a=a, **how: regard.entmax(z, a, **how)) for a in ALPHAS},
    "entmax-tensor": lambda z, **how: regard.entmax(z, torch.tensor(1.3, dtype=torch.float64), **how),
    "sparsemax": regard.sparsemax,
    "relumax": lambda z, **how: regard.relumax(z, 0.9, **how),
    "normrelu": lambda z, **how: regard.normrelu(z, 0.3, **how),
    "normrelu-zero": lambda z, **how: regard.normrelu(z, 0.3, empty="zero", **how),
    "normrelu-nearest": lambda z, **how: regard.normrelu(z, 0.3, empty="nearest", **how),
    "topk_softmax": lambda z, **how: regard.topk_softmax(z, 3, **how),
    "topk_uniform": lambda z, **how: regard.topk_uniform(z, 3, **how),
}
"""Functions that both implementations compute."""

REFERENCE: dict[str, Call] = {
    "softmax": lambda z, **how: regard.entmax(z, 1.0, **how),
    "topk_softmax-soft": lambda z, **how: regard.topk_softmax(z, 3, gradient="soft", **how),
    "topk_uniform-soft": lambda z, **how: regard.topk_uniform(z, 3, gradient="soft", **how),
    "topk_uniform-straight-through": lambda z, **how: regard.topk_uniform(z, 3, gradient="straight-through", **how),
}
"""Functions without a numba kernel."""

PAIRS = [(name, impl) for name in CALLS for impl in IMPLS] + [(name, "reference") for name in REFERENCE]

HOW: dict[str, dict[str, Any]] = {
    **{f"entmax-{a:.3g}": {"rule": "adaptive", "r": 1 / (a - 1)} for a in ALPHAS},
    "entmax-tensor": {"rule": "adaptive", "r": 1 / 0.3},
    "sparsemax": {"rule": "adaptive"},
    "relumax": {"rule": "anchored", "margin": 0.9},
    "normrelu": {"rule": "fixed", "bias": 0.3},
    "normrelu-zero": {"rule": "fixed", "bias": 0.3, "empty": "zero"},
    "normrelu-nearest": {"rule": "fixed", "bias": 0.3, "empty": "nearest"},
    "topk_softmax": {"rule": "nearest", "kernel": "gaussian", "k": 3},
    "topk_uniform": {"rule": "nearest", "kernel": "uniform", "k": 3},
    "topk_uniform-straight-through": {"rule": "nearest", "kernel": "uniform", "k": 3, "gradient": "straight-through"},
    "topk_softmax-soft": {"rule": "nearest", "kernel": "gaussian", "k": 3, "gradient": "soft"},
    "topk_uniform-soft": {"rule": "nearest", "kernel": "uniform", "k": 3, "gradient": "soft"},
    "softmax": {"rule": "nearest", "kernel": "gaussian", "k": 10**9},
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
