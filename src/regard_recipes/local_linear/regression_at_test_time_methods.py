"""What the test-time regression recipe measures: every estimator as a function of examples, scale and ridge.

The grid of scales and ridges is the same for all of them. A scale is counted in units of the one that the estimator
has by itself (1/sqrt(d) for attention); a ridge is relative to the total weight of a kernel, absolute for Mesa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.checks import ArgumentError, suggestion
from regard.grammar import Spec
from regard.grammar.solvers import ConjugateGradient
from regard.grammar.spec import local_linear
from regard.pairwise.attention import attention
from regard.recurrent.interpolated import interpolated_attention
from regard.recurrent.linear import linear_attention
from regard.recurrent.mesa import mesa_attention
from regard.tasks import ConeExamples

Predict = Callable[[ConeExamples, float, float, bool], Tensor]
"""(examples with a batch axis, scale, ridge, strictly past) -> predictions [B, L, d]."""
State = Callable[[Tensor, Tensor, Tensor, float, bool], Tensor]
"""(query, key, value [B, 1, L, d], ridge, strictly past) -> what a linear state says at the queries."""


@dataclass(frozen=True)
class Method:
    """An estimator.

    Attributes:
        name: in tables, figures and JSON.
        takes: which of "scale" and "ridge" it has.
        predict: see `Predict`.
    """

    name: str
    takes: tuple[str, ...]
    predict: Predict


def methods(specs: Iterable[str], residuals: Iterable[str], tol: float, seed: int) -> list[Method]:
    """Every estimator of the recipe: kernels as local constants and local linear models, linear states, what stands
    between (equation 9), and the two that look at nothing.

    Args:
        specs: kernels.
        residuals: "KERNEL+STATE", the kernel on the residuals of a state of `STATES`.
        tol: residual at which the systems of local linear models count as solved.
        seed: of the random predictor.

    Raises:
        ArgumentError: an unknown kernel or state, or a local linear model where a kernel is expected.
    """
    kernels = {name: _constant(name) for name in specs}
    made = [Method(name, _takes(spec), _kernel(spec)) for name, spec in kernels.items()]
    for spec in kernels.values():
        model = local_linear(spec)
        solved = replace(model, solver=ConjugateGradient(tol=tol))
        made.append(Method(str(model), (*_takes(spec), "ridge"), _kernel(solved)))
    made += [Method("elu", (), _elu)]
    for name, state in STATES.items():
        made.append(Method(name, ("ridge",) if state is _mesa else (), _plain(state)))
    for name in residuals:
        kernel, _, known = name.rpartition("+")
        if known not in STATES:
            raise ArgumentError(f"unknown state {known!r} of {name!r}.{suggestion(known, STATES)}")
        spec, state = _constant(kernel), STATES[known]
        takes = (*_takes(spec), *(("ridge",) if state is _mesa else ()))
        made.append(Method(name, takes, _interpolated(spec, state)))
    return [*made, Method("random", (), _random(seed)), Method("zero", (), lambda ex, *_: torch.zeros_like(ex.values))]


def _constant(name: str) -> Spec:
    spec = Spec.parse(name)
    if spec.degree:
        raise ArgumentError(f"{name} is a local linear model already; give its kernel alone.")
    return spec


def _takes(spec: Spec) -> tuple[str, ...]:
    return ("scale",) if spec.takes_scale else ()


def _kernel(spec: Spec) -> Predict:
    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        own = replace(spec, ridge=ridge) if spec.degree else spec
        found: Tensor = attention(*_one_head(examples), own, is_causal=True, exclude_self=strict,
                                  scale=_own_scale(spec, examples, scale))  # fmt: skip
        return found[:, 0]

    return predict


def _one_head(examples: ConeExamples) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, 1, L, d]."""
    return examples.queries[:, None], examples.keys[:, None], examples.values[:, None]


def _own_scale(spec: Spec, examples: ConeExamples, scale: float) -> float | None:
    """`scale` times the scale that the spec has by itself."""
    own: float = spec.similarity.default_scale(examples.keys.shape[-1])
    return own * scale if spec.takes_scale else None


def _elu(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
    """Linear attention as it was published, with the feature map 1 + elu and weights that sum to one."""
    return linear_attention(*_one_head(examples), "elu", exclude_self=strict)[0][:, 0]


def _linear(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool) -> Tensor:
    """S_i q / (n + d + 1) with S_i the sum of the n visible v k^T (equation 2 with a multiple of the identity for H).

    That multiple is the best one for normal keys and a single map: E|c S q - A q|^2 is least at c = 1 / (n + d + 1).
    S_i q itself, c = 1, is too large by about n.
    """
    visible = torch.arange(q.shape[-2]) + (0 if strict else 1)
    return linear_attention(q, k, v, "linear", exclude_self=strict, scale=1 / (visible + q.shape[-1] + 1.0))[0]


def _mesa(q: Tensor, k: Tensor, v: Tensor, ridge: float, strict: bool) -> Tensor:
    """The ridge regression through the origin of all visible values on their keys (equation 2), in float64: with a
    small ridge and fewer pairs than channels its systems have condition numbers near 1e6."""
    found: Tensor = mesa_attention(q.double(), k.double(), v.double(), ridge=ridge, exclude_self=strict)[0]
    return found.to(v.dtype)


STATES: dict[str, State] = {"linear": _linear, "mesa": _mesa}
"""Linear states, which equation 9 lets a kernel correct."""


def _plain(state: State) -> Predict:
    return lambda examples, scale, ridge, strict: state(*_one_head(examples), ridge, strict)[:, 0]


def _interpolated(spec: Spec, state: State) -> Predict:
    """Equation 9: the local constant of the residuals v_j - W_i k_j, and W_i q_i on top."""

    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        def trend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            return state(q, k, v, ridge, strict)

        found = interpolated_attention(*_one_head(examples), trend, spec, exclude_self=strict,
                                       scale=_own_scale(spec, examples, scale))  # fmt: skip
        return found[:, 0]

    return predict


def _random(seed: int) -> Predict:
    """A vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""

    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        size = examples.queries.norm(dim=-1, keepdim=True)
        return torch.randn(examples.values.shape, generator=draw) * size

    return predict
