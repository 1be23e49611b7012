"""The contextual memory of Memory Mosaics: what followed the keys so far that are like the present one.

    y_t = sum_{j < t} w(k_j, k_t) v_j,        v_j knows x_{j+1}

with the weights of any sentence of the grammar (sparse-attention paper, equations 5 and 6, section 2.4). Key and query
are one thing; token t completes the pair (k_{t-1}, v_{t-1}), so that strictly causal attention over pairs by key is
causal attention over pairs by the token that completed them. That is how it is computed and remembered: there is no
value that waits for its future but the last.

Shapes: B batch, T tokens given now, N tokens so far, C model width, H heads, D channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...checks import (
    ArgumentError,
    boolean_mask,
    flags,
    instance,
    number,
    on_device,
    one_of,
    refuse,
    require,
    segments,
    shape,
)
from ...grammar import Spec, as_spec
from ...pairwise.attention import attention, diagnosed_attention
from ...pairwise.visibility import runs_of
from ...recurrent.leaky import LeakyState
from ...recurrent.states import State
from ..arguments import check_heads, check_hidden, check_layer_idx
from ..attention.layer import Observer
from ..hooks import HookPoint
from .features import (
    LOOK_AHEAD,
    SCALE_LIMIT,
    SCALE_START,
    KeyFeatures,
    OutputProjection,
    Sharpness,
    ValueFeatures,
    begin,
    without_hidden,
)

CALL = "nn.ContextualMemory"
LEARNED = ("h", "bias", "margin")
"""Numbers of a sentence that are learned per head unless told otherwise."""
LEARNABLE = (*LEARNED, "alpha", "r", "ridge")
WIDE = 0.075
"""The share of random unit vectors that a fixed bandwidth leaves out at the start."""
STARTS = ("wide", "spec")
UNIFORM_GRADIENTS = ("straight-through", "hard")


@dataclass(frozen=True)
class ContextualState(State):
    """What a contextual memory remembers.

    Attributes:
        sums, poisoned: of the leaky average, as in `LeakyState`.
        key: [B, H, D], of the last real token, whose value waits for the next one.
        value: [B, H, D], that token's projection.
        keys, values: [B, H, N - 1, D]: the pair that each token but the first completed.
        tokens: N, hidden ones included.
    """

    sums: Tensor
    poisoned: Tensor
    key: Tensor
    value: Tensor
    keys: Tensor
    values: Tensor

    @property
    def leaky(self) -> LeakyState:
        """The state of the leaky average."""
        return LeakyState(self.sums, self.poisoned, tokens=self.tokens)

    def reset(self) -> ContextualState:
        """The state before the first token."""
        none = replace(self, keys=self.keys[:, :, :0], values=self.values[:, :, :0])
        return super(ContextualState, none).reset()


def wide_threshold(dim: int, share: float = WIDE) -> float:
    """The cosine below which lies the given share of pairs of random unit vectors in `dim` dimensions.

    Their angle has the density sin^(dim - 2), which is summed here over a grid.
    """
    if dim == 1:
        return -1.0
    angle = torch.linspace(0, math.pi, 8193, dtype=torch.float64, device="cpu")
    middle = (angle[1:] + angle[:-1]) / 2
    below = (middle.sin() ** (dim - 2)).cumsum(0)
    at = int(torch.searchsorted(below, (1 - share) * below[-1]))
    return math.cos(angle[at + 1])


class LearnedNumbers(nn.Module):
    """The numbers of a sentence that are learned per head, each a parameter [H] named after it.

    h, margin, r, ridge and alpha - 1 are positive and are learned as logarithms (`log_h`, ...); a bias as itself. A
    fixed bandwidth starts wide, so that it leaves out `WIDE` of random unit vectors, or at the number of the spec.
    """

    def __init__(self, spec: Spec, heads: int, dim: int, names: Sequence[str], start: str) -> None:
        super().__init__()
        self.starts = _starts(spec, dim, names, start)
        for name in self.starts:
            self.register_parameter(_label(name), nn.Parameter(torch.empty(heads)))
        self.heads = heads
        begin(self)

    def number_starts(self) -> dict[str, Tensor]:
        """What is learned per head, as learning begins."""
        own = {n: value if n == "bias" else math.log(value - (n == "alpha")) for n, value in self.starts.items()}
        return {_label(n): torch.full((self.heads,), value) for n, value in own.items()}

    def forward(self) -> dict[str, Tensor]:
        """`params` of `regard.attention`, each [H, 1]."""
        found = {}
        for name in self.starts:
            number = getattr(self, _label(name))[:, None]
            found[name] = number if name == "bias" else number.exp() + (name == "alpha")
        return found


def _label(name: str) -> str:
    return name if name == "bias" else f"log_{name}"


def _starts(spec: Spec, dim: int, names: Sequence[str], start: str) -> dict[str, float]:
    """Names and starting values of what is learned."""
    able = [name for name in names if name in spec.params and (name != "bias" or spec.kernel.compact)]
    first = {name: float(spec.params[name].default) for name in able}
    for name, value in first.items():
        above = 1.0 if name == "alpha" else 0.0
        require(
            name == "bias" or value > above,
            CALL,
            f"{name} is {value} in {spec} and is to be learned as a logarithm; start it above {above}, or leave it out "
            f"of learned.",
        )
    if start == "spec":
        return first
    threshold = wide_threshold(dim)
    if "h" in first:
        first["h"] = math.sqrt(2 * (1 - threshold))
    if "bias" in first and spec.bandwidth.bias is None and spec.takes_scale:
        # scores are beta^2 times a cosine, or less one where the similarity is a distance
        below = threshold - (1 if spec.similarity.upper == 0 else 0)
        first["bias"] = -below * math.exp(2 * SCALE_START)
    return first


class ContextualMemory(nn.Module):
    """Kernel regression on the pairs of a sequence so far; strictly causal, the first token's row is zero.

    Args:
        hidden_size: C.
        num_heads: H.
        head_dim: D; default `hidden_size // num_heads`, which must then be exact.
        spec: a `Spec` of degree 0 or 1, or its text. Where scores have a scale, it is beta^2, learned per head, on unit
            keys. Sentences without one (feature maps, kernels of a bounded similarity) are given keys of length beta;
            `fixed(h=...)` unit keys, since h is a distance between them.
        layer_idx: what observers are told.
        bias: of the three projections.
        average, key_eps: of `KeyFeatures`. scale_limit: of `Sharpness`. look_ahead: of `ValueFeatures`.
        learned: which numbers of the spec are learned per head: of h, bias, margin, alpha, r, ridge those that it has.
        start: where a learned h, and a bias that the spec does not give, begin: "wide", leaving out 7.5 % of random
            unit vectors, or "spec", at the spec's number.
        uniform_gradient: 0/1 weights of the nearest keys pass no gradient to keys. "straight-through" learns as if
            they were softmax's (see `regard.grammar`), "hard" as released: random keys for ever.

    Attributes:
        observer, observe_weights: as in `regard.nn.Attention`.
        hook_k, hook_v: see unit keys [B, H, T, D] and the values of the pairs that these tokens complete.
        hook_pattern: sees the weights [B, H, T, N] as `forward` returns them; while something listens they are made by
            the dense reference, and what it returns is used in their place.
        hook_out: sees the output [B, T, C].

    Raises:
        ArgumentError: sizes that do not fit, an unknown spec, name or word, or the solver `learned`, which needs a
            probe that this memory has not.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        spec: str | Spec = "softmax",
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
        check_features(CALL, key_eps, scale_limit)
        one_of(CALL, "look_ahead", look_ahead, LOOK_AHEAD)
        self.num_heads = num_heads
        self.head_dim = check_heads(CALL, hidden_size, num_heads, num_heads, head_dim)
        self.spec = contextual_spec(CALL, spec, uniform_gradient)
        check_learned(CALL, learned, start)
        self.layer_idx = check_layer_idx(CALL, layer_idx)
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
        """Heads and spec, for `print(model)`."""
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
        """Predict at every token from the pairs before it.

        Args:
            hidden_states: [B, T, C].
            attention_mask: boolean [B, N] over all tokens so far, True where a token is real. Hidden tokens change
                nothing, NaN included: pairs are made of real tokens that follow one another.
            state: of the tokens before these.
            remember: also return the state after these.
            output_attentions: also return the weights, by the dense reference.
            segment_ids: integers [B or 1, T] of packed documents: where the id changes a document begins, whose first
                token has no key and completes no pair. Not with a state, which holds one document a row.

        Returns:
            (output [B, T, C], the state or None, weights [B, H, T, N] or None). Column j of the weights belongs to the
            pair that token j + 1 completed; its key is token j's where no token is hidden between real ones.

        Raises:
            ArgumentError: wrong rank, dtype or shape.

        Cost: that of `regard.attention`, beside O(T C^2); the state holds 2 N C numbers.
        """
        flags(CALL, remember=remember, output_attentions=output_attentions)
        if state is not None:
            instance(CALL, "state", state, ContextualState, "a ContextualState or None")
        check_tokens(CALL, hidden_states, attention_mask, 0 if state is None else state.tokens, self.keys)
        segments(CALL, segment_ids, hidden_states.shape[0], hidden_states.shape[1], hidden_states.device)
        mask = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :]
        x = without_hidden(hidden_states, mask)
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
        """As `forward`, with the keys [B, H, T, D] of x at hand; x has zeros at hidden tokens."""
        require(
            segment_ids is None or (state is None and not remember),
            CALL,
            "segment_ids were given with a state, which holds one document a row; leave one of them out.",
        )
        tokens = x.shape[1]
        mask = None if attention_mask is None else attention_mask[:, -tokens:]
        keys, made = self.hook_k(keys), self.values(x)
        before_key, last_key = _previous(keys, None if state is None else state.key, mask)
        before, last = _previous(made, None if state is None else state.value, mask)
        following, pairs = made[:, :, tokens - before.shape[2] :], None
        if attention_mask is not None or segment_ids is not None:
            pairs = _completed(x.new_ones(1, tokens).bool() if attention_mask is None else attention_mask, segment_ids)
        if segment_ids is not None:  # no number of one document meets one of another, not even where nobody looks
            assert pairs is not None
            joined = ~pairs[:, None, :, None]
            before_key, before, following = (part.masked_fill(joined, 0) for part in (before_key, before, following))
        values = self.hook_v(self.values.combine(before, following))
        if state is not None:
            before_key = torch.cat([state.keys, before_key], 2)
            values = torch.cat([state.values, values], 2)
        pairs = None if attention_mask is None else pairs
        out, weights = self._attend(keys, before_key, values, pairs, output_attentions, segment_ids)
        after = None
        if remember:
            held = (leaky.sums, leaky.poisoned, last_key, last, before_key, values)
            after = ContextualState(*held, tokens=leaky.tokens)
        return self.hook_out(self.out_proj(out.transpose(1, 2).flatten(2))), after, weights

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        output_attentions: bool,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """([B, H, T, D], weights or None). Query i sees the pairs up to the one that its token completed."""
        hooked = self.hook_pattern.active
        dense = output_attentions or hooked or (self.observer is not None and self.observe_weights)
        arguments: dict[str, Any] = {"is_causal": True, "impl": "reference" if dense else "auto"}
        if segment_ids is not None:  # by key, with a pair for the last token: query i sees earlier keys of its document
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
            mask = None if mask is None else pad(mask, (0, 1))
            arguments.update(exclude_self=True, segment_ids=segment_ids)
        arguments["attn_mask"] = None if mask is None else mask[:, None, None]
        params = self.numbers()
        if params:
            arguments["params"] = params
        sharpness = None if self.sharpness is None else self.sharpness()
        if self.spec.takes_scale:
            assert sharpness is not None
            arguments["scale"] = sharpness[:, None]
        elif sharpness is not None:
            beta = sharpness.sqrt().to(key.dtype)[:, None, None]
            query, key = query * beta, key * beta
        if not dense and self.observer is None:
            first = query.shape[2] - key.shape[2] == 1 and key.shape[2] > 0
            if first:  # the first token sees nothing; without its row queries and pairs are as many
                out = attention(query[:, :, 1:], key, value, self.spec, **arguments)
                return pad(out, (0, 0, 1, 0)), None
            return attention(query, key, value, self.spec, **arguments), None
        out, found = diagnosed_attention(query, key, value, self.spec, **arguments)
        # the last token's pair, which nobody sees yet, so that weights have a column for every token
        columns = key.shape[2] + (segment_ids is None)
        shown = {"weights": found.weights, "effective_weights": found.effective_weights}
        whole = {n: pad(w, (0, columns - w.shape[-1])) for n, w in shown.items() if w is not None}
        found = replace(found, **whole)
        if self.observer is not None:
            self.observer(self.layer_idx, found.detached())
        weights = found.weights if found.effective_weights is None else found.effective_weights
        if hooked:
            shown = self.hook_pattern(weights)
            out = out if shown is weights else _mix(shown, value, mask)
            weights = shown
        return out, weights if output_attentions else None


def _mix(weights: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Weights [B, H, T, n or n + 1] that a hook put in place, times values [B, H, n, D]; what is hidden has none."""
    weights = weights[..., : value.shape[2]]
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, None], 0)
    return weights.to(value.dtype) @ value


def _previous(now: Tensor, pending: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(what stood at the real token before each, the last real token's).

    Args:
        now: [B, H, T, D].
        pending: of the last real token before these [B, H, D]; None for none, and then the first token, which
            completes no pair, is left out.
        mask: [B, T].
    """
    start = int(pending is None)
    if mask is None:
        line = now if pending is None else torch.cat([pending[:, :, None], now], 2)
        return line[:, :, :-1], now[:, :, -1]
    head = torch.zeros_like(now[:, :, :1]) if pending is None else pending[:, :, None]
    line = torch.cat([head, now], 2)
    place = torch.arange(1, line.shape[2], device=now.device)
    latest = torch.where(mask, place, 0).cummax(-1).values
    before = pad(latest[:, :-1], (1, 0))[:, start:]
    return _take(line, before), _take(line, latest[:, -1:])[:, :, 0]


def _take(line: Tensor, at: Tensor) -> Tensor:
    """line [B, H, L, D] at places [B, n]: [B, H, n, D]."""
    return line.gather(2, at[:, None, :, None].expand(-1, line.shape[1], -1, line.shape[3]))


def _completed(mask: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Which tokens but the first complete a pair: real ones with a real one before them in their document; [B, N] to
    [B, N - 1]."""
    earlier = mask.cumsum(-1) - mask.long()
    if segment_ids is not None:
        begins = runs_of(segment_ids)[0]
        mask, earlier, begins = torch.broadcast_tensors(mask, earlier, begins)
        earlier = earlier - earlier.gather(1, begins)
    return (mask & (earlier > 0))[:, 1:]


def check_features(call: str, key_eps: Any, *limits: Any) -> None:
    """Check numbers of `KeyFeatures` and `Sharpness` under the names that layers give them."""
    number(call, "key_eps", key_eps, low=0.0)
    for limit in limits:
        number(call, "scale_limit", limit)


def check_tokens(call: str, hidden_states: Tensor, mask: Tensor | None, past: int, keys: KeyFeatures) -> None:
    """Check hidden states [B, T, C] with T >= 1 and a mask [B, N] over `past` + T tokens.

    Raises:
        ArgumentError: they are not.
    """
    check_hidden(call, "hidden_states", hidden_states, keys.proj.in_features, keys.proj)
    if mask is None:
        return
    boolean_mask(call, "attention_mask", mask)
    on_device(call, "attention_mask", mask, hidden_states.device)
    batch, tokens = hidden_states.shape[0], past + hidden_states.shape[1]
    if tuple(mask.shape) != (batch, tokens):
        raise ArgumentError(
            f"{call}: attention_mask has shape {shape(mask)}, expected [{batch}, {tokens}], all tokens so far."
        )


def measures_distance(spec: Spec) -> bool:
    """Whether the bandwidth is a distance between keys, so that nothing else says how sharply they are compared."""
    return getattr(spec.bandwidth, "h", None) is not None


def contextual_spec(call: str, given: str | Spec, uniform_gradient: str) -> Spec:
    """The sentence of a contextual memory, 0/1 weights of the nearest keys with the gradient asked for.

    Raises:
        ArgumentError: an unknown spec or gradient, or the solver `learned`.
    """
    spec = as_spec(given, call)
    one_of(call, "uniform_gradient", uniform_gradient, UNIFORM_GRADIENTS)
    require(
        "probe" not in spec.params,
        call,
        f"spec: {spec} takes its slope from a probe that is learned from the tokens, which this memory has not; "
        f"choose another solver, such as cg or cholesky.",
    )
    rule = spec.bandwidth
    blind = spec.kernel.name == "uniform" and rule.name == "nearest" and rule.gradient == "hard"
    if blind and uniform_gradient == "straight-through":
        spec = replace(spec, bandwidth=replace(rule, gradient="straight-through"))
    return spec


def check_learned(call: str, names: object, start: str, argument: str = "start") -> None:
    """Names of numbers that can be learned, and where they start.

    Raises:
        ArgumentError: an unknown name or word.
    """
    known = isinstance(names, (list, tuple)) and all(isinstance(n, str) and n in LEARNABLE for n in names)
    if not known:
        raise refuse(call, "learned", names, f"a list of names among {', '.join(LEARNABLE)}")
    one_of(call, argument, start, STARTS)
