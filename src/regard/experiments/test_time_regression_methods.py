"""What the test-time regression recipe measures: every estimator as a function of examples, scale and ridge.

The grid of scales and ridges is the same for all of them. A scale is counted in units of the one that the estimator has
by itself (1/sqrt(d) for dot products, 1/d for plain linear attention); a ridge is relative to the total weight of a
kernel, absolute for Mesa, as equations 2 and 7 of the Local Linear Attention paper with its errata have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..estimators.linear import linear_attention
from ..grammar import Spec
from ..grammar.spec import local_linear
from ..ops import attention
from ..tasks.cone_regression import ConeExamples

Predict = Callable[[ConeExamples, float, float, bool], Tensor]
"""(examples with a batch axis, scale, ridge, strictly past) -> predictions [B, L, d]."""


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


def methods(specs: Iterable[str], states: Iterable[str], seed: int) -> list[Method]:
    """Every estimator of the recipe: kernels as local constants and local linear models, linear states, what stands
    between (equation 9), and the two that look at nothing."""
    kernels = {name: Spec.parse(name) for name in specs}
    made = [Method(name, _takes(spec), _kernel(spec)) for name, spec in kernels.items()]
    for name, spec in kernels.items():
        model = local_linear(spec)
        made.append(Method(str(model), (*_takes(spec), "ridge"), _kernel(model)))
    made += [Method("linear", ("scale",), _linear), Method("elu", (), _elu), Method("mesa", ("ridge",), _mesa)]
    for name, spec in kernels.items():
        for state in states:
            takes = (*_takes(spec), *(("ridge",) if state == "mesa" else ()))
            made.append(Method(f"{name}+{state}", takes, _interpolated(spec, STATES[state])))
    made += [Method("random", (), _random(seed)), Method("zero", (), lambda ex, *_: torch.zeros_like(ex.values))]
    return made


def _takes(spec: Spec) -> tuple[str, ...]:
    return ("scale",) if spec.takes_scale else ()


def _kernel(spec: Spec) -> Predict:
    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        return _attend(spec, examples.queries, examples.keys, examples.values, scale, ridge, strict)

    return predict


def _attend(spec: Spec, q: Tensor, k: Tensor, v: Tensor, scale: float, ridge: float, strict: bool) -> Tensor:
    """`regard.attention` on [B, L, d], a sequence at a time for local linear models."""
    own = spec.similarity.default_scale(q.shape[-1]) * scale if spec.takes_scale else None
    if spec.degree:
        spec = replace(spec, ridge=ridge)
    parts = zip(*(x[:, None].split(1 if spec.degree else len(x)) for x in (q, k, v)), strict=True)
    found = [attention(*part, spec, is_causal=True, exclude_self=strict, scale=own) for part in parts]
    return torch.cat(found)[:, 0]


def _linear(examples: ConeExamples, scale: float, ridge: float, strict: bool, q: Tensor | None = None) -> Tensor:
    """sum_j v_j k_j . q, of equation 2 with H = I, times scale / d, so that a pair's own value comes back whole."""
    q = examples.queries if q is None else q
    k, v = examples.keys[:, None], examples.values[:, None]
    return linear_attention(q[:, None], k, v, "linear", exclude_self=strict, scale=scale / q.shape[-1])[0][:, 0]


def _elu(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
    """Linear attention as it was published, with the feature map 1 + elu and weights that sum to one."""
    q, k, v = (x[:, None] for x in (examples.queries, examples.keys, examples.values))
    return linear_attention(q, k, v, "elu", exclude_self=strict)[0][:, 0]


def _mesa(examples: ConeExamples, scale: float, ridge: float, strict: bool, q: Tensor | None = None) -> Tensor:
    """The ridge regression through the origin of all visible values on their keys (equation 2)."""
    q = examples.queries if q is None else q
    found = []
    for query, k, v in zip(q, examples.keys, examples.values, strict=True):
        spread = (k[:, :, None] * k[:, None]).cumsum(0)
        if strict:
            spread = torch.cat([torch.zeros_like(spread[:1]), spread[:-1]])
        spread.diagonal(dim1=-2, dim2=-1).add_(ridge)
        solved = torch.cholesky_solve(query[..., None], torch.linalg.cholesky(spread))[..., 0]
        found.append((solved @ k.mT).tril(-1 if strict else 0) @ v)
    return torch.stack(found)


STATES: dict[str, Callable[..., Tensor]] = {"mesa": _mesa, "linear": _linear}
"""Linear states whose residuals equation 9 regresses."""


def _interpolated(spec: Spec, state: Callable[..., Tensor]) -> Predict:
    """Equation 9: the local constant of the residuals v_j - W_i k_j, and W_i q_i on top.

    With weights that sum to one it is  sum_j s_ij v_j + W_i (q_i - sum_j s_ij k_j):  the state read at what the keys
    miss of the query.
    """

    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        q, k, v = examples.queries, examples.keys, examples.values
        near = _attend(spec, q, k, torch.cat([v, k], -1), scale, ridge, strict)
        value, key = near.split(v.shape[-1], -1)
        return value + state(examples, 1.0, ridge, strict, q - key)

    return predict


def _random(seed: int) -> Predict:
    """A vector with the law of a value, v ~ N(0, |q|^2 I), and nothing else in common with it."""

    def predict(examples: ConeExamples, scale: float, ridge: float, strict: bool) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        q = examples.queries
        return torch.randn(examples.values.shape, generator=draw) * q.norm(dim=-1, keepdim=True)

    return predict
