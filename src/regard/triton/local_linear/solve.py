"""The systems of local linear attention, (C_i + ridge_i) t_i = right_i, by conjugate gradients for blocks of rows.

    C_i d = sum_j p_ij ((k_j - mean_i) . d) (k_j - mean_i)

C_i is never formed. A step streams the keys once. A row stops when its residual is small and then keeps its bits; a
block stops with its last row. Rows with few keys are solved one by one (`direct`).

With bfloat16 keys the direction is rounded before use and is then the direction: its image is exact but for the
weights, which are split in two terms. Vectors that a sweep does not need lie in memory meanwhile.

Legend: as in `math`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS, load_block
from ..runtime.call import Call, number_or_rows
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .direct import TILES as DIRECT
from .direct import solve_few
from .math import (
    of_head,
    opened,
    plan,
    ridge_width,
    row_factor,
    row_ridge,
    sweep,
    weighted_tile,
)
from .steps import AWAY, ROW, TERMS, TILE, D, begin, finish, follow, tile

RESTARTS = tl.constexpr(3)
"""How often a row restarts if its true residual is still too large."""


class Rule(NamedTuple):
    """How systems are solved: relative residual, most steps of a row, whether rows with few keys are solved directly,
    and whether true residuals are computed instead of those that the steps carry along."""

    tol: float
    limit: int
    direct: bool
    verify: bool


TILES = TileTable.by_width(
    "local_linear_solve",
    [(64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)],
    [(32, 32, 4, 1), (32, 16, 8, 2), (16, 16, 8, 1)],
    [(64, 32, 4, 3), (64, 64, 4, 2)],
)


@triton.jit
def _terms(q, c, lse, sight, k_at, keys, start, tiles, FORM: tl.constexpr):
    """Return sum_j p_ij |k_j|^2, the size of what a product with C sums."""
    found = tl.full((FORM.own,), 0.0, tl.float32)
    for n in range(tiles):
        k, p = weighted_tile(q, c, lse, sight, k_at, start + n * FORM.tile, keys, True, FORM)
        kf = k.to(tl.float32)
        found += tl.sum(p * tl.sum(kf * kf, 1)[None, :], 1)
    return found


@triton.jit(do_not_specialize=LENGTHS)
def _solve(
    right_ptr, matrices, kept, factor, ridge, span, value_ptr, scratch, statistics_ptr, status_ptr, tol, limit,
    heads, group, queries, keys, span_batch, mask_batch, mask_head, FORM: tl.constexpr,
):  # fmt: skip
    """Solve a block of rows."""
    head, batch, own, first, rows, sight = opened(span, heads, queries, span_batch, mask_batch, mask_head, FORM)
    tiles = plan(sight[0], sight[1], FORM.tile, FORM.masked)
    ranges = span[0] + batch * span_batch, span[1] + batch * span_batch
    at, c = head * queries, row_factor(factor[0] + head * queries, factor[1], rows, queries, FORM.factors)
    scratch += (head * tl.num_programs(0) + first // FORM.own) * (FORM.own * (TILE * FORM.wide + ROW))
    k_at = of_head(matrices[1], batch, own // group)
    right_ptr += at * FORM.dim
    ridge = ridge[0] + at * FORM.ridge, ridge[1]
    running = begin(scratch, right_ptr, kept[1] + at * FORM.dim, ranges, first, queries, tol, limit, FORM)
    tl.debug_barrier()
    q_at = of_head(matrices[0], batch, own)
    q = load_block(q_at[0], first, q_at[1], queries, FORM.own, FORM.dim, FORM.wide)
    lse = tl.load(kept[0] + at + rows, mask=rows < queries, other=float("inf"))
    phase, again, numbers = 0, RESTARTS, scratch + FORM.own * (TILE * FORM.wide) + tl.arange(0, FORM.own)
    if FORM.verify:
        terms = _terms(q, c, lse, sight, k_at, keys, tiles[0], tiles[1], FORM)
        tl.store(numbers + FORM.own * TERMS, terms + tl.max(row_ridge(ridge, first, queries, FORM.own, FORM), 1))
    while running > 0:
        d = tl.load(tile(scratch, D, 0, FORM.own, FORM)).to(k_at[0].dtype.element_ty)
        away = tl.load(numbers + FORM.own * AWAY)
        total, used = sweep(d, away, q, c, lse, sight, k_at, keys, tiles, FORM)
        running, phase, again = follow(
            total, used, phase, again, scratch, right_ptr, ridge, first, queries, limit, FORM
        )
    finish(scratch, value_ptr + at * FORM.dim, statistics_ptr + at * 2, status_ptr + at, first, queries, FORM)


def solve(
    right: Tensor, call: Call, ridge: float | Tensor, lse: Tensor, mean: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve (C_i + ridge_i) t_i = right_i for every query. Return t [B, H, Tq, D], float32; (steps, relative residual)
    [B, H, Tq, 2]; `SolveStatus` [B, H, Tq], int32. `right` and the means of keys [B, H, Tq, D], the ridge [B, H, Tq, 1
    or D] if it is a tensor, and `lse` [B, H, Tq] (in base 2, inf for a row without a key) are float32.

    Cost: 8 D a pair and step with keys in bfloat16, 6 D in float32; true residuals take at least one more step."""
    found = torch.empty_like(right), call.new(2), lse.new_empty(lse.shape, dtype=torch.int32)
    alone = DIRECT.pick(right.shape[-1], call.dtype)
    few = alone.keys if rule.direct else 0

    def run(tiles: Tiles) -> None:
        rows = triton.cdiv(right.shape[2], tiles.rows) * tiles.rows
        scratch = right.new_empty(right.shape[0] * right.shape[1], rows, TILE.value * call.form.wide + ROW.value)
        launch(
            _solve, call.grid(tiles.rows), right, call.matrices[:2], (lse, mean), call.factor,
            number_or_rows(ridge, lse), call.span.pointers, found[0], scratch, *found[1:], rule.tol, rule.limit,
            *call.sizes, *call.span.steps, tiles=tiles,
            FORM=call.fitted(tiles, ridge=ridge_width(ridge), few=few, verify=rule.verify),
        )  # fmt: skip

    run(TILES.pick(right.shape[-1], call.dtype, run, (call.form.masked, rule.direct)))
    if few:
        solve_few(right, call, ridge, lse, found, alone)
    return found
