"""What `lla_numerics` holds regard against: the dense solution, its rounding floors, and emulations of bfloat16
schemes of local linear attention.

An emulation rounds both operands of every matrix product to bfloat16 and keeps everything else in float32, as matrix
units do. The iteration of the published scheme is that of its kernels: from 0, steps of r.r / (d.Ad + 1e-10); a row
stops once r.r is 1e-12 of what it was or not finite. The covariance form has two more guards: a row stops where d.Ad is
not positive, and its result is the iterate with the least residual.

Legend: q, k, v [T, D] of one head; w [T, T] kernel weights, causal; p the same with rows that sum to one.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]
Times = Callable[[Tensor, Tensor], Tensor]
Data = tuple[Tensor, Tensor, Tensor]
"""q, k, v [T, D] of one head."""
Course = Iterator[tuple[int, Tensor]]
Scheme = Callable[[Tensor, Tensor, Tensor, float, Sequence[int]], Course]
"""(q, k, v, ridge, steps) -> pairs of a step and the output [T, D] there."""
GOAL, SHIFT = 1e-12, 1e-10


def rounded(x: Tensor) -> Tensor:
    """Return the nearest bfloat16, as float32."""
    return x.bfloat16().float()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b with operands rounded to bfloat16 and float32 sums."""
    return rounded(a) @ rounded(b)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products of rows, [T, 1]."""
    return (a * b).sum(-1, keepdim=True)


def kernel(q: Tensor, k: Tensor) -> Tensor:
    """Return exp(q.k / sqrt(D)) of a key that is not later, over the largest of its row: [T, T]."""
    z = (q @ k.T) * q.shape[-1] ** -0.5
    z = z.masked_fill(torch.ones_like(z, dtype=torch.bool).triu(1), -torch.inf)
    return (z - z.amax(-1, keepdim=True)).exp()


def dense(q: Tensor, k: Tensor, ridges: Sequence[float], dtype: torch.dtype) -> dict[float, Tensor]:
    """Return t [T, D] by ridge: every system formed in `dtype` and solved by Cholesky."""
    p, y, x, mean = centred(q.to(dtype), k.to(dtype))
    spread = weighted_pairs(p, y) - mean[:, :, None] * mean[:, None, :]
    eye, right = torch.eye(q.shape[-1], dtype=dtype), (x - mean)[..., None]
    return {ridge: torch.cholesky_solve(right, torch.linalg.cholesky(spread + ridge * eye))[..., 0] for ridge in ridges}


def weighted_pairs(p: Tensor, y: Tensor) -> Tensor:
    """Return sum_j p_ij y_j y_j^T, [T, D, D]."""
    return (p @ (y[:, :, None] * y[:, None, :]).flatten(1)).unflatten(-1, (y.shape[-1], -1))


def centred(
    q: Tensor, k: Tensor, times: Times = torch.matmul, moved: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p; keys and queries, if `moved` with the keys' mean as origin; and the means p y of those keys."""
    w = kernel(q, k)
    p = w / w.sum(-1, keepdim=True)
    origin = k.mean(0) if moved else torch.zeros_like(k[0])
    return p, k - origin, q - origin, times(p, k - origin)


def output(q: Tensor, k: Tensor, v: Tensor, t: Tensor, times: Times = torch.matmul) -> Tensor:
    """Return o_i = sum_j p_ij (1 + (k_j - kbar_i) . t_i) v_j, in the dtype of t; `times` takes its two products."""
    p, y, _, mean = centred(q.to(t.dtype), k.to(t.dtype))
    return times(p * (1 + times(t, y.T) - dot(mean, t)), v.to(t.dtype))


def outputs(
    heads: Sequence[Data], ridges: Sequence[float], dtype: torch.dtype, times: Times = torch.matmul
) -> dict[float, Tensor]:
    """Return by ridge the outputs [H, T, D], from systems solved densely in `dtype`."""
    solved = [(head, dense(*head[:2], ridges, dtype)) for head in heads]
    return {ridge: torch.stack([output(*head, t[ridge], times) for head, t in solved]) for ridge in ridges}


def floors_of(heads: Sequence[Data], ridges: Sequence[float]) -> dict[str, dict[float, Tensor]]:
    """Return two float32 solutions by ridge: "rounding", rounded once, and "floor", its last stage in bfloat16."""
    once = {ridge: rounded(out) for ridge, out in outputs(heads, ridges, torch.float32).items()}
    return {"rounding": once, "floor": outputs(heads, ridges, torch.float32, product)}


def iterates(apply: Apply, right: Tensor, steps: Sequence[int], guarded: bool = False) -> Course:
    """Run conjugate gradients for A x = `right` [T, D]: x after every one of `steps`."""
    x, r, d = torch.zeros_like(right), right, right
    square = first = dot(r, r)
    best, least = x, first
    for step in range(1, max(steps) + 1):
        active = (square > GOAL * first) & square.isfinite()
        image = apply(d)
        curvature = dot(d, image)
        if guarded:
            active &= curvature > 0
        length = square / (curvature + SHIFT)
        x = torch.where(active, x + length * d, x)
        r = torch.where(active, r - length * image, r)
        new = dot(r, r)
        d = torch.where(active, r + new / square * d, 0 if guarded else d)
        square = torch.where(active, new, square)
        best, least = torch.where(square < least, x, best), torch.minimum(square, least)
        if step in steps:
            yield step, best if guarded else x


def q_centred(q: Tensor, k: Tensor, v: Tensor, ridge: float, steps: Sequence[int]) -> Course:
    """Run the paper's algorithm (equations 10-16, algorithms 1 and 2 with their errata): Sigma = sum w (k - q)(k - q)^T
    from sums over k alone, o = sum w (1 - (k - q) . rho) v / delta. The ridge is relative to the total weight, as in
    the authors' code."""
    w = kernel(q, k)
    total, raw = w.sum(-1, keepdim=True), product(w, k)
    mu = raw - total * q

    def apply(d: Tensor) -> Tensor:
        along, aside = dot(q, d), dot(raw, d)
        return product(w * product(d, k.T), k) - along * raw - aside * q + total * (along * q + ridge * d)

    for step, rho in iterates(apply, mu, steps):
        delta = total - dot(mu, rho)
        yield step, product(w * (1 - product(rho, k.T) + dot(rho, q)) / delta, v)


def covariance(q: Tensor, k: Tensor, v: Tensor, ridge: float, steps: Sequence[int], moved: bool = False) -> Course:
    """Run the covariance form, (C + ridge) t = q - kbar, o = sum p (1 + (k - kbar) . t) v; `moved`: the mean of all
    keys is taken off keys and queries first, but for the scores."""
    p, y, x, mean = centred(q, k, product, moved)

    def slopes(d: Tensor) -> Tensor:
        return product(d, y.T) - dot(mean, d)

    for step, t in iterates(lambda d: product(p * slopes(d), y) + ridge * d, x - mean, steps, guarded=True):
        yield step, product(p * (1 + slopes(t)), v)


def q_centred_blocks(
    k: Tensor, v: Tensor, ridges: Sequence[float], counts: Sequence[int], strict: bool
) -> dict[tuple[float, int], tuple[Tensor, Tensor]]:
    """Solve BD-LLA as the paper defines it, for one sequence with q = k [T, d], in float64: the diagonal blocks of
    Sigma = sum w (k - q)(k - q)^T + ridge omega, o = sum w (1 - (k - q) . rho) v / delta, rho = Sigma^-1 mu. Return by
    ridge and number of blocks the predictions [T, dv], 0 where nothing is seen, and delta / omega [T], 1 there."""
    k, v = k.double(), v.double()
    length, dim = k.shape
    hidden = torch.ones(length, length, dtype=torch.bool).triu(0 if strict else 1)
    p = ((k @ k.T) * dim**-0.5).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    mass = p.sum(-1, keepdim=True)
    mu = p @ k - mass * k  # over omega, as all that follows
    cross = mu[:, :, None] * k[:, None, :]
    sigma = weighted_pairs(p, k) - cross - cross.mT - (mass * k)[:, :, None] * k[:, None, :]
    solutions = {}
    for ridge, count in itertools.product(ridges, counts):
        shape = (count, dim // count)
        tiled = sigma.unflatten(-1, shape).unflatten(-3, shape)
        block = tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3) + ridge * torch.eye(shape[1], dtype=k.dtype)
        rho = torch.linalg.solve(block, mu.unflatten(-1, shape)[..., None]).flatten(-3)
        delta = 1 - dot(mu, rho)
        solutions[ridge, count] = (p * (1 - rho @ k.T + dot(rho, k))) @ v / delta, delta[:, 0]
    return solutions


SCHEMES: dict[str, Scheme] = {
    "q-centred": q_centred,
    "covariance": covariance,
    "covariance, keys centred": partial(covariance, moved=True),
}
"""All in emulated bfloat16."""
