"""A causal language model in which every layer names its own estimator.

A pre-norm decoder (RMSNorm, rotary positions, SwiGLU, tied embeddings) on transformers' `PreTrainedModel` and
`GenerationMixin`. Attention is `regard.nn.Attention`, with one `Spec` per layer from `HybridConfig.mixers`.

Shapes: B batch, T tokens given now, N tokens so far (those in the cache and T), C model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .. import Spec
from ..checks import ArgumentError, shape
from ..nn import Attention, Ridge, Temperature, rotary_angles
from ..nn.attention import require_growing
from ..nn.ridge import RidgeProjection
from .cache import hybrid_cache
from .configuration_hybrid import HybridConfig

CALL = "HybridForCausalLM"
IGNORED = -100  # the label that the loss leaves out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x)), [B, T, C] -> [B, T, C]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HybridDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

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
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

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
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), weights


class HybridPreTrainedModel(PreTrainedModel):
    """What the model with and without the output matrix share: configuration, initial weights, saving."""

    config: HybridConfig
    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridDecoderLayer"]  # noqa: RUF012  (transformers reads class attributes)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """transformers' initial values, and where learned temperatures and ridges start."""
        super()._init_weights(module)
        if isinstance(module, Attention):
            for name, value in module.temperature.start().items():
                init.constant_(getattr(module, name), value)
        if isinstance(module, RidgeProjection):
            init.zeros_(module.weight)
            init.constant_(module.bias, module.rule.bias())


class HybridModel(HybridPreTrainedModel):
    """The decoder without the output matrix."""

    def __init__(self, config: HybridConfig) -> None:
        config.normalise()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = zip(config.layer_specs(), config.layer_temperatures(), config.layer_ridges(), strict=True)
        self.layers = nn.ModuleList(HybridDecoderLayer(config, *kind, i) for i, kind in enumerate(kinds))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, C] after the last norm; arguments as `HybridForCausalLM.forward`.

        Raises:
            ArgumentError: as `HybridForCausalLM.forward`.
        """
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden = self._embed(input_ids, inputs_embeds)
        past_key_values = self._cache(past_key_values, use_cache, pairs=bool(output_attentions))
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask = key_mask(attention_mask, hidden.shape[0], past + hidden.shape[1])
        positions = token_positions(position_ids, mask, past, hidden)
        assert self.config.head_dim is not None  # filled in by config.normalise
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        states: list[Tensor] = []
        attentions: list[Tensor] = []
        for layer in self.layers:
            states.append(hidden)
            hidden, weights = layer(
                hidden,
                angles,
                attention_mask=mask,
                past_key_values=past_key_values,
                output_attentions=bool(output_attentions),
            )
            attentions.append(weights)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states, hidden) if wanted else None,
            attentions=tuple(attentions) if output_attentions else None,
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """[B, T] tokens or [B, T, C] embeddings -> [B, T, C].

        Here and below a message is put together only when it is needed: under torch.compile a length may be a
        symbol, whose text cannot be traced.
        """
        if input_ids is not None and inputs_embeds is None:
            if input_ids.dim() != 2 or input_ids.shape[1] == 0:
                raise ArgumentError(f"{CALL}: input_ids has shape {shape(input_ids)}, expected [B, T] with T >= 1.")
            if input_ids.dtype not in (torch.int64, torch.int32):
                raise ArgumentError(f"{CALL}: input_ids has dtype {input_ids.dtype}, expected torch.int64.")
            return self.embed_tokens(input_ids)
        if input_ids is not None or inputs_embeds is None:
            raise ArgumentError(f"{CALL}: give either input_ids or inputs_embeds.")
        width = self.config.hidden_size
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] == 0 or inputs_embeds.shape[2] != width:
            raise ArgumentError(
                f"{CALL}: inputs_embeds has shape {shape(inputs_embeds)}, expected [B, T, {width}] with T >= 1."
            )
        return inputs_embeds

    def _cache(self, cache: Cache | None, use_cache: bool | None, *, pairs: bool) -> Cache | None:
        """The cache to fill: the one given, a new one (of pairs alone where `pairs`), or none.

        Unasked, training keeps none: nothing would read it, and recomputation must not fill it twice.
        """
        recomputed = self.gradient_checkpointing and self.training
        if cache is not None:
            if not isinstance(cache, Cache):
                kind = type(cache).__name__
                raise ArgumentError(f"{CALL}: past_key_values is a {kind}, expected a transformers Cache.")
            if recomputed:
                raise ArgumentError(
                    f"{CALL}: past_key_values does not go with gradient checkpointing in training; "
                    f"call model.eval() or leave the cache out."
                )
            require_growing(cache, CALL)
            return cache
        if use_cache and recomputed:
            raise ArgumentError(
                f"{CALL}: use_cache=True does not go with gradient checkpointing in training; leave it out."
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return hybrid_cache(self.config, pairs=pairs) if use_cache else None


class HybridForCausalLM(HybridPreTrainedModel, GenerationMixin):
    """The causal language model. What it is called with:

    - input_ids: tokens [B, T]; or inputs_embeds [B, T, C] in their place.
    - attention_mask: [B, N] over all tokens so far, boolean or integer, true where a token is real. Hidden
      tokens change nothing at the others, in values and in gradients.
    - position_ids: [B, T]; default: the number of real tokens before each.
    - past_key_values: a growing cache from an earlier call; it is extended. The model's own (`hybrid_cache`) keeps
      sums of fixed size for mixers with finite features and pairs for the others; a `DynamicCache` keeps pairs.
    - labels: [B, T], the tokens themselves (they are shifted here), -100 where none is to be predicted.
      Hidden tokens are neither predicted nor predicted from.
    - use_cache: fill a new cache; default the configuration's, and not in training.
    - logits_to_keep: only the last so many positions (0: all), or those in a tensor of positions.
    - output_attentions: also every layer's weights [B, H, T, N], by the dense reference.
    - output_hidden_states: also the hidden states before each layer and after the last norm.
    - further keywords (`num_items_in_batch`) go to the loss; `return_dict=False` gives a tuple.

    >>> import torch
    >>> from regard.models import HybridConfig, HybridForCausalLM
    >>> config = HybridConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                       mixers=["softmax", "biweight"])
    >>> model = HybridForCausalLM(config)
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 64])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        self.model = HybridModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: int
    ) -> None:
        """The model's own cache, unless one is given or asked for by name, or pairs must be seen again."""
        pairs = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        pairs = pairs or generation_config.output_attentions or self.config.output_attentions
        named = generation_config.cache_implementation not in (None, "dynamic")
        given = model_kwargs.get("past_key_values") is not None
        if pairs or named or given or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *sizes)
        else:
            model_kwargs["past_key_values"] = hybrid_cache(self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] of the next token, and the loss where labels are given; arguments as the class.

        Raises:
            ArgumentError: wrong rank, dtype or shape, an empty sequence, a static cache. (Tokens out of the
                vocabulary are torch's own IndexError.)
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            labels = visible_labels(labels, attention_mask, logits)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def key_mask(attention_mask: Tensor | None, batch: int, tokens: int) -> Tensor | None:
    """The attention mask as booleans [B, N].

    Raises:
        ArgumentError: not a boolean or integer tensor of shape [batch, tokens].
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.is_floating_point() or attention_mask.is_complex():
        kind = attention_mask.dtype if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ArgumentError(
            f"{CALL}: attention_mask is {kind}, expected a boolean or integer tensor, true where a token is real."
        )
    if tuple(attention_mask.shape) != (batch, tokens):
        raise ArgumentError(
            f"{CALL}: attention_mask has shape {shape(attention_mask)}, expected [{batch}, {tokens}]: one "
            f"entry for every token so far, those in the cache included."
        )
    return attention_mask != 0


def token_positions(position_ids: Tensor | None, mask: Tensor | None, past: int, hidden: Tensor) -> Tensor:
    """Positions [B or 1, T]: as given, else the number of real tokens before each.

    Raises:
        ArgumentError: `position_ids` is not an integer tensor of shape [B or 1, T].
    """
    batch, tokens = hidden.shape[:2]
    if position_ids is not None:
        fits = tuple(position_ids.shape) in ((batch, tokens), (1, tokens))
        if not fits or position_ids.is_floating_point():
            raise ArgumentError(
                f"{CALL}: position_ids has shape {shape(position_ids)} and dtype {position_ids.dtype}, "
                f"expected integers [{batch}, {tokens}] or [1, {tokens}]."
            )
        return position_ids
    if mask is None:
        return torch.arange(past, past + tokens, device=hidden.device)[None]
    return (mask.cumsum(-1) - 1).clamp_min(0)[:, past:]


def visible_labels(labels: Tensor, attention_mask: Tensor | None, logits: Tensor) -> Tensor:
    """The labels, with -100 where the mask hides the token or the one that it would be predicted from.

    Without the latter, the first real token of a left-padded row would be predicted from padding, and padding
    would be trained.

    Raises:
        ArgumentError: labels do not match the logits, or there is no token to predict.
    """
    if tuple(labels.shape) != tuple(logits.shape[:2]):
        raise ArgumentError(
            f"{CALL}: labels has shape {shape(labels)}, expected {shape(logits[..., 0])}, one for each "
            f"position that has logits."
        )
    if labels.shape[1] == 1:
        raise ArgumentError(
            f"{CALL}: labels of one position leave nothing to predict: each token is predicted from those before it."
        )
    if attention_mask is None:
        return labels
    visible = attention_mask[:, -labels.shape[1] :] != 0
    before = F.pad(visible[:, :-1], (1, 0), value=False)
    return labels.masked_fill(~(visible & before), IGNORED)
