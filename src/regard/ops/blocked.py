"""impl="blocked": any weighting at degree 0 in Theta(n d) memory, on any device, with its own backward.

A block of queries meets all keys it may see; scores, weights and their derivatives live for that block only. The
forward pass keeps the row statistics, the backward pass computes the weights again from them, so that no
threshold is searched twice. Both passes are torch custom operators: compiled graphs see one node, whatever the
length.

What becomes of a block of scores is up to its `Rows`: here plain torch operations for any weighting, in `cpu.py`
loops over rows, which also mark the keys that have weight: the products that follow leave out the rest.

Legend: N = B x H heads in a row; Tq, Tk queries and keys; n heads, q queries, w keys of a block; P row parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..checks import ArgumentError
from ..estimators import Diagnostics, Visibility
from ..estimators.diagnostics import counts, diagnose
from ..grammar import RowStats, Spec, Weighting
from ..grammar.kernels import Params
from .blocks import ELEMENTS, Block, Work, new_marks
from .dispatch import Cost, Inputs, Problem, register_impl

FLOATS = 6
"""top, theta, reach, mass, support, effective sample size: what the forward pass keeps of a row, beside three FLAGS,
empty, fallback and status, and the positions that the rule notes."""
FLAGS = 3


class Rows(Protocol):
    """What is done to a block of scores [n, q, w], which may be overwritten."""

    @property
    def indices(self) -> int:
        """How many positions are kept a row."""

    @property
    def marks(self) -> bool:
        """Whether `weigh` marks keys."""

    @property
    def exact(self) -> bool:
        """Whether `derive` must be given the very scores that `weigh` saw, and not such as differ by a rounding error
        because they were made from fewer keys: where a key has weight or none, and nothing between."""

    @property
    def elements(self) -> int:
        """Pairs of a query and a key to work on at a time."""

    def weigh(
        self, block: Block, z: Tensor, params: Params, counted: bool, marks: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The weights, and (floats [n, q, FLOATS], flags int32 [n, q, FLAGS], index int64 [n, q, indices]) of the rows.
        Keys with weight, or on which a threshold hangs, are marked in `marks`, where `self.marks`."""

    def derive(
        self, block: Block, z: Tensor, g: Tensor, kept: tuple[Tensor, Tensor, Tensor], params: Params, names: list[str]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(weights, dL/dz, dL/dparameter [n, q] by `names`), given g = dL/dweights."""


@dataclass(frozen=True)
class TorchRows:
    """Any weighting, by torch operations."""

    weighting: Weighting
    marks: ClassVar[bool] = False
    exact: ClassVar[bool] = True
    elements: ClassVar[int] = ELEMENTS

    @property
    def indices(self) -> int:
        return self.weighting.indices

    def weigh(
        self, block: Block, z: Tensor, params: Params, counted: bool, marks: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        z = block.hide(z)
        stats = self.weighting.fit(z, params, fast=z.device.type == "cpu")
        p = self.weighting.weights(z, stats, params)
        seen = counts(p) if counted else (torch.zeros_like(stats.top),) * 2
        floats = torch.cat([stats.top, stats.theta, stats.reach, stats.mass, *seen], -1)
        flags = torch.cat([stats.empty.int(), stats.fallback.int(), stats.status], -1)
        return p, (floats, flags, flags[..., :0].long() if stats.index is None else stats.index)

    def derive(
        self, block: Block, z: Tensor, g: Tensor, kept: tuple[Tensor, Tensor, Tensor], params: Params, names: list[str]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        z, stats, weighting = block.hide(z), unpack(*kept), self.weighting
        p = weighting.weights(z, stats, params)
        a, b = weighting.jacobian(z, p, stats, params)
        rho = (b * g).sum(-1, keepdim=True)
        del b  # a block of pairs, like all of these: what is not needed must not stand beside what is
        dz = a * (g - rho)
        del a
        found = weighting.param_grads(dz, g, rho, z, p, stats, params) if names else {}
        return p, weighting.finish(dz, rho, z, p, stats, params), [found[name][..., 0] for name in names]


def unpack(floats: Tensor, flags: Tensor, index: Tensor) -> RowStats:
    """Row statistics [..., 1] from what was kept of the rows."""
    return RowStats(
        top=floats[..., 0:1],
        theta=floats[..., 1:2],
        reach=floats[..., 2:3],
        mass=floats[..., 3:4],
        empty=flags[..., 0:1] != 0,
        fallback=flags[..., 1:2] != 0,
        status=flags[..., 2:3],
        index=index if index.shape[-1] else None,
    )


SOLVERS: dict[str, Callable[[Spec], Rows]] = {"blocked": lambda spec: TorchRows(spec.weighting)}
"""Name of an implementation to its `Rows`."""


@register_impl("blocked", priority=10)
class Blocked:
    """Theta(n d) memory for every kernel and bandwidth."""

    name: ClassVar[str] = "blocked"

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
        out, floats, flags, index, _ = _forward(
            q,
            inputs.k,
            inputs.v,
            torch.stack(given) if given else None,
            visible.mask,
            moved,
            _describe(self.name, inputs, names),
            offset,
            inputs.diagnostics,
        )
        if not inputs.diagnostics:
            return out, None
        support, ess = floats[..., 4:5], floats[..., 5:6]
        stats = unpack(floats, flags, index)
        return out, diagnose(inputs.spec, stats, support, ess, inputs.scale, inputs.row_params())


def _describe(solver: str, inputs: Inputs, names: list[str]) -> str:
    """Everything that is no tensor and no length, as one string: the operators' schema takes no objects."""
    visible = inputs.visible
    numbers = ",".join(f"{n}={p!r}" for n, p in inputs.params.items() if not isinstance(p, Tensor) and n != "ridge")
    return "|".join(
        [
            solver,
            inputs.spec.to_json(),
            ",".join(names),
            numbers,
            str(int(visible.causal)),
            str(int(visible.strict)),
            "" if visible.window is None else str(visible.window),
        ]
    )


@lru_cache(maxsize=256)
def rows_of(solver: str, spec: str) -> Rows:
    """The row solver of that name for the Spec of that JSON."""
    return SOLVERS[solver](Spec.from_json(spec))


def _rows(text: str) -> Rows:
    return rows_of(*text.split("|")[:2])


def _work(q: Tensor, k: Tensor, mask: Tensor | None, moved: Tensor | None, text: str, offset: int) -> Work:
    _, _, names, numbers, causal, strict, window = text.split("|")
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
    return Work(
        names=[n for n in names.split(",") if n],
        numbers={n: float(x) for n, x in pairs},
        visible=visible,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        total=q.shape[0] * q.shape[1],
        elements=_rows(text).elements,
    )


def _flat(x: Tensor) -> Tensor:
    """[B, H, ...] -> [B x H, ...]."""
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output [B, H, Tq, Dv], floats [B, H, Tq, FLOATS], flags int32 [B, H, Tq, FLAGS], index int64 [B, H, Tq, n],
    marks bool [B, H, ceil(Tq / ROWS), ceil(Tk / COLUMNS)])."""
    with torch.no_grad():  # off under autograd anyway, and to be off without it: the weightings ask
        return _forward_blocks(_work(q, k, mask, moved, text, offset), _rows(text), q, k, v, given, counted)


def _forward_blocks(
    work: Work, rows: Rows, q: Tensor, k: Tensor, v: Tensor, given: Tensor | None, counted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = _outputs(q, k, v, rows)
    out, *statistics, active = map(_flat, found)
    statistics[1][..., 0] = 1  # rows of blocks that see no key are skipped
    q, k, v, given = _flat(q), _flat(k), _flat(v), _flat_params(given)
    for block in work.blocks():
        marks = torch.zeros(block.heads, active.shape[2], dtype=torch.bool, device=q.device)
        p, kept = rows.weigh(block, block.scores(q, k), block.params(given), counted, marks)
        for whole, part in zip(statistics, kept, strict=True):
            block.rows(whole).copy_(part)
        if rows.marks:
            block.marks(active).logical_or_(marks)
            block.add_weighted(block.rows(out), p, block.columns(v), marks)
        else:
            block.rows(out).copy_(p @ block.columns(v))
    return found


def _outputs(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = q.shape[:3]
    return (
        q.new_zeros(*shape, v.shape[-1]),
        q.new_zeros(*shape, FLOATS),
        q.new_zeros(*shape, FLAGS, dtype=torch.int32),
        q.new_zeros(*shape, rows.indices, dtype=torch.int64),
        new_marks(q, k) if rows.marks else q.new_zeros(*shape[:2], 0, 0, dtype=torch.bool),
    )


@_forward.register_fake
def _(q, k, v, given, mask, moved, text, offset, counted):  # type: ignore[no-untyped-def]
    return _outputs(q, k, v, _rows(text))


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
    active: Tensor,
    text: str,
    offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the row parameters [P, B, H, Tq]."""
    with torch.no_grad():
        work = _work(q, k, mask, moved, text, offset)
        kept = (_flat(floats), _flat(flags), _flat(index))
        return _backward_blocks(work, _rows(text), grad, q, k, v, given, kept, _flat(active))


def _backward_blocks(
    work: Work,
    rows: Rows,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor],
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turned = (x.new_zeros(x.transpose(-1, -2).shape) for x in (k, v))
    found = q.new_zeros(q.shape), *turned, q.new_zeros(len(work.names), *q.shape[:3])
    dq, dk, dv = map(_flat, found[:3])
    dgiven = found[3].flatten(1, 2)
    q, k, v, grad, given = _flat(q), _flat(k), _flat(v), _flat(grad), _flat_params(given)
    for block in work.blocks():
        if rows.marks and not rows.exact:
            block = block.narrowed(block.marks(active))
        floats, flags, index = (block.rows(x) for x in kept)
        g = block.rows(grad) @ block.columns(v).transpose(-1, -2)
        z, params = block.scores(q, k), block.params(given)
        p, dz, dparams = rows.derive(block, z, g, (floats, flags, _placed(block, index)), params, work.names)
        del z, g
        block.add_columns(dv, block.rows(grad), p)
        for row, part in zip(dgiven, dparams, strict=True):
            block.rows(row).copy_(part)
        block.rows(dq).copy_(dz @ block.columns(k))
        block.add_columns(dk, block.rows(q), dz)
    return found[0], *(x.transpose(-1, -2).contiguous() for x in found[1:3]), found[3]


def _placed(block: Block, index: Tensor) -> Tensor:
    """Positions among the block's columns; beyond the second, an index holds counts."""
    return index if block.kept is None else torch.cat([block.place(index[..., :2].contiguous()), index[..., 2:]], -1)


@_backward.register_fake
def _(grad, q, k, v, given, mask, moved, floats, flags, index, active, text, offset):  # type: ignore[no-untyped-def]
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
        "attention: fast implementations are differentiable once; for second derivatives use impl='reference'."
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse)
