"""The delta rule, plain and gated: a linear model that every pair corrects by one step of gradient descent on
|v - W k|^2 / 2 (DeltaNet; Gated DeltaNet with decay; see section 2.1 of the local-linear-attention paper):

    W_i = alpha_i W_{i-1} (I - beta_i k_i k_i^T) + beta_i v_i k_i^T,    o_i = W_i q_i,    alpha_i = exp(g_i)

What pair i writes is beta_i times its error, u_i = beta_i (v_i - alpha_i W_{i-1} k_i): linear attention with decay
whose values are u. Inside a chunk the u are the solution of a triangular system in the pairs of its keys,

    (I + Diag(beta) L) U = Diag(beta) (V - K^ W^T),    L_ij = k_i . k_j exp(g_{j+1} + ... + g_i) for j < i,

K^ the keys with the decay since the beginning of the chunk and W the state there (the WY form: U = X - Y W^T with X and
Y made for all chunks at once). From chunk to chunk W^T goes by a matrix, Diag(exp g) - K~^T Y, K~ the keys with the
decay until the end.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value, F as D, E as Dv; c
positions of a chunk. State W^T [B, Hkv, D, Dv].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..checks import in_range
from ..pairwise.visibility import Visibility
from ..precision import full_precision, row_number
from .arguments import Form, PerKey, check, cleaned, log_decays, no_pairs, order, per_key
from .decay import CHUNK, Chunks, pairs, prefix, read, shifted, suffix
from .packing import by_document, documents
from .scan import scan
from .states import State, require_state

CALL = "delta_rule"


@dataclass(frozen=True)
class DeltaState(State):
    """What the delta rule has learned from all pairs so far; its size does not grow.

    Attributes:
        values: W^T [B, Hkv, D, Dv], float32 or float64.
        poisoned: boolean [B, Hkv]: a pair that was not finite was seen, so that every later row is NaN.
        tokens: how many positions were seen, masked ones included.
    """

    values: Tensor
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
    ) -> DeltaState:
        """W = 0, for keys of `dim` and values of `value_dim` (`dim` where None)."""
        sizes = (batch, kv_heads, dim, dim if value_dim is None else value_dim)
        values = torch.zeros(sizes, dtype=torch.promote_types(dtype, torch.float32), device=device)
        return cls(values, torch.zeros(batch, kv_heads, dtype=torch.bool, device=device))

    def read(self, query: Tensor, *, scale: float | Tensor | None = None) -> Tensor:
        """W q for other queries [B, H, Tq, D] after all pairs, [B, H, Tq, Dv]; `scale` as in `delta_rule`."""
        nothing = no_pairs(CALL, query, *self.values.shape[1::2])
        return delta_rule(query, *nothing, 0.0, state=self, is_causal=False, scale=scale)[0]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: float | Tensor,
    *,
    log_decay: float | Tensor | None = None,
    state: DeltaState | None = None,
    form: Form = "chunked",
    chunk_size: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    exclude_self: bool = False,
    segment_ids: Tensor | None = None,
    scale: float | Tensor | None = None,
) -> tuple[Tensor, DeltaState]:
    """The linear model that the delta rule makes of all pairs so far, read at the query, with a state to go on from.

    Prefill, chunks and single steps agree: each call takes the state of the one before. Nothing is mutated.

    Args:
        query: [B, H, Tq, D]. Nothing is divided by sqrt(D).
        key: [B, Hkv, Tk, D]; Hkv = H or a divisor of H. The rule is stable where beta |k|^2 < 2, so that keys are
            usually made unit vectors.
        value: [B, Hkv, Tk, Dv].
        beta: size of the step, >= 0: a number or broadcastable to [B, Hkv, Tk].
        log_decay: g <= 0 (the gated delta rule): per key head [Hkv] or one number, per token [B, Hkv, Tk], or per
            channel of the keys [B, Hkv, Tk, D], by which the state fades before the step; -inf forgets everything.
        state: what earlier calls left; None at the beginning.
        form: "chunked" (WY), "parallel" (one triangular system for all positions) or "recurrent" (step by step).
        chunk_size: positions of a chunk; `decay.CHUNK` where None.
        attn_mask: boolean over the keys of this call, [B, Tk] or [B, 1, 1, Tk]; True where a pair may be learned.
            Masked positions neither write nor fade.
        is_causal: query i reads W_i; Tq must equal Tk. Otherwise every query reads the state after all pairs.
        exclude_self: query i reads W_{i-1}; implies `is_causal`.
        segment_ids: integers [B or 1, T] of packed sequences, T = Tq = Tk: a document begins wherever the id changes,
            so that an id that comes back begins another one. Every document is computed as if it were alone, and the
            states that come in and go out hold one entry a document on the batch axis, ordered row by row (their
            `tokens` is that of the longest document). Padding with an id of its own counts as a document.
        scale: factor of the query, a number or broadcastable to [B, H, Tq]; 1 where None.

    Returns:
        (output [B, H, Tq, Dv] in the dtype of `query`, the state after all pairs). Rows without a visible key are 0;
        rows that see what is not finite are NaN, here or in any later call.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or numbers out of range.

    Precision: float32 (float64 for float64 inputs), whatever the inputs and autocast; a backward pass keeps it outside
    of autocast, where torch wants it. Derivatives: to any order.
    Cost: a head, O(T D (D + Dv + c)) for "chunked" with O(T (D + Dv + c) + (T / c) D (D + Dv)) memory; "parallel"
    O(T^2) memory and O(T^2 (T + D)) time; "recurrent" O(T D Dv).
    With segment_ids, documents of similar lengths are computed as one batch: fewer than T / 3 positions are added, and
    there are O(log T) batches, one after the other (`packing`). The ids are read on the host, so that a GPU is waited
    for, and torch.compile leaves packed calls out of its graphs.
    """
    causal = order(CALL, is_causal, exclude_self)
    mask = check(CALL, query, key, value, attn_mask, form, chunk_size, causal)
    packed = documents(CALL, segment_ids, query, key)
    dtype = torch.promote_types(query.dtype, torch.float32)
    (batch, _, queries, dim), kv_heads, value_dim = query.shape, key.shape[1], value.shape[3]
    fade = log_decays(CALL, log_decay, key, dim, dtype)
    step = per_key(CALL, "beta", beta, key, dtype)
    factor: float | Tensor = 1.0
    if scale is not None:
        in_range(CALL, "scale", scale, low=0.0, strict=True)
        factor = row_number(CALL, "scale", scale, (batch, query.shape[1], queries), dtype, query.device)
    if state is not None:
        sequences = batch if packed is None else packed.count
        wanted = {"values": (sequences, kv_heads, dim, value_dim)}
        require_state(CALL, state, DeltaState, wanted, query.new_empty(0, dtype=dtype))
    how: dict[str, Any] = {"causal": causal, "strict": exclude_self, "form": form, "chunk": chunk_size}
    learn = partial(_learn, dtype=dtype, **how)
    inputs = (query, key, value, step, fade, factor)
    with full_precision(query.device.type):
        return by_document(packed, learn, inputs, mask, state)


def _learn(
    inputs: tuple[Tensor, Tensor, Tensor, PerKey, PerKey | None, float | Tensor],
    mask: Tensor | None,
    state: DeltaState | None,
    *,
    dtype: torch.dtype,
    causal: bool,
    strict: bool,
    **how: Any,
) -> tuple[Tensor, DeltaState]:
    """`delta_rule` of checked inputs: query, key, value, beta, log_decay and the factor; mask [B, 1, T]."""
    query, key, value, step, fade, factor = inputs
    queries, (batch, kv_heads, keys, dim) = query.shape[2], key.shape
    if state is None:
        state = DeltaState.empty(batch, kv_heads, dim, value.shape[3], dtype=dtype, device=query.device)
    step, fade = step.kept(mask), fade and fade.kept(mask)
    visible = Visibility(queries, keys, causal, strict, mask=None if mask is None else mask[:, :, None])
    held = (state.values.detach() != 0).flatten(2).any(-1)
    own = cleaned(CALL, query, key, value, dtype, visible, held, state.poisoned, fade, step)
    q = own.query * (factor[..., None] if isinstance(factor, Tensor) else factor)
    how |= {"causal": causal, "strict": strict}
    out, after = corrected(q, own.key, own.value, step.value, fade and fade.value, state.values, **how)
    out = torch.where(own.poisoned[..., None], torch.nan, out).to(query.dtype)
    return out, DeltaState(after, state.poisoned | own.spoilt, tokens=state.tokens + keys)


def corrected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    start: Tensor,
    *,
    causal: bool = True,
    strict: bool = False,
    form: str = "chunked",
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(what the queries read [B, H, Tq, E], the state after all pairs); g [B, Hkv, T, 1 or F] or None."""
    queries = q.shape[2]
    if not causal:
        _, after = corrected(k, k, v, beta, g, start, form=form, chunk=chunk)
        return read(q, after), after
    if strict:
        q, k, v, g = shifted(q, k, v, g)
        beta = pad(beta, (1, 0))
    if form == "recurrent":
        rows, after = _recurrent(q, k, v, beta, g, start)
    else:
        rows, after = _chunked(q, k, v, beta, g, start, k.shape[2] if form == "parallel" else chunk or CHUNK)
    return rows[:, :, :queries], after


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, start: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    chunks = Chunks(k.shape[2], chunk)
    heads, q = q.shape[1], chunks.queries(q, k.shape[1])
    k, v, beta = chunks.cut(k), chunks.cut(v), chunks.cut(beta[..., None])
    g = None if g is None else chunks.cut(g)
    since, until = (k, k) if g is None else (k * prefix(g).exp(), k * suffix(g).exp())
    meet = pairs(k[..., None, :], k, g).tril(-1)
    system = beta * meet + torch.eye(chunks.size, dtype=k.dtype, device=k.device)
    right = beta * torch.cat([v, since], -1)
    found = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    x, y = found.split([v.shape[-1], k.shape[-1]], -1)
    turned = until.transpose(-1, -2)
    kept = k.new_ones(k.shape[-1]) if g is None else prefix(g)[..., -1, :].exp().expand(*k.shape[:3], k.shape[-1])
    before, after = scan(torch.diag_embed(kept) - turned @ y, turned @ x, start)
    queries = (q if g is None else q * prefix(g).exp()[..., None, :]).flatten(-3, -2)
    rows = pairs(q, k, g) @ (x - y @ before) + queries @ before
    return chunks.rows(rows, heads), after


def _recurrent(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """One pair at a time."""
    rows = [q.new_zeros(*q.shape[:2], 0, v.shape[-1])]
    for t in range(k.shape[2]):
        state = state if g is None else state * g[:, :, t, :, None].exp()
        at = k[:, :, t, :, None]
        error = v[:, :, t, None] - (state * at).sum(-2, keepdim=True)
        state = state + at * (beta[:, :, t, None, None] * error)
        rows.append(read(q[:, :, t : t + 1], state))
    return torch.cat(rows, 2), state
