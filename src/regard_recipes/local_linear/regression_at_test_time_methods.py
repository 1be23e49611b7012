"""The estimators of the test-time regression recipe, as functions of examples, scale and ridge.

A scale is counted in units of the estimator's own (1/sqrt(d) for attention); a ridge is relative to the total weight of
a kernel, absolute for Mesa.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
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
    """An estimator: its name, (examples with a batch axis, scale, ridge, strictly past) -> predictions [B, L, d], and
    whether scale and ridge matter to it."""

    name: str
    predict: Callable[[ConeExamples, float, float, bool], Tensor]
    takes_scale: bool = False
    takes_ridge: bool = False


def methods(specs: Iterable[str], residuals: Iterable[str], tol: float, seed: int) -> list[Method]:
    """Return every estimator: kernels (`specs`) as local constants and as local linear models solved to `tol`, linear
    states, kernels on the residuals of a state of `STATES` ("KERNEL+STATE", equation 9), and two that look at nothing,
    of which one draws with `seed`."""
    kernels = {name: _constant(name) for name in specs}
    made: list[tuple[str, Form, bool, bool]] = [
        (name, partial(_kernel, spec), spec.takes_scale, False) for name, spec in kernels.items()
    ]
    for spec in kernels.values():
        model = local_linear(spec)
        solved = replace(model, solver=ConjugateGradient(tol=tol))
        made.append((str(model), partial(_kernel, solved), spec.takes_scale, True))
    made += [("elu", _elu, False, False), ("linear", _linear, False, False), ("mesa", _mesa, False, True)]
    for name in residuals:
        kernel, _, known = name.rpartition("+")
        if known not in STATES:
            raise ArgumentError(f"unknown state {known!r} of {name!r}.{suggestion(known, STATES)}")
        spec = _constant(kernel)
        made.append((name, partial(_interpolated, spec, STATES[known]), spec.takes_scale, known == "mesa"))
    made += [("random", partial(_random, seed), False, False),
             ("zero", lambda q, k, v, *_: torch.zeros_like(v), False, False)]  # fmt: skip
    return [Method(name, partial(_predict, form), *takes) for name, form, *takes in made]


def _predict(form: Form, examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
    q, k, v = (x[:, None] for x in (examples.queries, examples.keys, examples.values))
    return form(q, k, v, scale, ridge, strict)[:, 0]


def _constant(name: str) -> Spec:
    spec = Spec.parse(name)
    if spec.degree:
        raise ArgumentError(f"{name} is a local linear model already; give its kernel alone.")
    return spec


def _kernel(spec: Spec, q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    own = replace(spec, ridge=ridge) if spec.degree else spec
    found: Tensor = attention(q, k, v, own, is_causal=True, exclude_self=strict, scale=_scale(spec, k, scale))
    return found


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


def _interpolated(
    spec: Spec, state: Form, q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool
) -> Tensor:
    """Predict by equation 9: the local constant of the residuals v_j - W_i k_j, and W_i q_i on top."""
    trend = lambda q, k, v, **_: state(q, k, v, 1.0, ridge, strict)  # noqa: E731
    found: Any = interpolated_attention(q, k, v, trend, spec, exclude_self=strict, scale=_scale(spec, k, scale))
    return found


def _random(seed: int, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """Predict a vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) * q.norm(dim=-1, keepdim=True)
