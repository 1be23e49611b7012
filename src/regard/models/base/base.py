"""Base classes of the causal language models.

A model consists of three classes: a `RegardConfig`, a `RegardModel` whose `decode` maps embeddings to the last hidden
states, and a `RegardForCausalLM`, which adds the output matrix.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import Cache, StaticCache
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ...checks import ArgumentError, instance, integers, refuse, require
from ...nn.arguments import require_growing
from ...nn.hooks import HookPoint
from . import arguments, packing
from .arguments import CACHE, CACHE_NAMES, IGNORED
from .base_config import RegardConfig
from .cache_layers import fixed_length, tokens_cached
from .loading import RegardPreTrainedModel
from .packing import Documents


@dataclass(frozen=True)
class Context:
    """Arguments of a decoder other than the embeddings."""

    mask: Tensor | None  # boolean [B, N], True where a token is real; a fixed cache may add columns of unfilled places
    real: Tensor | None  # the columns [B, T] of this call's tokens in the mask
    positions: Tensor  # integers [B or 1, T], the number of real tokens before each
    cache: Cache | None  # read and extended
    past: int | Tensor  # tokens in the cache, padding included; a tensor if a fixed cache counts on a device
    output_attentions: bool
    segments: Tensor | None = None  # integers [B or 1, T] that increase by one where a document begins


@dataclass(frozen=True)
class Decoded:
    """Outputs of a decoder."""

    hidden: Tensor  # [B, T, C] after the last norm, the input of the output matrix
    states: list[Tensor] = field(default_factory=list)  # before each layer
    attentions: list[Tensor | None] = field(default_factory=list)  # [B, H, T, N]; None for a layer without weights


class RegardModel(RegardPreTrainedModel):
    """The decoder without the output matrix; a subclass defines `decode` and `new_cache`."""

    honours_segments: ClassVar[bool] = False  # whether `decode` separates packed documents, which are refused otherwise
    fixed_caches: ClassVar[bool] = False  # whether caches of fixed length are taken; then `new_cache` takes `length`
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    decode: Callable[[Tensor, Context], Decoded]  # of embeddings [B, T, C]
    new_cache: Callable[..., Cache]  # empty; with `pairs=True` one with keys and values, where the model can have it
    gradient_checkpointing = False

    @property
    def call(self) -> str:
        """Return the name of the model for error messages."""
        return type(self).__name__.removesuffix("Model") + "ForCausalLM"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        segment_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **packed: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states [B, T, C] after the last norm; arguments and errors as in `RegardForCausalLM`."""
        given = arguments.one_cache(self.call, cache, past_key_values)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        hidden_wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        embedded = self._embed(input_ids, inputs_embeds)
        cache = self._cache(given, use_cache, pairs=bool(output_attentions))
        past, (batch, tokens) = tokens_cached(cache), embedded.shape[:2]
        least = tokens if isinstance(past, Tensor) else past + tokens
        mask = arguments.key_mask(self.call, attention_mask, batch, least, fixed_length(cache))
        positions = arguments.token_positions(self.call, position_ids, mask, past, embedded)
        real = None if mask is None else arguments.columns(mask, past, tokens)
        packed["segment_ids"] = segment_ids
        documents = Documents.of(self.call, (batch, tokens), real, position_ids, packed)
        segments = None
        if documents is not None:
            asked = given is not None or bool(use_cache)
            segments = documents.segments(self.call, cache_kept=cache is not None, cache_asked=asked)
            if segments is not None:
                require(self.honours_segments, self.call, f"{documents.packed}, which this model does not keep apart.")
                cache, positions = None, documents.positions(positions) if position_ids is None else positions
        if real is not None:  # masked tokens become zeros, so that NaN there reaches no product, forward or backward
            embedded = embedded.masked_fill(~real[..., None], 0)
        decoded = self.decode(embedded, Context(mask, real, positions, cache, past, bool(output_attentions), segments))
        states = (*decoded.states, decoded.hidden) if hidden_wanted else None
        attentions = tuple(w for w in decoded.attentions if w is not None) if output_attentions else None
        return BaseModelOutputWithPast(decoded.hidden, cache, states, attentions)

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the embeddings [B, T, C] that are given, or those of tokens [B, T].

        Messages are built only when they are raised: torch.compile cannot trace the text of a symbolic length.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ArgumentError(f"{self.call}: give either input_ids or inputs_embeds.")
        if inputs_embeds is not None:
            width = self.embed_tokens.embedding_dim
            ok = isinstance(inputs_embeds, Tensor) and inputs_embeds.is_floating_point() and inputs_embeds.dim() == 3
            if not ok or inputs_embeds.shape[1] == 0 or inputs_embeds.shape[2] != width:
                raise refuse(self.call, "inputs_embeds", inputs_embeds, f"floating-point [B, T, {width}] with T >= 1")
            return inputs_embeds
        ok = isinstance(input_ids, Tensor) and input_ids.dtype in (torch.int64, torch.int32) and input_ids.dim() == 2
        if not ok or input_ids is None or input_ids.shape[1] == 0:
            raise refuse(self.call, "input_ids", input_ids, "torch.int64 tokens [B, T] with T >= 1")
        if torch.compiler.is_compiling():
            return self.embed_tokens(input_ids)
        try:
            return self.embed_tokens(input_ids)
        except IndexError:  # raised on the CPU; checking beforehand would wait for an accelerator
            raise ArgumentError(arguments.outside(self.call, input_ids, self.config.vocab_size)) from None

    def _cache(self, cache: Cache | None, use_cache: bool | None, *, pairs: bool) -> Cache | None:
        """Return the cache to fill: the given one, a new one or None.

        The default is None in training, where nothing reads it and recomputation would fill it twice, and in exports.
        """
        asked = cache is not None or bool(use_cache)
        if torch.compiler.is_exporting():
            require(not asked, self.call, "a cache cannot be exported; leave cache and use_cache out.")
            return None
        if cache is not None:
            instance(self.call, "cache", cache, Cache, "a transformers Cache")
        if self.gradient_checkpointing and self.training:
            given = "use_cache=True" if cache is None else "cache"
            where = "with gradient checkpointing in training; call model.eval() or leave it out"
            require(not asked, self.call, f"{given} cannot be used {where}.")
        if cache is not None:
            if not self.fixed_caches:
                require_growing(cache, self.call)
            return cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return self.new_cache(pairs=pairs) if use_cache else None

    def run_layers(
        self, hidden: Tensor, context: Context, masks: Iterable[Tensor | None], *first: Any, **given: Any
    ) -> Decoded:
        """Run `layers` and `norm`; a layer is called with hidden states, `first`, its mask, context and `given`."""
        states, attentions = [], []
        given |= {"past_key_values": context.cache, "output_attentions": context.output_attentions}
        for layer, mask in zip(self.layers, masks, strict=True):
            states.append(hidden)
            hidden, weights = layer(hidden, *first, attention_mask=mask, segment_ids=context.segments, **given)
            attentions.append(weights)
        return Decoded(self.norm(hidden), states, attentions)


class RegardForCausalLM(RegardPreTrainedModel, GenerationMixin):
    """A causal language model: `RegardModel`, then the output matrix.

    Logits are `lm_head(model(...).last_hidden_state)`, as fused losses compute them, seen by the hook point
    `unembed.hook_out`. Arguments of a call:

    - input_ids: tokens [B, T]; or inputs_embeds [B, T, C].
    - attention_mask: [B, N] over all tokens so far, boolean, integer or 0.0 and 1.0, nonzero where a token is real.
      Masked tokens affect no other token, in values and in gradients.
    - position_ids: [B, T]; default: the number of real tokens before each.
    - cache, or by its name before transformers 5.24, past_key_values: a cache from an earlier call, which is extended.
      Models with attention in every layer also take one of fixed length, such as transformers' `StaticCache`.
    - labels: [B, T], the tokens themselves (they are shifted here), -100 where none is predicted. Masked tokens are
      neither predicted nor predicted from. The loss is 0 if no token is predicted.
    - use_cache: fill a new cache; default: the configuration's value, and False in training.
    - logits_to_keep: logits of the last positions only (0: all), or, without labels, of a tensor of positions.
    - output_attentions: also return attention weights, from the dense reference and with gradients. Layers without
      weights, such as Gated DeltaNet, are left out, as in transformers' hybrid models.
    - output_hidden_states: also return the hidden states before each layer and the input of the output matrix.
    - segment_ids: [B or 1, T], the document number of each token where rows hold several documents. Documents do not
      see each other, and the first token of each is not predicted. Position_ids that restart, `seq_idx`, and for a
      single row `cu_seq_lens_q` and `cu_seq_lens_k` [documents + 1] mean the same. No cache is kept.
    - further keywords go to the loss: `num_items_in_batch`, the divisor of the sum; `ignore_index`, instead of -100;
      `shift_labels` [B, T], the token to predict at each position, instead of `labels`.
    - `return_dict=False` returns a tuple.
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
        """Continue a text with transformers' `generate`, after checking the prompt.

        Raises:
            ArgumentError: an empty prompt, one longer than `max_position_embeddings`, tokens out of the vocabulary,
                or a row that is all padding.
        """
        call = f"{type(self).__name__}.generate"
        cache = arguments.one_cache(call, *(kwargs.pop(name, None) for name in CACHE_NAMES))
        if cache is not None:
            kwargs[CACHE] = cache
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        prompt = kwargs.get("inputs_embeds") if tokens is None else tokens
        given = args[0] if args else kwargs.get("generation_config")
        configs = [config for config in (given, self.generation_config) if config is not None]

        def special(name: str) -> Any:
            settings = [kwargs.get(name), *(getattr(config, name) for config in configs)]
            return next((token for token in settings if token is not None), None)

        if prompt is not None:
            mask, pad, ends = kwargs.get("attention_mask"), special("pad_token_id"), special("eos_token_id")
            ends = ends if isinstance(ends, (list, tuple)) else [ends]
            if mask is None and tokens is not None and pad is not None and pad not in ends:
                mask = tokens != pad  # as transformers will infer
            self._check_prompt(tokens, prompt, mask)
        elif special("bos_token_id") is None:
            raise ArgumentError(f"{call}: there is nothing to continue; give input_ids, or a bos_token_id.")
        early = "assistant_early_exit is not supported: these models run all their layers; give an assistant_model."
        require(special("assistant_early_exit") is None, call, early)
        return super().generate(inputs, *args, **kwargs)

    def _check_prompt(self, tokens: Tensor | None, prompt: Tensor, mask: Tensor | None) -> None:
        """Check that tokens [B, N] or embeddings [B, N, C] can be continued; waits for an accelerator once."""
        call, context = f"{type(self).__name__}.generate", self.config.max_position_embeddings
        name, axes = ("inputs_embeds", "[B, T, C]") if tokens is None else ("input_ids", "[B, T]")
        instance(call, name, prompt, Tensor, f"a tensor {axes}")
        if prompt.dim() != 2 + (tokens is None) or 0 in prompt.shape:
            empty = "there is nothing to continue; begin with one token, such as bos_token_id"
            raise refuse(call, name, prompt, f"{axes} with T >= 1: {empty}")
        long = f"the prompt has {prompt.shape[1]} tokens, more than the model's context of {context}"
        hint = "shorten it, or raise config.max_position_embeddings beyond the trained length"
        require(prompt.shape[1] <= context, call, f"{long}; {hint}.")
        vocabulary = self.config.vocab_size
        if tokens is not None and (tokens.is_floating_point() or ((tokens < 0) | (tokens >= vocabulary)).any()):
            raise ArgumentError(arguments.outside(call, tokens, vocabulary))
        if mask is not None and mask.dim() == 2 and not (mask != 0).any(-1).all():
            rows = (mask == 0).all(-1).nonzero().flatten().tolist()
            raise ArgumentError(f"{call}: row {rows[0]} of the prompt is all padding; leave it out or give it a token.")

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], generation_mode: Any, *sizes: int
    ) -> None:
        """Use the model's own cache unless one is given or named; one with keys and values where they are needed."""
        pairs = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.is_assistant
        pairs = pairs or generation_config.output_attentions or self.config.output_attentions
        named, cache = generation_config.cache_implementation, None
        if model_kwargs.get(CACHE) is None and generation_config.use_cache is not False:
            if named in (None, "dynamic"):
                cache = self.model.new_cache(pairs=bool(pairs))
            elif named == "static" and self.model.fixed_caches:
                cache = self.model.new_cache(pairs=bool(pairs), length=sizes[1])
        if cache is None or type(cache) is StaticCache:  # transformers keeps a StaticCache from call to call
            super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *sizes)
        else:
            model_kwargs[CACHE] = cache
            if generation_config.is_assistant:  # windows keep what was cropped; states refuse before they start
                cache.activate_past_recording()

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """Return the model's own positions: transformers' are 0 at padding, which would begin a document after it."""
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return arguments.counted(mask != 0)

    @staticmethod
    def create_masks_for_generate(
        config: RegardConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> Tensor | None:
        """Extend a mask [B, N] to the length of the cache, for `generate`, so that its shape stays equal."""
        if attention_mask is None:
            return None
        places = fixed_length(arguments.one_cache("generate", *map(others.get, CACHE_NAMES)))
        return F.pad(attention_mask, (0, max(places - attention_mask.shape[1], 0)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        segment_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, V] of the next token, and the loss if labels are given; arguments as in the class.

        Raises:
            ArgumentError: a wrong rank, dtype or shape, an empty sequence, a cache of another kind, or, on a CPU,
                tokens outside the vocabulary (elsewhere torch raises its own error).
        """
        cache = arguments.one_cache(type(self).__name__, cache, past_key_values)
        packed = packing.take({"segment_ids": segment_ids}, kwargs)
        arguments.refuse_misspelt(type(self).__name__, kwargs)
        outputs = self.model(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache,
            output_attentions, output_hidden_states, return_dict=True, **packed,
        )  # fmt: skip
        kept = arguments.positions_kept(type(self).__name__, logits_to_keep, labels)
        logits = self.unembed["hook_out"](self.lm_head(outputs.last_hidden_state[:, kept]))
        loss = None
        if labels is not None:
            if attention_mask is not None and cache is not None and fixed_length(cache):
                attention_mask = attention_mask[:, : int(cache.get_seq_length())]
            tokens = tuple(outputs.last_hidden_state.shape[:2])
            real = None if attention_mask is None else attention_mask[:, -tokens[1] :] != 0
            documents = Documents.of(type(self).__name__, tokens, real, position_ids, packed)
            loss = self._loss(logits, labels, attention_mask, documents, kwargs)
        return CausalLMOutputWithPast(loss, logits, getattr(outputs, CACHE), outputs.hidden_states, outputs.attentions)

    def _loss(
        self, logits: Tensor, labels: Tensor, mask: Tensor | None, documents: Documents | None, extra: dict[str, Any]
    ) -> Tensor:
        """Return the loss; `extra` are its further keywords, `ignore_index` among them."""
        call, ignored, shifted = type(self).__name__, extra.get("ignore_index", IGNORED), extra.get("shift_labels")
        require(type(ignored) is int, call, f"ignore_index is {ignored!r}, expected an integer.")
        integers(call, "labels", labels, *logits.shape[:2])
        if labels.shape[1] == 1 and shifted is None:
            raise ArgumentError(f"{call}: labels of one position leave nothing to predict; give two or more.")
        excluded = arguments.not_predicted(mask, documents, labels.shape[1])
        labels = labels if excluded is None else labels.masked_fill(excluded, ignored)
        predicted = labels[:, 1:]
        if shifted is not None:
            integers(call, "shift_labels", shifted, *logits.shape[:2])
            if excluded is not None:
                shifted = shifted.masked_fill(F.pad(excluded[:, 1:], (0, 1), value=False), ignored)
            predicted = extra["shift_labels"] = shifted.contiguous()
        count = extra.get("num_items_in_batch")
        count = (predicted != ignored).sum() if count is None else count
        extra["num_items_in_batch"] = count + (count == 0)  # the mean of no tokens is NaN; a sum over none is 0
        return self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **extra)


def tell_step(model: nn.Module, step: int) -> None:
    """Set the training step on the modules whose computation depends on it (those with `training_step`)."""
    for module in model.modules():
        if hasattr(module, "training_step"):
            module.training_step = step


def check_cache(call: str, cache: Cache, layers: int, rows: int) -> None:
    """Check that a cache that holds tokens has as many layers as the model, and keys of as many rows as the tokens."""
    if len(cache.layers) != layers and cache.get_seq_length() > 0:
        other = f"cache holds {len(cache.layers)} layers of another model, expected {layers}"
        raise ArgumentError(f"{call}: {other}; use model.model.new_cache().")
    every = (getattr(layer, "keys", None) for layer in cache.layers)  # of a quantised cache maybe empty
    held = next((keys.shape[0] for keys in every if keys is not None and keys.dim() == 4), rows)
    if held != rows:
        hint = "use one cache per batch, or repeat its rows with batch_repeat_interleave"
        raise ArgumentError(f"{call}: cache has {held} sequences, but the input has {rows}; {hint}.")
