"""Linear attention with decay:

    w_ij = sum_f phi_if psi_jf exp(sum_{j < l <= i} g_lf),        g <= 0

g is the same for all features (RetNet: per head; Mamba-2: per token) or not (GLA). The state is
A_i = Diag(exp g_i) A_{i-1} + psi_i val_i^T, and query i reads phi_i . A_i.

Every exponent is a sum of g, never a difference of sums, so decays down to -inf are exact. A decay per feature does
not factor out of the dot product: the positions are halved, the pairs across the middle are one product with the decay
split there, and each half is treated likewise.

Legend: B batch, H query heads, Hkv key heads, R = H / Hkv, T positions, F features, E values; n chunks of c positions.
phi [B, H, T, F], psi [B, Hkv, T, F], val [B, Hkv, T, E], g [B, Hkv, T, 1 or F] or None (no decay), beta [B, Hkv, T, 1]
or None, A [B, Hkv, F, E].
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from .scan import scan

CHUNK = 64
"""Positions of a chunk."""


def decayed(
    phi: Tensor, psi: Tensor, val: Tensor, g: Tensor | None, start: Tensor, *, beta: Tensor | None = None,
    causal: bool = True, strict: bool = False, form: str = "chunked", chunk: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (phi . A [B, H, Tq, E], the state after all keys [B, Hkv, F, E]); differentiable to any order.

    Causal: query i reads the state after key i; strict: before it. Otherwise every query reads the last state, and Tq
    and Tk may differ. Cost: "chunked" O(T c) time in addition to O(T F E) of the state and O(T c) memory;
    "parallel" O(T^2) both; "recurrent" O(T F E). With `beta`, the delta rule (`delta`).
    """
    if not causal:
        if beta is None:
            after = final(psi, val, g, start)
        else:
            after = decayed(psi, psi, val, g, start, beta=beta, form=form, chunk=chunk)[1]
        return read(phi, after), after
    queries = phi.shape[2]
    if strict:
        phi, psi, val, g, beta = shifted(phi, psi, val, g, beta)
    if form == "recurrent":
        rows, after = _recurrent(phi, psi, val, g, beta, start)
    else:
        size = psi.shape[2] if form == "parallel" else chunk or CHUNK
        rows, after = _chunked(phi, psi, val, g, beta, start, size)
    return rows[:, :, :queries], after


def retention_log_decay(query: Tensor, heads: int) -> Tensor:
    """Return RetNet's logarithms of the decay [H], log(1 - 2^(-5 - h)) for head h, in float32 at least."""
    h = torch.arange(heads, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    return torch.log1p(-(2.0 ** (-5 - h)))


def shifted(phi: Tensor, *keys: Tensor | None) -> tuple[Tensor, ...]:
    """Put an empty position before the keys and one query at the end, so that query i is read before key i."""
    return (pad(phi, (0, 0, 0, 1)), *(None if x is None else pad(x, (0, 0, 1, 0)) for x in keys))


def read(phi: Tensor, state: Tensor) -> Tensor:
    """Return phi . A of queries [B, H, Tq, F]."""
    return (phi.unflatten(1, (state.shape[1], -1)) @ state[:, :, None]).flatten(1, 2)


def final(psi: Tensor, val: Tensor, g: Tensor | None, start: Tensor) -> Tensor:
    """Return the state after all keys."""
    if g is None:
        return start + psi.transpose(-1, -2) @ val
    return start * g.sum(2).exp()[..., None] + (psi * suffix(g).exp()).transpose(-1, -2) @ val


def suffix(g: Tensor) -> Tensor:
    """Return the sum of g over the positions after each one."""
    return pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2) if g.shape[-2] else g


def faded(k: Tensor, g: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return for chunks of keys [..., n, c, F] and g the decay since the start at each position (None: none), that of
    the whole chunk [..., n, 1 or F], and the keys with the decay until its end."""
    if g is None:
        return None, k.new_ones(*k.shape[:-2], 1), k
    upto = g.cumsum(-2)
    return upto.exp(), upto[..., -1, :].exp(), k * suffix(g).exp()


def segments(g: Tensor) -> Tensor:
    """Return exp(sum of g over j < l <= i) for j <= i, else 0: [..., L] -> [..., L, L]."""
    length = g.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=g.device).tril(-1)
    return torch.where(below, g[..., :, None], 0).cumsum(-2).exp().tril()


def pairs(q: Tensor, k: Tensor, g: Tensor | None) -> Tensor:
    """Return w of all pairs [..., L R, L], 0 where the key comes after the query; row i R + r is head r of query i.
    q is [..., L, R, F], k [..., L, F], g [..., L, 1 or F] or None."""
    length, heads = q.shape[-3], q.shape[-2]
    if g is not None and g.shape[-1] > 1:
        return _split(q, k, g)
    w = (q.flatten(-3, -2) @ k.transpose(-1, -2)).unflatten(-2, (length, heads))
    if g is not None:
        w = w * segments(g[..., 0])[..., :, None, :]
        return w.flatten(-3, -2)
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return torch.where(seen[:, None], w, 0).flatten(-3, -2)


def _split(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Compute `pairs` for a decay per feature: both halves, and the pairs across the middle."""
    length, heads = q.shape[-3], q.shape[-2]
    if length <= 1:
        return q.flatten(-3, -2) @ k.transpose(-1, -2)
    if length % 2:
        q, k, g = pad(q, (0, 0, 0, 0, 0, 1)), pad(k, (0, 0, 0, 1)), pad(g, (0, 0, 0, 1))
        return _split(q, k, g)[..., : length * heads, :length]
    half = (2, length // 2)
    q, k, g = q.unflatten(-3, half), k.unflatten(-2, half), g.unflatten(-2, half)
    inner = _split(q, k, g)  # [..., 2, half R, half]
    late = q[..., 1, :, :, :] * g[..., 1, :, :].cumsum(-2).exp()[..., :, None, :]
    early = k[..., 0, :, :] * suffix(g[..., 0, :, :]).exp()
    across = late.flatten(-3, -2) @ early.transpose(-1, -2)
    first, second = inner[..., 0, :, :], inner[..., 1, :, :]
    return torch.cat([torch.cat([first, torch.zeros_like(first)], -1), torch.cat([across, second], -1)], -2)


class Chunks:
    """Cuts the positions of a call into n chunks of c; the last one is padded with zeros."""

    def __init__(self, length: int, chunk: int) -> None:
        self.length, self.size = length, max(1, min(chunk, length))
        self.count = max(1, -(-length // self.size))

    def cut(self, x: Tensor) -> Tensor:
        """Return [..., T, X] as [..., n, c, X]."""
        return pad(x, (0, 0, 0, self.count * self.size - self.length)).unflatten(-2, (self.count, self.size))

    def queries(self, phi: Tensor, kv_heads: int) -> Tensor:
        """Return [B, H, T, F] as [B, Hkv, n, c, R, F]."""
        return self.cut(phi).unflatten(1, (kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)

    def rows(self, x: Tensor, heads: int) -> Tensor:
        """Return [B, Hkv, n, c R, E] as [B, H, T, E]."""
        whole = x.unflatten(-2, (self.size, -1)).permute(0, 1, 4, 2, 3, 5)
        return whole.reshape(x.shape[0], heads, self.count * self.size, x.shape[-1])[:, :, : self.length]


def _chunked(
    phi: Tensor, psi: Tensor, val: Tensor, g: Tensor | None, beta: Tensor | None, start: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    chunks = Chunks(psi.shape[2], chunk)
    q, k, v = chunks.queries(phi, psi.shape[1]), chunks.cut(psi), chunks.cut(val)
    g = None if g is None else chunks.cut(g)
    inside = pairs(q, k, g)
    if beta is None:
        inside = inside @ v  # here, so that no pairs are held while the states are made
    upto, a, until = faded(k, g)
    q = q if upto is None else q * upto[..., None, :]
    transposed = until.transpose(-1, -2)
    if beta is None:
        before, after = scan(a, transposed @ v, start)
    else:
        x, y = _system(k, v, g, k if upto is None else k * upto, chunks.cut(beta))
        kept = torch.diag_embed(k.new_ones(k.shape[-1]) if g is None else a.expand(*k.shape[:3], k.shape[-1]))
        before, after = scan(kept - transposed @ y, transposed @ x, start)
        inside = _read_chunk(inside, x - y @ before, chunks.size)
    return chunks.rows(inside + q.flatten(-3, -2) @ before, phi.shape[1]), after


def _system(k: Tensor, v: Tensor, g: Tensor | None, since: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return X and Y of `delta` for every chunk; `since` is K^."""
    system = beta * pairs(k[..., None, :], k, g).tril(-1) + torch.eye(k.shape[-2], dtype=k.dtype, device=k.device)
    right = beta * torch.cat([v, since], -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    x, y = solution.split([v.shape[-1], k.shape[-1]], -1)
    return x, y


def _read_chunk(weights: Tensor, corrections: Tensor, size: int) -> Tensor:
    """Return weights @ corrections, with rows NaN from the first correction that overflows, but no rows before it: the
    weights of later tokens are zero, and zero times infinity is NaN."""
    lost = ~corrections.detach().isfinite().all(-1, keepdim=True)
    rows = (weights @ corrections.masked_fill(lost, 0)).unflatten(-2, (size, -1))
    return rows.masked_fill(lost.int().cummax(-2).values.bool()[..., None], torch.nan).flatten(-3, -2)


def _recurrent(
    phi: Tensor, psi: Tensor, val: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    rows = [phi.new_zeros(*phi.shape[:2], 0, val.shape[-1])]
    for t in range(psi.shape[2]):
        state = state if g is None else state * g[:, :, t, :, None].exp()
        at, value = psi[:, :, t, :, None], val[:, :, t, None]
        if beta is not None:
            value = beta[:, :, t, None] * (value - (state * at).sum(-2, keepdim=True))
        state = state + at * value
        rows.append(read(phi[:, :, t : t + 1], state))
    return torch.cat(rows, 2), state
