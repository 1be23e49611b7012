"""The chunked form of `feature_sums`: all pairs inside chunks of positions, sums between chunks.

A call is cut into steps in the order of its keys: queries before the first key, keys before the first query, stretches
of whole chunks with queries and keys, and the rest. The backward pass makes the sums again: upwards for the gradients
of the queries, and downwards, over later queries, for those of keys and values. Both are torch custom operators.

Legend: as in `feature_sums`; G = B x Hkv groups, R = H / Hkv query heads in each; a step has n chunks of c positions.
There phi is P [G, n, R c, F], psi is K [G, n, c, F], val is V [G, n, c, E].
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..one_node import once
from ..precision import full_precision
from .feature_sums import Sums, augment

CHUNK = 64
"""Positions of a chunk."""

ELEMENTS = {"cpu": 2**19}
"""Elements of the pairs and states of a step: what fits a cache; on other devices 2^24."""


INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? sums, Tensor? squares, float shift, "
    "bool causal, SymInt offset, bool guarded, bool keep, SymInt chunk"
)
"""The inputs of both operators in their schemas: without a tensor as bias it is the number `shift`."""


def chunked(
    q: Tensor, k: Tensor, v: Tensor, bias: float | Tensor, mask: Tensor | None, sums: Tensor | None,
    squares: Tensor | None, causal: bool, offset: int, chunk: int = CHUNK, *, keep: bool = True, guarded: bool = False,
) -> Sums:  # fmt: skip
    """Compute `Sums`: kernel-selection paper, equations 15-17 and 19 from chunk to chunk, 18 inside.

    q and k are features without the bias, `mask` is boolean [B or 1, Hkv or 1, Tk], `sums` and `squares` are the state
    before. Without `keep` the state after is not returned, and few queries weigh their keys directly; `guarded` asks
    for Q. O(T) memory, forward and backward; differentiable once, in reverse mode.
    """
    given, shift = (bias, 0.0) if isinstance(bias, Tensor) else (None, float(bias))
    guarded = guarded or squares is not None
    values, mass, power, after, after_squares = _forward(
        q, k, v, given, mask, sums, squares, shift, causal, offset, guarded, keep, chunk
    )
    squares = after_squares if keep and guarded else None
    return Sums(values, mass, power if guarded else None, after if keep else None, squares)


class _Step(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1), each in n chunks; with both, query i sees keys up to i."""

    q0: int
    q1: int
    k0: int
    k1: int
    n: int = 1


class _Work:
    """The inputs of an operator with the heads in groups."""

    def __init__(self, *inputs: Any) -> None:
        q, k, v, bias, mask, self.sums, self.squares, shift, *order = inputs
        self.causal, self.offset, self.guarded, self.keep, self.chunk = order
        batch, kv_heads, self.keys, width = k.shape
        self.groups, self.ratio, self.queries = batch * kv_heads, q.shape[1] // max(1, kv_heads), q.shape[2]
        self.features, self.values = width + 1, v.shape[3] + 1
        self.q = q.reshape(self.groups, self.ratio, self.queries, width)
        self.k, self.v = k.reshape(self.groups, self.keys, width), v.reshape(self.groups, self.keys, v.shape[3])
        self.bias: float | Tensor = shift if bias is None else bias.reshape(self.q.shape[:3])
        self.mask = None if mask is None else mask.expand(k.shape[:3]).reshape(self.groups, self.keys)

    def steps(self) -> list[_Step]:
        size = self.groups * (self.ratio * self.chunk * self.chunk + self.features * self.values)
        most = self.chunk * max(1, ELEMENTS.get(self.q.device.type, 2**24) // max(1, size))
        queries, keys, chunk = self.queries, self.keys, self.chunk

        def cut(start: int, stop: int) -> Iterator[tuple[int, int]]:
            return ((a, min(a + most, stop)) for a in range(start, stop, most))

        lead = min(max(-self.offset, 0), queries) if self.causal else 0  # queries that see only the state
        before = min(max(self.offset, 0), keys) if self.causal else keys  # keys that every query sees
        pairs = max(0, min(queries - lead, keys - before))
        whole = pairs - pairs % chunk
        steps = [_Step(a, b, 0, 0) for a, b in cut(0, lead)]
        steps += [_Step(lead, lead, a, b) for a, b in cut(0, before)]
        steps += [_Step(lead + a, lead + b, before + a, before + b, (b - a) // chunk) for a, b in cut(0, whole)]
        if whole < pairs:
            steps.append(_Step(lead + whole, lead + pairs, before + whole, before + pairs))
        steps += [_Step(a, b, 0, 0) for a, b in cut(lead + pairs, queries)]
        if self.keep:
            steps += [_Step(queries, queries, a, b) for a, b in cut(before + pairs, keys)]
        return steps

    def step(self, at: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """Return P, K and V of a step; without rows if it has no queries or no keys."""
        mask = None if self.mask is None else self.mask[:, at.k0 : at.k1]
        bias = self.bias[:, :, at.q0 : at.q1] if isinstance(self.bias, Tensor) else self.bias
        k, v = self.k[:, at.k0 : at.k1], self.v[:, at.k0 : at.k1]
        phi, psi, val = augment(self.q[:, :, at.q0 : at.q1], k, v, bias, mask)
        each = (at.n, (at.k1 - at.k0) // at.n)
        return self.cut(phi, at), psi.unflatten(1, each), val.unflatten(1, each)

    def cut(self, x: Tensor, at: _Step) -> Tensor:
        """Return x [G, R, n c, ...] as [G, n, R c, ...]."""
        return x.unflatten(2, (at.n, (at.q1 - at.q0) // at.n)).transpose(1, 2).flatten(2, 3)

    def uncut(self, x: Tensor, at: _Step) -> Tensor:
        """Return x [G, n, R c, ...] as [G, R, n c, ...]."""
        return x.unflatten(2, (self.ratio, x.shape[2] // self.ratio)).transpose(1, 2).flatten(2, 3)

    def meet(self, pairs: Tensor) -> Tensor:
        """Zero the pairs [G, n, R c, c] whose key comes after the query, in place."""
        pairs.view(*pairs.shape[:2], self.ratio, pairs.shape[3], pairs.shape[3]).tril_()
        return pairs

    def grouped(self, x: Tensor) -> Tensor:
        """Return x [B, H, Tq, ...] as [G, R, Tq, ...]."""
        return x.view(*self.q.shape[:3], *x.shape[3:])

    def start(self, given: Tensor | None, columns: int) -> Tensor:
        """Return the given state as [G, F, columns], or zeros."""
        size = (self.groups, self.features, columns)
        return self.q.new_zeros(size) if given is None else given.reshape(size)

    @property
    def direct(self) -> bool:
        """Whether to compute all pairs of queries and keys: nobody needs the state, and all pairs cost less than it."""
        few = self.ratio * self.queries * (self.features + self.values) <= self.features * self.values
        return few and not self.keep and self.sums is None and self.squares is None

    def pairs(self) -> Tensor:
        """Return the scores q . k + bias [G, R, Tq, Tk], 0 for masked keys."""
        w = self.q.flatten(1, 2) @ self.k.mT
        w = w.unflatten(1, (self.ratio, -1))
        w += self.bias[..., None] if isinstance(self.bias, Tensor) else self.bias
        return self.seen(w)

    def seen(self, w: Tensor) -> Tensor:
        """Zero the pairs [G, R, Tq, Tk] whose key is not seen, in place."""
        if self.mask is not None:
            w.masked_fill_(~self.mask[:, None, None], 0)
        return w.tril_(min(max(self.offset, -self.queries), self.keys)) if self.causal else w


def _running(start: Tensor, parts: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Return (start and the sum of the parts before each one [G, n, ...], start and the sum of all); the parts after
    each one if `backwards`."""
    if parts.shape[1] == 1:
        return start[:, None], start + parts[:, 0]
    before = torch.empty_like(parts)
    total = start
    for i in reversed(range(parts.shape[1])) if backwards else range(parts.shape[1]):
        before[:, i] = total
        total = total + parts[:, i]
    return before, total


@torch.library.custom_op(
    "regard::linear_forward", mutates_args=(), schema=f"({INPUTS}) -> ({', '.join(['Tensor'] * 5)})"
)
def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    """Return u [B, H, Tq, Dv], Z and Q [B, H, Tq], A [B, Hkv, F, E] and M [B, Hkv, F, F]; unwanted ones are empty."""
    out, work = _outputs(*inputs), _Work(*inputs)
    values, mass = work.grouped(out[0]), work.grouped(out[1])
    power = work.grouped(out[2]) if work.guarded else None
    with torch.no_grad(), full_precision(values.device.type):
        if work.direct:
            _weigh(work, values, mass, power)
            return out
        a, m = work.start(work.sums, work.values), work.start(work.squares, work.features) if work.guarded else None
        for at in work.steps():
            p, keys, val = work.step(at)
            before, a = _running(a, keys.mT @ val)
            rows = p @ before
            if m is not None:
                before, m = _running(m, keys.mT @ keys)
                squared = ((p @ before) * p).sum(-1)
            if at.q1 > at.q0 and at.k1 > at.k0:
                pairs = work.meet(p @ keys.mT)
                rows += pairs @ val
                if m is not None:
                    squared += pairs.square_().sum(-1)
            if at.q1 > at.q0:
                rows = work.uncut(rows, at)
                values[:, :, at.q0 : at.q1], mass[:, :, at.q0 : at.q1] = rows[..., :-1], rows[..., -1]
                if power is not None:
                    power[:, :, at.q0 : at.q1] = work.uncut(squared, at)
        _put(out[3:], (a, m))
    return out


def _put(out: tuple[Tensor, ...], states: tuple[Tensor | None, ...]) -> None:
    """Copy the states [G, ...] that are wanted."""
    for to, state in zip(out, states, strict=True):
        if to.numel() and state is not None:
            to.copy_(state.view_as(to))


@_forward.register_fake
def _outputs(*inputs: Any) -> tuple[Tensor, ...]:
    (q, k, v), (guarded, keep, _) = inputs[:3], inputs[-3:]
    features, values = k.shape[3] + 1, v.shape[3] + 1
    return (
        q.new_zeros(*q.shape[:3], v.shape[3]),
        q.new_zeros(q.shape[:3]),
        q.new_zeros(q.shape[:3] if guarded else 0),
        q.new_zeros((*k.shape[:2], features, values) if keep else 0),
        q.new_zeros((*k.shape[:2], features, features) if keep and guarded else 0),
    )


def _weigh(work: _Work, values: Tensor, mass: Tensor, power: Tensor | None) -> None:
    """Compute all pairs at once, for few queries and many keys."""
    w = work.pairs()
    torch.matmul(w.flatten(1, 2), work.v, out=values.flatten(1, 2))
    torch.sum(w, -1, out=mass)
    if power is not None:
        power.copy_(w.square_().sum(-1))


@torch.library.custom_op(
    "regard::linear_backward",
    mutates_args=(),
    schema=f"(Tensor g, Tensor? g_mass, Tensor? g_power, Tensor? g_sums, Tensor? g_squares, {INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    g: Tensor, g_mass: Tensor | None, g_power: Tensor | None, g_sums: Tensor | None, g_squares: Tensor | None,
    *inputs: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients of q, k, v, bias, sums and squares; empty for missing inputs."""
    grads, work = _gradients(g, g_mass, g_power, g_sums, g_squares, *inputs), _Work(*inputs)
    g_mass, g_power = (None if x is None else work.grouped(x)[..., None] for x in (g_mass, g_power))
    back = _Back(work, work.grouped(g), g_mass, g_power, grads)
    with torch.no_grad(), full_precision(g.device.type):
        if work.direct:
            back.direct()
            return grads
        steps, squared = work.steps(), g_power is not None
        before = work.start(work.squares, work.features) if squared else None
        back.upwards(steps, work.start(work.sums, work.values), before)
        squared = squared or g_squares is not None
        after = work.start(g_squares, work.features) if squared else None
        a, m = back.downwards(steps, work.start(g_sums, work.values), after)
        _put(grads[4:], (a, m))
    return grads


@_backward.register_fake
def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Return zeros like q, k, v, bias, sums and squares, contiguous; empty for None."""
    q, k, v, bias, _, sums, squares = arguments[5:12]
    return tuple(q.new_zeros(0 if x is None else x.shape) for x in (q, k, v, bias, sums, squares))


class _Back:
    """The backward pass: gradients of u [G, R, Tq, Dv], of Z and Q [G, R, Tq, 1] or None, and the outputs."""

    def __init__(self, work: _Work, g: Tensor, g_mass: Any, g_power: Any, out: tuple[Tensor, ...]) -> None:
        self.work, self.g, self.g_mass, self.g_power = work, g, g_mass, g_power
        self.dq, self.dk, self.dv = out[0].view_as(work.q), out[1].view_as(work.k), out[2].view_as(work.v)
        self.dbias = out[3].view(work.q.shape[:3]) if out[3].numel() else None

    def step(self, at: _Step) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of [u, Z] and of Q, shaped as P."""
        rows = slice(at.q0, at.q1)
        g = self.g[:, :, rows]
        mass = g.new_zeros(*g.shape[:-1], 1) if self.g_mass is None else self.g_mass[:, :, rows]
        g = self.work.cut(torch.cat([g, mass], -1), at)
        return g, None if self.g_power is None else self.work.cut(self.g_power[:, :, rows], at)

    def pairs(self, p: Tensor, keys: Tensor, val: Tensor, g: Tensor, g_power: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (w, dL/dw) of the pairs inside the chunks."""
        w = self.work.meet(p @ keys.mT)
        dw = g @ val.mT
        if g_power is not None:
            dw += 2 * g_power * w
        return w, self.work.meet(dw)

    def upwards(self, steps: list[_Step], a: Tensor, m: Tensor | None) -> None:
        """Write the gradients of queries and bias, from the sums over earlier keys."""
        for at in steps:
            p, keys, val = self.work.step(at)
            g, g_power = self.step(at)
            before, a = _running(a, keys.mT @ val)
            dp = g @ before.mT
            if m is not None and g_power is not None:
                before, m = _running(m, keys.mT @ keys)
                dp += g_power * (p @ (before + before.mT))
            if at.q1 > at.q0 and at.k1 > at.k0:
                dp += self.pairs(p, keys, val, g, g_power)[1] @ keys
            dp = self.work.uncut(dp, at)
            self.dq[:, :, at.q0 : at.q1] = dp[..., :-1]
            if self.dbias is not None:
                self.dbias[:, :, at.q0 : at.q1] = dp[..., -1]

    def downwards(self, steps: list[_Step], a: Tensor, m: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Write the gradients of keys and values, from the sums over later queries; return those of the first state."""
        for at in reversed(steps):
            p, keys, val = self.work.step(at)
            g, g_power = self.step(at)
            after, a = _running(a, p.mT @ g, backwards=True)
            dk, dv = val @ after.mT, keys @ after
            if m is not None:
                part = torch.zeros_like(m)[:, None] if g_power is None else p.mT @ (g_power * p)
                after, m = _running(m, part.expand(-1, at.n, -1, -1), backwards=True)
                dk += keys @ (after + after.mT)
            if at.q1 > at.q0 and at.k1 > at.k0:
                w, dw = self.pairs(p, keys, val, g, g_power)
                dk += dw.mT @ p
                dv += w.mT @ g
            self._write(slice(at.k0, at.k1), dk.flatten(1, 2)[..., :-1], dv.flatten(1, 2)[..., :-1])
        return a, m

    def direct(self) -> None:
        """Write all gradients from all pairs at once, as in `_weigh`."""
        work = self.work
        w = work.pairs()
        dw = (self.g.flatten(1, 2) @ work.v.mT).unflatten(1, (work.ratio, -1))
        if self.g_mass is not None:
            dw += self.g_mass
        if self.g_power is not None:
            dw += 2 * self.g_power * w
        dw = work.seen(dw)
        if self.dbias is not None:
            self.dbias.copy_(dw.sum(-1))
        dw, w = dw.flatten(1, 2), w.flatten(1, 2)
        self.dq.copy_((dw @ work.k).unflatten(1, (work.ratio, -1)))
        self._write(slice(None), dw.mT @ work.q.flatten(1, 2), w.mT @ self.g.flatten(1, 2))

    def _write(self, at: slice, dk: Tensor, dv: Tensor) -> None:
        mask = self.work.mask
        self.dk[:, at] = dk if mask is None else torch.where(mask[:, at, None], dk, 0)
        self.dv[:, at] = dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.how = inputs[7:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    *_, guarded, keep, _ = ctx.how
    wanted = (True, True, guarded, keep, keep and guarded)
    g, *rest = (x.contiguous() if x is not None and w else None for x, w in zip(grads, wanted, strict=True))
    g = saved[0].new_zeros(*saved[0].shape[:3], saved[2].shape[3]) if g is None else g
    dq, dk, dv, *states = _backward(g, *rest, *saved, *ctx.how)
    dbias, dsums, dsquares = (d if x is not None else None for x, d in zip((saved[3], *saved[5:]), states, strict=True))
    return dq, dk, dv, dbias, None, dsums, dsquares, *(None,) * 6


SECOND = "attention with impl='reference' or linear_attention with form='parallel'"
_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(once("the chunked form of linear attention is", SECOND))
