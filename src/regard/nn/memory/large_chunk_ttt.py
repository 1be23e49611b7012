"""A token mixer of window attention and fast weights: the language model of LaCT (Zhang et al. 2025, arXiv:2505.23884).

Shapes: B batch, T new tokens, Tk new and cached tokens, C model width, H attention heads, Hf heads of
fast weights, D = C / Hf channels of one, F width of its inner layer, W window.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

from ...checks import ArgumentError, choice, flags, number, optional_whole, require, segments, shape, within
from ...memory.large_chunk import LargeChunkMemory, LargeChunkState, flush, large_chunk_ttt
from ...memory.stream import check_held
from ...pairwise.attention import attention, diagnosed_attention
from ...precision import transformed
from ...recurrent.states import State, require_state
from ..arguments import as_input, check_heads, check_hidden, check_positions, columns_of, layer_of, positive_ints
from ..attention.norm import HeadRMSNorm
from ..attention.rotary import Rotary, in_heads
from ..hooks import HookPoint
from .projections import Tokens, clean_tokens

CALL = "nn.LargeChunkTTT"
Parts = tuple[Tensor, Tensor, Tensor]  # query, key, value
BASE_RATE = 1e-3
PRESETS = {
    "512C+512W": {"chunk_size": 512, "window": 512},
    "512C+2048W": {"chunk_size": 512, "window": 2048},
    "512C+4096W": {"chunk_size": 512, "window": 4096},
    "2048C+2048W": {"chunk_size": 2048, "window": 2048},
}
"""The four settings that the FwPKM paper (arXiv:2601.00671, appendix A) compares. The second was best and is the
default (the paper's Table 3 swaps the two numbers)."""


@dataclass(frozen=True)
class WindowState(State):
    """The keys and values within the window of later tokens, n <= W - 1."""

    key: Tensor  # [B, H, n, C / H], rotated by their positions
    value: Tensor  # [B, H, n, C / H]
    valid: Tensor  # boolean [B, n], which of them may be attended to


class LargeChunkTTT(nn.Module):
    """Softmax attention to the last W tokens, plus a SwiGLU network for every sequence and head that is trained on keys
    and values chunk by chunk. Both use the same queries, keys and values.

        q', k' = l2(silu(scale * (q, k) + shift)) rotated as q and k,    v' = silu(v)    one scale and shift per channel
        out = W_o (attention(q, k, v) + silu(w_s h) rms(f(q')))                             w_s h: one number per head
        loss of a chunk = - sum_t v'_t^T f(k'_t),     rates eta_t = softplus(w h_t + softplus^-1(1e-3)), three per head

    A chunk reads the weights of its start and is learned when the next token arrives (`regard.memory.large_chunk`).
    Chunks count the real tokens of a sequence; the window counts positions, as in `nn.Attention`.

    Args:
        hidden_size, num_heads, fast_heads, window: C, H, Hf and W; H and Hf divide C.
        inner: F / D.
        layer_idx: the layer's place in a cache.
        bias: biases of queries, keys and values.
        qk_norm: an RMS norm with gains over the whole width of queries, and of keys.
        fast_rotary: also rotate q' and k' by their positions.
        norm_eps: of the RMS norms.
        options: how the fast weights learn, by the names of `regard.memory.large_chunk.LargeChunkMemory`. The momentum
            m_t is the sigmoid of a projection.

    Attributes:
        gate, up, down: [Hf, F, D], [Hf, F, D], [Hf, D, F], parameters: the weights before the first token.
        chunk_size: tokens between two writes. May be set at any time.
        frozen: read the fast weights and do not write; the fast state stays as it is.
        hook_q, hook_k, hook_v: see queries, keys, values [B, H, T, C / H] of the attention.
        hook_read: sees what the networks return, [B, T, Hf, D], normalised and scaled. hook_out: the output [B, T, C].

    Parameters: 4 C^2 + 3 C F + 4 C + 5 Hf (C + 1) + D with momentum; with C = 768, Hf = 4, F = D they are 2,820,308.

    A token whose hidden state is not finite gets the output NaN and keeps its place, but it is neither attended to nor
    learned from; under `regard.checks.debug` it is an error.

    Raises:
        ArgumentError: sizes that do not divide, numbers out of range, or an unknown optimizer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        fast_heads: int = 4,
        inner: float = 1.0,
        window: int = 2048,
        layer_idx: int | None = None,
        bias: bool = False,
        qk_norm: bool = False,
        fast_rotary: bool = True,
        norm_eps: float = 1e-6,
        **options: Any,
    ) -> None:
        super().__init__()
        head_dim = check_heads(CALL, hidden_size, num_heads, num_heads, None, mend="change one")
        positive_ints(CALL, fast_heads=fast_heads, window=window)
        flags(CALL, bias=bias, qk_norm=qk_norm, fast_rotary=fast_rotary)
        number(CALL, "norm_eps", norm_eps, low=0.0, strict=True)
        number(CALL, "inner", inner, low=0.0, strict=True)
        uneven = f"hidden_size {hidden_size} is not a multiple of {fast_heads} fast_heads; change one."
        require(hidden_size % fast_heads == 0, CALL, uneven)
        self.settings = LargeChunkMemory.of(CALL, None, options)
        dim = hidden_size // fast_heads
        width = int(inner * dim)
        require(width > 0, CALL, f"inner is {inner!r}, expected a factor that leaves at least one of {dim} channels.")
        self.hidden_size, self.num_heads, self.head_dim, self.fast_heads = hidden_size, num_heads, head_dim, fast_heads
        self.window, self.chunk_size, self.fast_rotary = window, self.settings.chunk_size, fast_rotary
        self.frozen = False
        self.layer_idx: int | None = optional_whole(CALL, "layer_idx", layer_idx, 0)
        for part in ("q", "k", "v"):
            self.add_module(f"{part}_proj", nn.Linear(hidden_size, hidden_size, bias=bias))
        self.q_norm, self.k_norm = (HeadRMSNorm(hidden_size, norm_eps) if qk_norm else nn.Identity() for _ in "qk")
        for part in ("q", "k"):
            self.register_parameter(f"{part}_scale", nn.Parameter(torch.ones(hidden_size)))
            self.register_parameter(f"{part}_shift", nn.Parameter(torch.zeros(hidden_size)))
        self.rate_proj = nn.Linear(hidden_size, 3 * fast_heads)
        self.momentum_proj = nn.Linear(hidden_size, fast_heads) if self.settings.momentum else None
        self.read_norm = HeadRMSNorm(dim, norm_eps)
        self.read_proj = nn.Linear(hidden_size, fast_heads)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate = nn.Parameter(torch.empty(fast_heads, width, dim))
        self.up = nn.Parameter(torch.empty(fast_heads, width, dim))
        self.down = nn.Parameter(torch.empty(fast_heads, dim, width))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_read, self.hook_out = HookPoint(), HookPoint()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new first weights, N(0, 1 / inputs)."""
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    @classmethod
    def from_preset(cls, preset: str, hidden_size: int, num_heads: int, **options: Any) -> "LargeChunkTTT":
        """Return the layer with the chunk and window of a preset, a name in `PRESETS`, changed by the options given."""
        choice(f"{CALL}.from_preset", "preset", preset, PRESETS)
        return cls(hidden_size, num_heads, **{**PRESETS[preset], **options})

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, fast_heads={self.fast_heads}, window={self.window}, "
            f"chunk_size={self.chunk_size}, optimizer={self.settings.optimizer!r}{', frozen=True' * self.frozen}"
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix new tokens with all earlier ones.

        Args:
            hidden_states, position_embeddings, output_attentions: as in `nn.Attention.forward`.
            attention_mask: boolean [B, Tk] over all tokens so far, the new ones last; true where a token is real.
            past_key_values: a cache whose `layers[layer_idx]` holds two states, None before the first token, which are
                replaced: `window_state` (`WindowState`) and `fast_state` (`LargeChunkState`).
            segment_ids: integers [B or 1, T]: a change begins a new document, which sees no earlier one. The first
                document continues from the cache.

        Returns:
            (output [B, T, C], 0 at padding, weights [B, H, T, Tk] or None; here Tk counts cached and new keys).

        Raises:
            ArgumentError: wrong rank, dtype or shape; a mask of pairs; a cache without a place for the two states.
        """
        layer = self._layer(past_key_values)
        check_hidden(CALL, "hidden_states", hidden_states, self.hidden_size, self.o_proj)
        mask = self._new(attention_mask, hidden_states, layer)
        tokens = clean_tokens(CALL, hidden_states, mask, self.hidden_size, segment_ids)
        batch, length, _ = hidden_states.shape
        check_held(CALL, "hidden_states", hidden_states)
        segments(CALL, segment_ids, batch, length, hidden_states.device)
        check_positions(CALL, position_embeddings, hidden_states, self.head_dim)
        flags(CALL, output_attentions=output_attentions)
        hidden = as_input(tokens.hidden, self.o_proj)
        query, key = self.q_norm(self.q_proj(hidden)), self.k_norm(self.k_proj(hidden))
        value = self.v_proj(hidden)
        read, fast = self._learn(hidden, (query, key, value), position_embeddings, tokens, layer)
        query, key = (in_heads(x, self.head_dim, position_embeddings) for x in (query, key))
        pairs = (self.hook_q(query), self.hook_k(key), self.hook_v(in_heads(value, self.head_dim)))
        attended, weights, window = self._attend(pairs, tokens, layer, output_attentions)
        out = self.o_proj(attended.transpose(1, 2).flatten(2) + self.hook_read(read).flatten(2).to(attended.dtype))
        if layer is not None:
            layer.window_state, layer.fast_state = window, fast
        return self.hook_out(tokens.shown(out)), weights

    def flush(self, state: LargeChunkState) -> LargeChunkState:
        return flush(state, self.settings)

    def _learn(
        self, hidden: Tensor, parts: Parts, positions: Rotary, tokens: Tokens, layer: Any
    ) -> tuple[Tensor, LargeChunkState]:
        """Return what the fast weights read, [B, T, Hf, D], and their state after the call."""
        places = positions if self.fast_rotary else None
        (query, key, value), heads, wide = parts, (self.fast_heads, -1), tokens.hidden.dtype
        query = silu(query.to(wide) * self.q_scale.to(wide) + self.q_shift.to(wide)).unflatten(-1, heads)
        key = silu(key.to(wide) * self.k_scale.to(wide) + self.k_shift.to(wide)).unflatten(-1, heads)
        units = (x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) + 1e-5) for x in (query, key))
        turned = (in_heads(x.flatten(2), self.head_dim, places).transpose(1, 2).flatten(2) for x in units)
        query, key = (x.unflatten(-1, heads) for x in turned)
        rates = softplus(self.rate_proj(hidden).to(wide) + math.log(math.expm1(BASE_RATE)))
        share = None if self.momentum_proj is None else self.momentum_proj(hidden).to(wide).sigmoid()
        query = query.masked_fill(tokens.non_finite[..., None, None], torch.nan)
        value, rates = (x.unflatten(-1, heads) for x in (silu(value.to(wide)), rates))
        how: dict[str, Any] = {"share": share, "chunk_size": self.chunk_size, "frozen": self.frozen, **tokens.where}
        how["state"] = None if layer is None else layer.fast_state
        given = (query, key, value, rates, (self.gate, self.up, self.down), self.settings)
        read, state = within(CALL, None, large_chunk_ttt, *given, **how)
        return self.read_norm(read) * silu(self.read_proj(hidden).to(wide))[..., None], state

    def _attend(
        self, parts: Parts, tokens: Tokens, layer: Any, output_attentions: bool
    ) -> tuple[Tensor, Tensor | None, WindowState]:
        """Return attention to the window [B, H, T, C / H], its weights or None, and the next window state."""
        query, key, value = parts
        past, valid, seen = None if layer is None else layer.window_state, tokens.counted, 0
        if past is not None:
            sizes = {"key": (*key.shape[:2], past.key.shape[2], key.shape[3]), "value": past.key.shape}
            require_state(CALL, past, WindowState, sizes, key)
            key, value = torch.cat([past.key, key], 2), torch.cat([past.value, value], 2)
            valid, seen = torch.cat([past.valid, valid], 1), past.tokens
        ids = tokens.where["segment_ids"]
        runs = None if ids is None else _documents(ids, tokens.counted, valid.shape[1])
        weights = None
        arguments: dict[str, Any] = {"is_causal": True, "window": self.window, "segment_ids": runs}
        # under a torch.func transform the contents cannot be read
        arguments["attn_mask"] = None if not transformed() and valid.all() else valid[:, None, None]
        if output_attentions:
            out, diagnostics = diagnosed_attention(query, key, value, "softmax", impl="reference", **arguments)
            weights = diagnostics.weights
        else:
            out = attention(query, key, value, **arguments)
        kept = slice(max(valid.shape[1] - self.window + 1, 0), None)
        if runs is not None:
            valid = valid & (runs == runs[:, -1:])
        seen += query.shape[2]
        return out, weights, WindowState(key[:, :, kept], value[:, :, kept], valid[:, kept], tokens=seen)

    def _new(self, mask: Tensor | None, hidden: Tensor, layer: Any) -> Tensor | None:
        if mask is None:
            return None
        batch, tokens, _ = hidden.shape
        columns = columns_of(CALL, mask, tokens, hidden.device) if getattr(mask, "ndim", 2) != 3 else None
        pairs = columns is None or columns.shape[1:3] != (1, 1)
        seen = tokens + getattr(getattr(layer, "window_state", None), "tokens", 0)
        if columns is None or pairs or len(columns) != batch or columns.shape[3] != seen:
            hint = "give one row per sequence and one column per token, those in the cache included"
            if pairs:
                hint = "a mask of pairs cannot say what fast weights may learn: give segment_ids for packed documents"
            expected = f"[{batch}, {seen}], a column for every token so far"
            raise ArgumentError(f"{CALL}: attention_mask has shape {shape(mask)}, expected {expected}; {hint}.")
        return columns[:, 0, 0, -tokens:]

    def _layer(self, cache: Any) -> Any:
        if cache is None:
            return None
        layer = layer_of(CALL, cache, self.layer_idx)
        held = f"past_key_values holds a {type(layer).__name__} at layer {self.layer_idx}, no place for window and fast"
        fits = hasattr(layer, "window_state") and hasattr(layer, "fast_state")
        require(fits, CALL, f"{held} weights; use the model's new_cache().")
        return layer


def _documents(segment_ids: Tensor, counted: Tensor, keys: int) -> Tensor:
    """Return increasing document numbers [B, Tk]; what comes before the first real token belongs to its document."""
    batch, tokens = counted.shape
    ids = segment_ids.expand(batch, tokens)
    at = torch.arange(tokens, device=ids.device).expand(batch, tokens)
    last = torch.where(counted, at, -1).cummax(1).values
    first = counted.int().argmax(1, keepdim=True)
    ids = ids.gather(1, torch.where(last < 0, first, last))
    return pad(ids[:, 1:] != ids[:, :-1], (keys - tokens + 1, 0)).long().cumsum(1)
