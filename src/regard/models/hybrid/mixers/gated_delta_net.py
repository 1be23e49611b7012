"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as a mixer of tokens: the projections, the convolution and the
recurrence are those of transformers' Qwen3-Next, in plain PyTorch on a CPU and by flash-linear-attention's kernels
where it is installed and there is a GPU.

What transformers leaves open is settled here: padding anywhere in a row is as if it were not there, the state goes on
from any call to the next, whatever their lengths, and documents packed into a row are kept apart (transformers does so
in kernels for GPUs alone), by `regard.delta_rule`.

Shapes: B batch, T tokens given now, N tokens so far, C model width, H heads, D channels of a head, W the convolution's
width, G its channels (3 H D).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import unwrap
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from ....checks import number, require, segments
from ....nn.arguments import check_layer_idx, positive_int
from ....one_node import one_node
from ....recurrent.delta import delta_rule
from ....recurrent.states import State
from ...base.cache_layers import StateCacheLayer
from ...base.masks import all_real
from ..token_mixers import TokenMixer, own_layer, token_mixers

if TYPE_CHECKING:
    from ..configuration_hybrid import HybridConfig


@dataclass(frozen=True)
class GatedDeltaState(State):
    """What later tokens need.

    Attributes:
        conv: the last inputs of the convolution [B, G, W - 1].
        memory: the associative memory [B, H, D, D], in float32.
    """

    conv: Tensor
    memory: Tensor


class GatedDeltaCacheLayer(StateCacheLayer):
    """The state of one Gated DeltaNet layer, None before the first token."""

    held = ("delta",)
    update_refusal = "GatedDeltaCacheLayer: holds the state of a Gated DeltaNet, which writes it itself."
    no_way_back = (
        "GatedDeltaCacheLayer: tokens cannot be taken back from a recurrent state, as assisted and prompt-lookup "
        "decoding do; decode without an assistant."
    )
    delta: GatedDeltaState | None


@token_mixers.register("gated-deltanet", "gdn")
class GatedDeltaNet(TokenMixer):
    """A linear memory that forgets by a gate and is corrected by the delta rule, after a short convolution.

    The recurrence is computed in float32 whatever the dtype of the layer, float64 included, since that is what its
    kernels do. O(T C H D) for the projections, O(T H D^2) for the memory.

    Args:
        hidden_size: C.
        num_heads: H, of queries, keys and values alike.
        head_dim: D.
        conv_size: W.
        norm_eps: of the gated norm of the heads.
        layer_idx: the layer's place in a cache.
    """

    honours_segments = True
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
        for name, value in {"num_heads": num_heads, "head_dim": head_dim, "conv_size": conv_size}.items():
            positive_int("GatedDeltaNet", name, value)
        positive_int("GatedDeltaNet", "hidden_size", hidden_size)
        norm_eps = number("GatedDeltaNet", "norm_eps", norm_eps, low=0.0, strict=True)
        config = Qwen3NextConfig(
            hidden_size=hidden_size, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=norm_eps,
            linear_num_key_heads=num_heads, linear_num_value_heads=num_heads, linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim, linear_conv_kernel_dim=conv_size,
        )  # fmt: skip
        self.layer_idx = check_layer_idx("GatedDeltaNet", layer_idx)
        self.net = qwen.Qwen3NextGatedDeltaNet(config, 0)

    @staticmethod
    def build(config: HybridConfig, layer_idx: int, options: Mapping[str, Any]) -> GatedDeltaNet:
        """The layer of a hybrid model."""
        return GatedDeltaNet(config.hidden_size, **options, norm_eps=config.rms_norm_eps, layer_idx=layer_idx)

    def init_weights(self) -> None:
        """Set the decay of the heads as Qwen3-Next does."""
        init.ones_(self.net.dt_bias)
        init.copy_(self.net.A_log, torch.empty_like(self.net.A_log, device="cpu").uniform_(0.01, 16).log_())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[B, T, C] -> ([B, T, C], None); positions are not looked at, and there are no weights to show.

        `segment_ids` are integers [B or 1, T]: a change begins a new document. Not with a cache.

        Raises:
            ArgumentError: a cache without this layer's state, or with `segment_ids`.
        """
        kept = None
        if segment_ids is not None:
            require(past_key_values is None, "GatedDeltaNet", "segment_ids were given with a cache; leave one out.")
            segments(
                "GatedDeltaNet",
                segment_ids,
                hidden_states.shape[0],
                hidden_states.shape[1],
                hidden_states.device,
            )
        if past_key_values is not None:
            kept = own_layer("GatedDeltaNet", past_key_values, self.layer_idx or 0, GatedDeltaCacheLayer)
        mask = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :]
        state = None if kept is None else kept.delta
        out, state = self.mix(hidden_states, mask, state, remember=kept is not None, segment_ids=segment_ids)
        if kept is not None:
            kept.delta = state
        return out, None

    def mix(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        state: GatedDeltaState | None,
        *,
        remember: bool = True,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """[B, T, C] and the state of the tokens before -> ([B, T, C], the state of all).

        Args:
            hidden: [B, T, C].
            mask: boolean [B, T], true where a token is real; the others give 0 and change nothing.
            state: of an earlier call; None for none.
            remember: whether a state is wanted.
            segment_ids: integers [B or 1, T], of which a change begins a new document; without a state before or after.
        """
        if all_real(mask):
            return self._mix(hidden, None, state, remember, segment_ids)
        assert mask is not None
        # Real tokens first, each row's in their order: padding then stands behind all that could see it.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
        place = order[..., None].expand_as(hidden)
        real = mask.gather(1, order)
        hidden = hidden.gather(1, place).masked_fill(~real[..., None], 0)
        segment_ids = None if segment_ids is None else segment_ids.expand_as(order).gather(1, order)
        out, state = self._mix(hidden, real, state, remember, segment_ids)
        return torch.zeros_like(out).scatter(1, place, out.masked_fill(~real[..., None], 0)), state

    def _mix(
        self,
        hidden: Tensor,
        real: Tensor | None,
        state: GatedDeltaState | None,
        remember: bool,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, GatedDeltaState | None]:
        """As `mix`, for rows whose real tokens stand first."""
        net, tokens = self.net, hidden.shape[1]
        query, key, value, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden), net.in_proj_ba(hidden))
        mixed = torch.cat([x.flatten(2) for x in (query, key, value)], dim=-1).transpose(1, 2)
        reach = net.conv_kernel_size - 1
        before = mixed.new_zeros(*mixed.shape[:2], reach) if state is None else state.conv.to(mixed.dtype)
        inputs = torch.cat((before, mixed), dim=-1)
        convolved = F.silu(_convolved(inputs, net.conv1d.weight[:, 0], segment_ids)).transpose(1, 2)
        sizes = [net.key_dim, net.key_dim, net.value_dim]
        query, key, value = (x.unflatten(-1, (net.num_v_heads, -1)) for x in convolved.split(sizes, dim=-1))
        beta, decay = b.sigmoid(), -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
        if real is not None:  # a memory that neither fades nor is written
            beta, decay = beta * real[..., None], decay * real[..., None]
        memory = None
        if segment_ids is not None:
            out = _by_document(query, key, value, beta, decay, real, segment_ids)
        else:
            out, memory = _rule(query, key, value, decay, beta, None if state is None else state.memory)
        heads = net.norm(out.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim)).view_as(z)
        after = None
        if remember:
            assert memory is not None
            past = 0 if state is None else state.tokens
            after = GatedDeltaState(_latest(inputs, real, reach), memory, tokens=past + tokens)
        return net.out_proj(heads.flatten(2)), after


_RULES = (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
_PLAIN = tuple(map(unwrap, _RULES))
"""Without flash-linear-attention, whose kernels transformers would call on a CPU too."""


def _like(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return empty tensors of the shapes that `_rule` gives."""
    state = value.new_empty(value.shape[0], value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32)
    return value.new_empty(value.shape), state


@one_node("gated_delta_rule", _like)
def _rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the queries read [B, T, H, D], and the state [B, H, D, D] after all tokens."""
    rules = _PLAIN if query.device.type == "cpu" else _RULES
    rule = rules[0] if query.shape[1] == 1 else rules[1]
    out, after = rule(
        query,
        key,
        value,
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, after


def _convolved(inputs: Tensor, weight: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Convolve [B, G, W - 1 + T] with [G, W], channel by channel, to [B, G, T]; no document sees the one before."""
    if segment_ids is None:
        return F.conv1d(inputs, weight[:, None], groups=len(weight))
    reach, tokens = weight.shape[1] - 1, segment_ids.shape[1]
    before = F.pad(segment_ids, (reach, 0))
    out = inputs[..., reach:] * weight[:, reach:]
    for lag in range(1, reach + 1):
        place = slice(reach - lag, reach - lag + tokens)
        same = (before[:, place] == segment_ids) & (torch.arange(tokens, device=before.device) >= lag)
        out = out + torch.where(same[:, None], inputs[..., place], 0) * weight[:, reach - lag, None]
    return out


def _by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor,
    real: Tensor | None,
    segment_ids: Tensor,
) -> Tensor:
    """The gated delta rule [B, T, H, D] with a memory of its own for every document, in float32 as transformers has it:
    unit keys and queries, the latter over sqrt(D)."""
    given = value.dtype
    units = (qwen.l2norm(x.float()) for x in (query, key))
    query, key, value = (x.transpose(1, 2) for x in (*units, value.float()))
    steps = {"beta": beta.float().transpose(1, 2), "log_decay": decay.transpose(1, 2)}
    scale = query.shape[-1] ** -0.5
    out, _ = delta_rule(query, key, value, **steps, attn_mask=real, scale=scale, segment_ids=segment_ids)
    return out.transpose(1, 2).to(given)


def _latest(inputs: Tensor, real: Tensor | None, reach: int) -> Tensor:
    """The last `reach` inputs [B, G, reach] of each row, of [B, G, reach + T] whose real ones stand first."""
    if real is None:
        return inputs[..., inputs.shape[-1] - reach :]
    first = real.sum(1)[:, None] + torch.arange(reach, device=inputs.device)
    return inputs.gather(2, first[:, None].expand(-1, inputs.shape[1], -1))
