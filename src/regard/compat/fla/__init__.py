"""Functions of the package fla (PyPI: flash-linear-attention, release 0.6) under its names, computed by regard.

Names, order of arguments and shapes are those of `fla.ops`: q and k [B, T, H, K], v [B, T, HV, V], decays in log space.
They run on any device, in plain PyTorch: `chunk_*` in chunks, `fused_recurrent_*` token by token, in float32 (float64
for float64 inputs), with a derivative for every input, states included. docs/compat.md lists what differs. Arguments
that regard does not support raise an error unless they have their default.

Arguments that all functions share:

    scale                    factor of q k; default 1 / sqrt(K)
    initial_state            [N, HV, K, V] ([N, HV, V, K] with `state_v_first`); N = B without `cu_seqlens`
    output_final_state       whether to return the state after the last token; otherwise it is None
    use_qk_l2norm_in_kernel  divides q and k by sqrt(|x|^2 + 1e-6)
    cu_seqlens               integers [N + 1], the boundaries of N sequences packed into one row (B = 1)
    chunk_size               positions of a chunk, by keyword; default that of regard

They return (output [B, T, HV, V] in the dtype of q, final state or None), and raise `ArgumentError` for shapes, dtypes
and boundaries that do not fit. The cost is that of the function of regard that each names.

Legend: B rows, T positions, H heads of q and k, HV of v (a multiple of H, each head of q and k serving HV / H of them,
in the functions with decays per value head), K and V channels, N sequences.
"""

from .delta import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from .linear import (
    chunk_gla,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
)
from .regression import chunk_mesa_net, mesa_net_decoding_one_step, parallel_attn, parallel_parallax

__all__ = [
    "chunk_delta_rule", "chunk_gated_delta_rule", "chunk_gdn", "chunk_gla", "chunk_kda", "chunk_linear_attn",
    "chunk_mesa_net", "chunk_retention", "chunk_simple_gla", "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn", "fused_recurrent_gla", "fused_recurrent_kda",
    "fused_recurrent_linear_attn", "fused_recurrent_retention", "fused_recurrent_simple_gla",
    "mesa_net_decoding_one_step", "parallel_attn", "parallel_parallax",
]  # fmt: skip
