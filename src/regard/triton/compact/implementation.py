"""Compact attention and softmax at degree 0 as torch custom operators.

The forward pass keeps statistics and flags of every row (`block_rows`) and which blocks of pairs have weight; the
backward pass visits only those. Formulas: `grammar.weighting`; sparse-attention paper, sections 2 and 3.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...pairwise.blocked.block_rows import FLAGS, FLOATS, unpack
from ...pairwise.diagnostics import Diagnostics, diagnose
from ...pairwise.dispatch import Cost, Inputs, Problem
from ..runtime.operators import differentiable, operator, rows_together, tensor_or_number
from ..runtime.span import Span
from .rules import ADAPTIVE, ANCHORED, FIXED, MASK_TILE, SOFTMAX, STANDS, Rule, mask_tile_of, rule_of


def supports(problem: Problem) -> str | None:
    """Return None if the kernels support the call, else the reason."""
    found = rule_of(problem.spec, dict(problem.numbers), tensors=problem.params)
    return found if isinstance(found, str) else None


STEPS = 4
"""Assumed number of passes of a search, for cost estimates."""


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass, as if no block could be skipped, and its memory."""
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    share = 2 if problem.causal and problem.queries == problem.keys else 1
    rule = rule_of(problem.spec)
    code = rule.code if isinstance(rule, Rule) else SOFTMAX
    passes = {ADAPTIVE: 2 + STEPS, ANCHORED: 2}.get(code, 1)
    rows = problem.batch * problem.heads * problem.queries
    saved = 4 * rows * (FLOATS + FLAGS + problem.value_dim)
    lists = 5 * pairs // MASK_TILE**2 if code in (ADAPTIVE, ANCHORED) else 0
    return Cost(2 * pairs * (passes * problem.dim + problem.value_dim) // share, saved + lists)


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values, and diagnostics if asked for."""
    rule = rule_of(inputs.spec, inputs.params)
    assert isinstance(rule, Rule), rule  # `supports` has refused all else
    q, k, v = (rows_together(x) for x in (inputs.q, inputs.k, inputs.v))
    span = Span.of(inputs.visible, q)
    factor, scale = tensor_or_number(inputs.factor)
    given, number = tensor_or_number(inputs.params.get(rule.row), rule.number)
    leaves = (q, k, v, factor, given)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    mask_tile = mask_tile_of(max(q.shape[3], v.shape[3]), q.dtype)
    numbers = (scale, number, rule.code, rule.r, rule.stand, rule.own, *mask_tile)
    out, *kept = forward(q, k, v, factor, given, *span, *numbers, keep, inputs.diagnostics)
    if not inputs.diagnostics:
        return out, None
    floats, flags = kept[:2]
    stats = unpack(floats, flags, flags[..., :0])
    seen = (floats[..., 4:5], floats[..., 5:6], inputs.scale, inputs.row_params(), inputs.visible)
    return out, diagnose(inputs.spec, stats, *seen)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Return everything that a call computes: out [B, H, Tq, Dv]; floats [B, H, Tq, FLOATS]; flags int32 [B, H, Tq,
    FLAGS]; index int32 [B, H, Tq, n]; slope_mean float32 [B, H, Tq, Dv]; live uint8 [B, H, ceil(Tq / live_rows),
    ceil(Tk / live_keys)].

    `factor` and `given` (margin or bias), [B, H, Tq], replace `scale` and `number`. Only with `keep` is anything kept
    for a backward pass, and only with `counted` are support and effective sample size computed."""
    from . import forward as compact_forward

    span, (scale, number, *rule, live_rows, live_keys, keep, counted) = Span(*rest[:5]), rest[5:]
    found = _outputs(q, k, v, rule[0], rule[2], live_rows, live_keys, keep)
    own = scale if factor is None else factor, number if given is None else given
    compact_forward.forward(q, k, v, *own, span, found, tuple(rule), (live_rows, live_keys), (keep, counted))
    return found


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, rule: int, stand: int, live_rows: int, live_keys: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    indices = {ANCHORED: 3, FIXED: int(stand != STANDS["zero"])}.get(rule, 0)
    blocks = -(-shape[2] // live_rows), -(-k.shape[2] // live_keys)
    used = keep and rule != SOFTMAX  # with softmax every block has weight
    new = partial(torch.empty, device=q.device)
    return (
        new(*shape, v.shape[3], dtype=v.dtype),
        new(*shape, FLOATS, dtype=torch.float32),
        new(*shape, FLAGS, dtype=torch.int32),
        new(*shape, indices if keep else 0, dtype=torch.int32),
        new(*shape, v.shape[3] if keep and rule == ADAPTIVE else 0, dtype=torch.float32),
        torch.zeros(*shape[:2], *(blocks if used else (0, 0)), dtype=torch.uint8, device=q.device),
    )


_SEEN = "Tensor low, Tensor high, Tensor first, Tensor last, Tensor? mask"
_RULE = "SymInt rule, SymInt r, SymInt stand, str own, SymInt live_rows, SymInt live_keys"
forward = operator(
    "compact_forward",
    _forward,
    f"(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, {_SEEN}, float scale, float number, "
    f"{_RULE}, bool keep, bool counted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, v, *rest: _outputs(q, k, v, rest[9], rest[11], *rest[13:16]),
)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Return gradients of q, k, v, and float32 [B, H, Tq] of factor and margin or bias, empty if they are numbers."""
    from . import backward as compact_backward

    span, kept, (scale, *rule, live_rows, live_keys) = Span(*rest[:5]), rest[5:10], rest[10:]
    own = scale if factor is None else factor
    return compact_backward.backward(
        grad, q, k, v, own, span, kept, (live_rows, live_keys), tuple(rule), given is not None
    )


def _fake_gradients(grad, q, k, v, factor, given, *rest):
    rows = [(0,) if x is None else q.shape[:3] for x in (factor, given)]
    return (*map(torch.empty_like, (q, k, v)), *(q.new_empty(shape, dtype=torch.float32) for shape in rows))


backward = operator(
    "compact_backward",
    _backward,
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, {_SEEN}, Tensor floats, "
    f"Tensor flags, Tensor index, Tensor slope_mean, Tensor live, float scale, {_RULE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_gradients,
)


def _keep(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    out, *kept = output
    if inputs[12] != ADAPTIVE:
        kept[3] = out  # weights of the derivative of the sum of weights
    return (*inputs[:10], *kept), (inputs[10], *inputs[12:18])


differentiable(forward, backward, lambda *given: backward(*given), _keep)
