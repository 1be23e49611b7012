"""Local linear regression written out in float64, one formula beside another; nothing here calls regard.

    minimise over (a, B):  sum_j w_j |v_j - a - B' (k_j - q)|^2 + sum_d ridge_d |B_d|^2,   the prediction at q is a

Legend: q [.., Tq, D], k [.., Tk, D], v [.., Tk, Dv]; w kernel weights and p weights of sum 1 (or 0) [.., Tq, Tk]; ridge
a number, [.., Tq] or, one for every coordinate, [.., Tq, D], in the units of w.
"""

import torch
from torch import Tensor

Ridge = float | Tensor


def penalties(ridge: Ridge, q: Tensor) -> Tensor:
    """The ridge as [.., Tq, D]."""
    amount = torch.as_tensor(ridge, dtype=q.dtype)
    if amount.dim() == q.dim():
        return amount.expand(q.shape)
    return amount.expand(q.shape[:-1])[..., None].expand(q.shape)


def brute_force(w: Tensor, q: Tensor, k: Tensor, v: Tensor, ridge: Ridge) -> Tensor:
    """Least squares, a query at a time, of sqrt(w) [1, k - q] over sqrt(ridge) [0, I]; 0 for a row without weight."""
    n, dim = k.shape[-2:]
    out = []
    for w_i, q_i, amount in zip(w.unbind(-2), q.unbind(-2), penalties(ridge, q).unbind(-2), strict=True):
        root = w_i.sqrt()[..., None]
        design = torch.cat([torch.ones_like(k[..., :1]), k - q_i[..., None, :]], -1) * root
        below = torch.diag_embed(amount.sqrt())
        below = torch.cat([torch.zeros_like(below[..., :1]), below], -1)
        target = torch.cat([v * root, v.new_zeros(*v.shape[:-2], dim, v.shape[-1])], -2)
        stacked = torch.cat([design, below], -2)
        assert stacked.shape[-2] == n + dim
        found = torch.linalg.lstsq(stacked, target, driver="gelsd").solution[..., 0, :]
        out.append(torch.where(w_i.sum(-1, keepdim=True) > 0, found, 0))
    return torch.stack(out, -2)


def fit(p: Tensor, q: Tensor, k: Tensor, v: Tensor, ridge: Ridge) -> Tensor:
    """The same by normal equations in the keys about their mean, where the design is one for all queries; the ridge is
    that of weights of sum 1. Differentiable."""
    centre = k.mean(-2, keepdim=True)
    design = torch.cat([torch.ones_like(k[..., :1]), k - centre], -1)
    size = design.shape[-1]
    pairs = (design[..., :, None] * design[..., None, :]).flatten(-2)
    gram = (p @ pairs).unflatten(-1, (size, size))
    both = (design[..., :, None] * v[..., None, :]).flatten(-2)
    right = (p @ both).unflatten(-1, (size, v.shape[-1]))
    lost = p.sum(-1, keepdim=True) == 0
    corner = torch.cat([lost.to(q.dtype), penalties(ridge, q)], -1)  # anything regular where there is no weight
    solution = torch.linalg.solve(gram + torch.diag_embed(corner), right)
    at = torch.cat([torch.ones_like(q[..., :1]), q - centre], -1)
    return torch.where(lost, 0, (at[..., None, :] @ solution)[..., 0, :])


def systems(q: Tensor, k: Tensor, p: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """The systems A t = b about each row's mean key: (A [.., Tq, D, D], b = q - mean, keys less the mean)."""
    mean = p @ k
    away = k[..., None, :, :] - mean[..., :, None, :]
    spread = torch.einsum("...ij,...ija,...ijb->...iab", p, away, away)
    return spread + ridge * torch.eye(q.shape[-1], dtype=q.dtype), q - mean, away


def textbook(w: Tensor, q: Tensor, k: Tensor, v: Tensor, ridge: Ridge) -> Tensor:
    """Equations 6 to 8: z = k - q, omega = sum w, mu = sum w z, Sigma = sum w z z' + ridge, rho = Sigma^-1 mu,
    delta = omega - mu . rho, s = w (1 - z . rho) / delta, o = sum s v."""
    z = k[..., None, :, :] - q[..., :, None, :]
    omega, mu = w.sum(-1), (w[..., None] * z).sum(-2)
    sigma = torch.einsum("...ij,...ija,...ijb->...iab", w, z, z) + torch.diag_embed(penalties(ridge, q))
    rho = torch.linalg.solve(sigma, mu[..., None])[..., 0]
    delta = omega - (mu * rho).sum(-1)
    s = w * (1 - (z @ rho[..., None])[..., 0]) / delta[..., None]
    return s @ v


def softmax(z: Tensor, seen: Tensor) -> Tensor:
    """exp z over its sum among the keys that are seen; 0 in a row that sees none."""
    z = torch.where(seen, z, -torch.inf)
    top = z.detach().amax(-1, keepdim=True)
    e = torch.where(seen, (z - torch.where(top > -torch.inf, top, 0)).exp(), 0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, 1)


def lower(queries: int, keys: int | None = None, window: int | None = None) -> Tensor:
    """Causal order, end-aligned: [Tq, Tk]."""
    keys = queries if keys is None else keys
    at = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    return (key <= at) & (key > at - (keys + queries if window is None else window))


def draw(
    batch: int, heads: int, queries: int, dim: int, *, keys: int | None = None, kv_heads: int | None = None,
    value_dim: int | None = None, seed: int = 0, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normal q, k, v from a seed."""
    make = torch.Generator().manual_seed(seed)
    keys, kv_heads = keys or queries, kv_heads or heads
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim or dim))
    q, k, v = (torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def ratio(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected; NaN and infinity stay what they are."""
    assert found.shape == expected.shape
    gap = (found.detach().double() - expected.detach().double()).square().mean().sqrt()
    return float(gap / expected.detach().double().square().mean().sqrt())


def family(name: str, length: int = 1024, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Four kinds of keys: normal; on the unit sphere, with scores of the size of normal ones; of very different spread
    along the axes, about a mean far off; each query near one of the keys."""
    q, k, v = draw(1, 1, length, dim, seed=seed)
    make = torch.Generator().manual_seed(seed + 1)
    if name == "unit":
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    elif name == "anisotropic":
        spread = torch.logspace(0.5, -1, dim, dtype=torch.float64)
        offset = 3 * torch.randn(dim, generator=make, dtype=torch.float64)
        q, k = q * spread + offset, k * spread + offset
    elif name == "recall":
        at = (torch.rand(length, generator=make, dtype=torch.float64) * torch.arange(1, length + 1)).long()
        q = k[:, :, at] + 0.1 * q
    return tuple(x.to(torch.bfloat16) for x in (q, k, v))


FLOOR = {
    ("normal", 0.1): 1.6e-2, ("normal", 0.01): 0.10,
    ("unit", 0.1): 2.1e-3, ("unit", 0.01): 4.4e-3,
    ("anisotropic", 0.1): 1.6e-2, ("anisotropic", 0.01): 5.6e-2,
    ("recall", 0.1): 1.7e-3, ("recall", 0.01): 2.2e-3,
}  # fmt: skip
"""Relative errors of a float32 solve whose weights are rounded to bfloat16 before they meet the values."""
