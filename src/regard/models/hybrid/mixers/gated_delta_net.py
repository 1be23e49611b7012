"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as a token mixer.

Projections, convolution and recurrence are those of transformers' Qwen3-Next: plain PyTorch on a CPU, and
flash-linear-attention's kernels on a GPU if it is installed. Beyond transformers, padding may be anywhere in a row, the
state continues over calls of any length, and packed documents are separated on every device (`regard.delta_rule`).

Shapes: B batch, T tokens, C model width, H heads, D channels of a head, W width of the convolution, G = 3 H D its
channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers import initialization as init
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from ....checks import number, optional_whole
from ....nn.arguments import plain_filters, positive_ints
from ....one_node import one_node
from ....recurrent.delta import delta_rule
from ....recurrent.states import State
from ...base.cache_layers import StateCacheLayer
from ..token_mixers import StateMixer, States, short_convolution, token_mixers


@dataclass(frozen=True)
class GatedDeltaState(State):
    """The last inputs of the convolution [B, G, W - 1], and the associative memory [B, H, D, D] in float32."""

    conv: Tensor
    memory: Tensor


class GatedDeltaCacheLayer(StateCacheLayer):
    """The state of one Gated DeltaNet layer, None before the first token."""

    held = ("delta",)
    delta: GatedDeltaState | None


class GatedDeltaNetwork(qwen.Qwen3NextGatedDeltaNet):
    """Qwen3-Next's layer; it sets its own parameters, since transformers passes over modules that have none."""

    def init_weights(self) -> None:
        """Set the decay of the heads as Qwen3-Next does."""
        init.ones_(self.dt_bias)
        init.copy_(self.A_log, torch.empty_like(self.A_log, device="cpu").uniform_(0.01, 16).log_())

    def forward(
        self, hidden: Tensor, real: Tensor | None, state: GatedDeltaState | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """Compute `GatedDeltaNet.advance`: in a module's forward, whose hooks load weights that are on a disk."""
        tokens = hidden.shape[1]
        projected = self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        query, key, value, z, b, a = self.fix_query_key_value_ordering(*projected)
        mixed = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1).transpose(1, 2)
        before = None if state is None else state.conv
        mixed, last = short_convolution(mixed, plain_filters(self.conv1d, hidden.device), before, real, segment_ids)
        parts = mixed.transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        query, key, value = (x.unflatten(-1, (self.num_v_heads, -1)) for x in parts)
        beta, decay = b.sigmoid(), -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        if real is not None:  # padding neither decays nor writes the memory
            beta, decay = beta * real[..., None], decay * real[..., None]
        memory = None
        if segment_ids is not None:
            out = _by_document(query, key, value, beta, decay, real, segment_ids)
        else:
            out, memory = _rule(query, key, value, decay, beta, None if state is None else state.memory)
        heads = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim)).view_as(z)
        past = 0 if state is None else state.tokens
        after = None if memory is None else GatedDeltaState(last, memory, tokens=past + tokens)
        return self.out_proj(heads.flatten(2)), after


@token_mixers.register("gated-deltanet", "gdn")
class GatedDeltaNet(StateMixer):
    """A short convolution, then a linear memory with a forget gate, updated by the delta rule.

    The recurrence is computed in float32, as its kernels do. Cost: O(T C H D) (projections) and O(T H D^2) (memory).

    Args:
        hidden_size, num_heads, head_dim, conv_size: C, H (of queries, keys and values), D and W.
        norm_eps: of the gated norm of the heads.
        layer_idx: index of the layer in a cache.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"num_heads": 8, "head_dim": 64, "conv_size": 4}
    cache_layer = GatedDeltaCacheLayer

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 8,
        head_dim: int = 64,
        conv_size: int = 4,
        *,
        norm_eps: float = 1e-6,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "head_dim": head_dim, "conv_size": conv_size}
        positive_ints("GatedDeltaNet", **sizes)
        norm_eps = number("GatedDeltaNet", "norm_eps", norm_eps, low=0.0, strict=True)
        config = Qwen3NextConfig(
            hidden_size=hidden_size, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=norm_eps,
            linear_num_key_heads=num_heads, linear_num_value_heads=num_heads, linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim, linear_conv_kernel_dim=conv_size,
        )  # fmt: skip
        self.layer_idx = optional_whole("GatedDeltaNet", "layer_idx", layer_idx, 0)
        self.net = GatedDeltaNetwork(config, 0)
        self.net._is_hf_initialized = not self.net.A_log.is_meta  # transformers: it has drawn its values

    @staticmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> "GatedDeltaNet":
        return GatedDeltaNet(config.hidden_size, **options, norm_eps=config.rms_norm_eps, layer_idx=layer_idx)

    def advance(
        self, hidden: Tensor, real: Tensor | None, states: States, segment_ids: Tensor | None
    ) -> tuple[Tensor, States]:
        out, after = self.net(hidden, real, states[0], segment_ids)
        return out, (after,)


_RULES = (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
_PLAIN = tuple(map(unwrap, _RULES))
"""The rules without flash-linear-attention, whose kernels transformers would call on a CPU too."""


def _like(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes of `_rule`'s outputs."""
    state = value.new_empty(value.shape[0], value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32)
    return value.new_empty(value.shape), state


@one_node("gated_delta_rule", _like)
def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, T, H, D] and the state [B, H, D, D] after all tokens."""
    rules = _PLAIN if query.device.type == "cpu" else _RULES
    rule = rules[0] if query.shape[1] == 1 else rules[1]
    steps = {"g": decay, "beta": beta, "initial_state": state}
    return rule(query, key, value, **steps, output_final_state=True, use_qk_l2norm_in_kernel=True)


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor, real: Tensor | None, segment_ids: Tensor
) -> Tensor:
    """Return the gated delta rule [B, T, H, D] with one memory per document, in float32, scaled as in transformers."""
    given = value.dtype
    units = (qwen.l2norm(x.float()) for x in (query, key))
    query, key, value = (x.transpose(1, 2) for x in (*units, value.float()))
    steps = {"beta": beta.float().transpose(1, 2), "log_decay": decay.transpose(1, 2)}
    scale = query.shape[-1] ** -0.5
    out, _ = delta_rule(query, key, value, **steps, attn_mask=real, scale=scale, segment_ids=segment_ids)
    return out.transpose(1, 2).to(given)
