"""Weights of blocks of scores, and the conversion of a call to the arguments of a torch operator and back.

`Rows` computes the weights of a block and their derivative: here with torch operations for any weighting, in `cpu` with
loops over rows. The latter also mark the keys with weight, so that later products skip all other keys.

Legend: N = B x H heads, flattened; Tq, Tk queries and keys; n heads, q queries, w keys of a block; P row parameters.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from ...grammar import RowStats, Spec
from ...grammar.kernels import Params
from ...precision import PLAIN
from ..diagnostics import counts
from ..dispatch import Inputs
from ..visibility import Visibility
from . import live_rows
from .blocks import ELEMENTS, Block, Work

FLOATS = 6
"""Numbers kept per row: top, theta, reach, mass, support, effective sample size."""
FLAGS = 3
"""Flags kept per row: empty, fallback, status."""
Kept: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Statistics of rows: floats [..., FLOATS], flags int32 [..., FLAGS], positions int64 [..., indices]."""


@dataclass(frozen=True)
class Rows:
    """Weights of a block of scores [n, q, w], which may be overwritten, and their derivative: any weighting, with torch
    operations."""

    spec: Spec
    marks: ClassVar[bool] = False
    """Whether `weigh` marks keys."""
    elements: ClassVar[int] = ELEMENTS
    """Number of query-key pairs of a block."""

    @property
    def indices(self) -> int:
        """Number of positions kept per row."""
        return self.spec.weighting.indices

    def exact(self, params: Params) -> bool:
        """Return whether `derive` needs the same bits of the scores as `weigh`. Scores computed again from fewer keys
        can differ by rounding, which matters for weights with a jump or an infinite slope at the threshold."""
        return True

    def weigh(self, block: Block, z: Tensor, params: Params, counted: bool, marks: Tensor) -> tuple[Tensor, Kept]:
        """Return the weights and the statistics of the rows. If `self.marks`, mark in `marks` the keys that have weight
        or determine a threshold."""
        z = block.hide(z)
        stats, p = self.spec.weighting.fit_weights(z, params, fast=z.device.type == "cpu")
        seen = counts(p) if counted else (torch.zeros_like(stats.top),) * 2
        floats = torch.cat([stats.top, stats.theta, stats.reach, stats.mass, *seen], -1)
        flags = torch.cat([stats.empty.int(), stats.fallback.int(), stats.status], -1)
        return p, (floats, flags, flags[..., :0].long() if stats.index is None else stats.index)

    def derive(
        self, block: Block, z: Tensor, g: Tensor, kept: Kept, params: Params, share: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return (weights, dL/dz, dL/dparameter [n, q] by the call's names), for g = dL/dweights. `share` [n, q, 1] is
        the derivative by the logarithm of the total kernel weight if that is used, p the result of `again`."""
        stats, weighting, names = unpack(*kept), self.spec.weighting, block.work.names
        p = self.again(block, z, kept, params) if p is None else p
        a, b = weighting.jacobian(z, p, stats, params)
        g = weighting.centred(g, z, stats, params)
        rho = (b * g).sum(-1, keepdim=True)
        rho = rho if share is None else rho - share  # d(log sum K)/dz is A, up to the terms of `finish`
        del b  # free now: one value per query-key pair
        dz = g.sub_(rho).mul_(a) if not names else a * (g - rho)
        del a
        by_name = weighting.param_grads(dz, g, rho, z, p, stats, params) if names else {}
        return p, weighting.finish(dz, rho, z, p, stats, params), [by_name[name][..., 0] for name in names]

    def by_row(self, system: Any, right: Tensor, source: Tensor | None) -> live_rows.ByRow:
        """Solve the rows of a `WeightedRows` one by one; `ByRow.left` names those that the caller must solve."""
        return live_rows.grouped(system, right, source)

    def again(self, block: Block, z: Tensor, kept: Kept, params: Params) -> Tensor:
        """Return the weights, computed again; z changes only at masked keys."""
        return self.spec.weighting.weights(block.hide(z), unpack(*kept), params)


def unpack(floats: Tensor, flags: Tensor, index: Tensor) -> RowStats:
    """Return the kept statistics as `RowStats` [..., 1]."""
    top, theta, reach, mass = (floats[..., i : i + 1] for i in range(4))
    empty, fallback, status = flags[..., 0:1] != 0, flags[..., 1:2] != 0, flags[..., 2:3]
    return RowStats(top, theta, reach, mass, empty, fallback, status, index if index.shape[-1] else None)


SOLVERS: dict[str, type[Rows]] = {"blocked": Rows}
"""Implementation name to its `Rows`."""


ENCODED = (
    "Tensor? mask, Tensor? moved, Tensor? runs, float ridge_number, bool counted, str solver, str spec, str[] names, "
    "float[] numbers, bool causal, bool strict, SymInt? window, SymInt offset"
)
"""The result of `encoded` in the schema of an operator. The spec is JSON, so that a stored graph is self-contained;
`names` are those of the row parameters, then those of `numbers`."""


def given_of(inputs: Inputs) -> Tensor | None:
    """Return the row parameters [P, B, H, Tq] that are tensors; None where none is."""
    q = inputs.q
    tensors = [p.to(q.dtype).expand(q.shape[:3]) for p in inputs.params.values() if isinstance(p, Tensor)]
    return torch.stack(tensors) if tensors else None


def work_of(solver: str, inputs: Inputs) -> Work:
    """Return the call without its tensors."""
    numbers = {n: p for n, p in inputs.params.items() if not isinstance(p, Tensor)}
    names = [n for n in inputs.params if n not in numbers]
    ridge = 0.0 if isinstance(inputs.ridge, Tensor) else inputs.ridge
    rows, heads = SOLVERS[solver](inputs.spec), _heads(inputs.q, inputs.k)
    return Work(inputs.spec, rows, names, numbers, inputs.visible, *heads, ridge, inputs.diagnostics)


def encoded(solver: str, work: Work) -> tuple[Any, ...]:
    """Return the call as arguments of an operator."""
    visible = work.visible
    offset, moved = (0, visible.offset) if isinstance(visible.offset, Tensor) else (visible.offset, None)
    return (
        visible.mask, moved, visible.runs, work.ridge, work.counted, solver, work.spec.to_json(),
        [*work.names, *work.numbers], [*work.numbers.values()], visible.causal, visible.strict, visible.window, offset,
    )  # fmt: skip


def decoded(
    q: Tensor, k: Tensor, mask: Any, moved: Any, runs: Any, ridge: float, counted: bool, solver: str, spec: str,
    names: list[str], numbers: list[float], causal: bool, strict: bool, window: int | None, offset: int,
) -> Work:  # fmt: skip
    """Return the call from the result of `encoded`, for queries q and keys k."""
    at = offset if moved is None else moved
    visible = Visibility(q.shape[2], k.shape[2], causal, strict, window, at, mask, runs)
    rows, count = rows_of(solver, spec), len(names) - len(numbers)
    named = dict(zip(names[count:], numbers, strict=True))
    return Work(rows.spec, rows, list(names[:count]), named, visible, *_heads(q, k), ridge, counted)


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """Return H, Hkv and N."""
    return q.shape[1], k.shape[1], q.shape[0] * q.shape[1]


@lru_cache(maxsize=256)
def rows_of(solver: str, spec: str) -> Rows:
    """Return the `Rows` of that name for the Spec of that JSON."""
    return SOLVERS[solver](Spec.from_json(spec))


def at_once(inputs: Inputs) -> bool:
    """Return whether the operator's function can be called directly, since no graph is recorded."""
    recorded = inputs.problem.gradient or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if recorded or inputs.q.is_meta or torch._C._len_torch_dispatch_stack():
        return False
    given = (inputs.q, inputs.k, inputs.v, inputs.visible.mask, inputs.ridge, inputs.probe, *inputs.params.values())
    return all(type(x) in PLAIN for x in given if isinstance(x, Tensor))


def flat(x: Tensor) -> Tensor:
    """Reshape [B, H, ...] to [B x H, ...]."""
    return x.flatten(0, 1)
