"""Causal multi-head self-attention with any attention spec.

Shapes: B batch, T (or Tq) tokens in this call, Tk tokens so far, C model width, H query heads, Hkv key/value heads (a
divisor of H), D channels of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...checks import ArgumentError, broadcastable, choice, flags, number, optional_whole, refuse, segments, shape
from ...grammar import Spec, as_spec
from ...recurrent.linear import LinearState, finite_features, linear_attention
from .. import arguments as args
from ..hooks import HookPoint, Seen, observed_attention
from .norm import QK_NORMS, HeadRMSNorm
from .ridge import Ridge, RidgeProjection, as_ridge
from .rotary import Rotary, in_heads, rotate
from .temperature import Temperature, as_temperature

CALL = "nn.Attention"

Observer = Callable[[int | None, Any], None]


def _check_cache_and_segments(cache: Any, segment_ids: Tensor | None, hidden_states: Tensor) -> None:
    """Check the type of the cache, and that segment ids fit the input and come without a cache."""
    if cache is not None and not callable(getattr(cache, "update", None)):
        raise refuse(CALL, "past_key_values", cache, "a cache with update(key, value, layer_idx), or None")
    if cache is not None and segment_ids is not None:
        why = "past_key_values, a cache that holds one document per row; leave one out"
        raise ArgumentError(f"{CALL}: segment_ids were given with {why}.")
    segments(CALL, segment_ids, hidden_states.shape[0], hidden_states.shape[1], hidden_states.device)


class Attention(nn.Module):
    """Causal self-attention: query, key, value and output projections around `regard.attention`.

    Args:
        hidden_size, num_heads: model width C and query heads H.
        num_kv_heads: key/value heads, a divisor of `num_heads` (grouped queries); default `num_heads`.
        head_dim: channels of a head; default `hidden_size // num_heads`, which must then be exact.
        spec: a `Spec`, or the name or text of one.
        layer_idx: index of the layer in a cache, also passed to observers.
        window: attend to the last `window` tokens only, the current one included; None for all.
        bias: biases in the four projections.
        temperature: a rule of `regard.nn.temperatures` or its text: "fixed" (the usual scale), "learned" per head,
            "log" or "power" of the number of visible keys. Its learned values are parameters [H]. All but the usual
            scale need a spec whose scores have a scale.
        share_query_key: one projection for queries and keys, q = k (kernel-selection paper, section 7), without q_proj.
            Needs as many key/value heads as query heads. A token is then most similar to itself: see `exclude_self`.
        exclude_self: attend to earlier tokens only; the first token's output is 0.
        qk_norm: normalisation of queries and keys per head, before rotation. "rms": to root mean square 1, times a
            learned gain [D] (`q_norm`, `k_norm`). "l2": to length 1, without a gain; the usual scale is then sqrt(D)
            instead of 1/sqrt(D).
        ridge: of a local linear spec, a rule of `regard.nn.ridges` or its text: "fixed" (the value of the spec),
            "learned" from the token, one value per head, or "learned-per-dimension". The projection is `ridge_proj`.
        norm_eps: added to the mean square in `qk_norm` and `output_norm`.
        output_gate: multiply the heads' output by sigmoid(`gate_proj`(token)), channel by channel (gated attention, Qiu
            et al. 2025, arXiv:2505.06708).
        output_norm: normalise every head's output to root mean square 1, times a learned gain [D] (`out_norm`), before
            the gate (Qin et al. 2022, arXiv:2210.10340): for weights that do not sum to 1.

    A local linear spec regresses on the normalised and rotated keys. If its solver is "learned" (Parallax, arXiv
    2605.29157), `r_proj` computes the probe of every head, normalised (`r_norm`) and rotated like a query.

    Attributes:
        observer: None, or a callable `observer(layer_idx, diagnostics)`, called in every forward pass.
        observe_weights: use the dense reference for an observer, so that the diagnostics hold the weights.
        hook_q, hook_k, hook_v: see queries [B, H, T, D], keys and values [B, Hkv, T, D], normalised and rotated.
        hook_pattern: sees the weights [B, H, T, Tk] and may replace them; while a hook is registered they come from the
            dense reference. Not with a cache of linear-attention states.
        hook_out: sees the output [B, T, C].

    Raises:
        ArgumentError: sizes that do not fit, an unknown spec, a temperature for a spec without a scale, a learned
            ridge for a spec without a ridge, an unknown `qk_norm`, or shared queries and keys with grouped heads.
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
        temperature: str | Temperature = "fixed",
        share_query_key: bool = False,
        exclude_self: bool = False,
        qk_norm: str | None = None,
        ridge: str | Ridge = "fixed",
        norm_eps: float = 1e-6,
        output_gate: bool = False,
        output_norm: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        flags(CALL, bias=bias, share_query_key=share_query_key, exclude_self=exclude_self)
        flags(CALL, output_gate=output_gate, output_norm=output_norm)
        self.head_dim = args.check_heads(CALL, hidden_size, num_heads, self.num_kv_heads, head_dim)
        self.window = args.check_window(CALL, window)
        self.spec = as_spec(spec, CALL)
        self.temperature = as_temperature(temperature, CALL, "temperature")
        self.temperature.require(CALL, self.spec)
        self.ridge = as_ridge(ridge, CALL, "ridge")
        self.ridge.require(CALL, self.spec)
        self.qk_norm = choice(CALL, "qk_norm", qk_norm, QK_NORMS)
        number(CALL, "norm_eps", norm_eps, low=0.0, strict=True)
        args.check_shared(CALL, share_query_key, num_heads, self.num_kv_heads)
        self.share_query_key, self.exclude_self = share_query_key, exclude_self
        self.layer_idx: int | None = optional_whole(CALL, "layer_idx", layer_idx, 0)
        self.observer: Observer | None = None
        self.observe_weights = False
        if not share_query_key:
            self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.gate_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias) if output_gate else None
        self.out_norm = HeadRMSNorm(self.head_dim, norm_eps) if output_norm else None
        for name, value in self.temperature.start().items():
            self.register_parameter(name, nn.Parameter(torch.full((num_heads,), value)))
        self.probed = self.spec.degree == 1 and self.spec.solver.name == "learned"
        if self.probed:
            self.r_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        if self.qk_norm is not None:
            for part in ("q",) * (not share_query_key) + ("k",) + ("r",) * self.probed:
                self.add_module(f"{part}_norm", HeadRMSNorm(self.head_dim, norm_eps, unit=self.qk_norm == "l2"))
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        self.hook_pattern, self.hook_out = HookPoint(), HookPoint()
        learns = self.ridge.numbers(self.head_dim) > 0
        self.ridge_proj = RidgeProjection(hidden_size, num_heads, self.head_dim, self.ridge) if learns else None

    def extra_repr(self) -> str:
        grouped = self.num_kv_heads if self.num_kv_heads != self.num_heads else None
        temperature = None if self.temperature.neutral else str(self.temperature)
        ridge = None if self.ridge_proj is None else str(self.ridge)
        return args.described(
            num_heads=self.num_heads, num_kv_heads=grouped, head_dim=self.head_dim, spec=str(self.spec),
            window=self.window, temperature=temperature, qk_norm=self.qk_norm, ridge=ridge,
            share_query_key=self.share_query_key, exclude_self=self.exclude_self,
            output_gate=self.gate_proj is not None, output_norm=self.out_norm is not None,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Rotary = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the tokens of this call to all tokens so far.

        Args:
            hidden_states: [B, T, C].
            position_embeddings: (cos, sin) of `rotary_angles`, each [B or 1, T, R/2], which rotate the first R channels
                of a head; None for no positions.
            attention_mask: boolean, True where a key may be attended: [B, Tk] over all tokens so far, or
                [B, 1 or H, T, Tk], combined with causality and window. A query without a visible key gives zeros.
            past_key_values: a cache such as transformers' `DynamicCache`. `update(key, value, layer_idx)` appends keys
                and values [B, Hkv, T, D] in place and returns those that a query may need, the new ones last;
                `get_seq_length(layer_idx)` counts the tokens. If its layer, `layers[layer_idx]`, has a `linear_state`
                (a `LinearState` or None), it holds this state of fixed size and a token costs O(D Dv) at any length;
                only the mask's columns of new tokens are then read, since a pair cannot be removed from a sum. If its
                layer has a fixed length (transformers' `StaticCache`), Tk is that length, and a shorter mask is
                extended by False.
            output_attentions: also return the weights, from the dense reference: those with weights times values =
                output, some of which are negative for a local linear spec.
            segment_ids: integers [B or 1, T] of packed documents: a token attends only to its own run of equal numbers.

        Returns:
            Output [B, T, C], and weights [B, H, T, Tk] or None. With a window and a cache, Tk counts the tokens that
            the cache still holds.

        Raises:
            ArgumentError: a wrong rank, dtype or shape; a cache without `layer_idx`, or with `segment_ids`; more tokens
                than a cache of fixed length has places for; a cache of states for a spec without a finite feature map,
                or asked for the weights of earlier tokens.
        """
        args.check_hidden(CALL, "hidden_states", hidden_states, self.hidden_size, self.k_proj)
        args.check_positions(CALL, position_embeddings, hidden_states, self.head_dim)
        flags(CALL, output_attentions=output_attentions)
        _check_cache_and_segments(past_key_values, segment_ids, hidden_states)
        value = self.hook_v(in_heads(self.v_proj(hidden_states), self.head_dim))
        key = query = self.hook_k(self._position(self.k_proj(hidden_states), "k", position_embeddings))
        if not self.share_query_key:
            query = self.hook_q(self._position(self.q_proj(hidden_states), "q", position_embeddings))
        layer = None if past_key_values is None else self._layer(past_key_values)
        if hasattr(layer, "linear_state"):
            out, weights = self._attend_to_sums(layer, query, key, value, attention_mask, output_attentions)
        else:
            seen = self.order
            if hasattr(layer, "max_cache_len"):  # of fixed length, as `StaticLayer`
                attention_mask, seen = self._places(layer, attention_mask, query.shape[2], key.device), Seen()
            if past_key_values is not None:
                key, value = self._append(past_key_values, key, value, seen)
            seen = Seen(*seen[:3], self._mask(attention_mask, query, key), segment_ids)
            local = {} if self.ridge_proj is None else {"ridge": self.ridge_proj(hidden_states)}  # [B, H, T, 1 or D]
            if self.probed:
                local["probe"] = self._position(self.r_proj(hidden_states), "r", position_embeddings)
            out, weights = self._attend(query, key, value, seen, output_attentions, local)
        heads = (out if self.out_norm is None else self.out_norm(out)).transpose(1, 2).flatten(2)
        if self.gate_proj is not None:
            heads = heads * self.gate_proj(hidden_states).sigmoid()
        return self.hook_out(self.o_proj(heads)), weights

    @property
    def order(self) -> Seen:
        """Causality and window of every call, with a cache that grows or without one."""
        return Seen(True, self.exclude_self, self.window)

    def _position(self, x: Tensor, part: str, position_embeddings: Rotary) -> Tensor:
        """Return queries, keys or probes [B, H, T, D], normalised and then rotated, for x [B, T, H D]."""
        x = in_heads(x, self.head_dim)
        if self.qk_norm is not None:
            x = self.get_submodule(f"{part}_norm")(x)
        return x if position_embeddings is None else rotate(x, *position_embeddings)

    def _layer(self, cache: Any) -> Any:
        """Return this layer's entry in the cache, None if it has none, after checking that it suits the spec."""
        layer = args.layer_of(CALL, cache, self.layer_idx)
        if layer is None:
            args.require_growing(cache, CALL)
        if hasattr(layer, "linear_state") and (self.window is not None or not finite_features(self.spec)):
            why = f"{self.spec} {'with a window ' if self.window else ''}needs keys and values; use a DynamicCache"
            raise ArgumentError(f"{CALL}: the cache holds sums at layer {self.layer_idx}, but {why}.")
        return layer

    def _places(self, layer: Any, mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
        """Return which of the K places of a cache of fixed length each token sees, boolean [B or 1, 1 or H, T, K]; to
        be asked before `update`, which returns all places, filled or not.

        `mask` is boolean [B, N] or [B, 1 or H, T, N]; further columns are of places that are not filled yet. More
        tokens than places (checked on a CPU, where it costs no waiting) are an ArgumentError, unless the places are
        those of the window.
        """
        past, exclude = layer.get_seq_length(), int(self.exclude_self)
        slides = layer.is_sliding and self.window is not None and self.window + exclude <= layer.max_cache_len
        if not slides and not torch.compiler.is_compiling() and device.type == "cpu":
            places, total = layer.max_cache_len, int(past) + tokens
            if total > places:
                full = f"the cache has places for {places} tokens, and this call makes it {total}; make a longer cache"
                raise ArgumentError(f"{CALL}: {full}.")
        places, first = layer.get_mask_sizes(tokens)
        key = torch.arange(first, first + places, device=device)
        last = torch.arange(tokens, device=device)[:, None] + past - exclude
        seen = key <= last
        if self.window is not None:
            seen = seen & (key > last - self.window)
        if mask is None:
            return seen[None, None]
        mask = args.columns_of(CALL, mask, tokens, device)
        missing = max(first + places - mask.shape[-1], 0)
        return seen & pad(mask, (0, missing), value=False)[..., first : first + places]

    def _attend_to_sums(
        self, sums: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output_attentions: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Read and update the state; return [B, H, T, D] and weights or None."""
        state, mask = sums.linear_state, self._mask(mask, query, key)
        if mask is not None and mask.shape[1:3] != (1, 1):
            why = "a cache of sums needs one mask [B, Tk] for all heads and queries; use a transformers.DynamicCache"
            raise ArgumentError(f"{CALL}: attention_mask has shape {shape(mask)}, but {why}.")
        if self.hook_pattern.active:
            why = "have no weights; use a transformers.DynamicCache, or no cache"
            raise ArgumentError(f"{CALL}: a hook is registered at hook_pattern, but the cache holds sums, which {why}.")
        seen = Seen(*self.order[:3], mask)
        how = {"state": state, "attn_mask": mask, "exclude_self": self.exclude_self}
        how |= self._temper(query, key, seen, state)
        out, sums.linear_state = linear_attention(query, key, value, self.spec, **how)
        if not output_attentions and self.observer is None:
            return out, None
        if state is not None:
            why = "the cache holds only sums over them; use a transformers.DynamicCache, or no cache"
            raise ArgumentError(f"{CALL}: weights of earlier tokens were asked for, but {why}.")
        return self._attend(query, key, value, seen, output_attentions, {})

    def _append(self, cache: Any, key: Tensor, value: Tensor, order: Seen) -> tuple[Tensor, Tensor]:
        """Append to the cache; return all keys and values that it holds, [B, Hkv, Tk, D]."""
        tokens = key.shape[2]
        key, value = cache.update(key, value, self.layer_idx)
        if order.is_causal:  # `_places` has checked a cache of fixed length
            needed, why = cache.get_seq_length(self.layer_idx), "no window"
            hint = "use a cache that keeps all of them"
            if order.window is not None:
                needed, why = min(needed, order.window + order.exclude_self + tokens - 1), f"window={order.window}"
                hint = "let it keep window + exclude_self - 1 tokens (`sliding_window` counts one more)"
            if key.shape[2] < needed:
                given = f"the cache gave {key.shape[2]} tokens of the {needed} that {why} needs"
                raise ArgumentError(f"{CALL}: {given}; {hint}.")
        return key, value

    def _mask(self, mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the mask as [B, 1 or H, 1 or T, Tk] for the keys at hand."""
        if mask is None:
            return None
        (batch, heads, tokens, _), keys = query.shape, key.shape[2]
        mask = args.columns_of(CALL, mask, keys, key.device)
        # A cache with a window has dropped the oldest keys; the mask's last columns are those of the others.
        mask = mask[..., mask.shape[-1] - keys :]
        broadcastable(CALL, "attention_mask", mask, (batch, heads, tokens, keys))
        return mask

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, output_attentions: bool, local: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Call `regard.attention` with this layer's parameters; return [B, H, T, D] and weights or None."""
        arguments: dict[str, Any] = {**seen._asdict(), **self._temper(query, key, seen)}
        arguments["enable_gqa"] = self.num_kv_heads != self.num_heads
        if local:
            arguments["params"] = {**arguments.get("params", {}), **local}
        return observed_attention(self, query, key, value, output_attentions, **arguments)

    def _temper(self, query: Tensor, key: Tensor, seen: Seen, state: LinearState | None = None) -> dict[str, Any]:
        """Return the temperature as arguments of `regard.attention`."""
        n = None
        if self.temperature.counted:
            n = seen.counts(query, key)
            if state is not None:  # the last feature of every key is one, so that its sum counts the keys
                n = n + state.keys[:, :1, -1:].long()
        learned = {name: getattr(self, name) for name in self.temperature.start()}
        usual = None
        if self.qk_norm == "l2" and self.spec.takes_scale:
            usual = 1 / self.spec.similarity.default_scale(self.head_dim)
        return self.temperature.arguments(self.spec, self.head_dim, n, learned, usual)
