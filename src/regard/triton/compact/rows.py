"""What the forward kernels of compact attention do alike: which rows a program serves, which key blocks these see, the
scores of a block, and what is kept of rows.

Legend: R = FORM.rows queries of a program, K = FORM.keys keys of a block; q, k, v: of a program the rows of its queries
[R, D], and where the keys (values) of its head lie, the step from one to the next, and how many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..runtime.blocks import load, places_of, seen


class Form(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        rule, r, stand: as `compact.forward` takes them.
        dim, wide, value_dim, value_wide: D and Dv, each with the power of two that holds it.
        factors, given, masked: whether rows have a factor and a number of their own, and whether a mask hides keys.
        keep, counted: whether a backward pass follows, and whether weights are counted.
        rows, keys, granule: of a program, of a block, and the rows that share a mark.
        far: whether a block of keys reaches over 2^31 numbers.
    """

    rule: int
    r: int
    stand: int
    dim: int
    wide: int
    value_dim: int
    value_wide: int
    factors: bool
    given: bool
    masked: bool
    keep: bool
    counted: bool
    rows: int = 0
    keys: int = 0
    granule: int = 0
    far: bool = False


def padded(dim: int) -> tuple[int, int]:
    """A number of columns, and the power of two that holds them in a kernel."""
    return dim, max(16, 1 << (dim - 1).bit_length())


# Rows -----------------------------------------------------------------------------------------------------------


@triton.jit
def place_of(queries, heads, FORM: tl.constexpr):
    """Of a program: (its head among those of all batches, its block of rows, the batch, the head within it). The last
    rows begin first: where order is causal, they see most."""
    row_blocks = tl.cdiv(queries, FORM.rows)
    head = tl.program_id(0) // row_blocks
    row_block = row_blocks - 1 - tl.program_id(0) % row_blocks
    return head, row_block, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def own_rows(place, queries, FORM: tl.constexpr):
    """(numbers of the rows, which of them there are, their numbers among those of all heads): rows beyond the last
    repeat it, and are not stored."""
    row = place[1] * FORM.rows + tl.arange(0, FORM.rows)
    rows = tl.minimum(row, queries - 1)
    return rows, row < queries, place[0].to(tl.int64) * queries + rows


@triton.jit
def sight_of(low_ptr, high_ptr, mask_ptr, place, rows, range_batch, mask_batch, mask_head):
    """What rows see: (their first key, the end of their keys, both [R], the mask of the head)."""
    _, _, batch, own = place
    low = tl.load(low_ptr + batch * range_batch + rows)
    high = tl.load(high_ptr + batch * range_batch + rows)
    return low, high, mask_ptr + batch * mask_batch + own * mask_head


@triton.jit
def row_number(ptr, flat, number, GIVEN: tl.constexpr, FORM: tl.constexpr):
    """What rows number `flat` [R] were given, or the number of all."""
    return tl.load(ptr + flat) if GIVEN else tl.full((FORM.rows,), 1.0, tl.float32) * number


@triton.jit
def factors(ptr, flat, scale, FORM: tl.constexpr):
    """(what `key_scores` multiplies with, what makes scores of that), [R]. A number is left for later, since it is > 0:
    the best score is that of the largest q.k."""
    given = row_number(ptr, flat, scale, FORM.factors, FORM)
    return given, tl.full((FORM.rows,), 1.0, tl.float32) if FORM.factors else given


@triton.jit
def store_row(floats_ptr, flags_ptr, flat, real, top, theta, reach, mass, support, ess, empty, fallback):
    """The statistics of rows, as `block_rows` has them, with status 0."""
    tl.store(floats_ptr + flat * 6, top, mask=real)
    tl.store(floats_ptr + flat * 6 + 1, theta, mask=real)
    tl.store(floats_ptr + flat * 6 + 2, reach, mask=real)
    tl.store(floats_ptr + flat * 6 + 3, mass, mask=real)
    tl.store(floats_ptr + flat * 6 + 4, support, mask=real)
    tl.store(floats_ptr + flat * 6 + 5, ess, mask=real)
    tl.store(flags_ptr + flat * 3, empty.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 1, fallback.to(tl.int32), mask=real)
    tl.store(flags_ptr + flat * 3 + 2, tl.zeros_like(empty.to(tl.int32)), mask=real)


@triton.jit
def store_values(ptr, flat, x, stored, FORM: tl.constexpr):
    """x [R, Dv] into rows number `flat` of what is laid out like the output, where they are `stored`."""
    columns = tl.arange(0, FORM.value_wide)
    place = flat[:, None] * FORM.value_dim + columns[None, :]
    tl.store(ptr + place, x.to(ptr.dtype.element_ty), mask=stored[:, None] & (columns < FORM.value_dim)[None, :])


# Key blocks -----------------------------------------------------------------------------------------------------


@triton.jit
def key_blocks(sight, FORM: tl.constexpr):
    """(first, full, partial, last): key blocks [first, last) hold all that any of the rows sees; all rows see all of
    blocks [full, partial), none where a mask hides keys."""
    low, high, _ = sight
    first = tl.min(low, 0) // FORM.keys
    last = tl.maximum(tl.cdiv(tl.max(high, 0), FORM.keys), first)
    full = last
    partial = last
    if not FORM.masked:
        full = tl.minimum(tl.cdiv(tl.max(low, 0), FORM.keys), last)
        partial = tl.maximum(tl.min(high, 0) // FORM.keys, full)
    return first, full, partial, last


@triton.jit
def count_of(run, EDGE: tl.constexpr):
    """How many blocks of a run [first, full, partial, last) need masks, where EDGE, or how many do not."""
    first, full, partial, last = run
    return full - first + last - partial if EDGE else partial - full


@triton.jit
def block_of(run, t, EDGE: tl.constexpr):
    """The t-th of these from the last: those near the diagonal hold high scores, and the sooner they are seen, the
    fewer blocks look near enough to the best. At the EDGE [first, full) follow [partial, last), in their order."""
    first, _, partial, last = run
    if EDGE:
        return tl.where(t < last - partial, last - 1 - t, first + t - (last - partial))
    else:
        return partial - 1 - t


@triton.jit
def load_keys(of, block, DIM: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr, FORM: tl.constexpr):
    """A key block of k or v, [K, WIDTH]."""
    at, stride, keys = of
    first = block * FORM.keys
    held = tl.arange(0, FORM.keys) < keys - first
    return load(places_of(at, first, stride, FORM.keys, WIDTH, FORM.far), held, DIM, WIDTH, EDGE)


@triton.jit
def load_values(v, block, EDGE: tl.constexpr, FORM: tl.constexpr):
    """The values of a key block, [K, Dv]."""
    return load_keys(v, block, FORM.value_dim, FORM.value_wide, EDGE, FORM)


@triton.jit
def key_scores(q, k, block, factor, sight, EDGE: tl.constexpr, FORM: tl.constexpr):
    """(q.k of a key block [R, K], times `factor` [R], of any sign, where rows have their own, and at an EDGE -inf where
    a row does not see the key; the numbers of the keys)."""
    dot = tl.dot(q, tl.trans(load_keys(k, block, FORM.dim, FORM.wide, EDGE, FORM)), input_precision="ieee")
    columns = block * FORM.keys + tl.arange(0, FORM.keys)
    if FORM.factors:
        dot = dot * factor[:, None]
    if EDGE:
        dot = tl.where(seen(columns, sight[0], sight[1], sight[2], k[2], FORM.masked), dot, -float("inf"))
    return dot, columns


@triton.jit
def marks_of(marks_ptr, place, queries, keys, FORM: tl.constexpr):
    """Where the first mark of a program lies; one of a row for each key block, granules of rows below one another."""
    line = place[0].to(tl.int64) * tl.cdiv(queries, FORM.granule) + place[1] * (FORM.rows // FORM.granule)
    return marks_ptr + line * tl.cdiv(keys, FORM.keys)


@triton.jit
def row_marks(marks_at, keys, FORM: tl.constexpr):
    """Where those of each row [R] begin."""
    granule = tl.arange(0, FORM.rows) // FORM.granule
    return marks_at + granule.to(tl.int64) * tl.cdiv(keys, FORM.keys)


@triton.jit
def applied(acc, w, x):
    """(acc + w x [R, Dv], sums [R] of the weights, these [R, K]): both of them as they are rounded for the product, so
    that an output's sum to one."""
    p = w.to(x.dtype)
    w = p.to(tl.float32)
    return tl.dot(p, x, acc, input_precision="ieee"), tl.sum(w, 1), w


@triton.jit
def counted(counts, w):
    """(how many weights are not 0, sum of their squares), with those of a block [R, K]."""
    support, square = counts
    return support + tl.sum(tl.where(w > 0, 1.0, 0.0), 1), square + tl.sum(w * w, 1)
