"""The contextual memory of Memory Mosaics: kernel regression on the earlier tokens of a sequence.

    y_t = sum_{j < t} w(k_j, k_t) v_j,        v_j depends on x_{j+1}

with the weights of any attention spec (sparse-attention paper, equations 5 and 6, section 2.4). Keys serve as queries.
Token t completes the pair (k_{t-1}, v_{t-1}), so that causal attention without the diagonal over keys is causal
attention over completed pairs. The state holds completed pairs and the last token's key, which waits for its value.

Shapes: B batch, T tokens in this call, N tokens so far, C model width, H heads, D channels of a head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...checks import flags, instance, number, one_of, optional_whole, refuse, require, segments, token_mask
from ...grammar import Spec, as_spec
from ...pairwise.attention import attention
from ...recurrent.leaky import LeakyState
from ...recurrent.states import State
from ..arguments import check_heads, check_hidden
from ..attention.layer import Observer
from ..attention.temperature import Temperature, as_temperature
from ..hooks import HookPoint, Seen, observed_attention
from ..shifted_pairs import Pairs, pair_rows
from .features import (
    LOOK_AHEAD,
    SCALE_LIMIT,
    SCALE_START,
    KeyFeatures,
    OutputProjection,
    PerHead,
    Sharpness,
    ValueFeatures,
    without_hidden,
)

CALL = "nn.ContextualMemory"
LEARNED = ("h", "bias", "margin")  # parameters of a spec that are learned per head by default
LEARNABLE = (*LEARNED, "alpha", "r", "ridge")
WIDE = 0.075  # the share of random unit vectors to which an initial fixed bandwidth gives weight zero
STARTS = ("wide", "spec")
UNIFORM_GRADIENTS = ("straight-through", "hard")


@dataclass(frozen=True)
class ContextualState(State):
    """State of a contextual memory; `tokens` is N, masked ones included."""

    sums: Tensor  # of the leaky average, as in `LeakyState`
    non_finite: Tensor  # the same
    key: Tensor  # [B, H, D], of the last real token, whose value waits for the next token
    value: Tensor  # [B, H, D], the projection of that token
    keys: Tensor  # [B, H, N - 1, D], of the pairs that the tokens after the first completed
    values: Tensor  # [B, H, N - 1, D]

    @property
    def leaky(self) -> LeakyState:
        return LeakyState(self.sums, self.non_finite, tokens=self.tokens)

    def reset(self) -> "ContextualState":
        empty = replace(self, keys=self.keys[:, :, :0], values=self.values[:, :, :0])
        return super(ContextualState, empty).reset()


def wide_threshold(dim: int) -> float:
    """Return the quantile of order `WIDE` of the cosine between two random unit vectors in `dim` dimensions. Their
    angle has the density sin^(dim - 2), which is summed over a grid."""
    if dim == 1:
        return -1.0
    angle = torch.linspace(0, math.pi, 8193, dtype=torch.float64, device="cpu")
    middle = (angle[1:] + angle[:-1]) / 2
    below = (middle.sin() ** (dim - 2)).cumsum(0)
    index = int(torch.searchsorted(below, (1 - WIDE) * below[-1]))
    return math.cos(angle[index + 1])


class LearnedNumbers(PerHead):
    """Parameters of a spec that are learned per head, each a parameter [H].

    h, margin, r, ridge and alpha - 1 are positive and learned as logarithms (`log_h`, ...), a bias directly. An initial
    fixed bandwidth is wide (it excludes the share `WIDE` of random unit vectors) or the value of the spec.
    """

    def __init__(self, spec: Spec, heads: int, dim: int, names: Sequence[str], start: str) -> None:
        super().__init__()
        starts = _starts(spec, dim, names, start)
        self.labels = {name: name if name == "bias" else f"log_{name}" for name in starts}
        logs = {n: value if n == "bias" else math.log(value - (n == "alpha")) for n, value in starts.items()}
        self.add_numbers(heads, **{self.labels[n]: value for n, value in logs.items()})

    def forward(self) -> dict[str, Tensor]:
        """Return `params` of `regard.attention`, each [H, 1]."""
        params = {}
        for name, label in self.labels.items():
            value = getattr(self, label)[:, None]
            params[name] = value if name == "bias" else value.exp() + (name == "alpha")
        return params


def _starts(spec: Spec, dim: int, names: Sequence[str], start: str) -> dict[str, float]:
    learnable = [name for name in names if name in spec.params and (name != "bias" or spec.kernel.compact)]
    first = {name: float(spec.params[name].default) for name in learnable}
    for name, value in first.items():
        above = 1.0 if name == "alpha" else 0.0
        low = f"{name} is {value} in {spec}, learned as a logarithm"
        hint = f"start it above {above}, or leave it out of learned"
        require(name == "bias" or value > above, CALL, f"{low}; {hint}.")
    if start == "spec":
        return first
    threshold = wide_threshold(dim)
    if "h" in first:
        first["h"] = math.sqrt(2 * (1 - threshold))
    if "bias" in first and spec.bandwidth.bias is None and spec.takes_scale:
        # scores are beta^2 times a cosine, or times a cosine minus one if the similarity is a distance
        below = threshold - (1 if spec.similarity.upper == 0 else 0)
        first["bias"] = -below * math.exp(2 * SCALE_START)
    return first


class ContextualMemory(PerHead):
    """Kernel regression on the earlier pairs of a sequence; the first token's output is zero.

    Args:
        hidden_size, num_heads: C and H.
        head_dim: D; default `hidden_size // num_heads`, which must then be exact.
        spec: a `Spec` of degree 0 or 1, or its text. If its scores have a scale, it is beta^2, learned per head, on
            unit keys. Other specs (feature maps, kernels of a bounded similarity) get keys of length beta, and
            `fixed(h=...)` unit keys, since h is a distance between keys.
        layer_idx: passed to observers.
        bias: biases in the three projections.
        temperature: a rule of `regard.nn.temperatures` or its text, which multiplies beta^2, or divides the square of
            `fixed(h=...)`, by a factor that may depend on the number of pairs that a token sees: "fixed", "learned",
            "log", "power", with options such as "fixed(value=2)".
        average, key_eps: of `KeyFeatures`. scale_limit: of `Sharpness`. look_ahead: of `ValueFeatures`.
        learned: parameters learned per head: those of h, bias, margin, alpha, r, ridge that the spec has.
        start: initial value of a learned h, and of a bias that the spec does not give: "wide", which excludes 7.5 % of
            random unit vectors, or "spec", the value of the spec.
        uniform_gradient: 0/1 weights of top-k have no gradient in the keys. "straight-through" uses that of softmax
            (see `regard.grammar`), "hard" none, as released, so that keys stay random.

    Attributes:
        observer, observe_weights: as in `regard.nn.Attention`.
        hook_k, hook_v: see unit keys [B, H, T, D] and the values of the pairs that these tokens complete.
        hook_pattern: sees the weights [B, H, T, N] that `forward` returns and may replace them; while a hook is
            registered they come from the dense reference.
        hook_out: sees the output [B, T, C].

    Raises:
        ArgumentError: sizes that do not fit, an unknown spec or name, a temperature for a spec without a scale, or the
            solver `learned`, which needs a probe.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        spec: str | Spec = "softmax",
        temperature: str | Temperature = "fixed",
        layer_idx: int | None = None,
        bias: bool = False,
        average: bool = False,
        key_eps: float = 0.0,
        scale_limit: float = SCALE_LIMIT,
        look_ahead: str = "sum",
        learned: Sequence[str] = LEARNED,
        start: str = "wide",
        uniform_gradient: str = "straight-through",
    ) -> None:
        super().__init__()
        flags(CALL, bias=bias, average=average)
        number(CALL, "key_eps", key_eps, low=0.0)
        number(CALL, "scale_limit", scale_limit)
        one_of(CALL, "look_ahead", look_ahead, LOOK_AHEAD)
        self.head_dim = check_heads(CALL, hidden_size, num_heads, num_heads, head_dim)
        self.spec = contextual_spec(CALL, spec, uniform_gradient)
        check_learned(CALL, learned, start)
        self.temperature = as_temperature(temperature, CALL, "temperature")
        self.temperature.require(CALL, self.spec)
        self.add_numbers(num_heads, **self.temperature.start())
        self.layer_idx: int | None = optional_whole(CALL, "layer_idx", layer_idx, 0)
        self.observer: Observer | None = None
        self.observe_weights = False
        self.keys = KeyFeatures(hidden_size, num_heads, self.head_dim, bias=bias, average=average, eps=key_eps)
        self.sharpness = None if measures_distance(self.spec) else Sharpness(num_heads, scale_limit)
        self.values = ValueFeatures(hidden_size, num_heads, self.head_dim, bias=bias, look_ahead=look_ahead)
        self.numbers = LearnedNumbers(self.spec, num_heads, self.head_dim, learned, start)
        self.out_proj = OutputProjection(num_heads * self.head_dim, hidden_size, bias=bias)
        self.hook_k, self.hook_v = HookPoint(), HookPoint()
        self.hook_pattern, self.hook_out = HookPoint(), HookPoint()

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, spec={str(self.spec)!r}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        state: ContextualState | None = None,
        *,
        remember: bool = False,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, ContextualState | None, Tensor | None]:
        """Predict at every token from the earlier pairs.

        Args:
            hidden_states: [B, T, C].
            attention_mask: boolean [B, N] over all tokens so far, True where a token is real. Masked tokens, NaN
                included, have no effect: pairs are made of consecutive real tokens.
            state: of the tokens before these.
            remember: also return the state after these.
            output_attentions: also return the weights, from the dense reference.
            segment_ids: integers [B or 1, T] of packed documents; the first token of each has no key and completes no
                pair. Cannot be combined with a state, which holds one document per row.

        Returns:
            Output [B, T, C], state or None, weights [B, H, T, N] or None. Column j of the weights is the pair that
            token j + 1 completed; its key is token j's unless masked tokens lie between real ones.

        Cost: `regard.attention` and O(T C^2); the state holds 2 N C values.
        """
        flags(CALL, remember=remember, output_attentions=output_attentions)
        if state is not None:
            instance(CALL, "state", state, ContextualState, "a ContextualState or None")
        x, mask = checked_tokens(CALL, hidden_states, attention_mask, segment_ids, state, self.keys)
        keys, leaky = self.keys(x, mask, None if state is None else state.leaky, segment_ids)
        return self.recall(keys, leaky, x, attention_mask, state, remember, output_attentions, segment_ids)

    def recall(
        self,
        keys: Tensor,
        leaky: LeakyState,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: ContextualState | None = None,
        remember: bool = False,
        output_attentions: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, ContextualState | None, Tensor | None]:
        """Run `forward` with given keys [B, H, T, D] of x, which has zeros at masked tokens."""
        text = "segment_ids were given with a state, which holds one document per row; leave one of them out."
        require(segment_ids is None or (state is None and not remember), CALL, text)
        if state is not None and state.tokens == 0:
            state = None
        (batch, tokens, _), pairs = x.shape, None
        if attention_mask is not None or segment_ids is not None:
            real = x.new_ones(batch, tokens).bool() if attention_mask is None else attention_mask
            pairs = Pairs.of(real, tokens, segment_ids)
        hidden = None if attention_mask is None else pairs
        keys, projected = self.hook_k(keys), self.values(x)
        pair_keys, last_key = pair_rows(keys, None if state is None else state.key[:, :, None], hidden)
        before, last = pair_rows(projected, None if state is None else state.value[:, :, None], hidden)
        following = projected[:, :, tokens - before.shape[2] :]
        if segment_ids is not None and pairs is not None:  # apart in unused values too, so that NaN cannot spread
            across = ~pairs.visible[:, None, :, None]
            pair_keys, before, following = (part.masked_fill(across, 0) for part in (pair_keys, before, following))
        values = self.hook_v(self.values(before, following))
        if state is not None:
            pair_keys = torch.cat([state.keys, pair_keys], 2)
            values = torch.cat([state.values, values], 2)
        visible = None if hidden is None else hidden.visible
        out, weights = self._attend(keys, pair_keys, values, visible, segment_ids, output_attentions)
        after = None
        if remember:
            tensors = (leaky.sums, leaky.non_finite, last_key[:, :, 0], last[:, :, 0], pair_keys, values)
            after = ContextualState(*tensors, tokens=leaky.tokens)
        return self.hook_out(self.out_proj(out.transpose(1, 2).flatten(2))), after, weights

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, segment_ids: Tensor | None, dense: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return [B, H, T, D] and weights or None; query i sees the pairs up to the one that its token completed."""
        arguments: dict[str, Any] = {"is_causal": True, "params": self.numbers() or None}
        if segment_ids is not None:  # one pair per token, so that query i sees earlier keys of its document
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
            mask = None if mask is None else pad(mask, (0, 1))
            arguments.update(exclude_self=True, segment_ids=segment_ids)
        arguments["attn_mask"] = None if mask is None else mask[:, None, None]
        seen = dense or self.hook_pattern.active or self.observer is not None
        first = not seen and query.shape[2] == key.shape[2] + 1 > 1
        if first:  # without the first query, whose output is zero, there are as many queries as pairs
            query = query[:, :, 1:]
        query, key = self._sharpen(query, key, arguments)
        if first:
            return pad(attention(query, key, value, self.spec, **arguments), (0, 0, 1, 0)), None
        # with the pair of the last token, which no query sees yet, weights have a column for every token
        columns = key.shape[2] + (segment_ids is None)
        return observed_attention(self, query, key, value, dense, columns=columns, **arguments)

    def _sharpen(self, query: Tensor, key: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Add beta^2 and the temperature to the arguments of attention; return queries and keys, of length beta if the
        scores have no scale."""
        factor: float | Tensor = 1.0
        if not self.temperature.neutral:
            order = {name: each for name, each in arguments.items() if name != "params"}
            learned = {name: getattr(self, name) for name in self.temperature.start()}
            factor = self.temperature.scale(Seen(**order).counts(query, key), learned=learned)
        if self.sharpness is None:
            if not self.temperature.neutral:
                params = arguments["params"] or {}
                width = params.get("h", self.spec.params["h"].default)
                arguments["params"] = {**params, "h": width * factor**-0.5}
            return query, key
        sharpness = self.sharpness()
        if self.spec.takes_scale:
            arguments["scale"] = sharpness[:, None] * factor
            return query, key
        beta = sharpness.sqrt().to(key.dtype)[:, None, None]
        return query * beta, key * beta


def checked_tokens(
    call: str, hidden_states: Tensor, attention_mask: Tensor | None, segment_ids: Tensor | None, state: State | None,
    keys: KeyFeatures,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return hidden states [B, T, C], with zeros at masked tokens, and their mask [B, T] or None, after checking that
    `keys` can read them, the mask [B, N] over the tokens of `state` and these, and the documents."""
    check_hidden(call, "hidden_states", hidden_states, keys.proj.in_features, keys.proj)
    batch, tokens = hidden_states.shape[:2]
    seen = tokens if state is None else state.tokens + tokens
    token_mask(call, "attention_mask", attention_mask, batch, seen, like=hidden_states, of="hidden_states")
    segments(call, segment_ids, batch, tokens, hidden_states.device)
    mask = None if attention_mask is None else attention_mask[:, -tokens:]
    return without_hidden(hidden_states, mask), mask


def measures_distance(spec: Spec) -> bool:
    """Return whether the bandwidth is a distance between keys, so that keys keep unit length."""
    return getattr(spec.bandwidth, "h", None) is not None


def contextual_spec(call: str, given: str | Spec, uniform_gradient: str) -> Spec:
    """Return the spec of a contextual memory, with the gradient of 0/1 weights that was asked for."""
    spec = as_spec(given, call)
    one_of(call, "uniform_gradient", uniform_gradient, UNIFORM_GRADIENTS)
    needs = f"spec: {spec} needs a probe learned from the tokens, which this memory does not have"
    require("probe" not in spec.params, call, f"{needs}; choose another solver, such as cg or cholesky.")
    rule = spec.bandwidth
    no_gradient = spec.kernel.name == "uniform" and rule.name == "nearest" and rule.gradient == "hard"
    if no_gradient and uniform_gradient == "straight-through":
        spec = replace(spec, bandwidth=replace(rule, gradient="straight-through"))
    return spec


def check_learned(call: str, names: object, start: str, argument: str = "start") -> None:
    """Check the names of learned parameters, and the word that says where they start."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) and n in LEARNABLE for n in names):
        raise refuse(call, "learned", names, f"a list of names among {', '.join(LEARNABLE)}")
    one_of(call, argument, start, STARTS)
