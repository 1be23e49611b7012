"""impl="triton": which kernels do a call of `regard.attention`. Every part says for itself what it can do."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...estimators import Diagnostics
from ..dispatch import Cost, Inputs, Problem, register_impl
from . import compact, compact_decode, local_linear, local_linear_decode, support

FEW = 64
"""Query heads of a key head up to which one query's keys are split among programs."""


@register_impl("triton", priority=35)
class Triton:
    """Fused kernels on a GPU: compact attention and local linear attention in Theta(n d) memory, forward and backward;
    with one query, keys split among programs."""

    name: ClassVar[str] = "triton"

    def available(self) -> str | None:
        return support.MISSING

    def supports(self, problem: Problem) -> str | None:
        return support.unsupported(problem) or _kernels(problem.spec.degree).supports(problem)

    def hesitates(self, problem: Problem) -> str | None:
        return "for tests: on this device Triton only interprets" if problem.device == "cpu" else None

    def native(self, problem: Problem) -> bool:
        return bool(problem.spec.similarity.name == "dot")

    def clean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`estimators.precision.clean` in one pass over the numbers."""
        from .finite import clean

        return clean(x)

    def cost(self, problem: Problem) -> Cost:
        return _kernels(problem.spec.degree).cost(problem)

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        return _kernels(inputs.spec.degree, decoding=_decoding(inputs)).run(inputs)


def _kernels(degree: int, decoding: bool = False) -> Any:
    """The module whose kernels do it: one that `supports` a problem decodes all that it supports, too."""
    general, decode = (compact, compact_decode) if degree == 0 else (local_linear, local_linear_decode)
    return decode if decoding else general


def _decoding(inputs: Inputs) -> bool:
    """Whether there are so few queries that programs must share out the keys, and nothing but the output is asked."""
    group = inputs.q.shape[1] // max(1, inputs.k.shape[1])
    if inputs.q.shape[2] != 1 or group > FEW or inputs.diagnostics:
        return False
    given = (inputs.q, inputs.k, inputs.v, inputs.factor, inputs.ridge, inputs.probe, *inputs.params.values())
    return not (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given))
