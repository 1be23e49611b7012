"""`regard.local_linear_attention`: `regard.attention` of degree 1 with its options as arguments."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import floating, in_range, mapping, one_of, require, shown, within
from ..grammar import Spec, as_spec
from ..grammar.reader import kept
from ..grammar.solvers import Auto, ConjugateGradient, Solver, solvers
from ..grammar.spec import RIDGE_MODES, instance_of
from .attention import attention

CALL = "local_linear_attention"


def local_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ridge: float | Tensor = 0.1,
    spec: Spec | str = "softmax",
    solver: str | Solver = "auto",
    ridge_mode: str = "relative",
    max_iter: int | None = None,
    tol: float | None = None,
    probe: Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    **arguments: Any,
) -> Any:
    """Predict at every query by ridge regression of the values on the keys, weighted by `spec`.

    Local Linear Attention (arXiv 2510.01450), equations 6-8, for any normalised non-negative weights. For a ridge
    that tends to infinity, or `max_iter=0`, the result is that of `regard.attention` with `spec`.

    Args:
        query, key, value: as in `regard.attention`, whose other arguments (`attn_mask`, `is_causal`, `window`,
            `segment_ids`, `scale`, `enable_gqa`, `layout`, `impl`, `return_diagnostics`, ...) are accepted too.
        ridge: penalty on the slope, in squared units of the keys: a number, a tensor broadcastable to [B, H, Tq], or a
            tensor broadcastable to [B, H, Tq, D] with one value per coordinate. Differentiable.
        spec: the weights: a Spec or its text. Of a spec of degree 1 only the weights are used.
        solver: "auto", "cholesky", "cg", "block-diagonal", "learned", or an object of `regard.grammar.solvers`.
        ridge_mode: "relative" to the total kernel weight, or "absolute" (equation 7). For logits of 30 and more an
            absolute ridge is negligible. Fast implementations then raise it to the rounding error of the covariance
            (status JITTER); `impl="reference"` uses it unchanged, and solves in float64 there.
        max_iter, tol: options of conjugate gradients, which replace "auto" if either is given.
        probe: [B, H, Tq, D], minus the solution, for the solver "learned" (Parallax).
        params: the other parameters of the spec.

    Returns:
        The output [B, H, Tq, Dv], or (output, `Diagnostics`), whose `solver` holds status, iterations, relative
        residual and jitter per row.

    Raises:
        ArgumentError: as `regard.attention`; weights that are signed or do not sum to one; ridge 0 with conjugate
            gradients; `max_iter` or `tol` with another solver.

    Warns:
        RuntimeWarning: systems that did not converge or are inaccurate. Only `blocked` and `cpu` warn.

    Cost per row of T keys: 4 D T operations per step of conjugate gradients or D^2 T for Cholesky, in addition to 4 D T
    of attention; memory Theta(n d).
    """
    floating(CALL, "query", query)
    number, learned = _ridge(ridge, query)
    one_of(CALL, "ridge_mode", ridge_mode, RIDGE_MODES)
    local = _made(spec, number, solver, ridge_mode, max_iter, tol)
    given = mapping(CALL, "params", params) | learned
    if probe is not None:
        solver = local.solver.name
        require(solver == "learned", CALL, f"a probe was given, which only solver='learned' takes, not {solver!r}.")
        given["probe"] = probe
    return within(CALL, None, attention, query, key, value, local, params=given, **arguments)


def _ridge(ridge: float | Tensor, query: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Return the ridge as a number of the spec or as a parameter; the other one is unused."""
    if not isinstance(ridge, Tensor):
        in_range(CALL, "ridge", ridge, low=0.0, strict=False)
        if not torch.compiler.is_compiling():
            return float(ridge), {}
        ridge = torch.full((), ridge, dtype=torch.float64, device=query.device)  # one graph for all numbers
    return 0.1, {"ridge": ridge}


def _make(
    spec: Spec | str, ridge: float, solver: str | Solver, ridge_mode: str, max_iter: int | None, tol: float | None
) -> Spec:
    """Return the weights of `spec` with this local linear model."""
    options = {"degree": 1, "ridge": ridge, "solver": _solver(solver, max_iter, tol), "ridge_mode": ridge_mode}
    return within(CALL, "spec", replace, as_spec(spec, CALL), **options)


def _key(spec: Spec | str, ridge: float, solver: str | Solver, ridge_mode: str, *steps: Any) -> tuple[Any, ...]:
    return spec, ridge, ridge_mode, repr(_solver(solver, *steps))  # of what is checked: repr of anything may fail


_made = kept(_make, _key)


def _solver(solver: str | Solver, max_iter: int | None, tol: float | None) -> Any:
    made: Any = within(CALL, "solver", instance_of, solvers, solver)
    if max_iter is None and tol is None:
        return made
    if isinstance(made, Auto):
        made = ConjugateGradient()
    text = f"max_iter and tol belong to conjugate gradients; use solver='cg', not {shown(solver)}."
    require(isinstance(made, ConjugateGradient), CALL, text)
    numbers = {name: value for name, value in (("max_iter", max_iter), ("tol", tol)) if value is not None}
    return within(CALL, None, replace, made, **numbers)
