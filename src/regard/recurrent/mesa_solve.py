"""The systems of Mesa attention, one for every query, in chunks of positions:

    (H_i + Diag(lambda_i)) t_i = b_i,
    H_i = exp(g_1 + ... + g_i) H_0 + sum_{j <= i} exp(g_{j+1} + ... + g_i) beta_j k_j k_j^T

* "direct", if nothing fades and lambda is the same for all queries of a head: one Cholesky factor of the matrix A
  before a chunk and one of I + K A^-1 K^T inside it. Query i adds the first i keys to A, so its factor is the leading
  block of the second one;
* "dense": a matrix for every query, a block of them at a time;
* "cg": conjugate gradients on all queries of some chunks at once, where H_i p_i is linear attention with the keys as
  values. Converged queries no longer change. The true residual decides.

All are one torch operator without a derivative; `solved` adds the derivative of A_i^-1 b_i.

Legend: B batch, H query heads, Hkv key heads, T positions, D channels; b and t [B, H, T, D], k [B, Hkv, T, D], beta
[B, Hkv, T] or None, g [B, Hkv, T, 1] or None, H_0 [B, Hkv, D, D], lambda [B, H, 1 or T, D]; c positions of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..one_node import once
from ..pairwise.layout import repeat_heads
from .decay import Chunks, decayed, faded, segments
from .scan import scan

BLOCK = 16
"""Queries whose matrices are held at once."""
ELEMENTS = 2**21
"""Elements of the states and pairs that conjugate gradients hold at once."""
ROUNDS = 3
"""How often conjugate gradients restart from the true residual."""
SLACK = 20.0
"""They restart if the true residual exceeds this many times `tol`; less than that is rounding."""


class Systems(NamedTuple):
    """The tensors of the systems, as in the legend."""

    key: Tensor
    beta: Tensor | None
    g: Tensor | None
    gram: Tensor
    ridge: Tensor

    def detach(self) -> "Systems":
        return Systems(*(None if x is None else x.detach() for x in self))

    def part(self, at: slice, gram: Tensor) -> "Systems":
        """Return the systems of some positions, after keys whose sum of k k^T is `gram`."""
        key, beta, g = (None if x is None else x[:, :, at] for x in self[:3])
        assert key is not None
        return Systems(key, beta, g, gram, self.ridge if self.ridge.shape[2] == 1 else self.ridge[:, :, at])

    @property
    def written(self) -> Tensor:
        """beta k."""
        return self.key if self.beta is None else self.key * self.beta[..., None]

    def times(self, t: Tensor, chunk: int, causal: bool = True) -> tuple[Tensor, Tensor]:
        """Return (A_i t_i [B, H, T, D], H after all keys)."""
        product, after = decayed(t, self.key, self.written, self.g, self.gram, chunk=chunk, causal=causal)
        return product + self.ridge * t, after


class How(NamedTuple):
    """The method "direct", "dense" or "cg", positions of a chunk, and when conjugate gradients stop."""

    method: str
    chunk: int
    tol: float
    max_iter: int


def solved(b: Tensor, systems: Systems, how: How) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (A_i^-1 b_i, H after all keys, statistics [B, H, T]), differentiable once by one more solve: with u = A^-1
    dt, db = u and dA = -u t^T."""
    value, iterations = _solve(b.detach(), *systems.detach(), *how)
    product, gram = systems.times(value, how.chunk)
    left = b - product  # nearly zero; its derivative is that of b - A t at constant t
    return _attach(left, value, *systems.detach(), *how), gram, statistics(left, b, iterations)


def statistics(left: Tensor, b: Tensor, iterations: Tensor | None = None) -> dict[str, Tensor]:
    """Return "residual", |left| / |b| with left = b - A t, and "iterations", by default 0."""
    size = b.detach().norm(dim=-1)
    residual = left.detach().norm(dim=-1) / torch.where(size > 0, size, 1)
    none = torch.zeros_like(residual, dtype=torch.int32) if iterations is None else iterations
    return {"residual": residual, "iterations": none}


SYSTEMS = (
    "Tensor key, Tensor? beta, Tensor? g, Tensor gram, Tensor ridge, str method, SymInt chunk, float tol, "
    "SymInt max_iter"
)
"""`Systems` and `How` in the schemas of the operators."""


@torch.library.custom_op("regard::mesa_solve", mutates_args=(), schema=f"(Tensor b, {SYSTEMS}) -> (Tensor, Tensor)")
def _solve(b: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Solve (gram + ridge) t = b; return t and the iterations of conjugate gradients [B, H, T], 0 for other methods."""
    systems, how = Systems(*arguments[:5]), How(*arguments[5:])
    systems = systems._replace(ridge=systems.ridge.expand(*b.shape[:2], -1, -1))
    gram, size = systems.gram, {"direct": how.chunk, "dense": BLOCK, "cg": _together(b)}[how.method]
    solutions, steps = [b[:, :, :0]], [b.new_zeros(*b.shape[:2], 0, dtype=torch.int32)]
    with torch.no_grad():
        for first in range(0, b.shape[2], size):
            at = slice(first, first + size)
            right, part = b[:, :, at], systems.part(at, gram)
            if how.method == "cg":
                span = _Span(part, b.shape[1])
                (x, taken), gram = span.solve(right, how.tol, how.max_iter), span.after
            else:
                x, gram = (_direct if how.method == "direct" else _dense)(right, part)
                taken = right.new_zeros(right.shape[:3], dtype=torch.int32)
            solutions.append(x)
            steps.append(taken)
    return torch.cat(solutions, 2), torch.cat(steps, 2)


@_solve.register_fake
def _(b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(b, memory_format=torch.contiguous_format), b.new_empty(b.shape[:3], dtype=torch.int32)


@torch.library.custom_op(
    "regard::mesa_attach", mutates_args=(), schema=f"(Tensor left, Tensor value, {SYSTEMS}) -> Tensor"
)
def _attach(left: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Return `value` with the derivative of value + A^-1 left."""
    return value.clone()


@_attach.register_fake
def _(left: Tensor, value: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:7])
    ctx.how = inputs[7:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (_solve(grad.contiguous(), *ctx.saved_tensors, *ctx.how)[0], *(None,) * 10)


_attach.register_autograd(_differentiate, setup_context=_save)
SECOND = "mesa_attention with form='parallel' or form='recurrent'"
_solve.register_autograd(once("the chunked form of Mesa attention is", SECOND))


def _direct(b: Tensor, systems: Systems) -> tuple[Tensor, Tensor]:
    """Solve one chunk by Woodbury's identity with nested factors; memory Theta(c D + D^2) per head."""
    k = systems.key if systems.beta is None else systems.key * systems.beta.sqrt()[..., None]
    after, heads, size = systems.gram + k.transpose(-1, -2) @ k, b.shape[1], k.shape[2]
    k, whole = repeat_heads(k, heads), repeat_heads(systems.gram, heads) + torch.diag_embed(systems.ridge[:, :, 0])
    factor = _cholesky(whole)
    from_keys = torch.cholesky_solve(k.transpose(-1, -2), factor)  # A^-1 K^T
    inner = _cholesky(torch.eye(size, dtype=k.dtype, device=k.device) + k @ from_keys)
    upto = torch.ones(size, size, dtype=torch.bool, device=k.device).triu()  # key a (down) no later than query i
    # Rows of an enormous later key overflow; they must not reach earlier rows as 0 * NaN.
    rows = torch.linalg.solve_triangular(inner, from_keys.transpose(-1, -2), upper=False)
    rows = torch.nan_to_num(rows, 0.0, 0.0, 0.0)

    def solve(right: Tensor) -> Tensor:
        from_right = torch.cholesky_solve(right.transpose(-1, -2), factor)  # A^-1 b, each query's a column
        across = torch.linalg.solve_triangular(inner, k @ from_right, upper=False)
        return from_right.transpose(-1, -2) - torch.where(upto, across, 0).transpose(-1, -2) @ rows

    t = solve(b)
    pairs = torch.where(upto.T, t @ k.transpose(-1, -2), 0)
    return t + solve(b - t @ whole - pairs @ k), after  # with one step of refinement


def _cholesky(matrix: Tensor) -> Tensor:
    """Return a Cholesky factor. If a pivot is not positive, the diagonal is raised from there on; earlier rows belong
    to earlier queries and stay. The residual shows the error."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    amount = torch.finfo(matrix.dtype).eps * matrix.shape[-1]
    order = torch.arange(1, matrix.shape[-1] + 1, device=matrix.device)
    for _ in range(5):
        if not bool(info.any()):
            break
        late = (info[..., None] > 0) & (order >= info[..., None])
        matrix = matrix + torch.diag_embed(torch.where(late, amount * matrix.diagonal(dim1=-2, dim2=-1).abs(), 0))
        factor, info = torch.linalg.cholesky_ex(matrix)
        amount = amount * 16
    return factor


def _dense(b: Tensor, systems: Systems) -> tuple[Tensor, Tensor]:
    """Solve with a matrix for each query; memory Theta(D^2) for each."""
    matrices = every_gram(systems.key, systems.written, systems.g, systems.gram)
    whole, after = repeat_heads(matrices, b.shape[1]), matrices[:, :, -1].clone()
    whole.diagonal(dim1=-2, dim2=-1).add_(systems.ridge)
    return torch.linalg.solve_ex(whole, b)[0], after


def every_gram(key: Tensor, written: Tensor, g: Tensor | None, gram: Tensor) -> Tensor:
    """Return H_i [B, Hkv, T, D, D]; Theta(T D^2) memory, differentiable to any order."""
    length, dim = key.shape[2], key.shape[3]
    outer = (written[..., :, None] * key[..., None, :]).flatten(-2)
    if g is None:
        return gram[:, :, None] + outer.cumsum(2).unflatten(-1, (dim, dim))
    faded = g.cumsum(-2).exp()[..., None] * gram[:, :, None] if length else gram[:, :, None][:, :, :0]
    return faded + (segments(g[..., 0]) @ outer).unflatten(-1, (dim, dim))


def _together(b: Tensor) -> int:
    """Return how many queries, in chunks of `BLOCK`, `ELEMENTS` allow conjugate gradients at once."""
    batch, heads, length, dim = b.shape
    chunk = max(1, min(BLOCK, length))
    return chunk * max(1, ELEMENTS // max(1, batch * heads * (chunk * chunk + 2 * dim * dim)))


class _Span:
    """Some chunks [B, H, n, c, ...] of `BLOCK` queries, and the product of their matrices with a vector for each."""

    def __init__(self, systems: Systems, heads: int) -> None:
        self.chunks = Chunks(systems.key.shape[2], BLOCK)
        k, written, size = self.chunks.cut(systems.key), self.chunks.cut(systems.written), self.chunks.size
        g = None if systems.g is None else self.chunks.cut(systems.g)
        upto, fade, until = faded(written, g)
        self.upto = None if upto is None else repeat_heads(upto, heads)
        lower = torch.ones(size, size, dtype=k.dtype, device=k.device).tril()
        self.seen = lower if g is None else repeat_heads(segments(g[..., 0]), heads)
        start, self.after = scan(fade, until.transpose(-1, -2) @ k, systems.gram)
        self.start = repeat_heads(start, heads)
        self.key, self.written = repeat_heads(k, heads), repeat_heads(written, heads)
        ridge = systems.ridge
        self.ridge = ridge[:, :, None] if ridge.shape[2] == 1 else self.chunks.cut(ridge)
        self.inverse = self._first()

    def _first(self) -> Tensor:
        """Return the inverse of the first query's matrix of each chunk, the preconditioner: the other matrices differ
        from it by a few ranks and a decay. That of a later query would let later tokens change earlier rows."""
        matrix = self.written[..., :1, :].transpose(-1, -2) @ self.key[..., :1, :]
        matrix += self.start if self.upto is None else self.start * self.upto[..., :1, :]
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.ridge[..., 0, :])  # the first is not padding
        return torch.cholesky_inverse(_cholesky(matrix))

    def times(self, p: Tensor) -> Tensor:
        state = p @ self.start
        state = state if self.upto is None else state * self.upto
        return self.ridge * p + state + (self.seen * (p @ self.key.transpose(-1, -2))) @ self.written

    def solve(self, b: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor]:
        """Return (x, steps) of b [B, H, T, D]."""
        b = self.chunks.cut(b)
        x, goal = torch.zeros_like(b), tol * tol * b.square().sum(-1, keepdim=True)
        steps = b.new_zeros(*b.shape[:-1], 1, dtype=torch.int32)
        left, enough = b, goal
        for _ in range(ROUNDS):
            active = (left.square().sum(-1, keepdim=True) > enough) & (steps < max_iter)
            if not bool(active.any()):
                break
            x, steps = self._round(x, left, active, goal, steps, max_iter)
            left, enough = b - self.times(x), SLACK * SLACK * goal
        cut = lambda y: y.flatten(2, 3)[:, :, : self.chunks.length]  # noqa: E731
        return cut(x), cut(steps)[..., 0]

    def _round(
        self, x: Tensor, left: Tensor, active: Tensor, goal: Tensor, steps: Tensor, max_iter: int
    ) -> tuple[Tensor, Tensor]:
        """Run conjugate gradients until every system has converged or taken `max_iter` steps."""
        p = near = left @ self.inverse
        slope = (left * near).sum(-1, keepdim=True)
        while bool(active.any()):
            forward = self.times(p)
            curve = (p * forward).sum(-1, keepdim=True)
            active = active & (curve > 0) & (slope > 0)  # also false for NaN
            rate = torch.where(active, slope / torch.where(active, curve, 1), 0)
            x, left = x + rate * p, left - rate * forward
            near = left @ self.inverse
            new = (left * near).sum(-1, keepdim=True)
            p = torch.where(active, near + new / torch.where(active, slope, 1) * p, p)
            steps, slope = steps + active.int(), torch.where(active, new, slope)
            active = active & (left.square().sum(-1, keepdim=True) > goal) & (steps < max_iter)
        return x, steps
