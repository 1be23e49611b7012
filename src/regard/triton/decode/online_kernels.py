"""Softmax of few queries in one pass over the keys, and its merge: plain attention, and local linear attention with a
given t (Parallax). For any number s of a row, with s_j = k_j . t, the latter is

    o = sum_j p_j v_j + sum_j p_j (s_j - s) v_j - (sum_j p_j (s_j - s)) sum_j p_j v_j.

Legend: as in `compact_kernels`; scores in base 2; S = 2 with a given t, else 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..compact.math import LOG2E
from ..runtime.blocks import LENGTHS, store_numbers
from ..runtime.finite_kernel import non_finite
from .math import (
    add_weighted,
    fine_products,
    guarded,
    load_keys,
    load_values,
    load_vectors,
    opened,
    products,
    seen_keys,
)


@triton.jit(do_not_specialize=LENGTHS)
def online_kernel(
    matrices, factor, span, probe, part, state, heads, group, queries, stride_low, stride_mb, stride_mh, total_rows,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store over a program's tiles part [splits, N, S, DV] = (sum w v, and for t = -probe sum w (s_j - s) v) and state
    [splits, N, 2 S] = (m, sum w, and then sum w (s_j - s), s). FORM.raw: NaN in rows that see a non-finite number."""
    CORRECTED: tl.constexpr = probe is not None
    steps = stride_low, stride_mb, stride_mh
    _, held, own, tiles, sight, a, by, k, v = opened(matrices, factor, span, steps, heads, group, queries, FORM)
    by *= LOG2E
    wrong = non_finite(a)
    top = tl.full((FORM.own,), float("-inf"), tl.float32)
    mass, total = tl.full((FORM.own,), 0.0, tl.float32), tl.full((FORM.own, FORM.value_wide), 0.0, tl.float32)
    if CORRECTED:
        t = -load_vectors(probe, own, held, FORM.dim, FORM.wide)
        correction_mass, level_s, correction = mass, mass, total
    for n in range(tiles[1], tiles[2]):
        j = (tiles[0] + n) * FORM.tile
        keys = load_keys(k, j, j + tl.arange(0, FORM.tile) < sight[7], FORM)
        lost = non_finite(keys)
        score = products(a, keys, FORM.own) * by[:, None]
        seen = seen_keys(j, sight, FORM.masked, FORM)
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        level = tl.where(new == float("-inf"), 0.0, new)
        w, fade = tl.exp2(score - level[:, None]), tl.exp2(top - level)
        if CORRECTED:
            s, _ = fine_products(t, keys, FORM.own)
            near = tl.sum(tl.where(seen, s, 0.0), 1) / tl.maximum(tl.sum(seen.to(tl.float32), 1), 1.0)
            level_s = tl.where(mass > 0, level_s, near)
            ws = w * tl.where(seen, s - level_s[:, None], 0.0)
        values = load_values(v, j, tl.max(seen.to(tl.int32), 0) != 0, FORM)
        if FORM.raw:
            w, values = guarded(w, lost, values, seen, wrong, FORM)
        total = add_weighted(total * fade[:, None], w, values, FORM.own)
        mass = mass * fade + tl.sum(w, 1)
        if CORRECTED:
            correction = add_weighted(correction * fade[:, None], ws, values, FORM.own)
            correction_mass = correction_mass * fade + tl.sum(ws, 1)
        top = new
    DV: tl.constexpr = FORM.value_dim
    columns, split = tl.arange(0, FORM.value_wide), tl.program_id(1).to(tl.int64) * total_rows + own
    inside = held[:, None] & (columns < DV)[None, :]
    part += split[:, None] * ((1 + CORRECTED) * DV) + columns[None, :]
    tl.store(part, total, mask=inside)
    if CORRECTED:
        tl.store(part + DV, correction, mask=inside)
        store_numbers(state, split, (top, mass, correction_mass, level_s), held)
    else:
        store_numbers(state, split, (top, mass), held)


@triton.jit(do_not_specialize=LENGTHS)
def merge_kernel(
    part, state, out, splits, total_rows,
    CORRECTED: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge one row of the output from its splits, with the mean of the slopes as the common s."""
    row = tl.program_id(0).to(tl.int64)
    columns, places = tl.arange(0, WIDTH), tl.arange(0, PARTS)
    STEP: tl.constexpr = 2 + 2 * CORRECTED
    largest = tl.full((PARTS,), float("-inf"), tl.float32)
    for s in range(0, splits, PARTS):
        own = state + ((s + places).to(tl.int64) * total_rows + row) * STEP
        largest = tl.maximum(largest, tl.load(own, mask=s + places < splits, other=float("-inf")))
    top = tl.max(largest, 0)
    level = tl.where(top == float("-inf"), 0.0, top)
    mean = 0.0
    if CORRECTED:
        mass, slopes = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS,), tl.float32)
        for s in range(0, splits, PARTS):
            own, held = state + ((s + places).to(tl.int64) * total_rows + row) * STEP, s + places < splits
            w, m = tl.exp2(tl.load(own, mask=held, other=float("-inf")) - level), tl.load(own + 1, mask=held, other=0.0)
            mass += w * m
            slopes += w * (tl.load(own + 2, mask=held, other=0.0) + tl.load(own + 3, mask=held, other=0.0) * m)
        whole = tl.sum(mass, 0)
        mean = tl.sum(slopes, 0) / tl.where(whole > 0, whole, 1.0)
    mass, total = tl.zeros((PARTS,), tl.float32), tl.zeros((PARTS, WIDTH), tl.float32)
    rest, correction = mass, total
    for s in range(0, splits, PARTS):
        at, held = (s + places).to(tl.int64) * total_rows + row, s + places < splits
        inside = held[:, None] & (columns < DV)[None, :]
        own, to = state + at * STEP, part + at[:, None] * ((1 + CORRECTED) * DV) + columns[None, :]
        w, m = tl.exp2(tl.load(own, mask=held, other=float("-inf")) - level), tl.load(own + 1, mask=held, other=0.0)
        x = tl.load(to, mask=inside, other=0.0)
        mass += w * m
        total += w[:, None] * x
        if CORRECTED:
            moved = tl.load(own + 3, mask=held, other=0.0) - mean
            rest += w * (tl.load(own + 2, mask=held, other=0.0) + moved * m)
            correction += w[:, None] * (tl.load(to + DV, mask=inside, other=0.0) + moved[:, None] * x)
    whole = tl.sum(mass, 0)
    whole = tl.where(top == float("-inf"), 1.0, whole)
    found = tl.sum(total, 0)
    if CORRECTED:
        found = found + tl.sum(correction, 0) - (tl.sum(rest, 0) / whole) * found
    tl.store(out + row * DV + columns, (found / whole).to(out.dtype.element_ty), mask=columns < DV)
