"""Linear attention of fla, with and without decay, by `regard.linear_attention`.

Legend: as in `regard.compat.fla`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...checks import require, tensor, within
from ...public import LinearState, linear_attention
from ...recurrent.decay import retention_log_decay
from .calls import Sequences, check_shapes, form_of, fresh, refuse

Normaliser = tuple[Tensor, Tensor]


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute gated linear attention (arXiv 2312.06635) by `regard.linear_attention`. g: log decays [B, T, H, K]."""
    return _linear("chunk_gla", **locals(), channels="g")


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, reverse: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_gla` token by token. gk: log decays [B, T, H, K], default none."""
    return _linear("fused_recurrent_gla", **locals())


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute linear attention with a decay per head (Mamba-2, arXiv 2405.21060) by `regard.linear_attention`.

    g: log decays [B, T, H]. g_gamma: log decays [H], the same for all tokens. Neither: no decay.
    """
    return _linear("chunk_simple_gla", **locals())


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    reverse: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_simple_gla` token by token."""
    return _linear("fused_recurrent_simple_gla", **locals())


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *, chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute retention (RetNet, arXiv 2307.08621) by `regard.linear_attention`: head h fades by 1 - 2^(-5 - h)."""
    check_shapes("chunk_retention", q, k, v)
    return _linear("chunk_retention", **locals(), g_gamma=retention_log_decay(q, q.shape[2]))


def fused_recurrent_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, reverse: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_retention` token by token."""
    check_shapes("fused_recurrent_retention", q, k, v)
    return _linear("fused_recurrent_retention", **locals(), g_gamma=retention_log_decay(q, q.shape[2]))


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | Normaliser | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Normaliser | None]:  # fmt: skip
    """Compute linear attention (arXiv 2006.16236) of q and k that are features already, by `regard.linear_attention`.

    With `normalize` the output is divided by scale q . z + 1e-10, z the sum of k so far, and states are pairs (sum of
    k v^T [N, H, K, V], z [N, 1, H, K]).
    """
    return _normalised("chunk_linear_attn", **locals())


def fused_recurrent_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | Normaliser | None = None,
    output_final_state: bool = False, reverse: bool = False, normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | Normaliser | None]:  # fmt: skip
    """Compute `chunk_linear_attn` token by token, by default without normaliser."""
    return _normalised("fused_recurrent_linear_attn", **locals())


def _normalised(
    call: str, *, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | Normaliser | None, normalize: bool,
    **rest: Any,
) -> tuple[Tensor, Tensor | Normaliser | None]:  # fmt: skip
    """Compute `chunk_linear_attn`: the normaliser is the output of one more value channel that is 1 everywhere."""
    check_shapes(call, q, k, v)
    pair = isinstance(initial_state, tuple)
    require(normalize or not pair, call, "initial_state is a pair, which only normalize=True takes.")
    held, z = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if not normalize:
        return _linear(call, q=q, k=k, v=v, initial_state=held, **rest)
    wide = torch.promote_types(q.dtype, torch.float32)
    if held is not None:
        tensor(call, "initial_state", held, "N", q.shape[2], q.shape[3], v.shape[3])
        if z is not None:
            tensor(call, "initial_state[1]", z, held.shape[0], 1, *held.shape[1:3])
        sums = held.new_zeros(held.shape[:3]) if z is None else z[:, 0]
        held = torch.cat([held.to(wide), sums.to(wide)[..., None]], -1)
    inputs = {"q": q.to(wide), "k": k.to(wide), "v": pad(v, (0, 1), value=1.0).to(wide), "initial_state": held}
    rows, after = _linear(call, **inputs, **rest)
    out = (rows[..., :-1] / (rows[..., -1:] + 1e-10)).to(q.dtype)
    return out, None if after is None else (after[..., :-1], after[..., -1][:, None])


def _linear(
    call: str, *, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None,
    g_gamma: Tensor | None = None, scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, state_v_first: bool = False, chunk_size: int | None = None, channels: str = "gk",
    **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `regard.linear_attention`, unnormalised, with the sum of the decays; `channels` as in `check_shapes`."""
    refuse(call, **others)
    check_shapes(call, q, k, v, channels=channels, g=g, gk=gk)
    if g_gamma is not None:
        tensor(call, "g_gamma", g_gamma, q.shape[2])
        g = g_gamma if g is None else g + g_gamma
    g = gk if g is None else g
    packed, dim = Sequences(call, q, v.shape[2], cu_seqlens, state_v_first), q.shape[3]
    start, state = packed.start("initial_state", initial_state, dim, v.shape[3]), None
    if start is not None:  # regard's states have one feature more, for a bias
        keys = start.new_zeros(*start.shape[:2], dim + 1)
        state = LinearState(pad(start, (0, 0, 0, 1)), keys, None, fresh(start))
    out, after = within(
        call, None, linear_attention, q, k, v, "linear*unnormalised", log_decay=g, state=state,
        form=form_of(call), chunk_size=chunk_size, segment_ids=packed.ids,
        scale=dim**-0.5 if scale is None else scale, layout="bthd",
    )  # fmt: skip
    return out, packed.end(after.values[:, :, :dim], after.non_finite, initial_state) if output_final_state else None
