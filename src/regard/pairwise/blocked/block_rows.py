"""Weights of blocks of scores.

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
from ..diagnostics import counts
from . import live_rows
from .blocks import ELEMENTS, Block

FLOATS = 6
"""Numbers kept per row: top, theta, reach, mass, support, effective sample size."""
FLAGS = 3
"""Flags kept per row: empty, fallback, status."""
Kept: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Statistics of rows: floats [..., FLOATS], flags int32 [..., FLAGS], positions int64 [..., indices]."""


@dataclass(frozen=True)
class Rows:
    """Weights of a block of scores [n, q, w], which may be overwritten, and their derivative, with torch operations."""

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
        """Return weights and statistics. If `self.marks`, mark keys that have weight or determine a threshold."""
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


@lru_cache(maxsize=256)
def rows_of(solver: str, spec: str) -> Rows:
    """Return the `Rows` of that name for the Spec of that JSON."""
    return SOLVERS[solver](Spec.from_json(spec))


def flat(x: Tensor) -> Tensor:
    """Reshape [B, H, ...] to [B x H, ...]."""
    return x.flatten(0, 1)
