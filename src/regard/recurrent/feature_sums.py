"""Sums over keys with finite features, w_ij = phi_i . psi_j; kernel-selection paper, equations 13-22.

For every query i, over the keys j it sees,

    u_i = sum_j w_ij v_j     Z_i = sum_j w_ij     Q_i = sum_j w_ij^2

are phi_i . A, phi_i . b and phi_i . M phi_i with the state

    A = sum_j psi_j v_j^T  (13)     b = sum_j psi_j  (14)     M = sum_j psi_j psi_j^T.

`parallel` computes all pairs (18, 19), `recurrent` adds one key at a time (15, 16), and `chunks.chunked` does the first
inside chunks and the second between them.

Legend: B batch, H query heads, Hkv key heads, T positions, F features with the bias as the last (phi = [q; bias],
psi = [k; 1]), E = Dv + 1 values with a one as the last, so that b is a column of A and Z of u.
phi [B, H, Tq, F], psi [B, Hkv, Tk, F], val [B, Hkv, Tk, E], sums A [B, Hkv, F, E], squares M [B, Hkv, F, F], or None
if Q is not wanted. Causal: query i sees the keys j <= i + offset, and the state before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .decay import decayed, read


class Sums(NamedTuple):
    """The sums of each query, and the state after the last key."""

    values: Tensor  # u [B, H, Tq, Dv]
    mass: Tensor  # Z [B, H, Tq]
    power: Tensor | None  # Q [B, H, Tq]
    sums: Tensor | None  # A after all keys
    squares: Tensor | None  # M after all keys


def augment(
    q: Tensor, k: Tensor, v: Tensor, bias: float | Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (phi, psi, val) of q [..., Tq, F - 1], k [..., Tk, F - 1], v [..., Tk, Dv] and bias [..., Tq] or a number;
    psi is zero where the mask, broadcastable to [..., Tk], is False."""
    column = bias[..., None] if isinstance(bias, Tensor) else q.new_full((*q.shape[:-1], 1), bias)
    one = k.new_ones(*k.shape[:-1], 1)
    psi = torch.cat([k, one], -1)
    psi = psi if mask is None else torch.where(mask[..., None], psi, 0)
    return torch.cat([q, column], -1), psi, torch.cat([v, one], -1)


def parallel(
    phi: Tensor, psi: Tensor, val: Tensor, sums: Tensor, squares: Tensor | None, causal: bool, offset: int
) -> Sums:
    """Compute all pairs at once (equations 17-20): O(Tq Tk) time and memory; twice differentiable."""
    grouped = phi.unflatten(1, (psi.shape[1], -1))  # [B, Hkv, R, Tq, F]
    w = grouped @ psi[:, :, None].transpose(-1, -2)
    w = w.tril(offset) if causal else w
    rows = (w @ val[:, :, None] + grouped @ sums[:, :, None]).flatten(1, 2)
    after = sums + psi.transpose(-1, -2) @ val
    if squares is None:
        return Sums(rows[..., :-1], rows[..., -1], None, after, None)
    power = w.square().sum(-1) + ((grouped @ squares[:, :, None]) * grouped).sum(-1)
    after_squares = squares + psi.transpose(-1, -2) @ psi
    return Sums(rows[..., :-1], rows[..., -1], power.flatten(1, 2), after, after_squares)


def recurrent(
    phi: Tensor, psi: Tensor, val: Tensor, sums: Tensor, squares: Tensor | None, causal: bool, offset: int
) -> Sums:
    """Add one key at a time (equations 15, 16, 21, 22): O(F E) memory besides the outputs; twice differentiable. In
    causal order `offset` is 0 (a query sees its own key) or -1 (it does not)."""

    def read_all(values: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        queries = phi if causal else phi[:, :, :0]
        rows, after = decayed(queries, psi, values, None, start, strict=causal and offset < 0, form="recurrent")
        return rows if causal else read(phi, after), after

    rows, sums = read_all(val, sums)
    if squares is None:
        return Sums(rows[..., :-1], rows[..., -1], None, sums, None)
    images, squares = read_all(psi, squares)
    return Sums(rows[..., :-1], rows[..., -1], (images * phi).sum(-1), sums, squares)
