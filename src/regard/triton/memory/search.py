"""Exact search for the nearest sub-keys of every half of a query (Lample et al. 2019, section 3.1; score: equation 21
of the fast-weight product-key-memory paper), and the slots of sorted halves with their weights (equations 5 and 30).

`_rough` ranks all n sub-keys by 2 q.K - |K|^2 (or q.K) from products of tiles, with a known error bound. It stores each
as one integer: a score whose last bits are the key's number. `_choose` keeps 2 k or more of the best, measures them
again with squared differences (or products) summed in float64 and rounded to float32 once, and sorts them; of equals
the lowest number comes first. If the bound cannot exclude that a dropped key is as good as the k-th best (keys close
together, or equal), the token measures all keys that way. So results do not depend on the precision of the products.

Legend: B batch, T tokens, H heads, n sub-keys of a half, k selected, d width of a half; a set is a head and a half.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable, power_of_two

ROUGH = TileTable("memory_rough", {(1 << 20, 4): Tiles(64, 64, 4, 3)})
TABLE = TileTable("memory_search", {(1 << 20, 4): Tiles(8, 128, 4, 1)}, (Tiles(8, 64, 4, 1), Tiles(16, 64, 4, 1)))
"""`rows`: sets of a token that are searched at once; `keys`: sub-keys of a block."""
GAPS = 2048
"""How many differences a warp holds at once: rounds of loads take longer than the arithmetic between them."""


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
def _measure(q_row, keys, index, real, d, DISTANCE: tl.constexpr, R: tl.constexpr, M: tl.constexpr, FINE: tl.constexpr):
    """Return float64 squared distances to keys `index` [R, M], or minus products, inf if not `real`; and |q|^2 [R]."""
    total, square = tl.zeros((R, M, FINE // 4), tl.float64), tl.zeros((R, FINE // 4), tl.float64)
    at = tl.arange(0, FINE)
    for start in range(0, d, FINE):
        inside = start + at < d
        q = tl.load(q_row[:, None] + (start + at)[None, :], mask=inside[None, :], other=0.0).to(tl.float64)
        held = real[:, :, None] & inside[None, None, :]
        key = tl.load(keys[:, None, None] + index[:, :, None] * d + (start + at)[None, None, :], mask=held, other=0.0)
        key = key.to(tl.float64)
        square += tl.sum(tl.reshape(q * q, (R, FINE // 4, 4)), 2)  # four numbers of a thread
        if DISTANCE:
            gap = q[:, None, :] - key
            part = gap * gap
        else:
            part = -q[:, None, :] * key
        total += tl.sum(tl.reshape(part, (R, M, FINE // 4, 4)), 3)
    return tl.where(real, tl.sum(total, 2), float("inf")), tl.sum(square, 1)


@triton.jit
def _packed(measure, index):
    """Return int64 in the order of (measure rounded to float32, index)."""
    return (_ordered(measure.to(tl.float32)).to(tl.int64) << 32) | index.to(tl.int64)


@triton.jit
def _halved(x):
    """Return two bfloat16 whose sum is float32 x up to 2^-16 |x|; by integers, since single conversions are slow."""
    high = ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit(do_not_specialize=LENGTHS)
def _rough(
    query, sub_keys, ranks, most, rows, length, n, d, stride_b, stride_t, stride_h, stride_m,
    SETS: tl.constexpr, LOW: tl.constexpr, DISTANCE: tl.constexpr, R: tl.constexpr, KT: tl.constexpr,
    DT: tl.constexpr,
):  # fmt: skip
    """Score a block of sub-keys of one set for a block of rows, each as an int32: the high bits of the score before LOW
    bits of the complement of the key's number. Also store the largest |K|^2 of the block."""
    member, memory = tl.program_id(2) % SETS, (tl.program_id(2) // SETS).to(tl.int64)
    index, row = tl.program_id(0) * KT + tl.arange(0, KT), tl.program_id(1) * R + tl.arange(0, R)
    near = tl.minimum(row, rows - 1)  # rows past the end repeat the last one
    q_row = query + (memory + near // length) * stride_b + (near % length) * stride_t
    q_row += (member // 2) * stride_h + (member % 2) * d
    keys = sub_keys + memory * stride_m + (member * n + tl.minimum(index, n - 1)).to(tl.int64) * d
    dots, squared = tl.zeros((R, KT), tl.float32), tl.zeros((KT, DT), tl.float32)
    for j in range(0, d, DT):
        at = j + tl.arange(0, DT)
        q = tl.load(q_row[:, None] + at[None, :], mask=(at < d)[None, :], other=0.0)
        key = tl.load(keys[:, None] + at[None, :], mask=(at < d)[None, :], other=0.0)
        squared += key * key
        q_high, q_low = _halved(q)
        k_high, k_low = _halved(key)
        dots = tl.dot(q_low, tl.trans(k_high), dots)
        dots = tl.dot(q_high, tl.trans(k_low), dots)
        dots = tl.dot(q_high, tl.trans(k_high), dots)
    squares = tl.sum(squared, 1)
    if DISTANCE:
        dots = 2.0 * dots - squares[None, :]
    packed = ((_ordered(dots) >> LOW) << LOW) | ((1 << LOW) - 1 - index)[None, :]
    to = ranks + ((memory * rows + row) * SETS + member)[:, None] * n + index[None, :]
    tl.store(to, packed, mask=(row < rows)[:, None] & (index < n)[None, :])
    if tl.program_id(1) == 0:
        tl.store(most + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.max(squares, 0))


@triton.jit
def _survivors(ranks, n, K: tl.constexpr, R: tl.constexpr, M: tl.constexpr, KT: tl.constexpr):
    """Return (the K + 4 best int32 of `_rough`, in the first places of [R, M], then the least int32; the best of the
    others [R]). Every KT-th key competes for the same four sorted places; five of the best rarely share them."""
    none: tl.constexpr = -(2**31)
    a = tl.full((R, KT), none, tl.int32)
    b, c, e, out = a, a, a, a
    for start in range(0, n, KT):
        index = start + tl.arange(0, KT)
        x = tl.load(ranks[:, None] + index[None, :], mask=(index < n)[None, :], other=none)
        x, a = tl.minimum(a, x), tl.maximum(a, x)
        x, b = tl.minimum(b, x), tl.maximum(b, x)
        x, c = tl.minimum(c, x), tl.maximum(c, x)
        x, e = tl.minimum(e, x), tl.maximum(e, x)
        out = tl.maximum(out, x)
    kept = tl.full((R, M), none, tl.int32)
    for j in range(K + 4):
        top = tl.max(a, 1)[:, None]
        kept = tl.where(tl.arange(0, M)[None, :] == j, top, kept)
        hit = a == top
        a, b, c, e = tl.where(hit, b, a), tl.where(hit, c, b), tl.where(hit, e, c), tl.where(hit, none, e)
    return kept, tl.max(tl.maximum(a, out), 1)


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


@triton.jit
def _selected(
    q_row, keys, ranks, most, n, d, blocks, K: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, DISTANCE: tl.constexpr,
    R: tl.constexpr, KT: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """Return the K best of every row, packed, ascending, in the first places of [R, M]."""
    lane = tl.arange(0, M)
    rank = tl.zeros((R, M), tl.int32) + lane[None, :]
    last = tl.full((R, M), 9223372036854775807, tl.int64)
    whole = ranks is None
    best = last
    if ranks is not None:
        kept, left = _survivors(ranks, n, K, R, M, KT)
        index = (1 << LOW) - 1 - (kept & ((1 << LOW) - 1))
        measure, square = _measure(q_row, keys, index, kept > -(2**31), d, DISTANCE, R, M, FINE)
        none = lane.to(tl.int64)[None, :] + (9223372036854775807 - M)  # after all keys, also NaN, and all different
        best = tl.where(kept > -(2**31), _packed(measure, index), none)
        if M <= 32:  # rank the kept keys
            rank = tl.sum((best[:, None, :] < best[:, :, None]).to(tl.int32), 2)
        else:
            best = _least(best, None, K, R, M)
        largest = tl.zeros((R,), tl.float32)
        for start in range(0, blocks, 16):
            at = start + tl.arange(0, 16)
            some = tl.load(most[:, None] + at[None, :], mask=(at < blocks)[None, :], other=0.0)
            largest = tl.maximum(largest, tl.max(some, 1))
        worst = _float(((left >> LOW) + 1) << LOW)  # rounded up
        kth = tl.sum(tl.where(rank == K - 1, best, 0), 1)
        kth = _float((kth >> 32).to(tl.int32))
        # an upper bound for every dropped key: its rough score and the error of the products, whose factors are two
        # numbers of bfloat16 each: three terms of at most 2^-16
        grain = (d + 16 + 96) * 2.0**-21
        reach = tl.sqrt(square.to(tl.float32) * largest)
        error = tl.abs(kth) * 2.0**-21
        if DISTANCE:
            safe = (square - kth).to(tl.float32) > worst + error + grain * (2.0 * reach + largest)
        else:
            safe = -kth > worst + error + grain * reach
        whole = tl.min(safe.to(tl.int32), 0) == 0
    if whole:
        best, rank = last, tl.zeros((R, M), tl.int32) + lane[None, :]
        for start in range(0, n, M):
            index = tl.zeros((R, M), tl.int32) + (start + lane)[None, :]
            measure = _measure(q_row, keys, index, index < n, d, DISTANCE, R, M, FINE)[0]
            packed = tl.where(index < n, _packed(measure, index), 9223372036854775807)
            best = _least(best, packed, K, R, M)
    if M <= 32:
        best = tl.sum(tl.where(rank[:, :, None] == lane[None, None, :], best[:, :, None], 0), 1)
    return best


@triton.jit(do_not_specialize=LENGTHS)
def _choose(
    query, sub_keys, ranks, most, halves, scores, slots, weights, rows, length, n, d, blocks,
    stride_b, stride_t, stride_h, stride_m, eps,
    H: tl.constexpr, K: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, DISTANCE: tl.constexpr, R: tl.constexpr,
    KT: tl.constexpr, FINE: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Find the best sub-keys of one token's halves, and its slots."""
    SETS: tl.constexpr = 2 * H
    row, memory = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = memory * rows + row
    q_row = query + (memory + row // length) * stride_b + (row % length) * stride_t
    lane = tl.arange(0, M)
    for first in range(0, SETS, R):
        member = tl.minimum(first + tl.arange(0, R), SETS - 1)  # rows past the end repeat the last one
        line, set_ = token * SETS + member, memory * SETS + member
        keys = sub_keys + memory * stride_m + member.to(tl.int64) * n * d
        set_ranks, largest = None, None
        if ranks is not None:
            set_ranks, largest = ranks + line * n, most + set_ * blocks
        best = _selected(
            q_row + (member // 2) * stride_h + (member % 2) * d, keys, set_ranks, largest, n, d,
            blocks, K, M, LOW, DISTANCE, R, KT, FINE,
        )  # fmt: skip
        measure = _float((best >> 32).to(tl.int32))
        score = -measure
        if DISTANCE:
            score = -tl.log(eps + measure)
        to = line[:, None] * K + lane[None, :]
        tl.store(halves + to, best & 0xFFFFFFFF, mask=(lane < K)[None, :])
        tl.store(scores + to, score, mask=(lane < K)[None, :])
    if slots is not None:
        tl.debug_barrier()  # other threads of the program read what was stored
        _join(scores, halves, slots, weights, token, n, H, K, HP, KP)


@triton.jit
def _join(
    scores, halves, slots, weights, token, n, H: tl.constexpr, K: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Find the slots of one token among pairs with (a + 1)(b + 1) <= k of sorted halves, and their weights."""
    head, pair, lane = tl.arange(0, HP), tl.arange(0, KP * KP), tl.arange(0, KP)
    a, b = pair // KP, pair % KP
    may = (head < H)[:, None] & ((a + 1) * (b + 1) <= K)[None, :]
    first = ((token * H + head) * 2 * K)[:, None] + a[None, :]
    second = ((token * H + head) * 2 * K + K)[:, None] + b[None, :]
    total = tl.load(scores + first, mask=may, other=0.0) + tl.load(scores + second, mask=may, other=0.0)
    slot = tl.load(halves + first, mask=may, other=0) * n + tl.load(halves + second, mask=may, other=0)
    low: tl.constexpr = 0x7FFFFFFF
    packed = (_ordered(total).to(tl.int64) << 32) | (low - slot)
    none: tl.constexpr = -9223372036854775808
    packed = tl.where(may, packed, none)
    best = tl.full((HP, KP), none, tl.int64)
    for j in range(K):
        top = tl.max(packed, 1)
        best = tl.where(lane[None, :] == j, top[:, None], best)
        packed = tl.where(packed == top[:, None], none, packed)
    inside = (head < H)[:, None] & (lane < K)[None, :]
    score = tl.where(inside, _float((best >> 32).to(tl.int32)), -float("inf"))
    score = tl.exp(score - tl.max(tl.max(score, 1), 0))
    weight = score / tl.sum(tl.sum(score, 1), 0)
    to = ((token * H + head) * K)[:, None] + lane[None, :]
    tl.store(slots + to, low - (best & low), mask=inside)
    tl.store(weights + to, weight, mask=inside)


@triton.jit
def flags_set(flags, count):
    """Return how many of `count` bytes are 1."""
    total = 0
    for start in range(0, count, 1024):
        at = start + tl.arange(0, 1024)
        total += tl.sum(tl.load(flags + at, mask=at < count, other=0).to(tl.int32), 0)
    return total


def bytes_of(flags: Tensor | None) -> Tensor | None:
    """View booleans as bytes, contiguous, which kernels can read and write."""
    return None if flags is None else flags.contiguous().view(torch.uint8)


@torch.compiler.disable
def best_halves(
    query: Tensor, keys: Tensor, k: int, eps: float, *, distance: bool, joined: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the k best sub-keys of each half: scores float32 [B, T, H, 2, k], best first, and their indices, int64. If
    `joined`, also the k best of all n^2 sums of scores, int64 [B, T, H, k], best first and the lowest of equals first,
    and their weights, one softmax over all heads, float32; else None. `query` is float32 [B, T, H, Dk], `keys` float32
    [M, H, 2, n, Dk/2], M = B or 1 for all. Scores are -log(eps + |q - K|^2) of a distance, else q.K.

    Cost: 2 B T H n Dk multiplications, k float64 differences a row and key kept, and 2 B T H n int32 numbers that are
    held until the keys are chosen; two launches, or one for few keys."""
    (batch, tokens, heads, width), (memories, n) = query.shape, (keys.shape[0], keys.shape[3])
    query, keys = rows_together(query), keys if keys[:1].is_contiguous() else keys.contiguous()
    halves = torch.empty(batch, tokens, heads, 2, k, dtype=torch.int64, device=query.device)
    scores = torch.empty(halves.shape, dtype=torch.float32, device=query.device)
    slots = torch.empty(batch, tokens, heads, k, dtype=torch.int64, device=query.device) if joined else None
    weights = torch.empty(slots.shape, dtype=torch.float32, device=query.device) if slots is not None else None
    rows, sets, d = batch * tokens // max(1, memories), heads * 2, width // 2
    kept, low = max(16, power_of_two(k + 4)), max(1, (n - 1).bit_length())
    steps = (*query.stride()[:3], keys.stride(0) if memories > 1 else 0)
    most = ranks = None
    blocks = 0
    if n > kept:
        tiles = ROUGH.pick(d, query.dtype)
        blocks = -(-n // tiles.keys)
        ranks = torch.empty(batch * tokens * sets, n, dtype=torch.int32, device=query.device)
        most = torch.empty(memories * sets, blocks, dtype=torch.float32, device=query.device)
        launch(
            _rough, (blocks, -(-rows // tiles.rows), memories * sets), query, keys, ranks, most, rows, tokens, n,
            d, *steps, tiles=tiles, SETS=sets, LOW=low, DISTANCE=distance, R=tiles.rows, KT=tiles.keys, DT=32,
        )  # fmt: skip
    hp, kp = power_of_two(heads), power_of_two(k)

    def run(tiles: Tiles) -> None:
        r = min(tiles.rows, 2 * hp)
        warps = max(min(tiles.warps, r), 4 if hp * kp * kp > 256 else 1)
        launch(
            _choose, (rows, memories), query, keys, ranks, most, halves, scores, slots, weights, rows, tokens, n, d,
            blocks, *steps, eps, tiles=replace(tiles, warps=warps), H=heads, K=k, M=kept, LOW=low, DISTANCE=distance,
            R=r, KT=tiles.keys if k <= 8 else 2 * tiles.keys,
            FINE=max(4, min(power_of_two(d), GAPS * warps // (r * kept))), HP=hp, KP=kp,
        )  # fmt: skip

    run(TABLE.pick(d, query.dtype, run))
    return scores, halves, slots, weights


@triton.jit(do_not_specialize=("n",))
def _scores(
    upstream, weights, slots, halves, scores, by_scores, n,
    H: tl.constexpr, TOP: tl.constexpr, KP: tl.constexpr, TP: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Compute `through_weights` for one token."""
    first = tl.program_id(0).to(tl.int64) * H * TOP
    every = tl.arange(0, KP)
    weight = tl.load(weights + first + every, mask=every < H * TOP, other=0.0)
    mean = tl.sum(weight * tl.load(upstream + first + every, mask=every < H * TOP, other=0.0), 0)
    entry = tl.arange(0, TP)
    inside = entry < TOP
    for head in range(H):
        at = first + head * TOP + entry
        weight = tl.load(weights + at, mask=inside, other=0.0)
        u = weight * (tl.load(upstream + at, mask=inside, other=0.0) - mean)
        slot = tl.load(slots + at, mask=inside, other=0)
        for half in tl.static_range(2):
            place = slot // n if half == 0 else slot % n
            to = 2 * (at - entry) + half * TOP + entry
            met = tl.load(halves + to, mask=inside, other=-1)[:, None] == place[None, :]
            sums = tl.sum(tl.where(met, u[None, :], 0.0), 1)
            if DISTANCE:
                sums = -sums * tl.exp(tl.load(scores + to, mask=inside, other=0.0))
            tl.store(by_scores + to, sums, mask=inside)


@torch.compiler.disable
def through_weights(
    upstream: Tensor, weights: Tensor, slots: Tensor, halves: Tensor, scores: Tensor, n: int, distance: bool
) -> Tensor:
    """Return the gradient [B, T, H, 2, k] of the products of sub-keys and queries, or of squared distances, whose
    `scores` are -log, from the gradient of softmax weights [B, T, H, k] of the slots that n x n sub-keys give."""
    (batch, length, heads, k), by_scores = weights.shape, torch.empty_like(scores)
    launch(
        _scores, (batch * length,), upstream.contiguous(), weights, slots, halves, scores, by_scores, n,
        tiles=Tiles(warps=1, stages=1), H=heads, TOP=k, KP=power_of_two(heads * k), TP=power_of_two(k),
        DISTANCE=distance,
    )  # fmt: skip
    return by_scores
