"""A causal language model with its own attention spec or token mixer in every layer.

A pre-norm decoder (RMSNorm or LayerNorm, rotary positions, SwiGLU or GELU, tied embeddings). A layer mixes tokens by
`regard.nn.Attention` with a `Spec` of `HybridConfig.mixers`, or by a `TokenMixer`. Chosen layers also have a memory.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ...checks import require
from ...nn import Attention, HookPoint, feed_forwards, rotary_angles
from ...nn.attention.norm import make_norm
from ...nn.attention.ridge import RidgeProjection
from ...nn.memories import MemoryLayer, memory_layers
from ..base.arguments import all_real
from ..base.base import Context, Decoded, RegardForCausalLM, RegardModel, check_cache
from ..base.cache_layers import own_layer
from ..base.catalogue import LanguageModel, language_models
from ..base.loading import RegardPreTrainedModel
from .cache import MemoryCacheLayer, hybrid_cache, remembering
from .configuration_hybrid import HybridConfig
from .token_mixers import TokenMixer


class HybridDecoderLayer(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)) if there is a feed-forward layer.

    A memory written at test time (`memory`) adds to x before or after the mixer (`self_attn`); a trained one replaces
    the feed-forward layer. `memory_index` is the memory's place in the cache.
    """

    def __init__(self, config: HybridConfig, layer_idx: int, memory_index: int) -> None:
        super().__init__()
        self.self_attn = config.build_mixer(layer_idx)
        self.input_layernorm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)
        self.mlp: nn.Module | None = None
        self.memory: MemoryLayer | None = None
        self.memory_first = config.memory_place == "before-mixer"
        self.memory_index = memory_index
        self.hook_mlp_out = HookPoint()
        options: Any = config.memory_options or {}  # read by config.normalise
        for name in config.layer_memories().get(layer_idx, []):
            memory = memory_layers.get(name)(config.hidden_size, **options.get(name, {}))
            tensors = (*memory.parameters(recurse=False), *memory.buffers(recurse=False))
            memory._is_hf_initialized = not any(x.is_meta for x in tensors)  # transformers: it has drawn its values
            if memory.replaces_feed_forward:
                self.mlp = memory
            else:
                self.memory = memory
        if self.mlp is None and config.feed_forward != "none":
            self.mlp = feed_forwards.get(config.feed_forward)(config.hidden_size, config.intermediate_size)
        if self.mlp is not None:
            self.post_attention_layernorm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        tokens_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [B, T, C] after the layer, and attention weights or None. Arguments are those of
        `regard.nn.Attention`, and `tokens_mask`, the boolean mask [B, T] of this call's tokens (None: all are real)."""
        packed = {} if segment_ids is None else {"segment_ids": segment_ids}
        if self.memory_first:
            hidden_states = self._recall(hidden_states, tokens_mask, past_key_values, packed)
        attended, weights = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, attention_mask, past_key_values,
            output_attentions, **packed,
        )  # fmt: skip
        hidden_states = hidden_states + attended
        if not self.memory_first:
            hidden_states = self._recall(hidden_states, tokens_mask, past_key_values, packed)
        if self.mlp is None:
            return hidden_states, weights
        normed = self.post_attention_layernorm(hidden_states)
        if isinstance(self.mlp, MemoryLayer):
            given, _ = self.mlp(normed, tokens_mask, **packed)
        else:
            given = self.mlp(normed)
        return hidden_states + self.hook_mlp_out(given), weights

    def _recall(self, hidden: Tensor, mask: Tensor | None, cache: Cache | None, packed: dict[str, Tensor]) -> Tensor:
        """Return the residual stream [B, T, C] plus the memory's output."""
        if self.memory is None:
            return hidden
        read = cache if self.memory.remembers else None
        kept = own_layer("HybridForCausalLM", read, self.memory_index, MemoryCacheLayer)
        recalled, state = self.memory(hidden, mask, state=None if kept is None else kept.memory, **packed)
        if kept is not None:
            kept.memory = state
        return hidden + recalled


class HybridPreTrainedModel(RegardPreTrainedModel):
    config: HybridConfig
    _no_split_modules = ["HybridDecoderLayer"]  # noqa: RUF012  (transformers reads a class attribute)
    _can_compile_fullgraph = True  # with attention in every layer

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as transformers does, then learned temperatures, ridges, token mixers and memories."""
        super()._init_weights(module)
        if isinstance(module, Attention):
            for name, value in module.temperature.start().items():
                init.constant_(getattr(module, name), value)
        if isinstance(module, RidgeProjection):
            init.normal_(module.weight)  # draws as for an nn.Linear, so that later layers keep their weights for a seed
            init.zeros_(module.weight)
            init.constant_(module.bias, module.rule.bias())
        if hasattr(module, "init_weights") and not isinstance(module, RegardPreTrainedModel):
            module.init_weights()  # of a mixer, or of a part of one
        if isinstance(module, MemoryLayer):
            module.reset_parameters()


class HybridModel(HybridPreTrainedModel, RegardModel):
    """The decoder without the output matrix."""

    honours_segments = True
    fixed_caches = True

    def __init__(self, config: HybridConfig) -> None:
        config.normalise()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        depth, stateful = config.num_hidden_layers, remembering(config.layer_memories())
        self.layers = nn.ModuleList(
            HybridDecoderLayer(config, i, depth + stateful.index(i) if i in stateful else depth) for i in range(depth)
        )
        self.cached_layers = depth + len(stateful)
        self.training_step: int | None = None  # of the optimiser, set by `tell_step`
        self.passes = 0
        self.norm = make_norm(config.norm, config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def new_cache(self, *, pairs: bool = False, length: int | None = None) -> Cache:
        return hybrid_cache(self.config, pairs=pairs, length=length)

    def decode(self, embedded: Tensor, context: Context) -> Decoded:
        if context.cache is not None:
            check_cache(self.call, context.cache, self.cached_layers, len(embedded))
        if context.segments is not None:
            parts = ((i, p) for i, x in enumerate(self.layers) for p in (x.self_attn, x.memory, x.mlp))
            for depth, part in parts:
                apart = not isinstance(part, (TokenMixer, MemoryLayer)) or part.honours_segments
                mixed = f"which {type(part).__name__} at layer {depth} does not keep apart"
                require(apart, self.call, f"the rows hold several documents, {mixed}; give each a row of its own.")
        tokens = None if all_real(context.real) else context.real
        narrow = self._training_mask(context, embedded)
        angles = rotary_angles(context.positions, self.config.rotary_dim, self.config.rope_theta, embedded.dtype)
        masks = [context.mask] * len(self.layers)
        for i, window in enumerate(self.config.layer_windows() if narrow is not None else ()):
            if window is None and not isinstance(self.layers[i].self_attn, TokenMixer):
                masks[i] = narrow
        return self.run_layers(embedded, context, masks, angles, tokens_mask=tokens)

    def _training_mask(self, context: Context, embedded: Tensor) -> Tensor | None:
        """Return the mask [B or 1, 1, T, N] if training restricts full attention in this pass, otherwise None. It is no
        window of the layers, so that recomputation uses the mask of its forward pass."""
        window = self.config.training_window
        if window is None or not self.training:
            return None
        number = self.passes if self.training_step is None else self.training_step
        draw = torch.Generator().manual_seed(self.config.training_window_seed * 1_000_003 + number)
        self.passes += 1
        if torch.rand((), generator=draw) >= self.config.training_window_share:
            return None
        tokens = embedded.shape[1]
        total = context.past + tokens if context.mask is None else context.mask.shape[1]
        key = torch.arange(total, device=embedded.device)
        query = torch.arange(tokens, device=embedded.device)[:, None] + context.past
        near = (key <= query) & (key > query - window - int(self.config.exclude_self))
        return near[None, None] if context.mask is None else near & context.mask[:, None, None]


class HybridForCausalLM(HybridPreTrainedModel, RegardForCausalLM):
    """The causal language model; `RegardForCausalLM` describes its call and `hybrid_cache` its cache.

    Without a cache, every call begins with empty memories. `regard.models.hybrid.memories` freezes, flushes, saves and
    restores the memories in a cache.

    >>> import torch
    >>> from regard.models import HybridConfig, HybridForCausalLM
    >>> config = HybridConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    ...                       mixers=["softmax", "biweight"])
    >>> model = HybridForCausalLM(config)
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 64])
    """

    model_class = HybridModel


ABOUT = "A pre-norm decoder with rotary positions and its own attention spec or token mixer in every layer."
language_models.register("transformer")(LanguageModel(HybridConfig, HybridForCausalLM, ABOUT))
