"""Steps of sub-keys that increase the entropy of their use (equation 38 of the fast-weight product-key-memory paper
with its sign corrected), and sums of queries by sub-key. Nothing is atomic: a program finds the entries of its keys.

With p the softmax of a half's k scores s, p- its mean over the C counted tokens at each key, slope = log(p- + F) +
p- / (p- + F) and a_tj the slope at the key of entry (t, j), the gradient of sum p- log(p- + F) by a score is

    u_tj = p_tj (a_tj - sum_l p_tl a_tl) / C

and by a key 2 (K sum c - sum c q), c = -u exp(s), for s = -log(eps + |q - K|^2), and sum u q for products.

Legend: M memories, G = M * H * 2 sets of n sub-keys, P tokens of a memory, k entries of a token, d width of a half.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.fast_weight_rules import FLOOR
from ..runtime.blocks import LENGTHS, store_numbers
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, TileTable, power_of_two
from .search import bytes_of, flags_set

MARGINAL = TileTable("memory_marginal", {(1 << 20, 4): Tiles(rows=2048, keys=8)})
KEYS = TileTable("memory_keys", {(1 << 20, 4): Tiles(rows=64, keys=16, warps=4, stages=1)})
"""`rows`: entries, `keys`: sub-keys of a block."""
_FLOOR = tl.constexpr(FLOOR)


@triton.jit
def _softmax(s, among):
    """Return the softmax over the first axis, a token's entries; with a long second axis, sums stay in a thread."""
    s = tl.where(among, s, -float("inf"))
    e = tl.exp(s - tl.max(s, 0)[None, :])
    return e / tl.sum(e, 0)[None, :]


@triton.jit
def _counts(counted, memory, tokens):
    """Return C, at least 1."""
    number = tokens if counted is None else flags_set(counted + memory * tokens, tokens)
    return tl.maximum(number, 1).to(tl.float32)


@triton.jit
def _indices(halves, counted, memory, member, start, tokens, SETS: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """Load the sub-keys of R entries of a set; those of no counted token are 2^31 - 1."""
    at = start + tl.arange(0, R)
    fits = at < tokens * K
    part = ((memory * tokens + at // K) * SETS + member) * K + at % K
    index = tl.load(halves + part, mask=fits, other=0x7FFFFFFF).to(tl.int32)
    if counted is not None:
        index = tl.where(tl.load(counted + memory * tokens + at // K, mask=fits, other=0) != 0, index, 0x7FFFFFFF)
    return index


@triton.jit
def _load(
    halves, scores, entries, memory, member, start, end, tokens,
    SETS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Load R entries of a group: token, own sub-key (-1 beyond the end), whether each of the token's entries is this
    one, where they lie and whether they are there [KP, R], and their scores."""
    at, column = start + tl.arange(0, R), tl.arange(0, KP)[:, None]
    there = at < end
    entry = tl.load(entries + (memory * SETS + member) * tokens * K + at, mask=there, other=0)
    token = memory * tokens + entry // K
    first = (token * SETS + member) * K
    index = tl.load(halves + first + entry % K, mask=there, other=-1).to(tl.int32)
    part, fits = first[None, :] + column, there[None, :] & (column < K)
    return token, index, column == (entry % K)[None, :], part, fits, tl.load(scores + part, mask=fits, other=0.0)


@triton.jit
def find_use(
    program, counted, scores, halves, out, slope, entries, bounds, tokens, n,
    SETS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RAW: tl.constexpr, R: tl.constexpr, KT: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Compute `Use` for a block of sub-keys of one set."""
    blocks = tl.cdiv(n, KT)
    set_, block = (program // blocks).to(tl.int64), program % blocks
    memory, member, low = set_ // SETS, set_ % SETS, block * KT
    begin = 0
    for start in range(0, tokens * K, R):
        index = _indices(halves, counted, memory, member, start, tokens, SETS, K, R)
        begin += tl.sum((index < low).to(tl.int32), 0)
    end = begin
    for start in range(0, tokens * K, R):
        index = _indices(halves, counted, memory, member, start, tokens, SETS, K, R)
        mine = (index >= low) & (index < low + KT)
        to = set_ * tokens * K + end + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(entries + to, start + tl.arange(0, R), mask=mine)
        end += tl.sum(mine.to(tl.int32), 0)
    store_numbers(bounds, set_ * blocks + block, (begin, end), None)
    tl.debug_barrier()  # other threads of the program read what was stored
    sub_key = low + tl.arange(0, KT)
    total = tl.zeros((KT,), tl.float32)
    for start in range(begin, end, E):
        _, index, mine, _, fits, p = _load(halves, scores, entries, memory, member, start, end, tokens, SETS, K, KP, E)
        if not RAW:
            p = _softmax(p, (tl.arange(0, KP) < K)[:, None])
        p = tl.sum(tl.where(mine & fits, p, 0.0), 0)
        total += tl.sum(tl.where(index[None, :] == sub_key[:, None], p[None, :], 0.0), 1)
    to = set_ * n + sub_key
    if RAW:
        tl.store(out + to, total, mask=sub_key < n)
    else:
        mean = total / _counts(counted, memory, tokens)
        tl.store(out + to, mean, mask=sub_key < n)
        tl.store(slope + to, tl.log(mean + _FLOOR) + mean / (mean + _FLOOR), mask=sub_key < n)


@triton.jit(do_not_specialize=LENGTHS)
def _moved(
    sub_keys, query, scores, halves, counted, slope, entries, bounds, out, tokens, n, rate, blocks,
    stride_m, stride_q, stride_t, stride_h, length,
    D: tl.constexpr, SETS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, DISTANCE: tl.constexpr, R: tl.constexpr,
    KT: tl.constexpr, GROUPS: tl.constexpr, DT: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Compute `moved_keys` for a block of sub-keys of one set, GROUPS groups."""
    set_ = tl.program_id(2).to(tl.int64)
    memory, member = set_ // SETS, set_ % SETS
    sub_key = tl.program_id(0) * KT + tl.arange(0, KT)
    column = tl.program_id(1) * DT + tl.arange(0, DT)
    query += memory * stride_q + (member // 2) * stride_h + (member % 2) * D
    group = set_ * blocks + tl.program_id(0) * GROUPS
    begin, end = tl.load(bounds + 2 * group), tl.load(bounds + 2 * min(group + GROUPS, (set_ + 1) * blocks) - 1)
    pulled, weight = tl.zeros((KT, DT), tl.float32), tl.zeros((KT,), tl.float32)
    for start in range(begin, end, R):
        token, index, mine, part, fits, c = _load(
            halves, scores, entries, memory, member, start, end, tokens, SETS, K, KP, R
        )
        if slope is not None:
            s, p = c, _softmax(c, (tl.arange(0, KP) < K)[:, None])
            a = tl.load(slope + set_ * n + tl.load(halves + part, mask=fits, other=0), mask=fits, other=0.0)
            c = p * (a - tl.sum(p * a, 0)[None, :])
            if DISTANCE:
                c = -c * tl.exp(s)
        c = tl.sum(tl.where(mine & fits, c, 0.0), 0)
        spread = tl.where(index[None, :] == sub_key[:, None], c[None, :], 0.0)
        inside = (index >= 0)[:, None] & (column < D)[None, :]
        row = (token - memory * tokens).to(tl.int32)
        from_ = query + row * stride_t
        if not SINGLE:
            from_ = query + (row // length) * stride_q + (row % length) * stride_t
        q = tl.load(from_[:, None] + column[None, :], mask=inside, other=0.0)
        pulled = tl.dot(spread, q, pulled, input_precision="tf32x3")
        weight += tl.sum(spread, 1)
    fits = (sub_key < n)[:, None] & (column < D)[None, :]
    at = sub_keys + memory * stride_m + (member * n + sub_key)[:, None] * D + column[None, :]
    key = tl.load(at, mask=fits, other=0.0)
    gradient = pulled
    if DISTANCE:
        gradient = 2.0 * (key * weight[:, None] - pulled)
    if slope is not None:
        gradient = key - gradient * (rate / _counts(counted, memory, tokens))
    tl.store(out + (set_ * n + sub_key)[:, None] * D + column[None, :], gradient, mask=fits)


@torch.compiler.disable
def moved_keys(
    keys: Tensor, query: Tensor, scores: Tensor, halves: Tensor, counted: Tensor | None, slope: Tensor | None,
    groups: tuple[Tensor, Tensor], rate: float, *, distance: bool,
) -> Tensor:  # fmt: skip
    """Return sub-keys float32 [M, H, 2, n, d] after a step that increases the entropy, keys - rate * gradient. Without
    a slope (of `Use`) `scores` are coefficients c; return 2 (K sum c - sum c q), or sum c q of products. One
    launch. `query` is float32 [B, T, H, 2 d]; `counted` bool [M, P] or None for all."""
    (batch, length), (memories, heads, _, n, width) = query.shape[:2], keys.shape
    tokens, sets, k, (entries, bounds) = batch * length // max(1, memories), heads * 2, halves.shape[-1], groups
    query, keys = rows_together(query), keys if keys[:1].is_contiguous() else keys.contiguous()
    out = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    tiles, kp = KEYS.pick(width, keys.dtype), power_of_two(k)
    size, dt = MARGINAL.pick(n, torch.float32).keys, max(16, min(128, power_of_two(width)))
    kt = max(size, tiles.keys)
    launch(
        _moved, (-(-n // kt), -(-width // dt), memories * sets), keys, query, scores.contiguous(),
        halves.contiguous(), bytes_of(counted), slope, entries, bounds, out, tokens, n, rate, bounds.shape[1],
        keys.stride(0) if memories > 1 else 0, *query.stride()[:3], length,
        tiles=tiles, D=width, SETS=sets, K=k, KP=kp, DISTANCE=distance, R=max(16, min(tiles.rows, 1024 // kp)),
        KT=kt, GROUPS=kt // size, DT=dt, SINGLE=tokens == length,
    )  # fmt: skip
    return out
