"""Solvers: how the local linear model's systems (C_i + ridge_i) t_i = b_i are solved, one for every query.

A solver sees a `System`, which can form its matrices or merely apply them, and says of every row how it fared: none is
left unconverged in silence.

Legend: as in `systems`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..checks import ArgumentError, flag, number, optional_whole, whole
from ..registry import Registry
from .conjugate import conjugate_gradients
from .systems import Solved, SolveStatus, System

solvers: Registry[Any] = Registry("solver", "regard.solvers")


@runtime_checkable
class Solver(Protocol):
    """Solves systems."""

    name: ClassVar[str]
    exact: ClassVar[bool]  # whether autograd may go through `solve`; else its gradient is that of the exact solution
    needs_ridge: ClassVar[bool]  # whether ridge 0 is refused

    def solve(self, system: System, right: Tensor) -> Solved:
        """t with (C + ridge) t = `right` [..., D]."""


@torch.no_grad()
def _direct(matrix: Tensor, right: Tensor, value: Tensor, status: Tensor, jitter: Tensor | None = None) -> Solved:
    """What a direct solution of `matrix` x = `right` comes to: no iterations, and the residual |b - A x| / |b|."""
    size = torch.linalg.vector_norm(right, dim=-1)
    left = torch.linalg.vector_norm(right - (matrix @ value[..., None])[..., 0], dim=-1)
    none = torch.zeros_like(size)
    residual = torch.where(size > 0, left / torch.where(size > 0, size, 1), 0)
    return Solved(
        value,
        status.int(),
        {"iterations": none, "residual": residual, "jitter": none if jitter is None else jitter},
    )


@solvers.register("cholesky")
@dataclass(frozen=True)
class Cholesky:
    """Direct solve by a Cholesky factor. A numerically singular matrix gets the least-squares solution of minimum norm
    where ridge is 0 (by eigenvalues), else the first of three growing jitters that makes it regular.
    Cost D^3/3 a row, and D^2 a pair for the matrix.
    """

    name: ClassVar[str] = "cholesky"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    RUNGS: ClassVar[tuple[float, ...]] = (1e1, 1e3, 1e5)
    """Jitter, in units of D eps times the mean of the diagonal."""

    def solve(self, system: System, right: Tensor) -> Solved:
        return self.factor(system.matrix(), right, system.ridge)

    def factor(self, matrix: Tensor, right: Tensor, ridge: float | Tensor) -> Solved:
        """`matrix` x = `right`: [..., D, D], [..., D] -> [..., D]."""
        finite = torch.isfinite(matrix.detach()).all((-1, -2))
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        sound = torch.where(finite[..., None, None], matrix, eye)  # no row's NaN may fail the whole call
        factor, info = torch.linalg.cholesky_ex(sound)
        penalised = _penalised(ridge, info)
        singular = self._meaningless(factor.detach(), info, sound.detach(), penalised)
        status = torch.where(finite, 0, int(SolveStatus.NOT_FINITE))
        jitter = torch.zeros_like(right[..., 0])
        if not (torch.compiler.is_compiling() or bool(singular.any())):
            solution = torch.cholesky_solve(right[..., None], factor)
        else:
            jitter, left = self._jitter(sound.detach(), singular & penalised)
            left |= singular & (jitter == 0)
            raised = sound + jitter[..., None, None] * eye
            regular = torch.cholesky_solve(
                right[..., None], torch.linalg.cholesky_ex(torch.where(left[..., None, None], eye, raised))[0]
            )
            held = torch.where(left[..., None, None], sound, eye)
            least = torch.linalg.pinv(held, hermitian=True, rtol=_rtol(matrix)) @ right[..., None]
            solution = torch.where(left[..., None, None], least, regular)
            status = torch.where(jitter > 0, int(SolveStatus.JITTER), status)
            status = torch.where(left, int(SolveStatus.MINIMUM_NORM), status)
        value = torch.where(finite[..., None], solution[..., 0], torch.nan)
        found = _direct(matrix.detach(), right.detach(), value.detach(), status, jitter)
        return found._replace(value=value)

    def _jitter(self, matrix: Tensor, singular: Tensor) -> tuple[Tensor, Tensor]:
        """(the first rung on which a singular matrix is regular, 0 for the others; which no rung mends)."""
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        unit = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * torch.where(mean > 0, mean, 1)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        found, left = torch.zeros_like(unit), singular
        for rung in self.RUNGS:
            found = torch.where(left, rung * unit, found)
            raised = matrix + found[..., None, None] * eye
            factor, info = torch.linalg.cholesky_ex(raised)
            whole = torch.zeros_like(left)  # the jitter is the same in all coordinates, and so is the measure
            left = left & self._meaningless(factor, info, raised, whole)
        return torch.where(left, 0, found), left

    @staticmethod
    def _meaningless(factor: Tensor, info: Tensor, matrix: Tensor, penalised: Tensor) -> Tensor:
        """Whether there is no factor, or none that means anything: pivots of a numerically singular matrix are roots
        of rounding. A pivot is what elimination leaves of its own coordinate, whose scale is nobody else's matter; but
        without a ridge, that may be rounding from the start."""
        pivots = torch.diagonal(factor, dim1=-2, dim2=-1).square()
        whole = torch.diagonal(matrix, dim1=-2, dim2=-1)
        whole = torch.where(penalised[..., None], whole, whole.amax(-1, keepdim=True))
        return (info != 0) | ~(pivots > whole * _rtol(factor)).all(-1)


def _penalised(ridge: float | Tensor, like: Tensor) -> Tensor:
    """Which systems have a ridge above zero in every coordinate, as booleans like `like`."""
    if isinstance(ridge, Tensor):
        return (ridge.detach().amin(-1) > 0).expand(like.shape)
    return torch.full_like(like, ridge > 0, dtype=torch.bool)


def _rtol(matrix: Tensor) -> float:
    return float(matrix.shape[-1] * torch.finfo(matrix.dtype).eps * 10)


@solvers.register("cg")
@dataclass(frozen=True)
class ConjugateGradient:
    """Conjugate gradients, matrix-free: a row's iteration ends when its true residual |b - A t| is `tol` |b|, or as
    small as the precision allows; the block's, when every row's has.

    Args:
        max_iter: the most steps; 4 D where None. 0 gives t = 0, the local constant model.
        tol: relative residual; 1e-6 in float32 and 1e-10 in float64 where None. The relative error of the output
            is at most 0.8 times it, that of a row 3.6 times, on the data of `regard reproduce lla-numerics`.
        precondition: divide by one factored matrix a block, of the keys that all its rows see: fewer steps where
            keys are badly conditioned, more in early blocks.

    Cost: 4 D a step and pair.
    """

    max_iter: int | None = None
    tol: float | None = None
    precondition: bool = False

    name: ClassVar[str] = "cg"
    exact: ClassVar[bool] = False
    needs_ridge: ClassVar[bool] = True

    RESTARTS: ClassVar[int] = 3
    """How often a row whose recurrence was over before its true residual was small begins again."""

    def __post_init__(self) -> None:
        optional_whole("cg", "max_iter", self.max_iter, 0, 2**31)
        if self.tol is not None:
            number("cg", "tol", self.tol, low=0.0, strict=True)
            object.__setattr__(self, "tol", number("cg", "tol", self.tol, high=1.0))
        flag("cg", "precondition", self.precondition)

    @torch.no_grad()
    def solve(self, system: System, right: Tensor) -> Solved:
        tol = self.tol if self.tol is not None else (1e-10 if right.dtype == torch.float64 else 1e-6)
        limit = 4 * right.shape[-1] if self.max_iter is None else self.max_iter
        return conjugate_gradients(system, right, tol, limit, self.precondition, self.RESTARTS)


@solvers.register("block-diagonal")
@dataclass(frozen=True)
class BlockDiagonal:
    """Only the diagonal blocks of the covariance: in closed form for blocks of one or two coordinates, by Cholesky for
    larger ones. Another estimator than local linear attention, between it and attention; ridge near 1 suits it.

    Args:
        blocks: how many blocks, a divisor of D; D where 0.

    Cost: D / blocks a pair, and D^3 / (3 blocks^2) a row.
    """

    blocks: int = 0

    name: ClassVar[str] = "block-diagonal"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole("block-diagonal", "blocks", self.blocks, 0)

    def solve(self, system: System, right: Tensor) -> Solved:
        dim = right.shape[-1]
        count = self.blocks or dim
        if dim % count:
            raise ArgumentError(f"block-diagonal: {dim} coordinates do not divide into {count} blocks; give a divisor.")
        parts, b = system.diagonal(count), right.unflatten(-1, (count, dim // count))
        if dim == count:
            value, status = self._one(parts[..., 0], b)
        elif dim == 2 * count:
            value, status = self._two(parts, b)
        else:
            ridge = system.ridge
            if isinstance(ridge, Tensor):
                ridge = ridge.expand(right.shape).unflatten(-1, (count, dim // count))
            found = Cholesky().factor(parts, b, ridge)
            value, status = found.value, found.status
        solved = _direct(parts.detach(), b.detach(), value.detach(), status)
        worst = {name: x.amax(-1) for name, x in solved.statistics.items()}
        finite = torch.isfinite(parts.detach()).flatten(-3).all(-1)
        status = torch.where(finite, solved.status.amax(-1), int(SolveStatus.NOT_FINITE))
        return Solved(torch.where(finite[..., None], value.flatten(-2), torch.nan), status.int(), worst)

    @staticmethod
    def _one(parts: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of one: [..., g, 1] each."""
        held = parts > 0
        value = torch.where(held, b / torch.where(held, parts, 1), 0)
        return value, torch.where(held, 0, int(SolveStatus.MINIMUM_NORM))[..., 0]

    @staticmethod
    def _two(parts: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks of two by elimination, the larger pivot first: [..., g, 2, 2], [..., g, 2]."""
        swap = parts[..., 0, 0] < parts[..., 1, 1]
        a = torch.where(swap, parts[..., 1, 1], parts[..., 0, 0])
        d = torch.where(swap, parts[..., 0, 0], parts[..., 1, 1])
        first = torch.where(swap, b[..., 1], b[..., 0])
        second = torch.where(swap, b[..., 0], b[..., 1])
        held = a > 0
        share = torch.where(held, parts[..., 0, 1] / torch.where(held, a, 1), 0)
        rest = d - share * parts[..., 0, 1]
        sound = rest > a * torch.finfo(a.dtype).eps  # below, what is left of the second coordinate is rounding
        y = torch.where(sound, (second - share * first) / torch.where(sound, rest, 1), 0)
        x = torch.where(held, first / torch.where(held, a, 1), 0) - share * y
        value = torch.stack([torch.where(swap, y, x), torch.where(swap, x, y)], -1)
        return value, torch.where(sound, 0, int(SolveStatus.MINIMUM_NORM))


@solvers.register("learned")
@dataclass(frozen=True)
class Learned:
    """No system is solved: the caller gives `params={"probe": r}` [B, H, Tq, D] and t = -r (Parallax, Zuo et al.,
    arXiv 2605.29157). Cost: none."""

    name: ClassVar[str] = "learned"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    def solve(self, system: System, right: Tensor) -> Solved:
        if system.probe is None:
            raise ArgumentError(
                "learned: no probe was given; pass params={'probe': r} with r [B, H, Tq, D], or choose another solver."
            )
        none = torch.zeros(right.shape[:-1], dtype=right.dtype, device=right.device)
        return Solved(-system.probe, none.int(), {"iterations": none, "residual": none, "jitter": none})


@solvers.register("auto")
@dataclass(frozen=True)
class Auto:
    """What costs least: systems among the weighted keys for rows with few of them, Cholesky, or conjugate gradients.

    Weights that vanish (compact kernels, thresholds, short windows) have every row solved by itself: among its weighted
    keys where they are no more than its coordinates (than 2 D, of many keys), else by Cholesky. Others go by Cholesky
    for 16 coordinates and fewer, for few queries, and in blocks with queries that see no more than 2 D keys; else by
    conjugate gradients, with Cholesky for the rows that did not converge. `impl="reference"` takes Cholesky for all.

    Cost: that of what it chooses; at 64 coordinates about 10 steps of conjugate gradients cost as much as Cholesky.
    """

    name: ClassVar[str] = "auto"
    exact: ClassVar[bool] = True
    needs_ridge: ClassVar[bool] = False

    SMALL: ClassVar[int] = 16

    def solve(self, system: System, right: Tensor) -> Solved:
        dim = right.shape[-1]
        free = isinstance(system.ridge, float) and system.ridge == 0.0
        if system.sparse and not free:
            return system.by_row(right)
        short = system.fewest is None or system.fewest <= 2 * dim
        if free or short or dim <= self.SMALL or right.shape[-2] < self.SMALL:
            return Cholesky().solve(system, right)
        solved = ConjugateGradient().solve(system, right)
        # A singular system can have a long solution whose rounding hides any residual.
        failed = (solved.status == SolveStatus.UNCONVERGED) | ~_penalised(system.ridge, solved.status)
        if not bool(failed.any()):
            return solved
        direct = Cholesky().solve(system, right)  # for these rows alone: no row's answer depends on another's fate
        direct.statistics["iterations"] = solved.statistics["iterations"]
        statistics = {name: torch.where(failed, direct.statistics[name], x) for name, x in solved.statistics.items()}
        value = torch.where(failed[..., None], direct.value, solved.value)
        return Solved(value, torch.where(failed, direct.status, solved.status), statistics)
