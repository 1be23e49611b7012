"""Compact attention and softmax at degree 0 as torch custom operators.

Softmax and a fixed threshold take one pass (`stream`), rules relative to the best key a search and then a pass over the
blocks with weight (`search`). The forward pass keeps statistics and flags of every row (`block_rows`) and which blocks
have weight; the backward pass visits only those. Formulas: `grammar.weighting`; sparse-attention paper, sections 2, 3.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...one_node import differentiable
from ...pairwise.blocked.block_rows import FLAGS, FLOATS, unpack
from ...pairwise.diagnostics import Diagnostics, diagnose
from ...pairwise.dispatch import Cost, Inputs, Problem
from ..runtime.call import Call, number_or_rows
from ..runtime.launch import launch
from ..runtime.operators import FARTHEST, empty_gradients, later, operator, rows_together, tensor_or_number
from ..runtime.span import SEEN, Span
from ..runtime.support import before_hopper
from ..runtime.tiles import Tiles, TileTable
from . import rules

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-12}
"""Relative size of the last step of a threshold; the remaining error is about its square."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale: with a scale that underflows to 0 hidden keys would give NaN."""


def supports(problem: Problem) -> str | None:
    """Return None if the kernels support the call, else the reason."""
    rule = rules.rule_of(problem.spec, dict(problem.numbers), tensors=problem.params)
    return rule if isinstance(rule, str) else None


STEPS = 4  # assumed number of passes of a search, for cost estimates


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass, as if no block could be skipped, and its memory."""
    rows, rule = problem.batch * problem.heads * problem.queries, rules.rule_of(problem.spec)
    pairs, share = rows * problem.keys, 2 if problem.causal and problem.queries == problem.keys else 1
    code = rule.code if isinstance(rule, rules.Rule) else rules.SOFTMAX
    passes = {rules.ADAPTIVE: 2 + STEPS, rules.ANCHORED: 2}.get(code, 1)
    saved = 4 * rows * (FLOATS + FLAGS + problem.value_dim)
    lists = 5 * pairs // rules.MASK_TILE**2 if code in (rules.ADAPTIVE, rules.ANCHORED) else 0
    return Cost(2 * pairs * (passes * problem.dim + problem.value_dim) // share, saved + lists)


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values, and diagnostics if asked for."""
    rule = rules.rule_of(inputs.spec, inputs.params)
    assert isinstance(rule, rules.Rule), rule  # `supports` has refused everything else
    q, k, v = (rows_together(x, FARTHEST) for x in (inputs.q, inputs.k, inputs.v))
    span = Span.of(inputs.visible, q)
    factor, scale = tensor_or_number(inputs.factor)
    given, number = tensor_or_number(inputs.params.get(rule.row), rule.number)
    mask_tile = rules.mask_tile_of(max(q.shape[3], v.shape[3]), q.dtype)
    numbers = (scale, number, rule.code, rule.r, rule.stand, rule.own, *mask_tile)
    out, *kept = forward(q, k, v, factor, given, *span, *numbers, inputs.problem.gradient, inputs.diagnostics)
    if not inputs.diagnostics:
        return out, None
    floats, flags = kept[:2]
    return out, diagnose(inputs, unpack(floats, flags, flags[..., :0]), floats[..., 4:5], floats[..., 5:6])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, given: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    """Return all outputs of a call: out [B, H, Tq, Dv]; floats [B, H, Tq, FLOATS]; flags int32 [B, H, Tq, FLAGS]; index
    int32 [B, H, Tq, n]; slope_mean float32 [B, H, Tq, Dv]; live uint8 [B, H, query blocks, key blocks]. `factor` and
    `given` (margin or bias), [B, H, Tq], replace `scale` and `number`. Tensors for a backward pass are kept only with
    `keep`; support and effective sample size are computed only with `counted`."""
    from .one_pass import compact_stand_in_kernel, compact_stream_kernel
    from .search import compact_search_kernel, compact_weigh_kernel

    span, (scale, number, rule, r, stand, own, rows, keys, keep, counted) = Span(*rest[:5]), rest[5:]
    *stored, live = outs = _outputs(q, k, v, rule, stand, rows, keys, keep)
    searched = rule in (rules.ADAPTIVE, rules.ANCHORED)
    if searched and not keep:
        live = _marks(q, k, rows, keys)
    form = {"rule": rule, "r": r, "stand": stand, "given": given is not None, **rules.own_form(own)}
    form |= {"mask_tile": rows, "keep": keep, "counted": counted}
    call = Call(q, k, v, max(scale, LEAST_SCALE) if factor is None else factor, span, **form)
    threshold = *number_or_rows(number if given is None else given, span.low), TOLERANCE[call.dtype]
    read = call.matrices, call.factor, threshold, (*span.pointers, *span.steps), tuple(stored)

    def start(kernel: Any, tables: dict[int, TileTable], **changed: Any) -> None:
        """Run with tiles that fit the marks of blocks; fields that a kernel ignores are `changed` to one value."""
        form = call.form._replace(**changed)

        def run(tiles: Tiles) -> None:
            tiles = replace(tiles, rows=max(tiles.rows, rows), keys=keys)
            if kernel is compact_weigh_kernel and q.dtype == torch.bfloat16 and before_hopper(q.device):
                tiles = replace(tiles, rows=rows, warps=8)  # more rows per warp would spill
            programs = call.shape[0] * call.sizes[0] * -(-call.sizes[2] // tiles.rows)
            listed = programs * -(-call.sizes[3] // tiles.keys) if searched else 1
            launch(
                kernel, (programs,), *read, (live, call.blank(listed, dtype=torch.int32)), *call.sizes,
                tiles=tiles, FORM=form._replace(own=tiles.rows, tile=tiles.keys),
            )  # fmt: skip

        run(tables[call.dtype.itemsize].pick(max(form.dim, form.value_dim), call.dtype, run, form))

    if searched:
        nothing = {"value_dim": 0, "value_wide": 0, "keep": False, "counted": False, "relative": None, "source": ""}
        start(compact_search_kernel, rules.SEARCH, stand=0, **nothing)
        tables = rules.WEIGH_MEAN if keep and rule == rules.ADAPTIVE else rules.WEIGH
        start(compact_weigh_kernel, tables, stand=0, given=False)
        return outs
    start(compact_stream_kernel, rules.STREAM, stand=0)
    if rule == rules.FIXED and stand != rules.STANDS["zero"]:
        start(compact_stand_in_kernel, rules.STAND_IN, r=0, given=False, relative=None, source="")
    return outs


def _marks(q: Tensor, k: Tensor, rows: int, keys: int) -> Tensor:
    """Return marks of blocks of pairs, all 0."""
    blocks = -(-q.shape[2] // rows), -(-k.shape[2] // keys)
    return torch.zeros(*q.shape[:2], *blocks, dtype=torch.uint8, device=q.device)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, rule: int, stand: int, live_rows: int, live_keys: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    indices = {rules.ANCHORED: 3, rules.FIXED: int(stand != rules.STANDS["zero"])}.get(rule, 0)
    used = keep and rule != rules.SOFTMAX  # with softmax every block has weight
    new = partial(torch.empty, device=q.device)
    return (
        new(*shape, v.shape[3], dtype=v.dtype),
        new(*shape, FLOATS, dtype=torch.float32),
        new(*shape, FLAGS, dtype=torch.int32),
        new(*shape, indices if keep else 0, dtype=torch.int32),
        new(*shape, v.shape[3] if keep and rule == rules.ADAPTIVE else 0, dtype=torch.float32),
        _marks(q, k, live_rows, live_keys) if used else new(*shape[:2], 0, 0, dtype=torch.uint8),
    )


_RULE = "SymInt rule, SymInt r, SymInt stand, str own, SymInt live_rows, SymInt live_keys"
forward = operator(
    "compact_forward", _forward,
    f"(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, {SEEN}, float scale, float number, "
    f"{_RULE}, bool keep, bool counted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda q, k, v, *rest: _outputs(q, k, v, rest[9], rest[11], *rest[13:16]),
)  # fmt: skip


backward = operator(
    "compact_backward", later(__package__),
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? given, {SEEN}, Tensor floats, "
    f"Tensor flags, Tensor index, Tensor slope_mean, Tensor live, float scale, {_RULE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda _, *given: empty_gradients(given[:3], given[3:5]),
)  # fmt: skip


def _keep(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    out, *kept = output
    if inputs[12] != rules.ADAPTIVE:
        kept[3] = out  # weights of the derivative of the sum of weights
    return (*inputs[:10], *kept), (inputs[10], *inputs[12:18])


differentiable(forward, backward, lambda *given: backward(*given), _keep)
