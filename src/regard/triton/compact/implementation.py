"""Compact attention and softmax at degree 0: what the kernels are asked for, as torch custom operators.

Forward keeps floats and flags of every row (`block_rows`) and which blocks of pairs hold weight; backward visits those.
The formulas are those of `grammar.weighting`; sparse-attention paper, sections 2 and 3.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...pairwise.blocked.block_rows import FLAGS, FLOATS, refuse, unpack
from ...pairwise.diagnostics import Diagnostics, diagnose
from ...pairwise.dispatch import Cost, Inputs, Problem
from ..runtime.span import Span
from .rules import ADAPTIVE, ANCHORED, FIXED, GRANULE, SOFTMAX, STANDS, Rule, granule_of, rule_of


def supports(problem: Problem) -> str | None:
    """None where the kernels do it, else why not."""
    found = rule_of(problem.spec, dict(problem.numbers), tensors=problem.params)
    return found if isinstance(found, str) else None


STEPS = 4
"""Passes over blocks with weight until a threshold is found, assumed where a cost is asked for."""


def cost(problem: Problem) -> Cost:
    """Operations of the forward pass as though no block could be skipped, and its memory."""
    pairs = problem.batch * problem.heads * problem.queries * problem.keys
    share = 2 if problem.causal and problem.queries == problem.keys else 1
    rule = rule_of(problem.spec)
    code = rule.code if isinstance(rule, Rule) else SOFTMAX
    passes = {ADAPTIVE: 2 + STEPS, ANCHORED: 2}.get(code, 1)
    rows = problem.batch * problem.heads * problem.queries
    saved = 4 * rows * (FLOATS + FLAGS + problem.value_dim)
    lists = 5 * pairs // GRANULE**2 if code in (ADAPTIVE, ANCHORED) else 0
    return Cost(2 * pairs * (passes * problem.dim + problem.value_dim) // share, saved + lists)


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Output [B, H, Tq, Dv] in the dtype of the values, and diagnostics where they are asked for."""
    rule = rule_of(inputs.spec, inputs.params)
    assert isinstance(rule, Rule), rule  # `supports` has refused what it does not know
    q, k, v = (_rows_together(x) for x in (inputs.q, inputs.k, inputs.v))
    span = Span.of(inputs.visible, q.device)
    factor, scale = _tensor_or_number(inputs.factor, 1.0)
    given, number = _tensor_or_number(inputs.params.get(rule.row), rule.number)
    leaves = (q, k, v, factor, given)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    granule = granule_of(max(q.shape[3], v.shape[3]), q.dtype)
    numbers = (scale, number, rule.code, rule.r, rule.stand, *granule)
    out, *kept = forward(q, k, v, factor, given, *span, *numbers, keep, inputs.diagnostics)
    if not inputs.diagnostics:
        return out, None
    floats, flags = kept[:2]
    stats = unpack(floats, flags, flags[..., :0])
    seen = (floats[..., 4:5], floats[..., 5:6], inputs.scale, inputs.row_params(), inputs.visible)
    return out, diagnose(inputs.spec, stats, *seen)


def _rows_together(x: Tensor) -> Tensor:
    """x with its features side by side, as kernels load them."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _tensor_or_number(x: Any, default: float) -> tuple[Tensor | None, float]:
    """A number of every row [B, H, Tq], float32 and contiguous, or None and the number of all."""
    if isinstance(x, Tensor):
        return x.to(torch.float32).contiguous(), default
    return None, default if x is None else float(x)


@torch.library.custom_op("regard::triton_compact_forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | None,
    given: Tensor | None,
    low: Tensor,
    high: Tensor,
    first: Tensor,
    last: Tensor,
    mask: Tensor | None,
    scale: float,
    number: float,
    rule: int,
    r: int,
    stand: int,
    live_rows: int,
    live_keys: int,
    keep: bool,
    counted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out [B, H, Tq, Dv], floats [B, H, Tq, FLOATS], flags int32 [B, H, Tq, FLAGS], index int32 [B, H, Tq, n],
    tilt float32 [B, H, Tq, Dv], live uint8 [B, H, ceil(Tq / live_rows), ceil(Tk / live_keys)]).

    `factor` and `given` (margin or bias), [B, H, Tq], stand in place of `scale` and `number`. Without `keep`
    nothing is kept for a backward pass; `counted` says whether support and effective sample size are.
    """
    from . import forward as compact_forward

    span = Span(low, high, first, last, mask)
    found = _outputs(q, k, v, rule, stand, live_rows, live_keys, keep)
    own = scale if factor is None else factor, number if given is None else given
    compact_forward.forward(q, k, v, *own, span, found, rule, r, stand, (live_rows, live_keys), keep, counted)
    return found


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, rule: int, stand: int, live_rows: int, live_keys: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    indices = {ANCHORED: 3, FIXED: int(stand != STANDS["zero"])}.get(rule, 0)
    blocks = -(-shape[2] // live_rows), -(-k.shape[2] // live_keys)
    used = keep and rule != SOFTMAX  # of softmax every block has weight
    return (
        torch.empty(*shape, v.shape[3], dtype=v.dtype, device=q.device),
        torch.empty(*shape, FLOATS, dtype=torch.float32, device=q.device),
        torch.empty(*shape, FLAGS, dtype=torch.int32, device=q.device),
        torch.empty(*shape, indices if keep else 0, dtype=torch.int32, device=q.device),
        torch.empty(*shape, v.shape[3] if keep and rule == ADAPTIVE else 0, dtype=torch.float32, device=q.device),
        torch.zeros(*shape[:2], *(blocks if used else (0, 0)), dtype=torch.uint8, device=q.device),
    )


@forward.register_fake
def _(q, k, v, factor, given, low, high, first, last, mask, scale, number, rule, r, stand, *rest):
    return _outputs(q, k, v, rule, stand, *rest[:3])


@torch.library.custom_op("regard::triton_compact_backward", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: Tensor | None,
    given: Tensor | None,
    low: Tensor,
    high: Tensor,
    first: Tensor,
    last: Tensor,
    mask: Tensor | None,
    floats: Tensor,
    flags: Tensor,
    index: Tensor,
    tilt: Tensor,
    live: Tensor,
    scale: float,
    rule: int,
    r: int,
    stand: int,
    live_rows: int,
    live_keys: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, and of the factor and the margin or bias, float32 [B, H, Tq] where these were tensors."""
    from . import backward as compact_backward

    return compact_backward.backward(
        grad, q, k, v, scale if factor is None else factor, Span(low, high, first, last, mask), floats, flags, index,
        tilt, live, (live_rows, live_keys), rule, r, stand, given is not None,
    )  # fmt: skip


@backward.register_fake
def _(grad, q, k, v, factor, given, *rest):
    rows = [(0,) if x is None else q.shape[:3] for x in (factor, given)]
    return (*map(torch.empty_like, (q, k, v)), *(q.new_empty(shape, dtype=torch.float32) for shape in rows))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, *kept = output
    rule = inputs[12]
    if rule != ADAPTIVE:
        kept[3] = out  # what the derivative of the sum of weights is weighed with
    ctx.save_for_backward(*inputs[:10], *kept)
    ctx.numbers = inputs[10], *inputs[12:17]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 19
    saved = ctx.saved_tensors
    dq, dk, dv, dfactor, dgiven = backward(grad, *saved, *ctx.numbers)
    dfactor, dgiven = (None if x is None else dx for x, dx in zip(saved[3:5], (dfactor, dgiven), strict=True))
    return dq, dk, dv, dfactor, dgiven, *(None,) * 14


forward.register_autograd(_differentiate, setup_context=_save)
backward.register_autograd(refuse)
