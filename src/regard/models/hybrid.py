"""A causal language model in which every layer names its own estimator.

A pre-norm decoder (RMSNorm or LayerNorm, rotary positions, SwiGLU or GELU, tied embeddings). Attention is
`regard.nn.Attention`, with one `Spec` per layer from `HybridConfig.mixers`.

Shapes: B batch, T tokens given now, N tokens so far (those in the cache and T), C model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .. import Spec
from ..nn import Attention, HookPoint, Ridge, Temperature, feed_forwards, rotary_angles
from ..nn.norm import make_norm
from ..nn.ridge import RidgeProjection
from .base import Context, Decoded, RegardForCausalLM, RegardModel, RegardPreTrainedModel, check_depth
from .cache import hybrid_cache
from .catalogue import LanguageModel, language_models
from .configuration_hybrid import HybridConfig


class HybridDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)) where there is one."""

    def __init__(
        self, config: HybridConfig, spec: Spec, temperature: Temperature, ridge: Ridge, layer_idx: int
    ) -> None:
        super().__init__()
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            spec=spec,
            layer_idx=layer_idx,
            window=config.window,
            temperature=temperature,
            share_query_key=config.share_query_key,
            exclude_self=config.exclude_self,
            qk_norm=config.qk_norm,
            ridge=ridge,
            norm_eps=config.rms_norm_eps,
        )
        assert config.intermediate_size is not None  # filled in by config.normalise
        self.input_layernorm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module | None = None
        self.hook_mlp_out = HookPoint()
        if config.feed_forward != "none":
            self.mlp = feed_forwards.get(config.feed_forward)(config.hidden_size, config.intermediate_size)
            self.post_attention_layernorm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, C] -> ([B, T, C], attention weights or None); arguments as `regard.nn.Attention`."""
        attended, weights = self.self_attn(
            self.input_layernorm(hidden_states),
            position_embeddings,
            attention_mask,
            past_key_values,
            output_attentions,
        )
        hidden_states = hidden_states + attended
        if self.mlp is None:
            return hidden_states, weights
        return hidden_states + self.hook_mlp_out(self.mlp(self.post_attention_layernorm(hidden_states))), weights


class HybridPreTrainedModel(RegardPreTrainedModel):
    """What the model with and without the output matrix share."""

    config: HybridConfig
    config_class = HybridConfig
    _no_split_modules = ["HybridDecoderLayer"]  # noqa: RUF012  (transformers reads a class attribute)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers' initial values, and where learned temperatures and ridges start."""
        super()._init_weights(module)
        init_attention(module)


class HybridModel(HybridPreTrainedModel, RegardModel):
    """The decoder without the output matrix."""

    def __init__(self, config: HybridConfig) -> None:
        config.normalise()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = zip(config.layer_specs(), config.layer_temperatures(), config.layer_ridges(), strict=True)
        self.layers = nn.ModuleList(HybridDecoderLayer(config, *kind, i) for i, kind in enumerate(kinds))
        self.norm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def new_cache(self, *, pairs: bool = False) -> Cache:
        """`hybrid_cache` for this model."""
        return hybrid_cache(self.config, pairs=pairs)

    def decode(self, embedded: Tensor, context: Context) -> Decoded:
        """The layers, then the last norm."""
        assert self.config.head_dim is not None  # filled in by config.normalise
        if context.cache is not None:
            check_depth(self.call, context.cache, len(self.layers))
        angles = rotary_angles(context.positions, self.config.head_dim, self.config.rope_theta, embedded.dtype)
        hidden, states, attentions = embedded, [], []
        for layer in self.layers:
            states.append(hidden)
            hidden, weights = layer(
                hidden,
                angles,
                attention_mask=context.mask,
                past_key_values=context.cache,
                output_attentions=context.output_attentions,
            )
            attentions.append(weights)
        return Decoded(self.norm(hidden), states, attentions)


class HybridForCausalLM(HybridPreTrainedModel, RegardForCausalLM):
    """The causal language model; called as `RegardForCausalLM` says. Its own cache (`hybrid_cache`) keeps sums of
    fixed size for mixers with finite features and pairs for the others; a `DynamicCache` keeps pairs.

    >>> import torch
    >>> from regard.models import HybridConfig, HybridForCausalLM
    >>> config = HybridConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                       mixers=["softmax", "biweight"])
    >>> model = HybridForCausalLM(config)
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 64])
    """

    model_class = HybridModel


def init_attention(module: nn.Module) -> None:
    """Where the learned temperatures and ridges of an attention layer start; nothing for other modules."""
    if isinstance(module, Attention):
        for name, value in module.temperature.start().items():
            init.constant_(getattr(module, name), value)
    if isinstance(module, RidgeProjection):
        init.zeros_(module.weight)
        init.constant_(module.bias, module.rule.bias())


language_models.register("transformer")(
    LanguageModel(
        HybridConfig,
        HybridForCausalLM,
        "A pre-norm decoder with rotary positions in which every layer names its own sentence of the grammar.",
    )
)
