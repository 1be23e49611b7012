"""Mesa attention: the best linear model of all pairs so far, read at the query (local-linear-attention paper,
equation 2; MesaNet with decay and input gate):

    o_i = S_i (H_i + Diag(ridge))^-1 q_i
    S_i = sum_j gamma_ij beta_j v_j k_j^T,    H_i = sum_j gamma_ij beta_j k_j k_j^T

with gamma_ij = exp(sum of log_decay over j < l <= i). It is what linear attention would be, had it not taken H_i for
the identity. The systems are solved in `mesa_solve`.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import (
    ArgumentError,
    broadcastable,
    choice,
    flags,
    floating,
    in_range,
    number,
    on_device,
    optional_whole,
    shape,
)
from ..grammar import SolveStatus
from ..pairwise.local_regression import repeat_heads
from ..pairwise.visibility import Visibility
from ..precision import full_precision, row_number, transformed
from .arguments import FAR, Form, PerKey, check, cleaned, log_decays, no_pairs, order, per_key
from .decay import CHUNK, decayed, final, read, shifted
from .mesa_solve import How, Systems, every_gram, method, solved
from .packing import by_document, documents
from .states import State, require_state

CALL = "mesa_attention"
Solver = Literal["auto", "cholesky", "cg"]


@dataclass(frozen=True)
class MesaState(State):
    """What Mesa attention remembers of all pairs so far; its size does not grow.

    Attributes:
        values: sum gamma beta k v^T [B, Hkv, D, Dv], float32 or float64.
        gram: sum gamma beta k k^T [B, Hkv, D, D].
        poisoned: boolean [B, Hkv]: a pair that was not finite was seen, so that every later row is NaN.
        tokens: how many positions were seen, masked ones included.
    """

    values: Tensor
    gram: Tensor
    poisoned: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> MesaState:
        """The state before the first pair, for keys of `dim` and values of `value_dim` (`dim` where None)."""
        dtype = torch.promote_types(dtype, torch.float32)
        zeros = lambda *sizes: torch.zeros(batch, kv_heads, *sizes, dtype=dtype, device=device)  # noqa: E731
        poisoned = torch.zeros(batch, kv_heads, dtype=torch.bool, device=device)
        return cls(zeros(dim, dim if value_dim is None else value_dim), zeros(dim, dim), poisoned)

    def read(self, query: Tensor, *, ridge: float | Tensor, scale: float | Tensor | None = None) -> Tensor:
        """What the state predicts for other queries [B, H, Tq, D] after all pairs, [B, H, Tq, Dv].

        Args:
            ridge, scale: as in `mesa_attention`, whose errors it raises.
        """
        nothing = no_pairs(CALL, query, *self.values.shape[1::2])
        how: dict[str, Any] = {"ridge": ridge, "scale": scale, "is_causal": False}
        return mesa_attention(query, *nothing, state=self, **how)[0]


def mesa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ridge: float | Tensor,
    log_decay: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    state: MesaState | None = None,
    form: Form = "chunked",
    chunk_size: int | None = None,
    solver: Solver = "auto",
    tol: float | None = None,
    max_iter: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    exclude_self: bool = False,
    segment_ids: Tensor | None = None,
    scale: float | Tensor | None = None,
    return_diagnostics: bool = False,
) -> Any:
    """The ridge regression of all values so far on their keys, read at the query, with a state to go on from.

    Prefill, chunks and single steps agree: each call takes the state of the one before. Nothing is mutated.

    Args:
        query: [B, H, Tq, D]. Nothing is divided by sqrt(D): the model is W q with W fitted to the keys as they are.
        key: [B, Hkv, Tk, D]; Hkv = H or a divisor of H.
        value: [B, Hkv, Tk, Dv].
        ridge: > 0 (of a tensor, checked under `regard.checks.debug` alone): a number, per head [H], per head and
            dimension [H, D], per token [B, H, Tq], or broadcastable to [B, H, Tq, D]. It is absolute, in units of a
            squared key, and does not fade. Gradients flow.
        log_decay: g <= 0: per key head [Hkv] or one number, or per token [B, Hkv, Tk]; -inf forgets everything.
        beta: how much each pair counts, >= 0: a number or broadcastable to [B, Hkv, Tk]; 1 where None.
        state: what earlier calls left; None at the beginning.
        form: "chunked", "parallel" (a matrix for every query, all at once) or "recurrent" (one after the other).
        chunk_size: positions of a chunk; `decay.CHUNK` where None.
        solver: of the chunked form. "cholesky" (which "auto" takes): directly; where nothing fades and the ridge is
            the same for all tokens by two factors a chunk, else by a matrix for every query. "cg": by conjugate
            gradients, which need many well-conditioned systems to be the faster. The other forms solve directly.
        tol: |b - A t| / |b| at which conjugate gradients stop; None for 1e-6 in float32 and 1e-13 in float64.
        max_iter: their most steps; 2 D + 16 where None.
        attn_mask: boolean over the keys of this call, [B, Tk] or [B, 1, 1, Tk]; True where a key may be attended.
            Masked positions neither write nor fade.
        is_causal: query i sees the state and the keys j <= i; Tq must equal Tk. Otherwise every query reads the
            state after all pairs.
        exclude_self: query i reads the state before pair i; implies `is_causal`.
        segment_ids: integers [B or 1, T] of packed sequences, T = Tq = Tk: a document begins wherever the id changes,
            so that an id that comes back begins another one. Every document is computed as if it were alone, and the
            states that come in and go out hold one entry a document on the batch axis, ordered row by row (their
            `tokens` is that of the longest document). Padding with an id of its own counts as a document.
        scale: factor of the query, a number or broadcastable to [B, H, Tq]; 1 where None.
        return_diagnostics: also return a dict of [B, H, Tq]: "status" (`regard.grammar.SolveStatus`),
            "residual" (|b - A t| / |b|, the true one) and "iterations" (of conjugate gradients).

    Returns:
        (output [B, H, Tq, Dv] in the dtype of `query`, the state after all pairs[, diagnostics]). Rows without a
        visible key are 0; rows that see what is not finite are NaN, here or in any later call.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, numbers out of range, a solver that the form does not have.

    Warns:
        RuntimeWarning: a system was left unconverged (or lost its digits to a ridge that is too small): its residual
            exceeds `tol`, or where that is None the root of the precision (3e-4 in float32). Looked at where the
            numbers are at hand (CPU, not compiled).

    Precision: float32 (float64 for float64 inputs) for states and solves, whatever the inputs and autocast; a backward
    pass keeps it outside of autocast, where torch wants it.
    Derivatives: "chunked" once, backward, by one more solve (under forward mode and torch.func transforms it is
    "parallel"); they are those of the solution, so that they are as good as it is. The other forms to any order.
    Cost: a head, with chunks of c: O(T D (D + c) + (T / c) (D^3 + c^3)) by two factors a chunk, O(T D^3) by a matrix
    for every query, O(T D (D + c)) a step of conjugate gradients; memory O(T (D + c) + D^2 T / c), with c >= D that of
    the inputs. "parallel" and (for gradients) "recurrent" O(T D^2).
    With segment_ids, documents of similar lengths are computed as one batch: fewer than T / 3 positions are added, and
    there are O(log T) batches, one after the other (`packing`). The ids are read on the host, so that a GPU is waited
    for, and torch.compile leaves packed calls out of its graphs.
    """
    causal = order(CALL, is_causal, exclude_self)
    flags(CALL, return_diagnostics=return_diagnostics)
    mask = check(CALL, query, key, value, attn_mask, form, chunk_size, causal)
    packed = documents(CALL, segment_ids, query, key)
    dtype = torch.promote_types(query.dtype, torch.float32)
    how = _how(query, form, chunk_size, solver, tol, max_iter, dtype)
    ridge = _ridge(ridge, query, dtype)
    fade = log_decays(CALL, log_decay, key, None, dtype)
    weight = None if beta is None else per_key(CALL, "beta", beta, key, dtype)
    if state is not None:
        heads = (query.shape[0] if packed is None else packed.count, key.shape[1])
        sizes = {"values": (*heads, key.shape[3], value.shape[3]), "gram": (*heads, key.shape[3], key.shape[3])}
        require_state(CALL, state, MesaState, sizes, query.new_empty(0, dtype=dtype))
    inputs = (query, key, value, weight, fade, ridge, _scale(scale, query, dtype))
    fit = partial(
        _fit, dtype=dtype, causal=causal, strict=exclude_self, form=form, how=how, residuals=return_diagnostics
    )
    with full_precision(query.device.type):
        (out, found), after = by_document(packed, fit, inputs, mask, state)
    _warn(found, tol, dtype)
    return (out, after, _judged(found, tol, dtype)) if return_diagnostics else (out, after)


def _fit(
    inputs: tuple[Tensor, Tensor, Tensor, PerKey | None, PerKey | None, Tensor, float | Tensor],
    mask: Tensor | None,
    state: MesaState | None,
    *,
    dtype: torch.dtype,
    causal: bool,
    strict: bool,
    form: str,
    how: How,
    residuals: bool,
) -> tuple[tuple[Tensor, dict[str, Tensor]], MesaState]:
    """`mesa_attention` of checked inputs: query, key, value, beta, log_decay, ridge and scale; mask [B, 1, T]."""
    query, key, value, weight, fade, ridge, scale = inputs
    queries, (batch, kv_heads, keys, dim) = query.shape[2], key.shape
    if state is None:
        state = MesaState.empty(batch, kv_heads, dim, value.shape[3], dtype=dtype, device=query.device)
    weight, fade = weight and weight.kept(mask), fade and fade.kept(mask)
    visible = Visibility(queries, keys, causal, strict, mask=None if mask is None else mask[:, :, None])
    held = state.gram.detach().diagonal(dim1=-2, dim2=-1).sum(-1) > 0
    own = cleaned(CALL, query, key, value, dtype, visible, held, state.poisoned, fade, weight)
    systems = Systems(own.key, weight and weight.value, fade and fade.value, state.gram, ridge)
    out, gram, values, found = _predict(
        own.query * scale, own.value, systems, state.values, visible, form, how, residuals
    )
    out = torch.where(own.poisoned[..., None], torch.nan, out).to(query.dtype)
    found = {name: x[:, :, :queries] for name, x in found.items()}
    return (out, found), MesaState(values, gram, state.poisoned | own.spoilt, tokens=state.tokens + keys)


def _predict(
    q: Tensor,
    v: Tensor,
    systems: Systems,
    values: Tensor,
    visible: Visibility,
    form: str,
    how: How,
    residuals: bool,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(output, H and S after all pairs, statistics); outputs and statistics may have a query too many."""
    queries = q.shape[2]
    if visible.causal and visible.strict:
        systems, q, v = _before(systems, q, v)
    v = v if systems.beta is None else v * systems.beta[..., None]
    if not visible.causal:
        gram = final(systems.key, systems.written, systems.g, systems.gram)
        values = final(systems.key, v, systems.g, values)
        t = _all(gram, systems.ridge, q)
        left = (q - (read(t, gram) + systems.ridge * t)).detach() if residuals else None
        return read(t, values), gram, values, _statistics(left, q)
    if form == "chunked" and not transformed():
        done = solved(q, systems, how._replace(method=method(how.method, systems)))
        out, values = decayed(done.value, systems.key, v, systems.g, values, chunk=how.chunk)
        found = {"residual": done.residual, "iterations": done.iterations}
        return out[:, :, :queries], done.gram, values, found
    make = _recurrent if form == "recurrent" else _parallel
    t, out, gram, values = make(q, v, systems, values)
    left = (q - systems.times(t, how.chunk)[0]).detach() if residuals else None
    return out[:, :, :queries], gram, values, _statistics(left, q)


def _before(systems: Systems, q: Tensor, v: Tensor) -> tuple[Systems, Tensor, Tensor]:
    """Every query read before the pair of its position is written."""
    q, key, v, g = shifted(q, systems.key, v, systems.g)
    beta = None if systems.beta is None else pad(systems.beta, (1, 0))
    ridge = systems.ridge if systems.ridge.shape[2] == 1 else pad(systems.ridge, (0, 0, 0, 1), value=1.0)
    return Systems(key, beta, g, systems.gram, ridge), q, v


def _all(gram: Tensor, ridge: Tensor, q: Tensor) -> Tensor:
    """(H + Diag(ridge_i))^-1 q_i with one H [B, Hkv, D, D] for all queries."""
    whole = repeat_heads(gram, q.shape[1])
    if ridge.shape[2] == 1:
        matrix = whole + torch.diag_embed(ridge[:, :, 0])
        return torch.linalg.solve_ex(matrix, q.transpose(-1, -2))[0].transpose(-1, -2)
    return torch.linalg.solve_ex(whole[:, :, None] + torch.diag_embed(ridge), q)[0]


def _parallel(q: Tensor, v: Tensor, systems: Systems, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix for every query, all at once: (t, output, H, S)."""
    grams = every_gram(systems.key, systems.written, systems.g, systems.gram)
    matrices = repeat_heads(grams, q.shape[1]) + torch.diag_embed(systems.ridge)
    t = torch.linalg.solve_ex(matrices, q)[0]
    out, values = decayed(t, systems.key, v, systems.g, values, form="parallel")
    return t, out, torch.cat([systems.gram[:, :, None], grams], 2)[:, :, -1], values


def _recurrent(q: Tensor, v: Tensor, systems: Systems, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One pair at a time: (t, output, H, S)."""
    key, written, gram, ridge = systems.key, systems.written, systems.gram, systems.ridge
    solutions, rows = [q[:, :, :0]], [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
    for i in range(key.shape[2]):
        if systems.g is not None:
            fade = systems.g[:, :, i, :, None].exp()
            gram, values = gram * fade, values * fade
        at = key[:, :, i, :, None]
        gram, values = gram + at * written[:, :, i, None], values + at * v[:, :, i, None]
        own = ridge if ridge.shape[2] == 1 else ridge[:, :, i : i + 1]
        t = _all(gram, own, q[:, :, i : i + 1])
        solutions.append(t)
        rows.append(read(t, values))
    return torch.cat(solutions, 2), torch.cat(rows, 2), gram, values


def _statistics(left: Tensor | None, q: Tensor) -> dict[str, Tensor]:
    """Return those of a direct solve that left b - A t [B, H, T, D]; nothing for None."""
    if left is None:
        return {}
    size = q.detach().norm(dim=-1)
    residual = left.norm(dim=-1) / torch.where(size > 0, size, 1)
    return {"residual": residual, "iterations": torch.zeros_like(residual, dtype=torch.int32)}


def _limit(tol: float | None, dtype: torch.dtype) -> float:
    """The residual above which a system counts as unconverged."""
    return torch.finfo(dtype).eps ** 0.5 if tol is None else tol


def _judged(found: dict[str, Tensor], tol: float | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The statistics with a status."""
    residual = found["residual"]
    status = torch.where(residual <= _limit(tol, dtype), int(SolveStatus.OK), int(SolveStatus.UNCONVERGED))
    return {"status": torch.where(residual.isfinite(), status, int(SolveStatus.NOT_FINITE)), **found}


def _warn(found: dict[str, Tensor], tol: float | None, dtype: torch.dtype) -> None:
    """Say that systems are unconverged, where that can be seen without waiting."""
    residual = found.get("residual", torch.empty(0))
    if torch.compiler.is_compiling() or transformed() or type(residual) is not Tensor or residual.device.type != "cpu":
        return
    bad = ~(residual <= _limit(tol, dtype))
    if bool(bad.any()):
        warnings.warn(
            f"{CALL}: {int(bad.sum())} of {bad.numel()} systems are unconverged, with residuals up to "
            f"{float(residual.max()):.2g}; give a larger ridge or float64, and to conjugate gradients more max_iter "
            f"(return_diagnostics=True tells which).",
            RuntimeWarning,
            stacklevel=3,
        )


def _how(
    query: Tensor,
    form: str,
    chunk_size: int | None,
    solver: Any,
    tol: float | None,
    max_iter: int | None,
    dtype: torch.dtype,
) -> How:
    choice(CALL, "solver", solver, get_args(Solver))
    if solver == "cg" and form != "chunked":
        raise ArgumentError(f"{CALL}: form={form!r} solves directly; solver='cg' is for form='chunked'.")
    optional_whole(CALL, "max_iter", max_iter, 1)
    finest = 1e-13 if dtype == torch.float64 else 1e-6
    tol = finest if tol is None else number(CALL, "tol", tol, low=0.0, strict=True)
    return How(solver, min(chunk_size or CHUNK, FAR), tol, min(max_iter or 2 * query.shape[3] + 16, FAR))


def _ridge(ridge: Any, query: Tensor, dtype: torch.dtype) -> Tensor:
    """ridge as [B, H, 1 or Tq, D]."""
    in_range(CALL, "ridge", ridge, low=0.0, high=torch.finfo(dtype).max, strict=True)
    batch, heads, queries, dim = query.shape
    if not isinstance(ridge, Tensor):
        return torch.full((1, 1, 1, 1), float(ridge), dtype=dtype, device=query.device).expand(batch, heads, 1, dim)
    floating(CALL, "ridge", ridge)
    on_device(CALL, "ridge", ridge, query.device)
    fits: dict[int, tuple[int, ...]] = {
        0: (), 1: (heads,), 2: (heads, dim), 3: (batch, heads, queries), 4: (batch, heads, queries, dim)
    }  # fmt: skip
    if ridge.dim() not in fits:
        raise ArgumentError(
            f"{CALL}: ridge has shape {shape(ridge)}, expected [{heads}] (per head), [{heads}, {dim}] (and dimension), "
            f"[{batch}, {heads}, {queries}] (per token) or one that broadcasts to [{batch}, {heads}, {queries}, {dim}]."
        )
    broadcastable(CALL, "ridge", ridge, fits[ridge.dim()])
    places = {0: (None,) * 4, 1: (None, slice(None), None, None), 2: (None, slice(None), None), 3: (..., None), 4: ...}
    whole = ridge.to(dtype)[places[ridge.dim()]]
    return whole.expand(batch, heads, whole.shape[2], dim)


def _scale(scale: float | Tensor | None, query: Tensor, dtype: torch.dtype) -> float | Tensor:
    if scale is None:
        return 1.0
    in_range(CALL, "scale", scale, low=0.0, strict=True)
    rows = (query.shape[0], query.shape[1], query.shape[2])
    factor = row_number(CALL, "scale", scale, rows, dtype, query.device)
    return factor[..., None] if isinstance(factor, Tensor) else factor
