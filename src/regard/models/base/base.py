"""What all causal language models here have in common: arguments, caches, positions, labels, generation.

A model is three classes: a `RegardConfig`, a `RegardModel` that says what happens between embeddings and the last
hidden states (`decode`), and a `RegardForCausalLM` with the output matrix.

Shapes: B batch, T tokens given now, N tokens so far (those in the cache and T), C model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ...checks import ArgumentError, require, shape
from ...nn.arguments import require_growing
from ...nn.hooks import HookPoint
from . import packing
from .arguments import (
    IGNORED,
    check_labels,
    key_mask,
    kind,
    not_predicted,
    outside,
    positions_kept,
    refuse_misspelt,
    token_positions,
)
from .base_config import RegardConfig
from .loading import CheckedLoading
from .packing import Documents


@dataclass(frozen=True)
class Context:
    """What a decoder is told beside the embeddings.

    Attributes:
        mask: boolean [B, N], true where a token is real; None where all are.
        positions: integers [B or 1, T]: how many real tokens stand before each.
        cache: to be read and extended, or None.
        past: tokens in the cache, padding included.
        output_attentions: also return the weights.
        segments: integers [B or 1, T] that grow by one where a document begins; None where every row is one document.
            Comes to models that say `honours_segments` alone, and never with a cache.
    """

    mask: Tensor | None
    positions: Tensor
    cache: Cache | None
    past: int
    output_attentions: bool
    segments: Tensor | None = None


@dataclass(frozen=True)
class Decoded:
    """What a decoder gives back.

    Attributes:
        hidden: [B, T, C], after the last norm: what the output matrix reads.
        states: the hidden states before each layer.
        attentions: the weights of every layer [B, H, T, N], where they were asked for; None where a layer has none.
    """

    hidden: Tensor
    states: list[Tensor] = field(default_factory=list)
    attentions: list[Tensor | None] = field(default_factory=list)


class RegardPreTrainedModel(CheckedLoading):
    """What a model with and without the output matrix share: configuration, initial weights, saving."""

    config: RegardConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012  (transformers reads a class attribute)


class NewCache(Protocol):
    """How a model makes an empty cache."""

    def __call__(self, *, pairs: bool = False) -> Cache:
        """With `pairs`, one from which weights can be shown and tokens taken back, where there is such a one."""
        ...


class RegardModel(RegardPreTrainedModel):
    """The decoder without the output matrix. What a subclass has:

    Attributes:
        embed_tokens: the embeddings of tokens.
        decode: [B, T, C] embeddings and their context to what the output matrix reads.
        new_cache: an empty cache.
        honours_segments: whether `decode` keeps the documents of `Context.segments` apart; where it does not, packed
            documents are refused.
    """

    honours_segments: ClassVar[bool] = False
    embed_tokens: nn.Embedding
    decode: Callable[[Tensor, Context], Decoded]
    new_cache: NewCache
    gradient_checkpointing = False

    @property
    def call(self) -> str:
        """How messages name this model."""
        return type(self).__name__.removesuffix("Model") + "ForCausalLM"

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
        segment_ids: Tensor | None = None,
        **packed: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, C] after the last norm; arguments as `RegardForCausalLM`.

        Raises:
            ArgumentError: as `RegardForCausalLM.forward`.
        """
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        embedded = self._embed(input_ids, inputs_embeds)
        cache = self._cache(past_key_values, use_cache, pairs=bool(output_attentions))
        past = 0 if cache is None else cache.get_seq_length()
        mask = key_mask(self.call, attention_mask, embedded.shape[0], past + embedded.shape[1])
        positions = token_positions(self.call, position_ids, mask, past, embedded)
        real = None if mask is None else mask[:, past:]
        packed["segment_ids"] = segment_ids
        documents = Documents.of(self.call, tuple(embedded.shape[:2]), real, position_ids, packed)
        segments = None
        if documents is not None:
            asked = past_key_values is not None or bool(use_cache)
            segments = documents.segments(self.call, cache_kept=cache is not None, cache_asked=asked)
        if documents is not None and segments is not None:
            require(self.honours_segments, self.call, f"{documents.packed}, which this model does not keep apart.")
            cache, positions = None, documents.positions(positions) if position_ids is None else positions
        if mask is not None:  # what is hidden enters as zeros, so that no product of it, forward or back, can matter
            embedded = embedded.masked_fill(~mask[:, past:, None], 0)
        found = self.decode(embedded, Context(mask, positions, cache, past, bool(output_attentions), segments))
        return BaseModelOutputWithPast(
            last_hidden_state=found.hidden,
            past_key_values=cache,
            hidden_states=(*found.states, found.hidden) if wanted else None,
            attentions=tuple(w for w in found.attentions if w is not None) if output_attentions else None,
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """[B, T] tokens or [B, T, C] embeddings -> [B, T, C].

        Here and below a message is put together only when it is needed: under torch.compile a length may be a
        symbol, whose text cannot be traced.
        """
        if input_ids is not None and inputs_embeds is None:
            return self._look_up(input_ids)
        if input_ids is not None or inputs_embeds is None:
            raise ArgumentError(f"{self.call}: give either input_ids or inputs_embeds.")
        width = self.embed_tokens.embedding_dim
        if not isinstance(inputs_embeds, Tensor) or not inputs_embeds.is_floating_point():
            raise ArgumentError(
                f"{self.call}: inputs_embeds is {kind(inputs_embeds)}, expected a floating-point tensor."
            )
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] == 0 or inputs_embeds.shape[2] != width:
            raise ArgumentError(
                f"{self.call}: inputs_embeds has shape {shape(inputs_embeds)}, expected [B, T, {width}] with T >= 1."
            )
        return inputs_embeds

    def _look_up(self, input_ids: Tensor) -> Tensor:
        """[B, T] tokens -> [B, T, C]."""
        if not isinstance(input_ids, Tensor):
            raise ArgumentError(f"{self.call}: input_ids is {kind(input_ids)}, expected an integer tensor [B, T].")
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ArgumentError(f"{self.call}: input_ids has shape {shape(input_ids)}, expected [B, T] with T >= 1.")
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(f"{self.call}: input_ids has dtype {input_ids.dtype}, expected torch.int64.")
        if torch.compiler.is_compiling():
            return self.embed_tokens(input_ids)
        try:
            return self.embed_tokens(input_ids)
        except IndexError:  # the CPU says so by itself; looking beforehand would wait for an accelerator
            raise ArgumentError(outside(self.call, input_ids, self.config.vocab_size)) from None

    def _cache(self, cache: Cache | None, use_cache: bool | None, *, pairs: bool) -> Cache | None:
        """The cache to fill: the one given, a new one (of pairs alone where `pairs`), or none.

        Unasked, training keeps none: nothing would read it, and recomputation must not fill it twice. Nor does an
        exported graph, which has no place for one.
        """
        if torch.compiler.is_exporting():
            if cache is not None or use_cache:
                raise ArgumentError(
                    f"{self.call}: a cache cannot be exported; leave past_key_values and use_cache out."
                )
            return None
        recomputed = self.gradient_checkpointing and self.training
        if cache is not None:
            if not isinstance(cache, Cache):
                raise ArgumentError(f"{self.call}: past_key_values is a {kind(cache)}, expected a transformers Cache.")
            if recomputed:
                raise ArgumentError(
                    f"{self.call}: past_key_values does not go with gradient checkpointing in training; "
                    f"call model.eval() or leave the cache out."
                )
            require_growing(cache, self.call)
            return cache
        if use_cache and recomputed:
            raise ArgumentError(
                f"{self.call}: use_cache=True does not go with gradient checkpointing in training; leave it out."
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return self.new_cache(pairs=pairs) if use_cache else None


class RegardForCausalLM(RegardPreTrainedModel, GenerationMixin):
    """A causal language model. Its logits are `lm_head(base_model(...).last_hidden_state)`, since fused losses compute
    just that; the hook point `unembed.hook_out` sees them. What it is called with:

    - input_ids: tokens [B, T]; or inputs_embeds [B, T, C] in their place.
    - attention_mask: [B, N] over all tokens so far, boolean or integer, true where a token is real. Hidden
      tokens change nothing at the others, in values and in gradients.
    - position_ids: [B, T]; default: the number of real tokens before each.
    - past_key_values: a growing cache from an earlier call; it is extended.
    - labels: [B, T], the tokens themselves (they are shifted here), -100 where none is to be predicted.
      Hidden tokens are neither predicted nor predicted from. Where no token is to be predicted the loss is 0.
    - use_cache: fill a new cache; default the configuration's, and not in training.
    - logits_to_keep: only the last so many positions (0: all), or, without labels, those in a tensor of positions.
    - output_attentions: also the weights of the layers that have some, in their order, by the dense reference and with
      gradients. Layers without weights, such as Gated DeltaNet, are left out, as transformers does in hybrid models.
    - output_hidden_states: also the hidden states before each layer, and what the output matrix reads.
    - segment_ids: [B or 1, T], the number of each token's document where several are packed into a row: nothing of one
      reaches another, and its first token is not predicted. The same is made of position_ids that begin again, of
      `cu_seq_lens_q` and `cu_seq_lens_k` [documents + 1] of a single row, and of `seq_idx`. No cache is then kept.
    - further keywords go to the loss: `num_items_in_batch`, what the sum is divided by; `ignore_index` in the place of
      -100; `shift_labels` [B, T], the token to be predicted at each position itself, in the place of `labels`.
    - `return_dict=False` gives a tuple.
    """

    model_class: ClassVar[type[RegardModel]]
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: RegardConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(self.model.embed_tokens.embedding_dim, config.vocab_size, bias=False)
        self.unembed = nn.ModuleDict({"hook_out": HookPoint("unembed.hook_out")})
        self.post_init()

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, after a look at what it is to continue.

        Raises:
            ArgumentError: an empty prompt, one longer than `max_position_embeddings`, tokens out of the vocabulary,
                or a row that is all padding.
        """
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        prompt = kwargs.get("inputs_embeds") if tokens is None else tokens
        given = args[0] if args else kwargs.get("generation_config")
        configs = [config for config in (given, self.generation_config) if config is not None]

        def special(name: str) -> Any:
            found = [kwargs.get(name), *(getattr(config, name) for config in configs)]
            return next((token for token in found if token is not None), None)

        if prompt is not None:
            mask, pad, ends = kwargs.get("attention_mask"), special("pad_token_id"), special("eos_token_id")
            ends = ends if isinstance(ends, (list, tuple)) else [ends]
            if mask is None and tokens is not None and pad is not None and pad not in ends:
                mask = tokens != pad  # as transformers will infer
            self._check_prompt(tokens, prompt, mask)
        elif special("bos_token_id") is None:
            raise ArgumentError(
                f"{type(self).__name__}.generate: there is nothing to continue; give input_ids, or a bos_token_id."
            )
        return super().generate(inputs, *args, **kwargs)

    def _check_prompt(self, tokens: Tensor | None, prompt: Tensor, mask: Tensor | None) -> None:
        """The prompt, tokens [B, N] or embeddings [B, N, C], can be continued. Waits for an accelerator, once for a
        whole text."""
        call, context = f"{type(self).__name__}.generate", self.config.max_position_embeddings
        name, axes = ("inputs_embeds", "[B, T, C]") if tokens is None else ("input_ids", "[B, T]")
        if not isinstance(prompt, Tensor):
            raise ArgumentError(f"{call}: {name} is {kind(prompt)}, expected a tensor {axes}.")
        if prompt.dim() != 2 + (tokens is None) or 0 in prompt.shape:
            raise ArgumentError(
                f"{call}: {name} has shape {shape(prompt)}, expected {axes} with T >= 1: there is nothing to "
                f"continue; begin with one token, such as bos_token_id."
            )
        if prompt.shape[1] > context:
            raise ArgumentError(
                f"{call}: the prompt has {prompt.shape[1]} tokens, more than the model's context of {context}; shorten "
                f"it, or raise config.max_position_embeddings to go beyond what was trained."
            )
        vocabulary = self.config.vocab_size
        if tokens is not None and (tokens.is_floating_point() or ((tokens < 0) | (tokens >= vocabulary)).any()):
            raise ArgumentError(outside(call, tokens, vocabulary))
        if mask is not None and mask.dim() == 2 and not (mask != 0).any(-1).all():
            rows = (mask == 0).all(-1).nonzero().flatten().tolist()
            raise ArgumentError(f"{call}: row {rows[0]} of the prompt is all padding; leave it out or give it a token.")

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: int
    ) -> None:
        """The model's own cache, unless one is given or asked for by name, or pairs must be seen again."""
        pairs = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        pairs = pairs or generation_config.output_attentions or self.config.output_attentions
        named = generation_config.cache_implementation not in (None, "dynamic")
        given = model_kwargs.get("past_key_values") is not None
        if named or given or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *sizes)
        else:
            model_kwargs["past_key_values"] = self.model.new_cache(pairs=bool(pairs))

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
        segment_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V] of the next token, and the loss where labels are given; arguments as the class.

        Raises:
            ArgumentError: wrong rank, dtype or shape, an empty sequence, a static cache, and on a CPU tokens out of the
                vocabulary (elsewhere they are torch's own error).
        """
        packed = packing.take({"segment_ids": segment_ids}, kwargs)
        refuse_misspelt(type(self).__name__, kwargs)
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
            **packed,
        )
        kept = positions_kept(type(self).__name__, logits_to_keep, labels)
        logits = self.unembed["hook_out"](self.lm_head(outputs.last_hidden_state[:, kept]))
        loss = None
        if labels is not None:
            tokens = tuple(outputs.last_hidden_state.shape[:2])
            real = None if attention_mask is None else attention_mask[:, -tokens[1] :] != 0
            documents = Documents.of(type(self).__name__, tokens, real, position_ids, packed)
            loss = self._loss(logits, labels, attention_mask, documents, kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        documents: Documents | None,
        extra: dict[str, Any],
    ) -> Tensor:
        """The loss, with further keywords for it; 0 where no token is to be predicted."""
        call, ignored, shifted = type(self).__name__, extra.get("ignore_index", IGNORED), extra.get("shift_labels")
        require(type(ignored) is int, call, f"ignore_index is {ignored!r}, expected an integer.")
        check_labels(call, "labels", labels, logits)
        if labels.shape[1] == 1 and shifted is None:
            raise ArgumentError(
                f"{call}: labels of one position leave nothing to predict; a token is predicted from those before it."
            )
        hidden = not_predicted(attention_mask, documents, labels.shape[1])
        labels = labels if hidden is None else labels.masked_fill(hidden, ignored)
        predicted = labels[:, 1:]
        if shifted is not None:
            check_labels(call, "shift_labels", shifted, logits)
            if hidden is not None:
                shifted = shifted.masked_fill(F.pad(hidden[:, 1:], (0, 1), value=False), ignored)
            predicted = extra["shift_labels"] = shifted.contiguous()
        if extra.get("num_items_in_batch") is None:  # a mean over no token is not a number; a sum over none is 0
            extra["num_items_in_batch"] = (predicted != ignored).sum().clamp_min(1)
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **extra)


def tell_step(model: nn.Module, step: int) -> None:
    """Tell the parts of a model that do not compute the same in every training step which one begins."""
    for module in model.modules():
        if hasattr(module, "training_step"):
            module.training_step = step


def check_depth(call: str, cache: Cache, layers: int) -> None:
    """A cache that holds tokens has a layer for each of the model's.

    Raises:
        ArgumentError: it was filled by a model of another depth.
    """
    if len(cache.layers) != layers and cache.get_seq_length() > 0:
        raise ArgumentError(
            f"{call}: past_key_values holds {len(cache.layers)} layers of another model, expected {layers}; leave it "
            f"out or give model.model.new_cache()."
        )
