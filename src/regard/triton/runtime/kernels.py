"""The kernels of `span` and `finite`."""

import triton
import triton.language as tl

LIMIT = tl.constexpr((127 + 56) << 23)  # the bits of 2^56 in float32, the limit of `precision.clean`
NUMBERS = [f"{name}_{i}" for name in ("programs", "heads", "length") for i in range(3)]
"""Parameters that `clean_kernel` is not specialised for."""


@triton.jit
def _ends(row, runs, batch, offset, keys, window, CAUSAL: tl.constexpr, STRICT: tl.constexpr, WINDOW: tl.constexpr,
          RUNS: tl.constexpr):  # fmt: skip
    """Return the keys [low, high) of queries `row`, as `Visibility.bounds`. RUNS: 1 if shared by sequences, else 2."""
    at = row.to(tl.int64) + offset
    low = at * 0
    high = low + keys
    if CAUSAL:
        high = at if STRICT else at + 1
        if WINDOW:
            low = high - window
    elif WINDOW:
        low = at - window + 1
        high = at + window
    if RUNS:
        key = tl.minimum(tl.maximum(at, 0), keys - 1)
        if RUNS == 2:
            key += batch.to(tl.int64) * keys
        there = key >= 0  # there may be no keys
        low = tl.maximum(low, tl.load(runs[0] + key, mask=there, other=0))
        high = tl.minimum(high, tl.load(runs[1] + key, mask=there, other=0))
    low, high = tl.minimum(tl.maximum(low, 0), keys), tl.minimum(tl.maximum(high, 0), keys)
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit(do_not_specialize=["shift", "queries", "keys", "window"])
def spans_kernel(
    spans, runs, offsets, shift, queries, keys, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    STRICT: tl.constexpr, WINDOW: tl.constexpr, OFFSETS: tl.constexpr, RUNS: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Store the ranges of BLOCK queries and of BLOCK keys of one sequence. The first query whose range ends, or begins,
    after a key is found by bisection, since ends do not decrease."""
    batch = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.cast(shift, tl.int64)
    if OFFSETS:
        offset = tl.load(offsets + batch)
    low, high = _ends(at, runs, batch, offset, keys, window, CAUSAL, STRICT, WINDOW, RUNS)
    of_queries, of_keys = tl.cast(batch, tl.int64) * queries + at, tl.cast(batch, tl.int64) * keys + at
    tl.store(spans[0] + of_queries, low, mask=at < queries)
    tl.store(spans[1] + of_queries, high, mask=at < queries)
    if BY_KEYS:
        first, last = at * 0, at * 0  # how many queries are known to end, and to begin, at the key or before
        first_end, last_end = first + queries, last + queries
        left = queries
        while left > 0:
            middle = (first + first_end) // 2
            _, high = _ends(middle, runs, batch, offset, keys, window, CAUSAL, STRICT, WINDOW, RUNS)
            before, open_ = high <= at, first < first_end
            first, first_end = tl.where(open_ & before, middle + 1, first), tl.where(open_ & ~before, middle, first_end)
            middle = (last + last_end) // 2
            low, _ = _ends(middle, runs, batch, offset, keys, window, CAUSAL, STRICT, WINDOW, RUNS)
            before, open_ = low <= at, last < last_end
            last, last_end = tl.where(open_ & before, middle + 1, last), tl.where(open_ & ~before, middle, last_end)
            left = left // 2
        tl.store(spans[2] + of_keys, first, mask=at < keys)
        tl.store(spans[3] + of_keys, tl.maximum(first, last), mask=at < keys)


@triton.jit(do_not_specialize=["many", "group", "keys", "room", "mask_batch", "mask_head"])
def seen_before_kernel(
    key_bad, value_bad, mask, before, many, group, keys, room, mask_batch, mask_head, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store how many keys that may be seen are bad up to each key of one head, and if MASKED how many there are."""
    program = tl.program_id(0)
    batch, head = tl.cast(program // many, tl.int64), program % many
    first, to = (batch * (many // group) + head // group) * keys, tl.cast(program, tl.int64) * keys
    bad_before, before_here = 0, 0
    for start in range(0, keys, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = at < keys
        bad = tl.load(key_bad + first + at, mask=there, other=0) | tl.load(value_bad + first + at, mask=there, other=0)
        bad = (bad != 0).to(tl.int32)
        if MASKED:
            shown = tl.load(mask + batch * mask_batch + head * mask_head + at, mask=there, other=0).to(tl.int32)
            bad = bad * shown
            tl.store(before + room + to + at, before_here + tl.cumsum(shown, 0), mask=there)
            before_here += tl.sum(shown, 0)
        tl.store(before + to + at, bad_before + tl.cumsum(bad, 0), mask=there)
        bad_before += tl.sum(bad, 0)


@triton.jit
def _within(before, low, high, held):
    """Return how many are counted in [low, high), from running totals."""
    upto = tl.load(before + high - 1, mask=held & (high > 0), other=0)
    return upto - tl.load(before + low - 1, mask=held & (low > 0), other=0)


@triton.jit(do_not_specialize=["heads", "group", "queries", "keys", "room", "range_step"])
def seen_rows_kernel(
    query_bad, before, low, high, seen, heads, group, queries, keys, room, range_step, BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Store which of BLOCK rows of one head see a bad key, or are bad and see any."""
    program = tl.program_id(1)
    batch = tl.cast(program // heads, tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = row < queries
    low = tl.load(low + batch * range_step + row, mask=held, other=0)
    high = tl.maximum(tl.load(high + batch * range_step + row, mask=held, other=0), low)
    totals = before + tl.cast(program // group, tl.int64) * keys
    if MASKED:  # noqa: SIM108 - decided when the kernel is compiled
        some = _within(totals + room, low, high, held) > 0
    else:
        some = high > low
    at = tl.cast(program, tl.int64) * queries + row
    bad = some & (tl.load(query_bad + at, mask=held, other=0) != 0)
    tl.store(seen + at, (bad | (_within(totals, low, high, held) > 0)).to(tl.int8), mask=held)


@triton.jit
def non_finite(x):
    """Return which vectors [N, WIDTH] hold a number that is non-finite or beyond 2^56, from the bits without sign."""
    return tl.max(x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) > LIMIT


@triton.jit(do_not_specialize=NUMBERS)
def clean_kernel(
    matrices, programs_0, programs_1, programs_2, heads_0, heads_1, heads_2, length_0, length_1, length_2,
    DIMS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Clean one block of vectors of one head of one of COUNT tensors, by the third axis of the grid: x [B, H, T, D],
    contiguous along D, into contiguous cleaned and bad. With BACKWARD, `bad` says which vectors are zero."""
    programs_of, heads_of = (programs_0, programs_1, programs_2), (heads_0, heads_1, heads_2)
    lengths, at = (length_0, length_1, length_2), tl.program_id(1)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    for i in tl.static_range(COUNT):
        if tl.program_id(2) == i:
            x, cleaned, bad, stride_b, stride_h, stride_t = matrices[i]
            heads, length = heads_of[i], lengths[i]
            there = rows < tl.where(at < programs_of[i], length, 0)
            inside = there[:, None] & (columns < DIMS[i])[None, :]
            x += tl.cast(at // heads, tl.int64) * stride_b + tl.cast(at % heads, tl.int64) * stride_h
            values = tl.load(x + rows[:, None].to(tl.int64) * stride_t + columns[None, :], mask=inside, other=0.0)
            to = tl.cast(at, tl.int64) * length + rows
            if BACKWARD:
                lost = tl.load(bad + to, mask=there, other=0) != 0
            else:
                lost = non_finite(values)
                tl.store(bad + to, lost.to(tl.int8), mask=there)
            values = tl.where(lost[:, None], 0.0, values)
            tl.store(cleaned + to[:, None] * DIMS[i] + columns[None, :], values, mask=inside)
