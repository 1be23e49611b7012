"""Dense float64 forms that `gpu.py` checks kernels against, on the device, written beside regard and without it.

Legend: B batch, H query heads (Hkv key heads), Tq queries, Tk keys; z scores [B, H, Tq, Tk], `seen` boolean like them.
"""

import torch
from torch import Tensor


def causal(queries: int, keys: int, device: torch.device, window: int | None = None, strict: bool = False) -> Tensor:
    """Which keys queries at the end of the keys see."""
    at = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    high = at - int(strict)
    seen = key <= high
    return seen if window is None else seen & (key > high - window)


def weights(kind: str, z: Tensor, seen: Tensor) -> Tensor:
    """p with rows of sum one, 0 in rows without a key: softmax, adaptive with r = 1, 2, 3, anchored (r = 1, margin 1),
    fixed (r = 1, bias 0; uniform where no key is inside)."""
    z = z.masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    if kind == "softmax":
        w = torch.where(some, z, 0).softmax(-1)
    elif kind.startswith("adaptive"):
        w = adaptive(torch.where(some, z, 0), int(kind[-1]))
    elif kind == "anchored":
        w = (z - z.amax(-1, keepdim=True) + 1).clamp(min=0)
    else:
        w = z.clamp(min=0)
        w = torch.where(w.sum(-1, keepdim=True) > 0, w, seen.to(w.dtype))
    w = torch.where(some & seen, w, 0)
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total > 0, total, 1)


def adaptive(z: Tensor, r: int) -> Tensor:
    """[z / r - tau]_+^r with sum one: tau by 60 bisections, and a step of Newton through which gradients flow."""
    x = z / r
    with torch.no_grad():
        high = x.amax(-1, keepdim=True)
        low = high - 1
        for _ in range(60):
            middle = (low + high) / 2
            enough = (x - middle).clamp(min=0).pow(r).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    inside = (x - low).clamp(min=0)
    slope = ((inside > 0) if r == 1 else inside ** (r - 1)).to(x.dtype).sum(-1, keepdim=True) * r
    tau = low + (inside.pow(r).sum(-1, keepdim=True) - 1) / slope.detach()
    return (x - tau).clamp(min=0).pow(r)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q . k / sqrt(D), key heads repeated."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def attention(kind: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    p = weights(kind, scores(q, k), seen)
    return p @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def slopes(q: Tensor, k: Tensor, p: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """(t, mean of the keys), both [B, H, Tq, D], of Local Linear Attention: (C + ridge) t = q - mean, with C the
    covariance of the keys under a row's weights, all D x D of them at once: the naive form."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    dim = k.shape[-1]
    mean = p @ k
    squares = p @ (k[..., :, None] * k[..., None, :]).flatten(-2)
    covariance = squares.unflatten(-1, (dim, dim)) - mean[..., :, None] * mean[..., None, :]
    covariance.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor = torch.linalg.cholesky_ex(covariance).L
    return torch.cholesky_solve((q - mean)[..., None], factor)[..., 0], mean


def local_linear(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, ridge: float, probe: Tensor | None = None) -> Tensor:
    """o_i = sum_j p_ij (1 + (k_j - mean_i) . t_i) v_j, p softmax; t = -probe where a probe is given."""
    p = weights("softmax", scores(q, k), seen)
    if probe is None:
        t, mean = slopes(q, k, p, ridge)
    else:
        t, mean = -probe, p @ k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return spread(t, mean, k, p) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def spread(t: Tensor, mean: Tensor, k: Tensor, p: Tensor) -> Tensor:
    """The weights p_ij (1 + (k_j - mean_i) . t_i)."""
    k = k.repeat_interleave(t.shape[1] // k.shape[1], 1)
    return p * (1 + t @ k.transpose(-1, -2) - (t * mean).sum(-1, keepdim=True))


def live_share(q: Tensor, k: Tensor, kind: str, block: int = 64, rows: int = 24) -> float:
    """The share of blocks of a causal head in which a query gives some key weight, of those that hold a visible pair:
    over `rows` blocks of queries of the first head, evenly spread, at most."""
    length = q.shape[2]
    starts = range(0, length, block)
    step = max(1, len(starts) // rows)
    live = visible = 0
    for start in list(starts)[::-step]:
        end = min(start + block, length)
        own = causal(end - start, end, q.device)
        z = scores(q[:1, :1, start:end].float(), k[:1, :1, :end].float())
        some = (weights(kind, z, own)[0, 0] > 0).any(0)
        some = torch.nn.functional.pad(some, (0, -end % block)).view(-1, block).any(1)
        live, visible = live + int(some.sum()), visible + len(some)
    return live / visible
