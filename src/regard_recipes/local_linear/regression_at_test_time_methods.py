"""The estimators of the test-time regression recipe, as functions of examples, scale and ridge.

A scale is counted in units of the estimator's own (1/sqrt(d) for attention); a ridge is relative to the total weight of
a kernel, absolute for Mesa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

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

Form = Callable[[Tensor, Tensor, Tensor, float, float, bool], Tensor]
"""(query, key, value [B, 1, L, d], scale, ridge, strictly past) -> what is predicted at the queries."""


class Method(NamedTuple):
    """An estimator: its name, which of "scale" and "ridge" it takes, and (examples with a batch axis, scale, ridge,
    strictly past) -> predictions [B, L, d]."""

    name: str
    takes: tuple[str, ...]
    predict: Callable[[ConeExamples, float, float, bool], Tensor]


def methods(specs: Iterable[str], residuals: Iterable[str], tol: float, seed: int) -> list[Method]:
    """Return every estimator: kernels (`specs`) as local constants and as local linear models solved to `tol`, linear
    states, kernels on the residuals of a state of `STATES` ("KERNEL+STATE", equation 9), and two that look at nothing,
    of which one draws with `seed`.

    Raises:
        ArgumentError: an unknown kernel or state, or a local linear model where a kernel is expected.
    """
    kernels = {name: _constant(name) for name in specs}
    made = [_method(name, _kernel(spec), spec) for name, spec in kernels.items()]
    for spec in kernels.values():
        model = local_linear(spec)
        made.append(_method(str(model), _kernel(replace(model, solver=ConjugateGradient(tol=tol))), spec, True))
    made += [_method("elu", _elu), _method("linear", _linear), _method("mesa", _mesa, ridge=True)]
    for name in residuals:
        kernel, _, known = name.rpartition("+")
        if known not in STATES:
            raise ArgumentError(f"unknown state {known!r} of {name!r}.{suggestion(known, STATES)}")
        spec = _constant(kernel)
        made.append(_method(name, _interpolated(spec, STATES[known]), spec, known == "mesa"))
    return [*made, _method("random", _random(seed)), _method("zero", lambda q, k, v, *_: torch.zeros_like(v))]


def _method(name: str, form: Form, spec: Spec | None = None, ridge: bool = False) -> Method:
    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        q, k, v = (x[:, None] for x in (examples.queries, examples.keys, examples.values))
        return form(q, k, v, scale, ridge, strict)[:, 0]

    return Method(name, ("scale",) * bool(spec and spec.takes_scale) + ("ridge",) * ridge, predict)


def _constant(name: str) -> Spec:
    spec = Spec.parse(name)
    if spec.degree:
        raise ArgumentError(f"{name} is a local linear model already; give its kernel alone.")
    return spec


def _kernel(spec: Spec) -> Form:
    def form(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
        own = replace(spec, ridge=ridge) if spec.degree else spec
        found: Tensor = attention(q, k, v, own, is_causal=True, exclude_self=strict, scale=_scale(spec, k, scale))
        return found

    return form


def _scale(spec: Spec, k: Tensor, scale: float) -> float | None:
    """Return `scale` times the scale that the spec has by itself."""
    return spec.similarity.default_scale(k.shape[-1]) * scale if spec.takes_scale else None


def _elu(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Predict by linear attention as it was published, with the feature map 1 + elu and weights that sum to one."""
    return linear_attention(q, k, v, "elu", exclude_self=strict)[0]


def _linear(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Return S_i q / (n + d + 1) with S_i the sum of the n visible v k^T (equation 2 with a multiple of the identity
    for H), the best multiple for normal keys and a single map: E|c S q - A q|^2 is least at c = 1 / (n + d + 1)."""
    visible = torch.arange(q.shape[-2]) + (0 if strict else 1)
    return linear_attention(q, k, v, "linear", exclude_self=strict, scale=1 / (visible + q.shape[-1] + 1.0))[0]


def _mesa(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """Return the ridge regression through the origin of all visible values on their keys (equation 2), in float64:
    with a small ridge and fewer pairs than channels its systems have condition numbers near 1e6."""
    found: Tensor = mesa_attention(q.double(), k.double(), v.double(), ridge=ridge, exclude_self=strict)[0]
    return found.to(v.dtype)


STATES: dict[str, Form] = {"linear": _linear, "mesa": _mesa}
"""Linear states, which equation 9 lets a kernel correct."""


def _interpolated(spec: Spec, state: Form) -> Form:
    """Predict by equation 9: the local constant of the residuals v_j - W_i k_j, and W_i q_i on top."""

    def form(q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
        def trend(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
            return state(q, k, v, 1.0, ridge, strict)

        return interpolated_attention(q, k, v, trend, spec, exclude_self=strict, scale=_scale(spec, k, scale))

    return form


def _random(seed: int) -> Form:
    """Predict a vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""

    def form(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) * q.norm(dim=-1, keepdim=True)

    return form
