"""Memory Mosaics: a language model built of associative memories.

Every block has a contextual memory (kernel regression on the pairs of this text) and a persistent one (on learned
pairs), each with any attention spec. There are no position embeddings: order is encoded by leaky averages
(sparse-attention paper, sections 2.4 and B.1; Zhang et al. 2025).

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import Spec
from ...nn.mosaic.contextual_memory import ContextualMemory, ContextualState
from ...nn.mosaic.features import OutputProjection, PerHead, without_hidden
from ...nn.mosaic.persistent_memory import PersistentMemory
from ...recurrent.leaky import LeakyState
from ..base.arguments import all_real
from ..base.base import Context, Decoded, RegardForCausalLM, RegardModel, check_cache
from ..base.cache_layers import StateCacheLayer, own_layer
from ..base.catalogue import LanguageModel, language_models
from ..base.loading import RegardPreTrainedModel
from .configuration_memory_mosaic import MemoryMosaicConfig


class MemoryMosaicCacheLayer(StateCacheLayer):
    """The states of a block's memories, None before the first token; the persistent one also if keys are shared. The
    pairs of the contextual memory grow with the text, the rest has a fixed size."""

    held = ("contextual", "persistent")
    contextual: ContextualState | None
    persistent: LeakyState | None


class MemoryMosaicBlock(GradientCheckpointingLayer):
    """x + contextual(norm(x)), then x + persistent(norm(x)); with parallel wiring both of the same x."""

    def __init__(self, config: MemoryMosaicConfig, spec: Spec, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.parallel = config.wiring == "parallel"
        self.shared = config.persistent_keys == "shared"
        width, heads = config.hidden_size, config.num_attention_heads
        features: Any = {"bias": config.bias, "average": config.leaky == "average", "key_eps": config.key_eps}
        self.contextual_norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
        self.contextual = ContextualMemory(
            width, heads, spec=spec, temperature=config.layer_temperatures()[layer_idx], layer_idx=layer_idx,
            scale_limit=config.scale_limit, look_ahead=config.look_ahead, learned=config.learned,
            start=config.bandwidth_start, uniform_gradient=config.uniform_gradient, **features,
        )  # fmt: skip
        if not self.shared:
            self.persistent_norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
        assert config.persistent_slots is not None  # filled in by config.normalise
        self.persistent = PersistentMemory(
            width, heads, config.persistent_slots, spec=config.persistent_spec(), copies=config.persistent_copies,
            own_keys=not self.shared, scale_limit=config.persistent_scale_limit, **features,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, T, C] after the block, and the contextual memory's weights or None.

        The mask is boolean [B, N] over all tokens so far, and `segment_ids` [B or 1, T] are of packed documents.
        """
        cache = own_layer("MemoryMosaicForCausalLM", past_key_values, self.layer_idx, MemoryMosaicCacheLayer)
        state = None if cache is None else cache.contextual
        normed = self.contextual_norm(hidden_states)
        arguments: dict[str, Any] = {"state": state, "remember": cache is not None, "segment_ids": segment_ids}
        arguments["output_attentions"] = output_attentions
        if self.shared:
            mask = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :]
            normed = without_hidden(normed, mask)
            keys, leaky = self.contextual.keys(normed, mask, None if state is None else state.leaky, segment_ids)
            contextual, after, weights = self.contextual.recall(keys, leaky, normed, attention_mask, **arguments)
            persistent = self.persistent.read(keys)
        else:
            contextual, after, weights = self.contextual(normed, attention_mask, **arguments)
            normed = self.persistent_norm(hidden_states if self.parallel else hidden_states + contextual)
            before = None if cache is None else cache.persistent
            persistent, leaky = self.persistent(normed, attention_mask, before, segment_ids=segment_ids)
        if cache is not None:
            cache.contextual, cache.persistent = after, None if self.shared else leaky
        return hidden_states + contextual + persistent, weights


class MemoryMosaicPreTrainedModel(RegardPreTrainedModel):
    config: MemoryMosaicConfig
    _no_split_modules = ["MemoryMosaicBlock"]  # noqa: RUF012  (transformers reads a class attribute)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise by the configuration's `initializer`; parameters per head by their `number_starts`."""
        config, layers = self.config, self.config.num_hidden_layers
        fan_in = config.initializer == "fan-in"
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5 if fan_in else config.initializer_range
            if isinstance(module, OutputProjection):
                std *= (layers if fan_in else 2 * layers) ** -0.5
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            std = config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0
            init.normal_(module.weight, std=std if fan_in else config.initializer_range)
        else:
            super()._init_weights(module)
        if isinstance(module, PerHead):
            for name, start in module.number_starts().items():
                init.copy_(getattr(module, name), start)
        if isinstance(module, PersistentMemory):
            init.normal_(module.slot_keys, std=module.head_dim**-0.5)
            init.normal_(module.slot_values, std=module.head_dim**-0.5)


class MemoryMosaicModel(MemoryMosaicPreTrainedModel, RegardModel):
    """The decoder without the output matrix."""

    honours_segments = True

    def __init__(self, config: MemoryMosaicConfig) -> None:
        config.normalise()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MemoryMosaicBlock(config, spec, i) for i, spec in enumerate(config.layer_specs()))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
        self.post_init()

    def new_cache(self, *, pairs: bool = False) -> Cache:
        """Return an empty cache, which keeps pairs in any case and cannot be cropped."""
        return Cache(layers=[MemoryMosaicCacheLayer() for _ in range(self.config.num_hidden_layers)])

    def decode(self, embedded: Tensor, context: Context) -> Decoded:
        """Run the blocks and the last norm; divide by sqrt(C) if logits are scaled.

        The factor comes before the output matrix because fused losses apply that matrix themselves.
        """
        if context.cache is not None:
            check_cache(self.call, context.cache, len(self.layers), len(embedded))
        mask = None if all_real(context.mask) else context.mask
        decoded = self.run_layers(embedded, context, [mask] * len(self.layers))
        if not self.config.scale_logits:
            return decoded
        return replace(decoded, hidden=decoded.hidden * self.config.hidden_size**-0.5)


class MemoryMosaicForCausalLM(MemoryMosaicPreTrainedModel, RegardForCausalLM):
    """The causal language model, called like every `RegardForCausalLM`. It ignores `position_ids`.

    >>> import torch
    >>> from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM
    >>> config = MemoryMosaicConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                             mixers="biweight")
    >>> MemoryMosaicForCausalLM(config)(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 64])
    """

    model_class = MemoryMosaicModel


ABOUT = "A network of associative memories: kernel regression on the text so far and on learned pairs."
language_models.register("memory-mosaic")(LanguageModel(MemoryMosaicConfig, MemoryMosaicForCausalLM, ABOUT))
