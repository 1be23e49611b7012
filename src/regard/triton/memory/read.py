"""Weighted sums of rows of a table and their mixes with tokens' values (fast-weight product-key memory, equation 24).

Legend: B batch, T tokens, K slots a token; M tables of N rows of Dv numbers, P = B T / M tokens of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable, power_of_two
from .search import bytes_of

ROWS = TileTable(
    "memory_rows",
    {(512, 4): Tiles(rows=8, keys=512, warps=4, stages=1), (1 << 20, 4): Tiles(8, 1024, 8, 1)},
    (Tiles(8, 512, 2, 1), Tiles(16, 512, 4, 1)),
)
"""`rows`: rows of the table that are processed at once; `keys`: the widest part of a row."""
PULLS = TileTable("memory_pulls", ROWS.shipped, ROWS.others)


@triton.jit
def _extent(good, token, K: tl.constexpr, D: tl.constexpr):
    """Return how many entries and columns of a token are read: K and D, or 0 if it is not good."""
    reach, wide = K, D
    if good is not None:
        some = tl.load(good + token).to(tl.int32)
        reach, wide = some * K, some * D
    return reach, wide


@triton.jit(do_not_specialize=LENGTHS)
def _rows(
    table, slots, weights, other, good, sums, dots, value, gate, mixed, tokens, length, stride_m, stride_v, stride_vt,
    stride_g, stride_gt, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Compute for one token sum_j w_j V[slot_j], its mix with a value, and the products of those rows with `other`."""
    token = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    table += tl.program_id(1).to(tl.int64) * stride_m
    column, entry = tl.arange(0, DT), tl.arange(0, R)
    reach, wide = _extent(good, token, K, D)
    share = 1.0
    if value is not None:
        value += (token // length) * stride_v + (token % length) * stride_vt
        if gate is not None:
            gate += (token // length) * stride_g + (token % length) * stride_gt
            share = tl.load(gate, mask=wide > 0, other=0.0).to(tl.float32)
    once: tl.constexpr = DT >= D
    if weights is not None:
        for start in range(0, D, DT):
            inside = start + column < D
            total = tl.zeros((DT,), tl.float32)
            for j in range(0, K, R):
                there = j + entry < reach
                slot = tl.load(slots + token * K + j + entry, mask=there, other=0)
                part = slot[:, None] * D + (start + column)[None, :]
                row = tl.load(table + part, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
                weight = tl.load(weights + token * K + j + entry, mask=there, other=0.0)
                total += tl.sum(weight[:, None] * row, 0)
                if other is not None and once:
                    given = tl.load(other + token * D + column, mask=column < wide, other=0.0)
                    tl.store(dots + token * K + j + entry, tl.sum(row * given[None, :], 1), mask=j + entry < K)
            tl.store(sums + token * D + start + column, total, mask=inside)
            if value is not None:
                target = tl.load(value + start + column, mask=start + column < wide, other=0.0).to(tl.float32)
                total = target + share * (total - target) if gate is not None else target + total
                tl.store(mixed + token * D + start + column, total, mask=inside)
    if other is not None and not (weights is not None and once):
        for j in range(0, K, R):
            there = j + entry < reach
            slot = tl.load(slots + token * K + j + entry, mask=there, other=0)
            products = tl.zeros((R,), tl.float32)
            for start in range(0, D, DT):
                inside = start + column < D
                part = slot[:, None] * D + (start + column)[None, :]
                row = tl.load(table + part, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
                given = tl.load(other + token * D + start + column, mask=start + column < wide, other=0.0)
                products += tl.sum(row * given[None, :], 1)
            tl.store(dots + token * K + j + entry, products, mask=j + entry < K)


@triton.jit(do_not_specialize=LENGTHS)
def _pulls(
    table, slots, good, by_sum, by_mix, sums, value, gate, dots, by_read, by_value, by_gate, tokens, length,
    stride_m, stride_b, stride_t, stride_v, stride_vt, stride_g, stride_gt,
    K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Compute `pulled_rows` for one token."""
    token = tl.program_id(1).to(tl.int64) * tokens + tl.program_id(0)
    table += tl.program_id(1).to(tl.int64) * stride_m
    row, at = token // length, token % length
    by_mix += row * stride_b + at * stride_t
    value += row * stride_v + at * stride_vt
    column, entry = tl.arange(0, DT), tl.arange(0, R)
    reach, wide = _extent(good, token, K, D)
    share = 1.0
    if gate is not None:
        share = tl.load(gate + row * stride_g + at * stride_gt, mask=wide > 0, other=0.0).to(tl.float32)
    for j in range(0, K, R):
        there = j + entry < reach
        slot = tl.load(slots + token * K + j + entry, mask=there, other=0)
        products, change = tl.zeros((R,), tl.float32), tl.zeros((DT,), tl.float32)
        for start in range(0, D, DT):
            seen = start + column < wide
            given = tl.load(by_mix + start + column, mask=seen, other=0.0)
            u = share * given
            if by_sum is not None:
                u += tl.load(by_sum + token * D + start + column, mask=seen, other=0.0)
            if j == 0:
                inside = start + column < D
                tl.store(by_read + token * D + start + column, u, mask=inside)
                to = by_value + token * D + start + column
                tl.store(to, given - share * given if gate is not None else given, mask=inside)
                if gate is not None:
                    target = tl.load(value + start + column, mask=seen, other=0.0).to(tl.float32)
                    change += given * (tl.load(sums + token * D + start + column, mask=seen, other=0.0) - target)
            part = slot[:, None] * D + (start + column)[None, :]
            rows = tl.load(table + part, mask=there[:, None] & seen[None, :], other=0.0).to(tl.float32)
            products += tl.sum(rows * u[None, :], 1)
        tl.store(dots + token * K + j + entry, products, mask=j + entry < K)
        if gate is not None and j == 0:
            tl.store(by_gate + token, tl.sum(change, 0))


@torch.compiler.disable
def picked_rows(
    table: Tensor, slots: Tensor, weights: Tensor | None, other: Tensor | None = None, good: Tensor | None = None,
    value: Tensor | None = None, gate: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return sum_j weights_pj V[slots_pj] [M, P, Dv], V[slots_pj] . other_p [M, P, K], and the mixes of those sums with
    values [B, T, Dv]: g sum + (1 - g) value, or sum + value without a gate; all float32, and empty if they need what is
    None. One launch; reads P K Dv numbers of the table, float32 or bfloat16 [M, N, Dv], contiguous. Slots are int64
    [M, P, K]; weights, other, value and gate [B, T] float32; of tokens that are not `good` [M, P] results are 0."""
    (memories, tokens, k), width = slots.shape, table.shape[-1]
    sums = _float32(table, *((0,) if weights is None else (memories, tokens, width)))
    dots = _float32(table, *((0,) if other is None else slots.shape))
    mixed = _float32(table, *((0,) if value is None else value.shape))
    value = None if value is None else rows_together(value)
    weights, other = (None if x is None else x.contiguous() for x in (weights, other))
    length, steps = (1, (0, 0)) if value is None else (value.shape[1], value.stride()[:2])

    def run(tiles: Tiles) -> None:
        launch(
            _rows, (tokens, memories), table, slots.contiguous(), weights, other, bytes_of(good), sums, dots, value,
            gate, mixed, tokens, length, table.stride(0), *steps, *_strides(gate),
            tiles=tiles, K=k, D=width, **_widths(tiles, k, width),
        )  # fmt: skip

    run(ROWS.pick(width, table.dtype, run, (value is not None, gate is not None)))
    return sums, dots, mixed


@torch.compiler.disable
def pulled_rows(
    table: Tensor, slots: Tensor, good: Tensor | None, by_sum: Tensor | None, by_mix: Tensor, sums: Tensor,
    value: Tensor, gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Differentiate `picked_rows` from the gradients of sums by_sum [M, P, Dv], or None, and of mixes by_mix [B, T,
    Dv], by one launch. Return the gradient u . V[slots_pj] [M, P, K] of weights, u = by_sum + g by_mix, and the
    gradients of value [B, T, Dv] and gate [B, T], which is meaningless without a gate."""
    (memories, tokens, k), width = slots.shape, table.shape[-1]
    by_mix, value, by_sum = rows_together(by_mix), rows_together(value), None if by_sum is None else by_sum.contiguous()
    shapes = (slots.shape, sums.shape, value.shape, value.shape[:2])
    dots, by_read, by_value, by_gate = (_float32(table, *shape) for shape in shapes)

    def run(tiles: Tiles) -> None:
        launch(
            _pulls, (tokens, memories), table, slots.contiguous(), bytes_of(good), by_sum, by_mix, sums, value, gate,
            dots, by_read, by_value, by_gate, tokens, value.shape[1], table.stride(0), *by_mix.stride()[:2],
            *value.stride()[:2], *_strides(gate), tiles=tiles, K=k, D=width, **_widths(tiles, k, width),
        )  # fmt: skip

    run(PULLS.pick(width, table.dtype, run, (gate is not None,)))
    return dots, by_read, by_value, by_gate


def _float32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(gate: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if gate is None else gate.stride()


def _widths(tiles: Tiles, k: int, width: int) -> dict[str, int]:
    """Return how many rows, and numbers of a row, are processed at once."""
    return {"R": min(tiles.rows, power_of_two(k)), "DT": min(tiles.keys, power_of_two(width))}
