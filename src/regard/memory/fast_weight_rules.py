"""How a chunk is written into a fast-weight product-key memory: how far each token moves the slots that it read, and
how the sub-keys move (sections 3.2 and 3.3 of the paper).

Let w be the weights with which token t read its slots, e_t = v^_t - v_t+1 its error, g_t its gate, and N_i the number
of times that slot i was read in the chunk:

    V_i <- V_i - (1 / N_i) sum over t, j with slot_tj = i of share_tj e_t,       share_tj = rate g_t w_tj step_t,

and the registry `step_rules` defines step_t. Sub-keys take a step of rate * address_weight up the gradient of the
entropy -sum_i p-_i log(p-_i + 1e-8), p- the marginal use of each set of sub-keys over the chunk (equation 38, sign
corrected). With several heads the released program uses one marginal for all heads.

Legend: M memories, P tokens of one write, H heads, n sub-keys of a half, k slots a head, d = Dk / 2, Dv of a value; G
sets of sub-keys, M * H * 2.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from ..checks import ArgumentError, choice, flags, number, within
from ..grammar import Spec
from ..registry import Registry
from .product_key import SlotScore, by_set, score_gradient
from .stores.slot_values import SlotValues

CALL = "WriteRule"
KeyUpdate = Literal["entropy", "pooled-entropy", "mse", "none"]
FLOOR = 1e-8  # added to a probability under the logarithm, as the released program does
BLOCK = 4096  # tokens of a memory that are handled at once if each needs n or K Dv numbers


@dataclass(frozen=True)
class Written:
    """The tokens of one write. Entries of tokens that are not counted are finite and unused."""

    slots: Tensor  # [M, P, H, k], what was read
    weights: Tensor  # [M, P, H, k]
    errors: Tensor  # [M, P, Dv], v^ - target; 0 where nothing is written
    gate: Tensor | None  # [M, P], or None for 1
    counted: Tensor  # boolean [M, P], tokens that read
    written: Tensor  # boolean [M, P], those of them that have a target
    query: Tensor | None = None  # [M, P, H, Dk]; this and the following are None if the keys' update does not need them
    halves: Tensor | None = None  # int64 [M, P, H, 2, k]
    half_scores: Tensor | None = None  # [M, P, H, 2, k]
    scores: Tensor | None = None  # [M, P, H, k]

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Written":
        return Written(**{f.name: None if (x := getattr(self, f.name)) is None else fn(x) for f in fields(self)})


StepRule = Callable[[Written], Tensor | float]
"""Return step_t [M, P] for the tokens of one write, or one number."""
step_rules: Registry[StepRule] = Registry("step rule", "regard.step_rules")


@step_rules.register("normalized")
def normalized(tokens: Written) -> Tensor:
    """Return 1 / S: one write makes a single pair exact, whatever its weights, and writing the same chunk again never
    increases its errors.

    S, the share of the step that the token itself sees, is the sum over its slots of W^2 / m: W is the weight that all
    heads together give the slot, m the number of heads that selected it. A token that gives no slot weight has step 1:
    its shares are 0.
    """
    weights, slots = tokens.weights.flatten(-2), tokens.slots.flatten(-2)
    if tokens.slots.shape[-2] == 1:
        seen = weights.square().sum(-1)
    else:
        same = slots[..., :, None] == slots[..., None, :]
        total = torch.where(same, weights[..., None, :], 0).sum(-1)
        seen = (weights * total / same.sum(-1)).sum(-1)
    return 1 / torch.where(seen == 0, 1, seen)


@step_rules.register("paper")
def paper(tokens: Written) -> float:
    """Return 1: equations 35 and 36."""
    return 1.0


@step_rules.register("reference", "program")
def reference(tokens: Written) -> Tensor:
    """Return k H C / pairs, as the released program does, with C the number of tokens read and pairs those with a
    target. Repeated writes diverge where g k H S exceeds 2, for example for a query that equals a key."""
    heads, k = tokens.slots.shape[-2:]
    pairs = tokens.written.sum(-1, keepdim=True).clamp(min=1)
    return heads * k * tokens.counted.sum(-1, keepdim=True).to(tokens.weights.dtype) / pairs


@dataclass(frozen=True)
class WriteRule:
    """How a chunk is written.

    Args:
        name: of the step (`step_rules`): "normalized", "paper" or "reference".
        learning_rate: rate, >= 0, of values and keys (1 in the paper).
        address_weight: factor of the keys' entropy step, >= 0: 10 in the paper, 1 in the released program.
        key_update: "entropy": one marginal for each set of sub-keys, as in the paper; "pooled-entropy": one marginal
            over all heads for each half, as in the released program (the same with one head); "mse": a gradient step
            of size rate on the mean of g_t e_t^2 / 2 over the chunk's pairs and the Dv features, through weights and
            scores (the paper's ablation without addressing loss, scaled as in the released program); or "none".
        look_ahead: the target of a token is the value of the next token, otherwise its own.
        border: the target of a chunk's last token is the first of the next chunk; otherwise it has none (the released
            program in training).
        gate_loss: gates weight the errors.

    The paper is WriteRule("paper", address_weight=10), the released program WriteRule("reference", address_weight=1,
    border=False, key_update="pooled-entropy").

    Raises:
        ArgumentError: an unknown name or a number out of range.
    """

    name: str = "normalized"
    learning_rate: float = 1.0
    address_weight: float = 10.0
    key_update: KeyUpdate = "entropy"
    look_ahead: bool = True
    border: bool = True
    gate_loss: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", within(CALL, "name", step_rules.canonical, self.name))
        for name in ("learning_rate", "address_weight"):
            number(CALL, name, getattr(self, name), low=0.0)
        choice(CALL, "key_update", self.key_update, get_args(KeyUpdate))
        flags(CALL, look_ahead=self.look_ahead, border=self.border, gate_loss=self.gate_loss)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of tokens that a write needs, among those of `FastWeightState.waiting`."""
        by_keys = ("query", "halves", "half_scores") if self.key_update != "none" else ()
        by_scores = ("scores",) if self.key_update == "mse" else ()
        return ("slots", "weights", "read", "value", "position", "gate", "good", *by_keys, *by_scores)

    def steps(self, tokens: Written) -> Tensor:
        """Return rate g_t step_t [M, P], 0 where nothing is written."""
        step = self.learning_rate * step_rules.get(self.name)(tokens)
        if tokens.gate is not None and self.gate_loss:
            step = step * tokens.gate
        return torch.where(tokens.written, step, tokens.errors.new_zeros(()))

    def moved_keys(self, keys: Tensor, values: SlotValues, tokens: Written, kind: SlotScore, spec: Spec) -> Tensor:
        """Return the sub-keys [M, H, 2, n, d] after a write, given keys and values that the tokens were read with."""
        if self.key_update == "none":
            return keys
        lacks_scores = self.key_update == "mse" and tokens.scores is None
        if lacks_scores or tokens.query is None or tokens.halves is None or tokens.half_scores is None:
            why = "tokens that are not written yet were read with another; flush(state) before it changes"
            raise ArgumentError(f"{CALL}: key_update is {self.key_update!r}, but {why}.")
        query, halves = _sets(tokens.query.unflatten(-1, (2, -1))), _sets(tokens.halves)
        half_scores = _sets(tokens.half_scores)
        rate = self.learning_rate
        if self.key_update != "mse":
            rate *= self.address_weight
            pooled = keys.shape[1] if self.key_update == "pooled-entropy" else 1
            counted = tokens.counted.repeat_interleave(len(query) // len(tokens.counted), 0)
            upstream = _entropy_gradient(half_scores, halves, counted, keys.shape[-2], pooled)
        else:
            upstream = _sets(_error_gradient(tokens, self.gate_loss, values, keys.shape[-2], spec))
        flat = keys.reshape(len(query), *keys.shape[-2:])
        parts = zip(*(x.split(BLOCK, 1) for x in (query, halves, half_scores, upstream)), strict=True)
        gradient = torch.zeros_like(flat)
        for q, index, scores, up in parts:
            gradient = gradient + kind.key_gradient(q, flat, index, scores, up)
        return keys - rate * gradient.view_as(keys)


def _sets(x: Tensor) -> Tensor:
    """Reshape [M, P, H, 2, ...] to [G, P, ...]."""
    return by_set(x, shared=False)[0]


def _entropy_gradient(scores: Tensor, index: Tensor, counted: Tensor, n: int, pooled: int) -> Tensor:
    """Return d/dscores [G, P, k] of sum_i p-_i log(p-_i + FLOOR), p- the mean over the tokens counted [G, P] and over
    `pooled` heads of the softmax of their scores at the sub-keys `index`."""
    p = scores.softmax(-1)
    share = counted.to(p.dtype) / (counted.sum(-1, keepdim=True).clamp(min=1) * pooled)
    flat = index.flatten(1)
    marginal = p.new_zeros(len(p), n).scatter_add(1, flat, (p * share[..., None]).flatten(1))
    if pooled > 1:
        by_head = marginal.view(-1, pooled, 2, n)
        marginal = by_head.sum(1, keepdim=True).expand_as(by_head).reshape(-1, n)
    slope = (marginal + FLOOR).log() + marginal / (marginal + FLOOR)
    at = slope.gather(1, flat).view_as(p)
    return share[..., None] * p * (at - (p * at).sum(-1, keepdim=True))


def _error_gradient(tokens: Written, gated: bool, values: SlotValues, n: int, spec: Spec) -> Tensor:
    """Return d/dhalf_scores [M, P, H, 2, k] of the mean of g_t e_t^2 / 2 over the pairs and features."""
    assert tokens.scores is not None
    assert tokens.halves is not None
    pairs = tokens.written.sum(-1, keepdim=True).clamp(min=1)
    share = tokens.written / (pairs * tokens.errors.shape[-1]).to(tokens.errors.dtype)
    if gated and tokens.gate is not None:
        share = share * tokens.gate
    errors = tokens.errors * share[..., None]
    blocks = zip(tokens.slots.flatten(-2).split(BLOCK, 1), errors.split(BLOCK, 1), strict=True)
    dense = torch.cat([(values.rows(slots) @ part[..., None]).squeeze(-1) for slots, part in blocks], 1)
    grad = score_gradient(tokens.scores.flatten(-2), tokens.weights.flatten(-2), dense, spec).view_as(tokens.scores)
    places = torch.stack([tokens.slots // n, tokens.slots % n], -2)  # [M, P, H, 2, k]: of which sub-keys they are
    met = tokens.halves[..., :, None] == places[..., None, :]
    return (met.to(grad.dtype) @ grad[..., None, :, None]).squeeze(-1)
