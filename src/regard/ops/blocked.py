"""impl="blocked": any weighting at degree 0 in Theta(n d) memory, on any device, with its own backward.

A block of queries meets all keys it may see; scores, weights and their derivatives live for that block only. The
forward pass keeps the row statistics, the backward pass computes the weights again from them, so that no
threshold is searched twice. Both passes are torch custom operators: compiled graphs see one node, whatever the
length.

Legend: N = B x H heads in a row, of which a group is done at a time; Tq, Tk queries and keys; F features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..estimators import Diagnostics, Visibility
from ..estimators.diagnostics import counts, diagnose
from ..grammar import RowStats, Spec
from .dispatch import Cost, Inputs, Problem, register_impl

ELEMENTS = 2**18
"""Pairs of a query and a key worked on at a time: what fits a core's cache with its copies."""

FLOATS = ("top", "theta", "reach", "mass", "support", "ess")
FLAGS = ("empty", "fallback", "status")


@register_impl("blocked", priority=10)
class Blocked:
    """Theta(n d) memory for every kernel and bandwidth."""

    def available(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if problem.transformed:
            return "is differentiable once, backward: no forward mode, no torch.func transforms"
        if problem.spec.degree:
            return "computes degree 0 alone; the local linear model runs with impl='reference'"
        return None

    def cost(self, problem: Problem) -> Cost:
        pairs = problem.batch * problem.heads * problem.queries * problem.keys
        share = 2 if problem.causal and problem.queries == problem.keys else 1
        rows = problem.batch * problem.heads * problem.queries
        flops = 2 * pairs * (problem.dim + problem.value_dim) // share
        return Cost(flops, 4 * (rows * (problem.value_dim + 11) + 8 * max(ELEMENTS, 16 * problem.keys)))

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        q, visible = inputs.q, inputs.visible
        shape = q.shape[:3]
        names = [n for n, p in inputs.params.items() if isinstance(p, Tensor)]
        given = [inputs.params[n].to(q.dtype).expand(shape) for n in names]  # type: ignore[union-attr]
        offset, moved = (0, visible.offset) if isinstance(visible.offset, Tensor) else (visible.offset, None)
        out, floats, flags, index = _forward(
            q,
            inputs.k,
            inputs.v,
            torch.stack(given) if given else None,
            visible.mask,
            moved,
            _describe(inputs, names),
            offset,
            inputs.diagnostics,
        )
        if not inputs.diagnostics:
            return out, None
        stats = _unpack(floats, flags, index)
        support, ess = floats[4, ..., None], floats[5, ..., None]
        return out, diagnose(inputs.spec, stats, support, ess, inputs.scale, inputs.row_params())


def _describe(inputs: Inputs, names: list[str]) -> str:
    """Everything that is no tensor and no length, as one string: the operators' schema takes no objects."""
    visible = inputs.visible
    numbers = ",".join(f"{n}={p!r}" for n, p in inputs.params.items() if not isinstance(p, Tensor) and n != "ridge")
    return "|".join(
        [
            inputs.spec.to_json(),
            ",".join(names),
            numbers,
            str(int(visible.causal)),
            str(int(visible.strict)),
            "" if visible.window is None else str(visible.window),
        ]
    )


@lru_cache(maxsize=256)
def _weighting(text: str) -> Any:
    return Spec.from_json(text).weighting


@dataclass
class _Work:
    """One call, seen as blocks of heads and queries."""

    weighting: Any
    names: list[str]
    numbers: dict[str, float]
    visible: Visibility
    heads: int
    kv_heads: int
    total: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, mask: Tensor | None, moved: Tensor | None, text: str, offset: int) -> _Work:
        spec, names, numbers, causal, strict, window = text.split("|")
        visible = Visibility(
            queries=q.shape[2],
            keys=k.shape[2],
            causal=causal == "1",
            strict=strict == "1",
            window=int(window) if window else None,
            offset=offset if moved is None else moved,
            mask=mask,
        )
        pairs = (item.split("=") for item in numbers.split(",") if item)
        return cls(
            weighting=_weighting(spec),
            names=[n for n in names.split(",") if n],
            numbers={n: float(x) for n, x in pairs},
            visible=visible,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            total=q.shape[0] * q.shape[1],
        )

    def blocks(self) -> Iterator[_Block]:
        queries = self.visible.queries
        width = self.visible.keys if self.visible.window is None else 2 * self.visible.window + 256
        rows = max(1, min(queries, 256, max(16, ELEMENTS // max(1, min(width, self.visible.keys)))))
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low, high = self.visible.span(first, last)
            if high == low:
                continue
            group = max(1, min(self.total, ELEMENTS // (rows * (high - low))))
            for n in range(0, self.total, group):
                yield _Block(self, slice(n, min(n + group, self.total)), first, last, low, high)


@dataclass
class _Block:
    """Heads `at`, queries [first, last), keys [low, high)."""

    work: _Work
    at: slice
    first: int
    last: int
    low: int
    high: int

    def rows(self, x: Tensor) -> Tensor:
        """The block's queries of x [N, Tq, ...]."""
        return x[self.at, self.first : self.last]

    def kv(self, device: torch.device) -> Tensor | slice:
        """Which of the B x Hkv key heads the block's heads read."""
        ratio = self.work.heads // self.work.kv_heads
        if ratio == 1:
            return self.at
        if self.at.stop - self.at.start == 1:
            return slice(self.at.start // ratio, self.at.start // ratio + 1)
        return torch.arange(self.at.start, self.at.stop, device=device) // ratio

    def columns(self, x: Tensor) -> Tensor:
        """The block's keys of x [B x Hkv, Tk, ...]."""
        return x[self.kv(x.device), self.low : self.high]

    def add_columns(self, total: Tensor, part: Tensor) -> None:
        where = self.kv(total.device)
        if isinstance(where, slice):
            total[where, self.low : self.high] += part
        else:
            total[:, self.low : self.high].index_add_(0, where, part)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        z = self.rows(q) @ self.columns(k).transpose(-1, -2)
        seen = self.work.visible.block(self.first, self.last, self.low, self.high, z.device)
        if seen is None:
            return z
        if seen.shape[0] == 1 and seen.shape[1] == 1:
            return z.masked_fill_(~seen[0], -torch.inf)
        full = seen.expand(self.work.total // self.work.heads, self.work.heads, *seen.shape[-2:])
        n = torch.arange(self.at.start, self.at.stop, device=z.device)
        return z.masked_fill_(~full[n // self.work.heads, n % self.work.heads], -torch.inf)

    def params(self, given: Tensor | None) -> dict[str, float | Tensor]:
        """Numbers, and the block's rows of `given` [P, N, Tq] as [n, q, 1]."""
        tensors = {} if given is None else dict(zip(self.work.names, given, strict=True))
        return {**self.work.numbers, **{n: self.rows(p)[..., None] for n, p in tensors.items()}}


def _flat(x: Tensor) -> Tensor:
    """[B, H, T, ...] -> [B x H, T, ...]."""
    return x.flatten(0, 1)


def _flat_params(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.flatten(1, 2)


@torch.library.custom_op("regard::blocked_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    mask: Tensor | None,
    moved: Tensor | None,
    text: str,
    offset: int,
    counted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(output [B, H, Tq, Dv], FLOATS [6, B, H, Tq], FLAGS int32 [3, B, H, Tq], index int64 [B, H, Tq, n])."""
    with torch.no_grad():  # off under autograd anyway, and to be off without it: the weightings ask
        work = _Work.of(q, k, mask, moved, text, offset)
        return _forward_blocks(work, q, k, v, given, counted)


def _forward_blocks(
    work: _Work, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, counted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, floats, flags, index = _outputs(q, v, work.weighting)
    flat_out, flat_index = _flat(out), _flat(index)
    flat_floats, flat_flags = floats.flatten(1, 2), flags.flatten(1, 2)
    flat_flags[0] = 1  # rows of blocks that see no key are skipped
    flat_q, flat_k, flat_v, flat_given = _flat(q), _flat(k), _flat(v), _flat_params(given)
    for block in work.blocks():
        z = block.scores(flat_q, flat_k)
        params = block.params(flat_given)
        stats = work.weighting.fit(z, params, fast=q.device.type == "cpu")
        p = work.weighting.weights(z, stats, params)
        block.rows(flat_out).copy_(p @ block.columns(flat_v))
        values = [stats.top, stats.theta, stats.reach, stats.mass, *(counts(p) if counted else ())]
        for row, value in zip(flat_floats, values, strict=False):
            block.rows(row).copy_(value[..., 0])
        for row, value in zip(flat_flags, (stats.empty, stats.fallback, stats.status), strict=True):
            block.rows(row).copy_(value[..., 0])
        if stats.index is not None:
            block.rows(flat_index).copy_(stats.index)
    return out, floats, flags, index


def _outputs(q: Tensor, v: Tensor, weighting: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(len(FLOATS), *shape),
        q.new_zeros(len(FLAGS), *shape, dtype=torch.int32),
        q.new_zeros(*shape, weighting.indices, dtype=torch.int64),
    )


@_forward.register_fake
def _(q, k, v, given, mask, moved, text, offset, counted):  # type: ignore[no-untyped-def]
    return _outputs(q, v, _weighting(text.split("|")[0]))


def _unpack(floats: Tensor, flags: Tensor, index: Tensor) -> RowStats:
    """Row statistics [..., 1] from what `_forward` packed."""
    return RowStats(
        top=floats[0, ..., None],
        theta=floats[1, ..., None],
        reach=floats[2, ..., None],
        mass=floats[3, ..., None],
        empty=flags[0, ..., None] != 0,
        fallback=flags[1, ..., None] != 0,
        status=flags[2, ..., None],
        index=index if index.shape[-1] else None,
    )


@torch.library.custom_op("regard::blocked_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    mask: Tensor | None,
    moved: Tensor | None,
    floats: Tensor,
    flags: Tensor,
    index: Tensor,
    text: str,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the row parameters [P, B, H, Tq]."""
    with torch.no_grad():
        work = _Work.of(q, k, mask, moved, text, offset)
        return _backward_blocks(work, grad, q, k, v, given, _unpack(floats, flags, index))


def _backward_blocks(
    work: _Work, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, stats: RowStats
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))  # contiguous: the flat views below are written to
    dgiven = q.new_zeros(len(work.names), *q.shape[:3])
    flat_dq, flat_dk, flat_dv, flat_dgiven = _flat(dq), _flat(dk), _flat(dv), _flat_params(dgiven)
    flat_q, flat_k, flat_v, flat_grad = _flat(q), _flat(k), _flat(v), _flat(grad)
    saved = stats.map(_flat)
    for block in work.blocks():
        z = block.scores(flat_q, flat_k)
        params = block.params(_flat_params(given))
        stats = saved.map(block.rows)
        p = work.weighting.weights(z, stats, params)
        out_grad = block.rows(flat_grad)
        g = out_grad @ block.columns(flat_v).transpose(-1, -2)
        block.add_columns(flat_dv, p.transpose(-1, -2) @ out_grad)
        a, b = work.weighting.jacobian(z, p, stats, params)
        rho = (b * g).sum(-1, keepdim=True)
        dz = a * (g - rho)
        if work.names:
            found = work.weighting.param_grads(dz, g, rho, z, p, stats, params)
            for row, name in zip(flat_dgiven, work.names, strict=True):  # type: ignore[arg-type]
                block.rows(row).copy_(found[name][..., 0])
        del a, b, g  # each is a block of pairs: what is not needed must not stand beside what is
        dz = work.weighting.finish(dz, rho, z, p, stats, params)
        block.rows(flat_dq).copy_(dz @ block.columns(flat_k))
        block.add_columns(flat_dk, dz.transpose(-1, -2) @ block.rows(flat_q))
    return dq, dk, dv, dgiven


@_backward.register_fake
def _(grad, q, k, v, given, mask, moved, floats, flags, index, text, offset):  # type: ignore[no-untyped-def]
    count = 0 if given is None else given.shape[0]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), q.new_empty(count, *q.shape[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, given, mask, moved, text, offset, _ = inputs
    ctx.save_for_backward(q, k, v, given, mask, moved, *output[1:])
    ctx.text, ctx.offset = text, offset
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 9
    saved = ctx.saved_tensors
    dq, dk, dv, dgiven = _backward(grad.contiguous(), *saved, ctx.text, ctx.offset)
    return dq, dk, dv, dgiven if saved[3] is not None else None, None, None, None, None, None


def _refuse(ctx: Any, *_: Any) -> None:
    raise ArgumentError(
        "attention: impl='blocked' is differentiable once; for second derivatives use impl='reference'."
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
