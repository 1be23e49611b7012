"""Delta rules of fla by `regard.delta_rule`.

Legend: as in `regard.compat.fla`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...checks import number, require, shape, tensor, within
from ...public import DeltaState, delta_rule
from ...recurrent.arguments import l2_normalized
from .calls import Sequences, check_shapes, form_of, fresh, refuse


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute DeltaNet (arXiv 2406.06484) by `regard.delta_rule`. beta: step sizes [B, T, H]."""
    return _delta("chunk_delta_rule", **locals(), grouped=False)


def fused_recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_delta_rule` token by token. beta: step sizes [B, T, H], default 1."""
    return _delta("fused_recurrent_delta_rule", **locals(), grouped=False)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, chunk_indices: Tensor | None = None,
    cp_context: None = None, *, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute Gated DeltaNet (arXiv 2412.06464) by `regard.delta_rule`.

    g: log decays [B, T, HV]; with `use_gate_in_kernel` the decay is -exp(A_log) softplus(g + dt_bias), with A_log and
    dt_bias [HV]. beta: step sizes [B, T, HV]; with `use_beta_sigmoid_in_kernel` their logits, and `allow_neg_eigval`
    doubles their sigmoid.
    """
    return _delta("chunk_gated_delta_rule", **locals())


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, gk: Tensor | None = None, gv: None = None,
    beta: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_gated_delta_rule` token by token.

    As there; gk: log decays per channel [B, T, HV, K], which are added to g. beta is 1 by default.
    """
    return _delta("fused_recurrent_gated_delta_rule", **locals())


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False,
    safe_gate: bool = False, lower_bound: float | None = None, disable_recompute: bool = False,
    return_intermediate_states: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, cp_context: None = None, use_graph: bool = False,
    max_num_seqs: int | None = None, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute Kimi Delta Attention (arXiv 2510.26692) by `regard.delta_rule` with a decay per channel.

    g: log decays [B, T, HV, K]; with `use_gate_in_kernel` the decay is -exp(A_log) softplus(g + dt_bias), and with
    `lower_bound` lower_bound sigmoid(exp(A_log) (g + dt_bias)), with A_log [HV] and dt_bias [HV K]. beta as in
    `chunk_gated_delta_rule`.
    """
    return _delta("chunk_kda", **locals(), channels="g")


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, lower_bound: float | None = None,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `chunk_kda` token by token."""
    return _delta("fused_recurrent_kda", **locals(), channels="g")


def _delta(
    call: str, *, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, g: Tensor | None = None,
    gk: Tensor | None = None, scale: float | None, initial_state: Tensor | None, output_final_state: bool,
    use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None, state_v_first: bool = False,
    chunk_size: int | None = None, use_gate_in_kernel: bool = False, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False, grouped: bool = True, channels: str = "gk", **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `regard.delta_rule`; `grouped` and `channels` as in `check_shapes`."""
    refuse(call, **others)
    check_shapes(call, q, k, v, grouped=grouped, channels=channels, g=g, gk=gk, beta=beta)
    g = _gate(call, g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g
    g = g if gk is None else gk if g is None else g[..., None] + gk
    beta = _steps(call, beta, v, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    packed = Sequences(call, q, v.shape[2], cu_seqlens, state_v_first)
    start = packed.start("initial_state", initial_state, q.shape[3], v.shape[3])
    q, k = (l2_normalized(q), l2_normalized(k)) if use_qk_l2norm_in_kernel else (q, k)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    out, after = within(
        call, None, delta_rule, q, k, v, beta, log_decay=g, form=form_of(call),
        state=None if start is None else DeltaState(start, fresh(start)), chunk_size=chunk_size, segment_ids=packed.ids,
        scale=q.shape[3] ** -0.5 if scale is None else scale, layout="bthd",
    )  # fmt: skip
    return out, packed.end(after.values, after.non_finite, initial_state) if output_final_state else None


def _gate(call: str, g: Any, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return the decays of raw gates [B, T, HV] or [B, T, HV, K] by the formulas of `chunk_kda`."""
    require(g is not None, call, "use_gate_in_kernel=True needs g, the gate before its activation.")
    require(A_log is not None or lower_bound is not None, call, "use_gate_in_kernel=True needs A_log [HV].")
    for name, x, wanted in (("A_log", A_log, g.shape[2]), ("dt_bias", dt_bias, g.shape[2:].numel())):
        if x is not None:
            count = tensor(call, name, x, like=g, of="g").numel()
            require(count == wanted, call, f"{name} has shape {shape(x)}, expected {wanted} numbers for g {shape(g)}.")
    if lower_bound is not None:
        number(call, "lower_bound", lower_bound, high=0.0)
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    g = g if dt_bias is None else g + dt_bias.reshape(g.shape[2:])
    speed: Any = 1 if A_log is None else A_log.reshape(g.shape[2], *[1] * (g.dim() - 3)).exp()
    return -speed * softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(speed * g)


def _steps(call: str, beta: Tensor | None, v: Tensor, sigmoid: bool, negative: bool) -> Tensor:
    """Return the step sizes: beta, or of its logits sigmoid(beta), twice that with `allow_neg_eigval`."""
    require(sigmoid or not negative, call, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True.")
    if beta is None:
        return torch.ones_like(v[..., 0])
    return beta.sigmoid() * (2 if negative else 1) if sigmoid else beta
