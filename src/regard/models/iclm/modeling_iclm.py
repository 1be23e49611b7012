"""ICLM: a causal language model that predicts by functional gradient descent on its own context.

Two streams over the slots of a text (ICLM paper, sections 4 to 6). The covariates phi are a Transformer over the
tokens. f is never an input of attention: it is a sum of context-token embeddings, weighted by kernels of covariates
(`regard.nn.FunctionalGradient`), and of feed-forward outputs if there are any.

The context of slot s are the tokens before x_s, and its target is x_s: phi at slot s is computed from the start vector
and x_0..x_{s-1}, and the value paired with it is the embedding of x_s, one position ahead. f of slot t + 1, which sees
the pairs up to t, gives the logits at position t. With `start="bos"` the first token replaces the start vector.

Shapes: B batch, T tokens in this call, N tokens so far, S slots so far, R slots in this call (T, or T + 1 with the
start slot), n pairs so far (S - 1), C width of the covariates, E width of f, H heads, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ... import Spec
from ...checks import ArgumentError, require
from ...nn import Attention, FunctionalGradient, HookPoint, expected_embedding, feed_forwards, rotary_angles
from ...nn.arguments import plain_table
from ...nn.functional_gradient import mean_embedding
from ...nn.shifted_pairs import Pairs, pair_rows
from ..base.base import Context, Decoded, RegardForCausalLM, RegardModel
from ..base.catalogue import LanguageModel, language_models
from ..base.loading import RegardPreTrainedModel
from .configuration_iclm import ICLMConfig
from .contributions import Contributions, trace
from .iclm_cache import ICLMCache, PairLayer
from .slots import Slots, scatter_tokens

Angles = tuple[Tensor, Tensor]


class ICLMFeedForward(nn.Module):
    """LayerNorm, then a feed-forward layer, [B, R, C] -> [B, R, C]; `hook_out` sees its output."""

    def __init__(self, kind: str, size: int, inner: int | None, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=eps)
        self.feed_forward = feed_forwards.get(kind)(size, inner)
        self.hook_out = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(self.feed_forward(self.norm(x)))


class CovariateBlock(GradientCheckpointingLayer):
    """phi + attention(norm(phi)), then phi + feed_forward(norm(phi)) (equation 9)."""

    def __init__(self, config: ICLMConfig, spec: Spec, layer: int) -> None:
        super().__init__()
        assert config.d_phi is not None  # filled in by config.normalise
        self.norm = nn.LayerNorm(config.d_phi, eps=config.layer_norm_eps)
        self.attn = Attention(config.d_phi, config.num_attention_heads, spec=spec, layer_idx=layer)
        self.mlp: ICLMFeedForward | None = None
        if config.phi_mlp != "none":
            self.mlp = ICLMFeedForward(config.phi_mlp, config.d_phi, config.intermediate_size, config.layer_norm_eps)

    def forward(
        self,
        phi: Tensor,
        angles: Angles,
        mask: Tensor | None = None,
        past_key_values: ICLMCache | None = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return phi [B, R, C] after the block, and attention weights [B, H, R, S] or None."""
        attended, weights = self.attn(self.norm(phi), angles, mask, past_key_values, output_attentions, segment_ids)
        phi = phi + attended
        return phi if self.mlp is None else phi + self.mlp(phi), weights


class FunctionBlock(GradientCheckpointingLayer):
    """f + functional_gradient(norm(phi), values), then f + feed_forward(norm(f)) (equations 11 and 12)."""

    def __init__(self, config: ICLMConfig, spec: Spec, layer: int) -> None:
        super().__init__()
        sizes: Any = (config.d_phi, config.d_f, config.f_attention_heads)  # filled in by config.normalise
        how: dict[str, Any] = {"variant": config.variant, "average": config.f_average}
        self.norm = nn.LayerNorm(sizes[0], eps=config.layer_norm_eps)
        self.attn = FunctionalGradient(*sizes, spec=spec, layer_idx=config.covariate_blocks + layer, **how)
        self.to_side = config.f_mlp == "side"
        self.mlp: ICLMFeedForward | None = None
        if config.f_mlp != "none":
            inner = config.f_intermediate_size
            self.mlp = ICLMFeedForward(config.f_feed_forward, sizes[1], inner, config.layer_norm_eps)
        self.hook_out = HookPoint()

    def forward(
        self,
        f: Tensor,
        side: Tensor | None,
        phi: Tensor,
        values: Tensor,
        angles: Angles | None,
        pairs: Pairs | None = None,
        cache: PairLayer | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return f [B, R, E] and side after the block, and weights [B, H, rows, n] or None.

        `side` is the sum of the feed-forward outputs that are kept apart from f; phi is [B, R, C], values [B, n, E].
        """
        update, weights = self.attn(self.norm(phi), values, angles, pairs, cache, output_attentions)
        f = f + update
        if self.mlp is not None:
            added = self.mlp(f)
            if self.to_side:
                side = added if side is None else side + added
            else:
                f = f + added
        return self.hook_out(f), side, weights


class FinalNorm(nn.LayerNorm):
    """LayerNorm; `hook_scale` sees its divisor sqrt(variance + eps), [B, T, 1], and may replace it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps=eps)
        self.hook_scale = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Return x [B, T, E], normalised."""
        if not self.hook_scale.active:
            return super().forward(x)
        centred, scale = self.split(x)
        return (centred / self.hook_scale(scale)).to(x.dtype) * self.weight + self.bias

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x minus its mean [B, T, E] and the divisor [B, T, 1], at least in float32."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = x - x.mean(-1, keepdim=True)
        return centred, (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


class StartVector(nn.Module):
    """The covariate of the empty context (y_0), a learned vector [C]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, rows: Tensor, slots: Slots) -> Tensor:
        """Return [B, R, C]: rows [B, T, C] in the slots of tokens, the vector in the others."""
        start = self.weight.to(rows.dtype)
        if slots.token_slots is None:
            return torch.cat((start.expand(rows.shape[0], 1, -1), rows), 1)
        return scatter_tokens(start.expand(rows.shape[0], slots.positions.shape[1], -1), rows, slots.token_slots)


class ICLMPreTrainedModel(RegardPreTrainedModel):
    config: ICLMConfig
    _no_split_modules = ["CovariateBlock", "FunctionBlock"]  # noqa: RUF012  (transformers reads a class attribute)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as transformers does, the last norm too, and the start vector like an embedding."""
        super()._init_weights(module)
        if isinstance(module, FinalNorm):  # transformers knows norms by the names of their classes
            init.ones_(module.weight)
            init.zeros_(module.bias)
        if isinstance(module, StartVector):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)


class ICLMModel(ICLMPreTrainedModel, RegardModel):
    """Both streams, without the output matrix.

    Covariate blocks come first, then f blocks, in the layer numbers of observers and in:

    - `attentions`: weights between tokens [B, H, T, N]. Column j of a covariate block is the token read last, of an f
      block the token whose value is averaged. Weights of the start slot are left out here; hook points see them.
    - `hidden_states`: the covariates before each pair of blocks [B, T, C], f before each f block [B, T, E], and the
      input of the output matrix: one more than `num_hidden_layers`.
    """

    honours_segments = True

    def __init__(self, config: ICLMConfig) -> None:
        config.normalise()
        super().__init__(config)
        assert config.d_phi is not None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_covariates = None if config.tie_phi else nn.Embedding(config.vocab_size, config.d_phi)
        self.start = StartVector(config.d_phi) if config.start == "param" else None
        self.embed = nn.ModuleDict({"hook_out": HookPoint("embed.hook_out")})
        specs = config.covariate_specs()[: config.covariate_blocks]
        self.phi = nn.ModuleList(CovariateBlock(config, spec, i) for i, spec in enumerate(specs))
        self.f = nn.ModuleList(FunctionBlock(config, spec, i) for i, spec in enumerate(config.layer_specs()))
        self.norm_values = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm_values else None
        self.ln_final = FinalNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def new_cache(self, *, pairs: bool = False) -> ICLMCache:
        """Return an empty `ICLMCache`, which keeps keys and values in any case."""
        return ICLMCache(len(self.phi), len(self.f), self.start is not None)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return embeddings as `RegardModel` does; those of the covariates' table, if any, follow: [B, T, E + C]."""
        if self.embed_covariates is None:
            return super()._embed(input_ids, inputs_embeds)
        if input_ids is None or inputs_embeds is not None:
            raise ArgumentError(f"{self.call}: give input_ids; with tie_phi=False the covariates have their own table.")
        return torch.cat((super()._embed(input_ids, None), self.embed_covariates(input_ids)), -1)

    def decode(self, embedded: Tensor, context: Context) -> Decoded:
        cache, config = self._checked_cache(context.cache, len(embedded)), self.config
        words = self.embed["hook_out"](embedded[..., : config.hidden_size])
        phi = words[..., : config.d_phi] if self.embed_covariates is None else embedded[..., config.hidden_size :]
        slots = Slots.of(context, self.start is not None)
        if self.start is not None and context.past == 0:
            phi = self.start(phi, slots)
        steps = _Steps(self, words, slots, cache, context.past)
        with_weights = context.output_attentions
        phi_angles = self._angles(slots.positions, config.num_attention_heads, phi.dtype)
        f_angles = None
        if config.f_rope:
            same = config.f_attention_heads == config.num_attention_heads
            f_angles = phi_angles if same else self._angles(slots.positions, config.f_attention_heads, phi.dtype)
        f, side = phi.new_zeros(*phi.shape[:2], config.hidden_size), None
        phi_states, f_states, phi_weights, f_weights = [], [], [], []
        tokens = words.shape[1]
        for layer, block in enumerate(self.f):
            before = phi
            phi_states.append(slots.of_tokens(phi, tokens))
            if layer < len(self.phi):
                phi, weights = self.phi[layer](phi, phi_angles, slots.mask, cache, with_weights, slots.segments)
                phi_weights.append(weights)
            covariates = phi if config.f_reads == "post" else before
            f_states.append(slots.of_tokens(f, tokens))
            values = steps.values(layer, f)
            pair_cache = None if cache is None else cache.function_layer(layer)
            f, side, weights = block(f, side, covariates, values, f_angles, slots.pairs, pair_cache, with_weights)
            # the first slot has no pair: it lacks a column and, if it is in this call, a row
            f_weights.append(None if weights is None else F.pad(weights, (1, 0, phi.shape[1] - weights.shape[2], 0)))
        hidden = f if side is None else f + side
        maps = [None if w is None else slots.maps(w, context.past, tokens) for w in phi_weights + f_weights]
        return Decoded(self.ln_final(slots.of_tokens(hidden, tokens)), phi_states + f_states, maps)

    def _checked_cache(self, cache: object, batch: int) -> ICLMCache | None:
        if cache is None:
            return None
        if not isinstance(cache, ICLMCache):
            kind = f"a {type(cache).__name__}, which cannot hold keys that wait for their values"
            raise ArgumentError(f"{self.call}: cache is {kind}; leave it out or give model.model.new_cache().")
        cached, blocks = (cache.covariate_layers, cache.function_layers), (len(self.phi), len(self.f))
        differ = "cache is for {} covariate and {} f blocks, the model has {} and {}".format(*cached, *blocks)
        require(cached == blocks, self.call, f"{differ}; use model.model.new_cache().")
        rows = next((x.shape[0] for x in cache.shared.grown.values()), batch)
        differ = f"cache has {rows} sequences, but the input has {batch}; use one cache per batch."
        require(rows == batch, self.call, differ)
        return cache

    def _angles(self, positions: Tensor, heads: Any, dtype: torch.dtype) -> Angles:
        width: Any = self.config.d_phi  # filled in by config.normalise
        return rotary_angles(positions, width // heads, self.config.rope_theta, dtype)


class _Steps:
    """The values of each gradient step: embeddings minus their expectation (equation 7)."""

    def __init__(self, model: ICLMModel, words: Tensor, slots: Slots, cache: ICLMCache | None, past: int) -> None:
        self.config, self.pairs = model.config, slots.pairs
        self.table: Any = None if self.config.expectation == "none" else plain_table(model.embed_tokens, words.device)
        self.cache = None if cache is None else cache.shared
        # the value of the first slot's pair is the token of the second slot
        values = slots.completing(words) if model.start is not None or past else words[:, 1:]
        self.cached = {} if self.cache is None else {n: x[:, 0] for n, x in self.cache.grown.items()}
        self.new = {"value": values if model.norm_values is None else model.norm_values(values)}
        self.waiting: dict[str, Tensor] = {}
        self.current = self._all("value")
        if self.config.expectation != "none":
            self.current = self.current - mean_embedding(self.table)

    def values(self, layer: int, f: Tensor) -> Tensor:
        """Return [B, n, E] for f block `layer`, given f [B, R, E] before it."""
        span = self.config.pairs // self.config.gd_steps
        if layer and layer % span == 0:
            name, expected = f"step{layer // span}", expected_embedding(f, self.table)
            pending = None if self.cache is None else self.cache.pending(name)
            new, waiting = pair_rows(expected[:, None], pending, self.pairs)
            self.new[name], self.waiting[name] = new[:, 0], waiting[:, 0]
            self.current = self._all("value") - self._all(name)
        if layer == (self.config.gd_steps - 1) * span and self.cache is not None:
            held, made = ({n: x[:, None] for n, x in kept.items()} for kept in (self.waiting, self.new))
            self.cache.extend(held, **made)
        return self.current

    def _all(self, name: str) -> Tensor:
        """Return the entries of all pairs so far, the new ones last."""
        new = self.new[name]
        return torch.cat((self.cached[name], new), 1) if name in self.cached else new


class ICLMForCausalLM(ICLMPreTrainedModel, RegardForCausalLM):
    """The causal language model, called like every `RegardForCausalLM`. Its cache is an `ICLMCache`.

    >>> import torch
    >>> from regard.models import ICLMConfig, ICLMForCausalLM
    >>> config = ICLMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, f_mlp="none")
    >>> model = ICLMForCausalLM(config).eval()
    >>> text = torch.arange(8)[None]
    >>> model(text).logits.shape
    torch.Size([1, 8, 64])
    >>> parts = model.contributions(text)  # of every context token to every logit
    >>> torch.allclose(parts.logits(), model(text).logits, atol=1e-5)
    True
    """

    model_class = ICLMModel

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize as transformers does; raise ArgumentError with `tie_phi=False`, where there are two tables."""
        if self.model.embed_covariates is not None and (args or kwargs):
            second = "with tie_phi=False there is a second table, of covariates, which would not be resized"
            call = f"{type(self).__name__}.resize_token_embeddings"
            raise ArgumentError(f"{call}: {second}; build a model with another vocab_size.")
        return super().resize_token_embeddings(*args, **kwargs)

    @torch.no_grad()
    def contributions(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        positions: Sequence[int] | Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Contributions:
        """Return the logits as sums over context tokens, layers and heads; see `Contributions`.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T], nonzero where a token is real.
            positions: those whose logits are explained, negative ones from the end; None for all T.
            segment_ids: [B or 1, T], the document number of each token; tokens of other documents add 0.

        Raises:
            ArgumentError: as `forward`, or for positions outside the text.
        """
        return trace(self, input_ids, attention_mask, positions, segment_ids)


ABOUT = "A Transformer over covariates; the prediction is a kernel-weighted sum of context-token embeddings."
language_models.register("iclm")(LanguageModel(ICLMConfig, ICLMForCausalLM, ABOUT))
