"""MesaNet, Parallax and softmax attention of fla by regard's functions of the same kind.

Legend: as in `regard.compat.fla`.
"""

from torch import Tensor

from ...checks import optional_whole, tensor, within
from ...public import MesaState, attention, local_linear_attention, mesa_attention
from ...recurrent.arguments import l2_normalized
from .calls import Sequences, check_shapes, fresh, refuse


def chunk_mesa_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lamb: Tensor, h_kk_init: Tensor | None = None,
    h_kv_init: Tensor | None = None, output_final_state: bool = False, max_CG_iteration: int = 30,
    use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute MesaNet (arXiv 2506.05233) by `regard.mesa_attention` with conjugate gradients.

    g: log decays [B, T, H]. beta: weights of the keys [B, T, H]. lamb: ridge [H, K]. `max_CG_iteration` bounds the
    steps, which end before at the tolerance of `regard.mesa_attention`. States, initial and final: the sums of k k^T
    [N, H, K, K] and of k v^T [N, H, K, V].

    Returns:
        (output [B, T, H, V], the two final states, or None and None).

    Warns:
        RuntimeWarning: as `regard.mesa_attention`, of systems that did not converge.
    """
    call = "chunk_mesa_net"
    check_shapes(call, q, k, v, g=g, beta=beta)
    dim = q.shape[3]
    tensor(call, "lamb", lamb, q.shape[2], dim)
    optional_whole(call, "max_CG_iteration", max_CG_iteration, 1)
    packed = Sequences(call, q, q.shape[2], cu_seqlens)
    gram = packed.start("h_kk_init", h_kk_init, dim, dim)
    values = packed.start("h_kv_init", h_kv_init, dim, v.shape[3])
    state, some = None, gram if values is None else values
    if some is not None:
        values = some.new_zeros(*some.shape[:3], v.shape[3]) if values is None else values
        gram = some.new_zeros(*some.shape[:3], dim) if gram is None else gram
        state = MesaState(values, gram, fresh(some))
    q, k = (l2_normalized(q), l2_normalized(k)) if use_qk_l2norm_in_kernel else (q, k)
    out, after = within(
        call, None, mesa_attention, q, k, v, ridge=lamb, log_decay=g, beta=beta, state=state, solver="cg",
        max_iter=max_CG_iteration, segment_ids=packed.ids, layout="bthd",
    )  # fmt: skip
    if not output_final_state:
        return out, None, None
    ends = ((after.gram, h_kk_init), (after.values, h_kv_init))
    return (out, *(packed.end(x, after.non_finite, initial) for x, initial in ends))


def mesa_net_decoding_one_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, lamb: Tensor, beta: Tensor, prev_h_kk: Tensor, prev_h_kv: Tensor,
    max_CG_iteration: int = 30,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute one token of `chunk_mesa_net`: q and k [B, H, K], v [B, H, V], g and beta [B, H].

    Returns:
        (output [B, H, V], the sums of k k^T, the sums of k v^T).
    """
    call = "mesa_net_decoding_one_step"
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor(call, name, x, "B", "H", "K")
    for name, x in (("g", g), ("beta", beta)):
        tensor(call, name, x, *q.shape[:2])
    states = {"h_kk_init": prev_h_kk, "h_kv_init": prev_h_kv, "max_CG_iteration": max_CG_iteration}
    one = [x[:, None] for x in (q, k, v, g, beta)]
    out, *after = within(call, None, chunk_mesa_net, *one, lamb, output_final_state=True, **states)
    return (out[:, 0], *after)


def parallel_parallax(
    q: Tensor, r: Tensor, k: Tensor, v: Tensor, scale: float | None = None, window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal Parallax (arXiv 2605.29157) by `regard.local_linear_attention` with the solver "learned".

    q and the probe r [B, T, HQ, D], k and v [B, T, H, D]; HQ is a multiple of H. `scale` multiplies q k alone.
    `window_size`: query i sees the keys from i - window_size + 1 to i.

    Returns:
        Output [B, T, HQ, D].
    """
    call = "parallel_parallax"
    _check_queries(call, q, k, v)
    tensor(call, "r", r, *q.shape, like=q, of="q")
    packed, how = Sequences(call, q, q.shape[2], cu_seqlens), {"solver": "learned", "probe": r}
    return within(call, None, local_linear_attention, q, k, v, **how, **_causal(packed, scale, window_size))


def parallel_attn(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, scale: float | None = None,
    window_size: int | None = None, cu_seqlens: Tensor | None = None, chunk_indices: Tensor | None = None, *,
    sink_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal softmax attention by `regard.attention`. Shapes and arguments as in `parallel_parallax`."""
    call = "parallel_attn"
    refuse(call, g=g, sink_bias=sink_bias)
    _check_queries(call, q, k, v)
    packed = Sequences(call, q, q.shape[2], cu_seqlens)
    return within(call, None, attention, q, k, v, **_causal(packed, scale, window_size))


def _check_queries(call: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    tensor(call, "q", q, "B", "T", "HQ", "D")
    tensor(call, "k", k, *q.shape[:2], "H", q.shape[3], like=q, of="q")
    tensor(call, "v", v, *k.shape[:3], "D", like=q, of="q")


def _causal(packed: Sequences, scale: float | None, window: int | None) -> dict[str, object]:
    """Return the arguments of `regard.attention` for causal order in the layout of fla."""
    optional_whole(packed.call, "window_size", window, 1)
    shared = {"is_causal": True, "enable_gqa": True, "layout": "bthd"}
    return {"scale": scale, "window": window, "segment_ids": packed.ids, **shared}
