"""Mesa attention: the ridge regression of all values so far on their keys, read at the query (local-linear-attention
paper, equation 2; MesaNet with decay and input gate):

    o_i = S_i (H_i + Diag(ridge))^-1 q_i
    S_i = sum_j gamma_ij beta_j v_j k_j^T,    H_i = sum_j gamma_ij beta_j k_j k_j^T

with gamma_ij = exp(sum of log_decay over j < l <= i). Linear attention is the case in which the inverse is left out.
The systems are solved in `mesa_solve`.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks
from ..grammar import SolveStatus
from ..pairwise.layout import Layout, any_layout, repeat_heads
from ..precision import transformed
from . import arguments
from .arguments import FAR, Call, Form, PerKey, Tokens, begin, log_decays, per_key, read_state, row_scale, tokens
from .decay import CHUNK, decayed, final, shifted
from .mesa_solve import How, Systems, every_gram, solved, statistics
from .states import LinearMap, Sizes

CALL = "mesa_attention"
Solver = Literal["auto", "cholesky", "cg"]


@dataclass(frozen=True)
class MesaState(LinearMap):
    """The state of Mesa attention, of fixed size.

    Attributes:
        values: sum gamma beta k v^T [B, Hkv, D, Dv], float32 or float64.
        gram: sum gamma beta k k^T [B, Hkv, D, D].
        non_finite, tokens: as in `regard.LinearState`.
    """

    values: Tensor
    gram: Tensor
    non_finite: Tensor

    @staticmethod
    def sizes(dim: int, value_dim: int) -> Sizes:
        return {"values": (dim, value_dim), "gram": (dim, dim)}

    def read(self, query: Tensor, *, ridge: float | Tensor, scale: float | Tensor | None = None) -> Tensor:
        """Return the output [B, H, Tq, Dv] of queries [B, H, Tq, D]; `ridge` and `scale` as in `mesa_attention`."""
        return read_state(mesa_attention, query, self, ridge=ridge, scale=scale)


@any_layout
def mesa_attention(
    query: Tensor, key: Tensor, value: Tensor, *, ridge: float | Tensor, log_decay: float | Tensor | None = None,
    beta: float | Tensor | None = None, state: MesaState | None = None, form: Form = "chunked",
    chunk_size: int | None = None, solver: Solver = "auto", tol: float | None = None, max_iter: int | None = None,
    attn_mask: Tensor | None = None, is_causal: bool = True, exclude_self: bool = False,
    segment_ids: Tensor | None = None, scale: float | Tensor | None = None, layout: Layout = "bhtd",
    return_diagnostics: bool = False,
) -> Any:  # fmt: skip
    """Fit a ridge regression of all values so far on their keys, and read it at the queries.

    Args:
        query: [B, H, Tq, D], not divided by sqrt(D).
        key, value: [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv]; H is a multiple of Hkv.
        ridge: > 0 (tensors are checked only under `regard.checks.debug`), in units of a squared key: a number, per head
            [H], per head and dimension [H, D], per token [B, H, Tq], or broadcastable to [B, H, Tq, D]. It does not
            fade. Gradients flow.
        log_decay: g <= 0: a number, per key head [Hkv] or per token [B, Hkv, Tk]; -inf clears the state.
        beta: weight of each key >= 0: a number or broadcastable to [B, Hkv, Tk]; default 1.
        form: "chunked", "parallel" (the matrices of all queries at once) or "recurrent" (one after the other).
        state, chunk_size, attn_mask, is_causal, segment_ids: as in `regard.linear_attention`.
        exclude_self: query i reads the state before key i; implies `is_causal`.
        solver: of the chunked form. "cholesky" (also "auto") solves directly: by two factors a chunk if nothing fades
            and the ridge is the same for all tokens, else by one matrix per query. "cg" is conjugate gradients, which
            are faster for many well-conditioned systems. The other forms solve directly.
        tol: |b - A t| / |b| at which conjugate gradients stop; default 1e-6 in float32 and 1e-13 in float64.
        max_iter: their largest number of steps; default 8 D + 16.
        scale: factor of the query, a number or broadcastable to [B, H, Tq]; default 1.
        layout: as in `regard.linear_attention`, also in `ridge` and `beta`.
        return_diagnostics: also return a dict of [B, H, Tq]: "status" (`regard.grammar.SolveStatus`), "residual"
            (|b - A t| / |b|, the true one) and "iterations" (of conjugate gradients).

    Returns:
        (output, state[, diagnostics]), the first two as `regard.linear_attention`.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, numbers out of range, a solver that the form does not have.

    Warns:
        RuntimeWarning: the residual of a system exceeds `tol`, or by default the root of the precision (3e-4 in
            float32). Checked on the CPU, outside compiled graphs.

    Precision: as `regard.delta_rule`. Derivatives: "chunked" once, in reverse mode, by one more solve (under forward
    mode and torch.func transforms it runs as "parallel"), as exact as the solution; the other forms to any order.
    Cost per head with chunks of c: O(T D (D + c) + (T / c) (D^3 + c^3)) by two factors a chunk, O(T D^3) by a matrix
    per query, O(T D (D + c)) per step of conjugate gradients; memory O(T (D + c) + D^2 T / c). "parallel" and (for
    gradients) "recurrent" O(T D^2) memory.
    """
    checks.flags(CALL, return_diagnostics=return_diagnostics)
    call = begin(CALL, query, key, value, attn_mask, form, chunk_size, is_causal, exclude_self, segment_ids)
    how = _how(query, call, solver, tol, max_iter)
    ridge = _ridge(ridge, query, call.dtype)
    fade = log_decays(CALL, log_decay, key, None, call.dtype)
    weight = None if beta is None else per_key(CALL, "beta", beta, key, call.dtype)
    state = call.state(state, MesaState, key, MesaState.sizes(key.shape[3], value.shape[3]))
    inputs = (tokens(call, query, key, value, fade, weight), weight, fade, ridge, row_scale(call, scale, query))
    (out, solved), after = call.run(_fit, inputs, state, how=how, residuals=return_diagnostics)
    out, limit = out.to(query.dtype), torch.finfo(call.dtype).eps ** 0.5 if tol is None else tol
    _warn(solved, limit)
    return (out, after, _judged(solved, limit)) if return_diagnostics else (out, after)


def _fit(
    inputs: tuple[Tokens, PerKey | None, PerKey | None, Tensor, float | Tensor], mask: Tensor | None,
    state: MesaState, call: Call, how: How, residuals: bool,
) -> tuple[tuple[Tensor, dict[str, Tensor]], MesaState]:  # fmt: skip
    qkv, weight, fade, ridge, scale = inputs
    held = state.gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1) > 0
    rows, non_finite = qkv.non_finite(call.visible(qkv, mask), held, state.non_finite)
    qkv, beta, g = qkv.masked(mask), weight and weight.kept(mask).value, fade and fade.kept(mask).value
    systems = Systems(qkv.key, beta, g, state.gram, ridge)
    out, gram, values, measured = _predict(qkv.query * scale, qkv.value, systems, state.values, call, how, residuals)
    out = torch.where(rows[..., None], torch.nan, out)
    measured = {name: x[:, :, : rows.shape[2]] for name, x in measured.items()}
    return (out, measured), MesaState(values, gram, non_finite, tokens=state.tokens + qkv.key.shape[2])


def _predict(
    q: Tensor, v: Tensor, systems: Systems, values: Tensor, call: Call, how: How, residuals: bool
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Return (output, H and S after all keys, statistics); the last two may have a query too many."""
    queries = q.shape[2]
    if call.causal and call.strict:
        systems, q, v = _before(systems, q, v)
    v = v if systems.beta is None else v * systems.beta[..., None]
    if call.causal and call.form == "chunked" and not transformed():
        direct = "direct" if systems.g is None and systems.ridge.shape[2] == 1 else "dense"
        t, gram, measured = solved(q, systems, how if how.method == "cg" else how._replace(method=direct))
        out, values = decayed(t, systems.key, v, systems.g, values, chunk=how.chunk)
        return out[:, :, :queries], gram, values, measured
    t, out, gram, values = _plain(q, v, systems, values, call)
    measured = statistics(q - systems.times(t, how.chunk, call.causal)[0], q) if residuals else {}
    return out[:, :, :queries], gram, values, measured


def _before(systems: Systems, q: Tensor, v: Tensor) -> tuple[Systems, Tensor, Tensor]:
    """Shift the keys so that query i is read before key i."""
    q, key, v, g = shifted(q, systems.key, v, systems.g)
    beta = None if systems.beta is None else pad(systems.beta, (1, 0))
    ridge = systems.ridge if systems.ridge.shape[2] == 1 else pad(systems.ridge, (0, 0, 0, 1), value=1.0)
    return Systems(key, beta, g, systems.gram, ridge), q, v


def _all(gram: Tensor, ridge: Tensor, q: Tensor) -> Tensor:
    """Return (H + Diag(ridge_i))^-1 q_i with one H [B, Hkv, D, D] for all queries."""
    whole = repeat_heads(gram, q.shape[1])
    if ridge.shape[2] == 1:
        matrix = whole + torch.diag_embed(ridge[:, :, 0])
        return torch.linalg.solve_ex(matrix, q.transpose(-1, -2))[0].transpose(-1, -2)
    return torch.linalg.solve_ex(whole[:, :, None] + torch.diag_embed(ridge), q)[0]


def _plain(q: Tensor, v: Tensor, systems: Systems, values: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve with one H for all queries or one for each, all at once or one after the other: (t, output, H, S)."""
    key, written, g, gram, ridge = systems.key, systems.written, systems.g, systems.gram, systems.ridge
    form = "recurrent" if call.form == "recurrent" else "parallel"
    if not call.causal:
        gram = final(key, written, g, gram)
        t = _all(gram, ridge, q)
    elif form == "parallel":
        grams = every_gram(key, written, g, gram)
        t = torch.linalg.solve_ex(repeat_heads(grams, q.shape[1]) + torch.diag_embed(ridge), q)[0]
        gram = torch.cat([gram[:, :, None], grams[:, :, -1:]], 2)[:, :, -1].clone()  # not a view of a larger tensor
    else:
        solutions = [q[:, :, :0]]
        for i in range(key.shape[2]):
            gram = gram if g is None else gram * g[:, :, i, :, None].exp()
            gram = gram + key[:, :, i, :, None] * written[:, :, i, None]
            here = ridge if ridge.shape[2] == 1 else ridge[:, :, i : i + 1]
            solutions.append(_all(gram, here, q[:, :, i : i + 1]))
        t = torch.cat(solutions, 2)
    out, values = decayed(t, key, v, g, values, form=form, causal=call.causal)
    return t, out, gram, values


def _judged(measured: dict[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Return the statistics with a status: systems with a residual above `limit` are unconverged."""
    residual = measured["residual"]
    status = torch.where(residual <= limit, int(SolveStatus.OK), int(SolveStatus.UNCONVERGED))
    return {"status": torch.where(residual.isfinite(), status, int(SolveStatus.NOT_FINITE)), **measured}


def _warn(measured: dict[str, Tensor], limit: float) -> None:
    """Warn of unconverged systems, if the residuals are on the CPU."""
    residual = measured.get("residual", torch.empty(0))
    if torch.compiler.is_compiling() or transformed() or type(residual) is not Tensor or residual.device.type != "cpu":
        return
    bad = ~(residual <= limit)
    if bool(bad.any()):
        most = f"{int(bad.sum())} of {bad.numel()} systems are unconverged, with residuals up to {residual.max():.2g}"
        hint = "use a larger ridge or float64, or with solver='cg' a larger max_iter"
        text = f"{CALL}: {most}; {hint} (return_diagnostics=True shows which)."
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _how(query: Tensor, call: Call, solver: Any, tol: float | None, max_iter: int | None) -> How:
    checks.choice(CALL, "solver", solver, get_args(Solver))
    direct = f"form={call.form!r} solves directly; solver='cg' is for form='chunked'."
    checks.require(solver != "cg" or call.form == "chunked", CALL, direct)
    checks.optional_whole(CALL, "max_iter", max_iter, 1)
    finest = 1e-13 if call.dtype == torch.float64 else 1e-6
    tol = finest if tol is None else checks.number(CALL, "tol", tol, low=0.0, strict=True)
    return How(solver, min(call.chunk or CHUNK, FAR), tol, min(max_iter or 8 * query.shape[3] + 16, FAR))


def _ridge(ridge: Any, query: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the ridge as [B, H, 1 or Tq, D]."""
    checks.in_range(CALL, "ridge", ridge, low=0.0, high=torch.finfo(dtype).max, strict=True)
    batch, heads, queries, dim = query.shape
    sizes = {
        0: ((), ""),
        1: ((heads,), "per head"),
        2: ((heads, dim), "and dimension"),
        3: ((batch, heads, queries), "per token"),
        4: ((batch, heads, queries, dim), "and dimension"),
    }
    whole = arguments.four_axes(CALL, "ridge", ridge, sizes, dtype, query.device)
    return whole.expand(batch, heads, whole.shape[2], dim)
