"""Exact search for the nearest sub-keys of every half of a query, without a tensor of all scores (Lample et al. 2019,
section 3.1; score: equation 21 of the fast-weight product-key-memory paper).

A first pass ranks all n sub-keys by 2 q.K - |K|^2 (or q.K) from products of tiles, in float32 with a known error bound.
It keeps 2 k or more of the best in registers, each as one integer: a score whose last bits are the key's number. These
are measured again with squared differences (or products) summed in float64 and rounded to float32 once, and sorted; of
equals the lowest number comes first. If the bound cannot exclude that a dropped key is as good as the k-th best (keys
close together, or equal), the rows of the block measure all keys that way. So results do not depend on the precision of
the products.

Legend: B batch, T tokens, H heads, n sub-keys of a half, k selected, d width of a half; a set is a head and a half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable

TABLE = TileTable("memory_search", {(1 << 20, 4): Tiles(16, 128, 8, 3)}, (Tiles(16, 64, 8, 3), Tiles(32, 64, 8, 3)))
GAPS = 8192
"""How many differences a program holds at once: rounds of loads take longer than the arithmetic between them."""


@triton.jit
def _ordered(x):
    """Return float32 as int32 of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float(bits):
    """Invert `_ordered`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _measured(
    q_row, keys, index, there, d, DISTANCE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, FINE: tl.constexpr
):  # fmt: skip
    """Return squared distances to the keys `index` [R, M], or minus products, in float64; infinite if not `there`."""
    total = tl.zeros((R, M), tl.float64)
    at = tl.arange(0, FINE)
    for start in range(0, d, FINE):
        inside = start + at < d
        q = tl.load(q_row[:, None] + (start + at)[None, :], mask=inside[None, :], other=0.0).to(tl.float64)
        key = tl.load(
            keys + index[:, :, None] * d + (start + at)[None, None, :],
            mask=there[:, :, None] & inside[None, None, :],
            other=0.0,
        ).to(tl.float64)
        if DISTANCE:
            gap = q[:, None, :] - key
            total += tl.sum(gap * gap, 2)
        else:
            total -= tl.sum(q[:, None, :] * key, 2)
    return tl.where(there, total, float("inf"))


@triton.jit
def _packed(measure, index):
    """Return int64 in the order of (measure rounded to float32, index)."""
    return (_ordered(measure.to(tl.float32)).to(tl.int64) << 32) | index.to(tl.int64)


@triton.jit
def _survivors(
    q_row, keys, n, d,
    DISTANCE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, KT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Return (M of the best keys by rough scores, int32 [R, M], high bits of a score before LOW bits of n's complement;
    the best of all others [R]; the largest |K|^2). Every KT-th key competes for the same four places: the k best of a
    row are hardly ever five of these."""
    none: tl.constexpr = -(2**31)
    a = tl.full((R, KT), none, tl.int32)
    b, c, e, out = a, a, a, a
    most = 0.0
    for start in range(0, n, KT):
        own = start + tl.arange(0, KT)
        dots, squared = tl.zeros((R, KT), tl.float32), tl.zeros((KT, DT), tl.float32)
        for j in range(0, d, DT):
            at = j + tl.arange(0, DT)
            held = (own < n)[:, None] & (at < d)[None, :]
            q = tl.load(q_row[:, None] + at[None, :], mask=(at < d)[None, :], other=0.0)
            key = tl.load(keys + own[:, None] * d + at[None, :], mask=held, other=0.0)
            dots = tl.dot(q, tl.trans(key), dots, input_precision="tf32x3")
            squared += key * key
        squares = tl.sum(squared, 1)
        if DISTANCE:
            dots = 2.0 * dots - squares[None, :]
        scores = tl.where((own < n)[None, :], dots, -float("inf"))
        most = tl.maximum(most, tl.max(squares, 0))
        number = (1 << LOW) - 1 - own
        x = ((_ordered(scores) >> LOW) << LOW) | number[None, :]
        x, a = tl.minimum(a, x), tl.maximum(a, x)
        x, b = tl.minimum(b, x), tl.maximum(b, x)
        x, c = tl.minimum(c, x), tl.maximum(c, x)
        x, e = tl.minimum(e, x), tl.maximum(e, x)
        out = tl.maximum(out, x)
    found = tl.full((R, M), none, tl.int32)
    for j in range(M):
        top = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, e)), 1)
        found = tl.where(tl.arange(0, M)[None, :] == j, top[:, None], found)
        a, b = tl.where(a == top[:, None], none, a), tl.where(b == top[:, None], none, b)
        c, e = tl.where(c == top[:, None], none, c), tl.where(e == top[:, None], none, e)
    left = tl.maximum(tl.maximum(tl.maximum(a, b), tl.maximum(c, e)), out)
    return found, tl.max(left, 1), most


@triton.jit
def _least(one, other, K: tl.constexpr, R: tl.constexpr, M: tl.constexpr):
    """Return the K least of [R, M] once or twice, ascending, in the first places of [R, M]. No number occurs twice."""
    none: tl.constexpr = 9223372036854775807
    best = tl.full((R, M), none, tl.int64)
    for j in range(K):
        top = tl.min(one, 1)
        if other is not None:
            top = tl.minimum(top, tl.min(other, 1))
            other = tl.where(other == top[:, None], none, other)
        best = tl.where(tl.arange(0, M)[None, :] == j, top[:, None], best)
        one = tl.where(one == top[:, None], none, one)
    return best


@triton.jit(do_not_specialize=LENGTHS)
def _search(
    query, sub_keys, halves, scores, rows, tokens, n, d, stride_b, stride_t, stride_h, stride_m, eps,
    H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, DISTANCE: tl.constexpr, ROUGH: tl.constexpr,
    R: tl.constexpr, KT: tl.constexpr, DT: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    member, memory = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * R + tl.arange(0, R)
    row = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    token = memory * rows + row
    q_row = query + (token // tokens) * stride_b + (token % tokens) * stride_t
    q_row += (member // 2) * stride_h + (member % 2) * d
    sub_keys += memory * stride_m + member.to(tl.int64) * n * d
    place = tl.arange(0, M)
    last = tl.full((R, M), 9223372036854775807, tl.int64)
    whole = not ROUGH
    best = last
    if ROUGH:
        found, left, most = _survivors(q_row, sub_keys, n, d, DISTANCE, R, M, LOW, KT, DT)
        index = (1 << LOW) - 1 - (found & ((1 << LOW) - 1))
        measure = _measured(q_row, sub_keys, index, index < n, d, DISTANCE, R, M, FINE)
        best = _least(_packed(measure, index), None, K, R, M)
        square = tl.zeros((R,), tl.float64)
        for j in range(0, d, 128):
            at = j + tl.arange(0, 128)
            q = tl.load(q_row[:, None] + at[None, :], mask=(at < d)[None, :], other=0.0).to(tl.float64)
            square += tl.sum(q * q, 1)
        worst = _float(((left >> LOW) + 1) << LOW)  # rounded up
        kth = tl.sum(tl.where(place[None, :] == K - 1, best, 0), 1)
        kth = _float((kth >> 32).to(tl.int32))
        # an upper bound for every dropped key: its rough score and the error of the products
        grain = (d + 16) * 2.0**-21
        reach = tl.sqrt(square.to(tl.float32) * most)
        error = tl.abs(kth) * 2.0**-21
        if DISTANCE:
            safe = (square - kth).to(tl.float32) > worst + error + grain * (2.0 * reach + most)
        else:
            safe = -kth > worst + error + grain * reach
        whole = tl.min(safe.to(tl.int32), 0) == 0
    if whole:
        best = last
        for start in range(0, n, M):
            index = tl.zeros((R, M), tl.int32) + (start + place)[None, :]
            measure = _measured(q_row, sub_keys, index, index < n, d, DISTANCE, R, M, FINE)
            packed = tl.where(index < n, _packed(measure, index), 9223372036854775807)
            best = _least(best, packed, K, R, M)
    index = (best & 0xFFFFFFFF).to(tl.int32)
    measure = _float((best >> 32).to(tl.int32))
    score = -measure
    if DISTANCE:
        score = -tl.log(eps + measure)
    to = (token * H * 2 + member)[:, None] * K + place[None, :]
    tl.store(halves + to, index.to(tl.int64), mask=(place < K)[None, :])
    tl.store(scores + to, score, mask=(place < K)[None, :])


@triton.jit
def flags_set(flags, count):
    """Return how many of so many bytes are 1."""
    found = 0
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        found += tl.sum(tl.load(flags + at, mask=at < count, other=0).to(tl.int32), 0)
    return found


def bytes_of(flags: Tensor | None) -> Tensor | None:
    """View booleans as bytes, contiguous, which kernels can read and write."""
    return None if flags is None else flags.contiguous().view(torch.uint8)


@torch.compiler.disable
def best_halves(query: Tensor, keys: Tensor, k: int, eps: float, *, distance: bool) -> tuple[Tensor, Tensor]:
    """Return the k best sub-keys of each half: scores float32 [B, T, H, 2, k], best first, and their indices, int64.

    Args:
        query: float32 [B, T, H, Dk].
        keys: float32 [M, H, 2, n, Dk/2], M = B, or 1 for all sequences.
        k: from 1 to n. eps: added to squared distances.
        distance: scores -log(eps + |q - K|^2), else q.K.

    Cost: 2 B T H n Dk multiplications, k float64 differences a row and key kept; one launch."""
    (batch, tokens, heads, width), (memories, n) = query.shape, (keys.shape[0], keys.shape[3])
    query, keys = rows_together(query), keys if keys[:1].is_contiguous() else keys.contiguous()
    halves = torch.empty(batch, tokens, heads, 2, k, dtype=torch.int64, device=query.device)
    scores = torch.empty(halves.shape, dtype=torch.float32, device=query.device)
    rows = batch * tokens // max(1, memories)
    kept = max(16, triton.next_power_of_2(k + 4))
    low = max(1, (n - 1).bit_length())

    def run(tiles: Tiles) -> None:
        kt = tiles.keys if k <= 8 else 2 * tiles.keys
        grid = (triton.cdiv(rows, tiles.rows), heads * 2, memories)
        launch(
            _search, grid, query, keys, halves, scores, rows, tokens, n, width // 2,
            query.stride(0), query.stride(1), query.stride(2), keys.stride(0) if memories > 1 else 0, eps,
            tiles=tiles, H=heads, K=k, M=kept, LOW=low, DISTANCE=distance,
            ROUGH=n > kept, R=tiles.rows, KT=kt, DT=32, FINE=max(2, GAPS // (tiles.rows * kept)),
        )  # fmt: skip

    run(TABLE.pick(width // 2, query.dtype, run))
    return scores, halves
