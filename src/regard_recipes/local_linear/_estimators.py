"""The estimators of the recipe test-time-regression, which nothing trains.

A scale is counted in units of the estimator's own (1/sqrt(d) for attention); a ridge is relative to the total weight of
a kernel, absolute for Mesa.
"""

from collections.abc import Callable, Sequence
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


class Setting(NamedTuple):
    """The scale, in units of the estimator's own, the ridge, and whether a query sees only the pairs before it."""

    scale: float
    ridge: float
    strict: bool


Form = Callable[[Tensor, Tensor, Tensor, Setting], Tensor]
"""(query, key, value [B, 1, L, d], setting) -> what is predicted at the queries."""


class Method(NamedTuple):
    """An estimator: (batch of examples, setting) -> predictions [B, L, d], and whether scale and ridge matter."""

    name: str
    predict: Callable[[ConeExamples, Setting], Tensor]
    takes_scale: bool = False
    takes_ridge: bool = False


def kernel(name: str) -> Spec:
    """Return the spec of a kernel, a local constant."""
    spec = Spec.parse(name)
    if spec.degree:
        raise ArgumentError(f"{name} is a local linear model already; give its kernel alone.")
    return spec


def methods(specs: Sequence[str], residuals: Sequence[str], tol: float, seed: int) -> list[Method]:
    """Return every estimator: kernels (`specs`) as local constants and as local linear models solved to `tol`, linear
    states, kernels on `residuals` of `STATES` ("KERNEL+STATE", equation 9), zero, and random vectors (`seed`)."""
    constants = [kernel(name) for name in specs]
    made: list[Any] = [(name, smoother(spec), spec.takes_scale) for name, spec in zip(specs, constants, strict=True)]
    for model in map(local_linear, constants):
        solved = replace(model, solver=ConjugateGradient(tol=tol))
        made.append((str(model), smoother(solved), model.takes_scale, True))
    elu: Form = lambda q, k, v, setting: linear_attention(q, k, v, "elu", exclude_self=setting.strict)[0]  # noqa: E731
    made += [("elu", elu), ("linear", linear), ("mesa", mesa, False, True)]
    for name in residuals:
        weights, _, state = name.rpartition("+")
        if state not in STATES:
            raise ArgumentError(f"unknown state {state!r} of {name!r}.{suggestion(state, STATES)}")
        spec = kernel(weights)
        made.append((name, smoother(spec, STATES[state]), spec.takes_scale, state == "mesa"))
    made += [("random", partial(random, seed)), ("zero", lambda q, k, v, setting: torch.zeros_like(v))]
    return [Method(name, partial(predict, form), *takes) for name, form, *takes in made]


def predict(form: Form, examples: ConeExamples, setting: Setting) -> Tensor:
    """Return the predictions [B, L, d] of a form."""
    q, k, v = (x[:, None] for x in (examples.queries, examples.keys, examples.values))
    return form(q, k, v, setting)[:, 0]


def smoother(spec: Spec, state: Form | None = None) -> Form:
    """Return attention; with a state that of its residuals v_j - W_i k_j, and W_i q_i on top (equation 9)."""

    def form(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
        scale = spec.similarity.default_scale(k.shape[-1]) * setting.scale if spec.takes_scale else None
        how: dict[str, Any] = {"is_causal": True, "exclude_self": setting.strict, "scale": scale}
        if state is not None:
            return interpolated_attention(q, k, v, lambda q, k, v, **_: state(q, k, v, setting), spec, **how)
        return attention(q, k, v, replace(spec, ridge=setting.ridge) if spec.degree else spec, **how)

    return form


def linear(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Return S_i q / (n + d + 1) with S_i the sum of the n visible v k^T (equation 2 with a multiple of the identity
    for H), the best multiple for normal keys and a single map: E|c S q - A q|^2 is least at c = 1 / (n + d + 1)."""
    visible = torch.arange(q.shape[-2]) + (not setting.strict)
    return linear_attention(q, k, v, "linear", exclude_self=setting.strict, scale=1 / (visible + q.shape[-1] + 1.0))[0]


def mesa(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Return the ridge regression through the origin of all visible values on their keys (equation 2), in float64:
    with a small ridge and fewer pairs than channels its systems have condition numbers near 1e6."""
    q, k, double = q.double(), k.double(), v.double()
    return mesa_attention(q, k, double, ridge=setting.ridge, exclude_self=setting.strict)[0].to(v.dtype)


STATES: dict[str, Form] = {"linear": linear, "mesa": mesa}  # linear states, which equation 9 lets a kernel correct


def random(seed: int, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """Predict a vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""
    return torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) * q.norm(dim=-1, keepdim=True)
