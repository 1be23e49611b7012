"""The delta rule, plain and gated: each key and value correct a linear model by one step of gradient descent on
|v - W k|^2 / 2 (DeltaNet; Gated DeltaNet with decay; section 2.1 of the local-linear-attention paper):

    W_i = alpha_i W_{i-1} (I - beta_i k_i k_i^T) + beta_i v_i k_i^T,    o_i = W_i q_i,    alpha_i = exp(g_i)

This is linear attention with decay whose values are u_i = beta_i (v_i - alpha_i W_{i-1} k_i). Inside a chunk the u
solve a triangular system,

    (I + Diag(beta) L) U = Diag(beta) (V - K^ W^T),    L_ij = k_i . k_j exp(g_{j+1} + ... + g_i) for j < i,

where W is the state at the start of the chunk and K^ the keys with the decay since then (the WY form: U = X - Y W^T
with X and Y made for all chunks at once). One chunk multiplies W^T by Diag(exp g) - K~^T Y, K~ the keys with the decay
until its end.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels of a key, Dv of a value, F as D, E as Dv; c
positions of a chunk. State W^T [B, Hkv, D, Dv].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pairwise.layout import Layout, any_layout
from .arguments import Call, Form, PerKey, Tokens, begin, log_decays, per_key, read_state, row_scale, tokens
from .decay import decayed
from .states import LinearMap, Sizes

CALL = "delta_rule"


@dataclass(frozen=True)
class DeltaState(LinearMap):
    """The state of the delta rule: `values`, W^T [B, Hkv, D, Dv], float32 or float64; else as `regard.LinearState`."""

    values: Tensor
    non_finite: Tensor

    @staticmethod
    def sizes(dim: int, value_dim: int) -> Sizes:
        return {"values": (dim, value_dim)}

    def read(self, query: Tensor, *, scale: float | Tensor | None = None) -> Tensor:
        """Return W q [B, H, Tq, Dv] for queries [B, H, Tq, D]; `scale` as in `delta_rule`."""
        return read_state(delta_rule, query, self, 0.0, scale=scale)


@any_layout
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
    layout: Layout = "bhtd",
) -> tuple[Tensor, DeltaState]:
    """Learn a linear map from keys to values by the delta rule, and read it at the queries.

    Args:
        query: [B, H, Tq, D], not divided by sqrt(D).
        key: [B, Hkv, Tk, D]; H is a multiple of Hkv. Stable for beta |k|^2 < 2; keys are usually unit vectors.
        value: [B, Hkv, Tk, Dv].
        beta: step size >= 0: a number or broadcastable to [B, Hkv, Tk].
        log_decay: g <= 0 (the gated delta rule), applied to the state before the step: a number, per key head [Hkv],
            per token [B, Hkv, Tk] or per channel of the keys [B, Hkv, Tk, D]; -inf in a tensor clears the state.
        form: "chunked" (WY), "parallel" (one triangular system for all positions) or "recurrent" (step by step).
        state, chunk_size, attn_mask, segment_ids: as in `regard.linear_attention`.
        is_causal: query i reads W_i; Tq must equal Tk. Otherwise every query reads the last state.
        exclude_self: query i reads W_{i-1}; implies `is_causal`.
        scale: factor of the query, a number or broadcastable to [B, H, Tq]; default 1.
        layout: "bthd" for tensors with tokens before heads, as in `regard.attention`; also in `beta` and `log_decay`.

    Returns:
        (output, state) as `regard.linear_attention`.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or numbers out of range.

    Precision: float32 (float64 for float64 inputs), also under autocast; call backward outside autocast, as torch
    advises. Derivatives: to any order.
    Cost per head: "chunked" O(T D (D + Dv + c)) time and O(T (D + Dv + c) + (T / c) D (D + Dv)) memory; "parallel"
    O(T^2 (T + D)) time and O(T^2) memory; "recurrent" O(T D Dv) time.
    """
    call = begin(CALL, query, key, value, attn_mask, form, chunk_size, is_causal, exclude_self, segment_ids)
    fade = log_decays(CALL, log_decay, key, query.shape[3], call.dtype)
    step = per_key(CALL, "beta", beta, key, call.dtype)
    factor = row_scale(call, scale, query)
    state = call.state(state, DeltaState, key, DeltaState.sizes(key.shape[3], value.shape[3]))
    out, after = call.run(_learn, (tokens(call, query, key, value, fade, step), step, fade, factor), state)
    return out.to(query.dtype), after


def _learn(
    inputs: tuple[Tokens, PerKey, PerKey | None, Any], mask: Tensor | None, state: DeltaState, call: Call
) -> tuple[Tensor, DeltaState]:
    qkv, step, fade, factor = inputs
    held = (state.values.detach() != 0).flatten(2).any(-1)
    rows, non_finite = qkv.non_finite(call.visible(qkv, mask), held, state.non_finite)
    qkv, step, g = qkv.masked(mask), step.kept(mask), fade and fade.kept(mask).value
    tensors = (qkv.query * factor, qkv.key, qkv.value, g, state.values)
    out, after = decayed(*tensors, beta=step.value[..., None], **call.how)
    out = torch.where(rows[..., None], torch.nan, out)
    return out, DeltaState(after, non_finite, tokens=state.tokens + qkv.key.shape[2])
