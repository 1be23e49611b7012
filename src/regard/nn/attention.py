"""Causal multi-head self-attention with any sentence of the grammar in the place of softmax.

Shapes: B batch, T tokens given now (Tq), Tk tokens given so far (with a cache), C model width, H query heads,
Hkv key/value heads (H a multiple of Hkv), D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import Spec, attention
from ..checks import ArgumentError, boolean_mask, broadcastable, floating, require, shape
from .rotary import rotate

Observer = Callable[[int | None, Any], None]


class KeyValueCache(Protocol):
    """What the layer asks of a cache; transformers' `DynamicCache` is one."""

    def get_seq_length(self, layer_idx: int) -> int:
        """Tokens seen by that layer."""
        ...

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append [B, Hkv, Tq, D] pairs; return the pairs that a query may need, the new ones last."""
        ...


class Attention(nn.Module):
    """Causal self-attention; query, key, value and output projections around `regard.attention`.

    Args:
        hidden_size: model width C.
        num_heads: query heads H.
        num_kv_heads: key/value heads, a divisor of `num_heads` (grouped queries); default `num_heads`.
        head_dim: channels of a head; default `hidden_size // num_heads`, which must then be exact.
        spec: a `Spec`, or the name or text of one.
        layer_idx: the layer's place in a cache and in what observers are told.
        window: attend to the last `window` tokens only (the present one included); None for all.
        bias: biases in the four projections.
        learn_temperature: learn log t, one number per query head, with scores q.k / (t sqrt(D)) and t = 1 at
            the start. Needs a kernel that has a scale.

    Attributes:
        observer: None, or a callable `observer(layer_idx, diagnostics)` that is told of every forward pass.
            What it is given is detached from the graph only as far as `regard.attention` detaches it.
        observe_weights: with an observer, use the dense reference so that the diagnostics hold the weights.

    Raises:
        ArgumentError: sizes that do not fit, an unknown spec, or a temperature for a kernel without a scale.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        spec: str | Spec = "softmax",
        layer_idx: int | None = None,
        window: int | None = None,
        bias: bool = False,
        learn_temperature: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = check_heads("nn.Attention", hidden_size, num_heads, self.num_kv_heads, head_dim)
        self.window = check_window("nn.Attention", window)
        self.spec = Spec.parse(spec) if isinstance(spec, str) else spec
        require(
            self.spec.takes_scale or not learn_temperature,
            "nn.Attention",
            f"learn_temperature needs scores that have a scale, and {self.spec} has none; leave it out.",
        )
        self.layer_idx = layer_idx
        self.observer: Observer | None = None
        self.observe_weights = False
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.log_temperature = nn.Parameter(torch.zeros(num_heads)) if learn_temperature else None

    def extra_repr(self) -> str:
        """Heads, spec and window, for `print(model)`."""
        kv = f", num_kv_heads={self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        window = f", window={self.window}" if self.window is not None else ""
        return f"num_heads={self.num_heads}{kv}, head_dim={self.head_dim}, spec={str(self.spec)!r}{window}"

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the tokens given to all tokens so far.

        Args:
            hidden_states: [B, T, C].
            position_embeddings: (cos, sin) of `rotary_angles`, each [B or 1, T, D/2]; None for no positions.
            attention_mask: boolean, True may be attended: a key mask [B, Tk] over all tokens so far, or
                [B, 1 or H, T, Tk]. Causality and window are applied besides. A row without a key gives zeros.
            past_key_values: a growing cache, to which the new keys and values are appended (the one thing
                that a forward pass changes).
            output_attentions: also return the weights, by the dense reference implementation.

        Returns:
            (output [B, T, C], weights [B, H, T, Tk] or None). With a window and a cache, Tk counts the tokens
            that the cache still holds.

        Raises:
            ArgumentError: wrong rank, dtype or shape; a padded (static) cache; a cache without `layer_idx`.
        """
        floating("nn.Attention", "hidden_states", hidden_states)
        if hidden_states.dim() != 3 or hidden_states.shape[1] == 0:
            raise ArgumentError(
                f"nn.Attention: hidden_states has shape {shape(hidden_states)}, expected [B, T, C] with T >= 1."
            )
        query = self._heads(self.q_proj(hidden_states), self.num_heads)
        key = self._heads(self.k_proj(hidden_states), self.num_kv_heads)
        value = self._heads(self.v_proj(hidden_states), self.num_kv_heads)
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = self._remember(past_key_values, key, value)
        mask = self._mask(attention_mask, query, key)
        out, weights = self._attend(query, key, value, mask, output_attentions)
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _remember(self, cache: KeyValueCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append to the cache; all pairs that it holds, [B, Hkv, Tk, D]."""
        if self.layer_idx is None:
            raise ArgumentError("nn.Attention: a cache was given to a layer without layer_idx; set it.")
        require_growing(cache, "nn.Attention")
        return cache.update(key, value, self.layer_idx)

    def _mask(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """The mask as [B, 1 or H, 1 or T, Tk] for the keys at hand."""
        if mask is None:
            return None
        boolean_mask("nn.Attention", "attention_mask", mask)
        batch, heads, tokens, keys = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        if mask.dim() not in (2, 4) or mask.shape[-1] < keys:
            raise ArgumentError(
                f"nn.Attention: attention_mask has shape {shape(mask)}, expected [{batch}, Tk] or "
                f"[{batch}, 1, {tokens}, Tk] with Tk >= {keys}, the tokens so far."
            )
        # A cache with a window has dropped the oldest pairs, so the mask's last columns are the ones meant.
        mask = mask[..., mask.shape[-1] - keys :]
        mask = mask[:, None, None, :] if mask.dim() == 2 else mask
        broadcastable("nn.Attention", "attention_mask", mask, (batch, heads, tokens, keys))
        return mask

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output_attentions: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`regard.attention` with this layer's numbers: ([B, H, T, D], weights or None)."""
        dense = output_attentions or (self.observer is not None and self.observe_weights)
        arguments: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": True,
            "window": self.window,
            "enable_gqa": self.num_kv_heads != self.num_heads,
            "impl": "reference" if dense else "auto",
        }
        if self.log_temperature is not None:  # kernels without a scale refuse one, so it is not passed unasked
            scale = torch.exp(-self.log_temperature.float()) * self.head_dim**-0.5
            arguments["scale"] = scale[None, :, None]
        if not dense and self.observer is None:
            return attention(query, key, value, self.spec, **arguments), None
        out, diagnostics = attention(query, key, value, self.spec, return_diagnostics=True, **arguments)
        if self.observer is not None:
            self.observer(self.layer_idx, diagnostics)
        return out, diagnostics.weights if output_attentions else None


def check_heads(call: str, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """The channels of a head, after checking that the sizes fit together.

    Raises:
        ArgumentError: a size that is not a positive integer, or one that does not divide another.
    """
    sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, size in {**sizes, "head_dim": 1 if head_dim is None else head_dim}.items():
        positive_int(call, name, size)
    require(
        num_heads % num_kv_heads == 0,
        call,
        f"{num_heads} query heads do not divide among {num_kv_heads} key/value heads; choose a divisor of {num_heads}.",
    )
    if head_dim is not None:
        return head_dim
    require(
        hidden_size % num_heads == 0,
        call,
        f"hidden_size {hidden_size} is not a multiple of {num_heads} heads; change one, or give head_dim.",
    )
    return hidden_size // num_heads


def check_window(call: str, window: int | None) -> int | None:
    """`window`, after checking that it is None or a positive integer."""
    if window is not None:
        positive_int(call, "window", window)
    return window


def positive_int(call: str, name: str, value: object) -> None:
    """`value` is an integer above zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{call}: {name} is {value!r}, expected a positive integer.")


def require_growing(cache: object, call: str) -> None:
    """`cache` holds the tokens seen and nothing else.

    Queries stand at the end of the keys, so a cache that is padded to its final length would put them at the
    wrong place.
    """
    if getattr(cache, "is_compileable", False):
        raise ArgumentError(
            f"{call}: past_key_values is a {type(cache).__name__}, which is padded to a fixed length; "
            f"use a cache that grows, such as transformers.DynamicCache."
        )
