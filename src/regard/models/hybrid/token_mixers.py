"""Token mixers: layers that mix tokens without being attention with a spec.

A mixer is one file in `mixers/` that ends with

    @token_mixers.register("my-mixer")
    class MyMixer(TokenMixer): ...

and `HybridConfig.mixers` may then name it for any layer.

Convolutions are causal and channel by channel. The short one is that of Gated DeltaNet: over the last few tokens,
before the memory sees queries, keys and values. The long one is over all tokens.

Shapes: B batch, T tokens in this call, N tokens so far (cached ones included), C model width, H heads, D channels of a
head, W the convolution's width, G its channels.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from typing_extensions import Self

from ...checks import ArgumentError, optional_whole, require, segments, suggestion, whole
from ...grammar import Spec, as_spec, bandwidths, kernels, presets, similarities
from ...nn.arguments import plain_filters, positive_ints
from ...recurrent.linear import linear_attention
from ...recurrent.packing import by_document, documents
from ...recurrent.states import State
from ...registry import Registry
from ..base.arguments import all_real
from ..base.cache_layers import StateCacheLayer, own_layer


class TokenMixer(nn.Module, ABC):
    """A module that mixes tokens and keeps its own state.

    It is called as `regard.nn.Attention`: with hidden states [B, T, C], (cos, sin) of the positions, a boolean mask
    [B, N], a cache and `output_attentions`; it returns (output [B, T, C], weights or None).

    For packed documents, a mixer with `honours_segments` is also given `segment_ids`, integers [B or 1, T] that
    increase by one where a document begins, and no cache. Each document must give the same output as it gives alone.

    Attributes:
        honours_segments: whether `segment_ids` are accepted; if not, packed documents raise an error.
        defaults: the options with their default values.
        cache_layer: the class of the mixer's layer in a transformers `Cache`; created without arguments.
    """

    honours_segments: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    cache_layer: ClassVar[type[CacheLayerMixin]]
    forward: Callable[..., tuple[Tensor, Tensor | None]]

    @staticmethod
    @abstractmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> "TokenMixer":
        """Build the module of layer `layer_idx` of a model with this `HybridConfig` and these options."""

    def write_waiting(self, layer: Any) -> None:
        """Write the tokens that wait for the end of a chunk in this mixer's cache layer; by default there are none."""

    def init_weights(self) -> None:
        """Initialise the parameters that transformers does not know, after its own initialisation; by default none. Use
        `transformers.initialization`, which leaves loaded parameters unchanged. transformers passes over a module
        without parameters of its own, so a submodule whose parameters need this defines `init_weights` itself."""


token_mixers: Registry[type[TokenMixer]] = Registry(
    "token mixer", "regard.token_mixers", home="regard.models.hybrid.mixers"
)


def read_mixer(given: str | Spec, call: str, argument: str) -> str | Spec:
    """Return a spec, or the name of a token mixer; the error about an unknown word suggests both."""
    word = given.strip() if isinstance(given, str) else ""
    if word in token_mixers:
        return token_mixers.canonical(word)
    try:
        return as_spec(given, call, argument)
    except ArgumentError:
        if not re.fullmatch(r"[\w-]+", word) or word in bandwidths or word in similarities:
            raise  # not about an unknown word
        hint = suggestion(word, [*kernels.names(), *presets(), *token_mixers.names(aliases=True)])
        raise ArgumentError(f"{call}: {argument}: {word!r} is neither a spec nor a token mixer.{hint}") from None


States = tuple[Any, ...]  # what a mixer keeps, in the order of `cache_layer.held`; None before the first token


class StateMixer(TokenMixer):
    """A token mixer with states of fixed size in a `StateCacheLayer`; a subclass defines `advance`. Padding, packed
    documents and the cache are handled here."""

    honours_segments = True
    cache_layer: ClassVar[type[StateCacheLayer]]
    layer_idx: int | None

    @abstractmethod
    def advance(
        self, hidden: Tensor, real: Tensor | None, states: States, segment_ids: Tensor | None
    ) -> tuple[Tensor, States]:
        """Return the output [B, T, C] and the states after all tokens.

        `hidden` [B, T, C] is zero at padding. `real`, boolean [B, T], has the real tokens of each row first; None: all
        are real. `segment_ids`, integers [B or 1, T], change where a document begins, and come without states.
        """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return [B, T, C], and None: there are no weights, and positions are not used. A cache without this layer's
        state, or with `segment_ids`, is an ArgumentError."""
        call, (batch, tokens, _) = type(self).__name__, hidden_states.shape
        both = segment_ids is not None and past_key_values is not None
        require(not both, call, "segment_ids were given with past_key_values; leave one out.")
        segments(call, segment_ids, batch, tokens, hidden_states.device)
        kept = own_layer(call, past_key_values, self.layer_idx or 0, self.cache_layer)
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        held = self.cache_layer.held
        states = tuple(None if kept is None else getattr(kept, name) for name in held)
        out, states = self.mix(hidden_states, mask, states, segment_ids)
        if kept is not None:
            for name, state in zip(held, states, strict=True):
                setattr(kept, name, state)
        return out, None

    def mix(
        self, hidden: Tensor, mask: Tensor | None, states: States, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, States]:
        """Do what `advance` does for any mask [B, T] of real tokens; padding gives 0 and changes nothing else."""
        if mask is None or all_real(mask):
            return self.advance(hidden, None, states, segment_ids)
        # Move the real tokens of each row to the front, so that no real token follows padding.
        order = (~mask).to(torch.int8).argsort(dim=1, stable=True)
        index = order[..., None].expand_as(hidden)
        real = mask.gather(1, order)
        hidden = hidden.gather(1, index).masked_fill(~real[..., None], 0)
        segment_ids = None if segment_ids is None else segment_ids.expand_as(order).gather(1, order)
        out, states = self.advance(hidden, real, states, segment_ids)
        return torch.zeros_like(out).scatter(1, index, out.masked_fill(~real[..., None], 0)), states


@dataclass(frozen=True)
class ConvolutionState(State):
    """The last inputs of a convolution, [B, 3 H D, W - 1]."""

    inputs: Tensor


class RecurrentCacheLayer(StateCacheLayer):
    """The memory of one layer and the last inputs of its convolution, None before the first token."""

    held = ("memory", "convolution")
    memory: Any
    convolution: ConvolutionState | None


class Heads(NamedTuple):
    """Inputs of a memory: query, key and value are [B, H, T, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor  # [B, T, C], for gates
    how: dict[str, Any]  # arguments of every function of `regard.recurrent`: state, attn_mask and segment_ids


class RecurrentMixer(StateMixer):
    """Queries, keys and values, a memory of fixed size, a norm for each head, an output gate and a projection.

    A subclass says how its memory is written and read (`recall`), and makes parameters of its own (`make`).

    Args:
        hidden_size, num_heads, head_dim: C, H and D.
        conv_size: W; 1 for no convolution; default: that of `defaults`.
        norm_eps: of the norm of the heads.
        layer_idx: the layer's place in a cache.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"conv_size": 4}
    cache_layer = RecurrentCacheLayer

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        conv_size: int | None = None,
        *,
        norm_eps: float = 1e-6,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        call, conv_size = type(self).__name__, self.defaults["conv_size"] if conv_size is None else conv_size
        positive_ints(call, hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
        whole(call, "conv_size", conv_size, 1, 2**20)
        self.layer_idx = optional_whole(call, "layer_idx", layer_idx, 0)
        self.num_heads, self.head_dim, self.conv_size = num_heads, head_dim, conv_size
        inner = num_heads * head_dim
        self.project = nn.Linear(hidden_size, 3 * inner, bias=False)
        self.conv = nn.Conv1d(3 * inner, 3 * inner, conv_size, groups=3 * inner, bias=False) if conv_size > 1 else None
        self.gate = nn.Linear(hidden_size, inner, bias=False)
        self.norm = nn.RMSNorm(head_dim, norm_eps)
        self.output = nn.Linear(inner, hidden_size, bias=False)
        self.make(hidden_size)

    def make(self, hidden_size: int) -> None:
        """Make the parameters of the memory; by default there are none."""

    @classmethod
    def build(cls, config: Any, layer_idx: int, options: Mapping[str, Any]) -> Self:
        """Build the layer of a hybrid model; its heads are the model's."""
        heads = config.num_attention_heads
        width = config.head_dim or config.hidden_size // heads
        return cls(config.hidden_size, heads, width, **options, norm_eps=config.rms_norm_eps, layer_idx=layer_idx)

    @abstractmethod
    def recall(self, heads: Heads) -> tuple[Tensor, State | None]:
        """Return what the queries read, [B, H, T, D], and the memory after all tokens (or None for packed rows)."""

    def advance(
        self, hidden: Tensor, real: Tensor | None, states: States, segment_ids: Tensor | None
    ) -> tuple[Tensor, States]:
        memory, convolution = states
        weight = None if self.conv is None else plain_filters(self.conv, hidden.device)
        before = None if convolution is None else convolution.inputs
        mixed, last = short_convolution(self.project(hidden).transpose(1, 2), weight, before, real, segment_ids)
        parts = mixed.transpose(1, 2).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        how = {"state": memory, "attn_mask": real, "segment_ids": segment_ids}
        read, memory = self.recall(Heads(query, key, value, hidden, how))
        heads = self.norm(read).transpose(1, 2).flatten(2) * F.silu(self.gate(hidden))
        tokens = hidden.shape[1] + (0 if convolution is None else convolution.tokens)
        return self.output(heads), (memory, ConvolutionState(last, tokens=tokens))


class LongConvolution(RecurrentMixer):
    """q * (f(k * v) + skip * k * v), channel by channel, where f is a convolution over all tokens (`convolve`).

    A subclass also has `skip`, [H, D].
    """

    skip: nn.Parameter

    @abstractmethod
    def convolve(self, inputs: Tensor, real: Tensor | None, state: Any) -> tuple[Tensor, State]:
        """Return outputs and the state after all tokens for inputs [B, H, D, T], which are 0 at padding. `real` is
        boolean [B, T], real tokens first; None: all are."""

    def recall(self, heads: Heads) -> tuple[Tensor, State | None]:
        how, mask = heads.how, heads.how["attn_mask"]
        packed = documents(type(self).__name__, how["segment_ids"], heads.query, heads.key)
        mask = None if mask is None else mask[:, None]
        if packed is None:
            return self._read(heads[:3], mask, how["state"])
        alone = lambda *given: (self._read(*given)[0], None)  # noqa: E731 (states of documents may have many lengths)
        return by_document(packed, alone, heads[:3], mask)

    def _read(self, parts: tuple[Tensor, ...], mask: Tensor | None, state: Any) -> tuple[Tensor, State]:
        """Do what `recall` does for queries, keys and values [B, H, T, D] and a mask [B, 1, T]."""
        query, key, value = parts
        real = None if mask is None else mask[:, 0]
        inputs = (key * value).to(torch.promote_types(query.dtype, torch.float32)).transpose(2, 3)
        if real is not None:
            inputs = inputs * real[:, None, None]
        out, state = self.convolve(inputs, real, state)
        out = out + self.skip.to(inputs.dtype)[..., None] * inputs
        return query * out.transpose(2, 3).to(query.dtype), state


def decaying_attention(heads: Heads, log_decay: Tensor) -> tuple[Tensor, State]:
    """Return linear attention with decay factors exp(log_decay), and its state."""
    scale = heads.query.shape[-1] ** -0.5
    return linear_attention(*heads[:3], "linear*unnormalised", log_decay=log_decay, scale=scale, **heads.how)


def gates(projected: Tensor) -> Tensor:
    """Return numbers of tokens and heads [B, T, H] as [B, H, T], in float32 at least."""
    return projected.transpose(1, 2).contiguous().to(torch.promote_types(projected.dtype, torch.float32))


def convolved(inputs: Tensor, weight: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Convolve [B, G, W - 1 + T] with [G, W], channel by channel, to [B, G, T]; no document sees the one before."""
    if segment_ids is None:
        return F.conv1d(inputs, weight[:, None], groups=len(weight))
    reach, tokens = weight.shape[1] - 1, segment_ids.shape[1]
    before = F.pad(segment_ids, (reach, 0))
    out = inputs[..., reach:] * weight[:, reach:]
    for lag in range(1, reach + 1):
        lagged = slice(reach - lag, reach - lag + tokens)
        same = (before[:, lagged] == segment_ids) & (torch.arange(tokens, device=before.device) >= lag)
        out = out + torch.where(same[:, None], inputs[..., lagged], 0) * weight[:, reach - lag, None]
    return out


def short_convolution(
    mixed: Tensor, weight: Tensor | None, before: Tensor | None, real: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return silu of the convolution of [B, G, T] with [G, W] (None: the inputs as they are), and its last inputs.

    `before` [B, G, W - 1] are the last inputs of earlier tokens (None: zeros); `real` [B, T] has real tokens first.
    """
    reach = 0 if weight is None else weight.shape[1] - 1
    past = mixed.new_zeros(*mixed.shape[:2], reach) if before is None else before.to(mixed.dtype)
    inputs = torch.cat((past, mixed), dim=-1)
    if weight is not None:
        mixed = F.silu(convolved(inputs, weight, segment_ids))
    if real is None:
        return mixed, inputs[..., inputs.shape[-1] - reach :]
    last = real.sum(1)[:, None] + torch.arange(reach, device=inputs.device)
    return mixed, inputs.gather(2, last[:, None].expand(-1, inputs.shape[1], -1))


def long_convolution(inputs: Tensor, kernel: Tensor) -> Tensor:
    """Convolve [B, H, D, N] causally with a filter [H, D, N] for each channel: O(N^2) time, O(N) memory a channel.

    Sums are used, since Fourier transforms would spread rounding and non-finite values to earlier tokens.
    """
    x, weight = inputs.flatten(1, 2), kernel.flatten(0, 1).flip(-1)[:, None]
    return F.conv1d(F.pad(x, (kernel.shape[-1] - 1, 0)), weight, groups=len(weight)).view_as(inputs)
