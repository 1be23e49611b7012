"""Steps of sub-keys that increase the entropy of their use (equation 38 of the fast-weight product-key-memory paper
with its sign corrected), and sums of queries by sub-key, without atomic operations: every program reads all tokens for
its own keys.

With p the softmax of a half's k scores s, p- its mean over the C counted tokens at each key, slope = log(p- + F) +
p- / (p- + F) and a_tj the slope at the key of entry (t, j), the gradient of sum p- log(p- + F) by a score is

    u_tj = p_tj (a_tj - sum_l p_tl a_tl) / C

and by a key sum u_tj ds_tj/dK, which is 2 (K sum c - sum c q), c = -u exp(s), for s = -log(eps + |q - K|^2), and
sum u q for products.

Legend: M memories, G = M * H * 2 sets of n sub-keys, P tokens of a memory, k entries of a token, d width of a half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.fast_weight_rules import FLOOR
from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable
from .search import bytes_of, flags_set

MARGINAL = TileTable("memory_marginal", {(1 << 20, 4): Tiles(rows=128, keys=8, warps=4, stages=2)})
KEYS = TileTable("memory_keys", {(1 << 20, 4): Tiles(rows=64, keys=32, warps=8, stages=2)})
"""`rows`: tokens, `keys`: sub-keys of a block."""


@triton.jit
def _softmax(s, among):
    """Return the softmax over the first axis, that of a token's entries. Sums over the first axis stay within a thread
    where the others are long."""
    s = tl.where(among, s, -float("inf"))
    e = tl.exp(s - tl.max(s, 0)[None, :])
    return e / tl.sum(e, 0)[None, :]


@triton.jit
def _counts(counted, tokens):
    """Return C, at least 1."""
    number = tokens if counted is None else flags_set(counted, tokens)
    return tl.maximum(number, 1).to(tl.float32)


@triton.jit(do_not_specialize=LENGTHS)
def _marginal(
    scores, halves, counted, out, slope, tokens, n, floor,
    SETS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RAW: tl.constexpr, R: tl.constexpr, KT: tl.constexpr,
):  # fmt: skip
    """Compute p- and its slope for a block of sub-keys of one set; RAW: the sums of `scores` by key instead."""
    memory, member = tl.program_id(2).to(tl.int64), tl.program_id(1)
    if counted is not None:
        counted += memory * tokens
    own = tl.program_id(0) * KT + tl.arange(0, KT)
    place = tl.arange(0, KP)
    total = tl.zeros((KT,), tl.float32)
    for start in range(0, tokens, R):
        row = start + tl.arange(0, R)
        fits = (place < K)[:, None] & (row < tokens)[None, :]
        part = place[:, None] + ((memory * tokens + row) * SETS + member)[None, :] * K
        p = tl.load(scores + part, mask=fits, other=0.0)
        if not RAW:
            p = _softmax(p, (place < K)[:, None])
        fine = fits
        if counted is not None and not RAW:
            fine = fits & (tl.load(counted + row, mask=row < tokens, other=0) != 0)[None, :]
        index = tl.load(halves + part, mask=fits, other=-1).to(tl.int32)
        index = tl.reshape(tl.where(fine, index, -1), (R * KP,))
        p = tl.reshape(p, (R * KP,))
        total += tl.sum(tl.where(index[None, :] == own[:, None], p[None, :], 0.0), 1)
    to = (memory * SETS + member) * n + own
    if RAW:
        tl.store(out + to, total, mask=own < n)
    else:
        mean = total / _counts(counted, tokens)
        tl.store(out + to, mean, mask=own < n)
        tl.store(slope + to, tl.log(mean + floor) + mean / (mean + floor), mask=own < n)


@triton.jit(do_not_specialize=LENGTHS)
def _moved(
    sub_keys, query, scores, halves, counted, slope, out, tokens, n, rate,
    stride_m, stride_q, stride_t, stride_h, length,
    D: tl.constexpr, SETS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, DISTANCE: tl.constexpr, R: tl.constexpr,
    KT: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """Compute a block of sub-keys of one set: K - rate times the gradient. Without a slope `scores` are
    coefficients c, and the result is 2 (K sum c - sum c q), or sum c q for products."""
    set_ = tl.program_id(2).to(tl.int64)
    memory, member = set_ // SETS, set_ % SETS
    if counted is not None:
        counted += memory * tokens
    own = tl.program_id(0) * KT + tl.arange(0, KT)
    column = tl.program_id(1) * DT + tl.arange(0, DT)
    place = tl.arange(0, KP)
    pulled, weight = tl.zeros((KT, DT), tl.float32), tl.zeros((KT,), tl.float32)
    for start in range(0, tokens, R):
        row = start + tl.arange(0, R)
        token = memory * tokens + row
        fits = (place < K)[:, None] & (row < tokens)[None, :]
        part = place[:, None] + (token * SETS + member)[None, :] * K
        index = tl.load(halves + part, mask=fits, other=-1).to(tl.int32)
        c = tl.load(scores + part, mask=fits, other=0.0)
        if slope is not None:
            s, p = c, _softmax(c, (place < K)[:, None])
            a = tl.load(slope + set_ * n + index, mask=fits, other=0.0)
            c = p * (a - tl.sum(p * a, 0)[None, :])
            if DISTANCE:
                c = tl.where(fits, -c * tl.exp(s), 0.0)
            if counted is not None:
                c = tl.where((tl.load(counted + row, mask=row < tokens, other=0) != 0)[None, :], c, 0.0)
        spread = tl.sum(tl.where(index[:, None, :] == own[None, :, None], c[:, None, :], 0.0), 0)
        inside = (row < tokens)[:, None] & (column < D)[None, :]
        from_ = query + (token // length) * stride_q + (token % length) * stride_t
        from_ += (member // 2) * stride_h + (member % 2) * D
        q = tl.load(from_[:, None] + column[None, :], mask=inside, other=0.0)
        pulled = tl.dot(spread, q, pulled, input_precision="tf32x3")
        weight += tl.sum(spread, 1)
    fits = (own < n)[:, None] & (column < D)[None, :]
    at = sub_keys + memory * stride_m + (member * n + own)[:, None] * D + column[None, :]
    key = tl.load(at, mask=fits, other=0.0)
    gradient = pulled
    if DISTANCE:
        gradient = 2.0 * (key * weight[:, None] - pulled)
    if slope is not None:
        gradient = key - gradient * (rate / _counts(counted, tokens))
    tl.store(out + (set_ * n + own)[:, None] * D + column[None, :], gradient, mask=fits)


@torch.compiler.disable
def marginal_of(
    scores: Tensor, halves: Tensor, counted: Tensor | None, memories: int, n: int, *, raw: bool = False
) -> tuple[Tensor, Tensor]:
    """Return p- and the slope of the entropy's loss, both float32 [M * H * 2, n], from scores float32 and halves int64
    [B, T, H, 2, k]; `counted` bool [M, P], P = B T / M, or None for all. If `raw`, return the sums of `scores` by key
    and an empty slope. One launch."""
    batch, length, heads, _, k = halves.shape
    tokens, sets = batch * length // max(1, memories), heads * 2
    mean = torch.empty(memories * sets, n, dtype=torch.float32, device=halves.device)
    slope = torch.empty((0,) if raw else mean.shape, dtype=torch.float32, device=halves.device)
    tiles, kp = MARGINAL.pick(n, mean.dtype), triton.next_power_of_2(k)
    launch(
        _marginal, (triton.cdiv(n, tiles.keys), sets, memories), scores.contiguous(), halves.contiguous(),
        bytes_of(counted), mean, slope, tokens, n, FLOOR, tiles=tiles, SETS=sets, K=k, KP=kp, RAW=raw,
        R=max(1, tiles.rows * 8 // kp), KT=tiles.keys,
    )  # fmt: skip
    return mean, slope


@torch.compiler.disable
def moved_keys(
    keys: Tensor, query: Tensor, scores: Tensor, halves: Tensor, counted: Tensor | None, slope: Tensor | None,
    rate: float, *, distance: bool,
) -> Tensor:  # fmt: skip
    """Return sub-keys float32 [M, H, 2, n, d] after a step that increases the entropy, keys - rate * gradient. Without
    a slope (of `marginal_of`) `scores` are coefficients c, and 2 (K sum c - sum c q) is returned, or sum c q for
    products. One launch.

    `query` float32 [B, T, H, 2 d]; `scores` float32 and `halves` int64 [B, T, H, 2, k]; `counted` bool [M, P] or None
    for all; `distance`: whether scores are those of distances, else of products."""
    (batch, length), (memories, heads, _, n, width) = query.shape[:2], keys.shape
    tokens, sets, k = batch * length // max(1, memories), heads * 2, halves.shape[-1]
    query, keys = rows_together(query), keys if keys[:1].is_contiguous() else keys.contiguous()
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    tiles, kp = KEYS.pick(width, keys.dtype), triton.next_power_of_2(k)
    dt = max(16, min(64, triton.next_power_of_2(width)))
    launch(
        _moved, (triton.cdiv(n, tiles.keys), triton.cdiv(width, dt), memories * sets), keys, query,
        scores.contiguous(), halves.contiguous(), bytes_of(counted), slope, out, tokens, n, rate,
        keys.stride(0) if memories > 1 else 0, *query.stride()[:3], length,
        tiles=tiles, D=width, SETS=sets, K=k, KP=kp, DISTANCE=distance,
        R=max(16, min(tiles.rows, tiles.rows * 8 // kp)), KT=tiles.keys, DT=dt,
    )  # fmt: skip
    return out
