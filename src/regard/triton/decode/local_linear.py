"""Local linear attention with few queries: programs share out the keys.

A solved t reads keys twice and values once: with D = Dv, 6 D bytes a key in bfloat16, where softmax reads 4 D, and
8 D^2 bytes a row and split for second moments. A split holds at least 16 D keys (4 G D if G > 4 query heads share a key
head), so that moments take at most 2 D bytes a key and the total at most twice softmax's. If rows keep the device busy,
there is one split of all keys.

In the first pass every row gathers mass, mean and covariance of its weighted keys. Then one program a row solves its
system, by conjugate gradients or, if these do not converge, by elimination. In the second pass p (1 + e) of all heads
of a key head meet its values together. The learned solver (Parallax) solves nothing and takes one pass.

Covariance form: t = (C + ridge)^-1 (q - mean), e_j = (k_j - mean) . t, o = sum_j p_j (1 + e_j) v_j (Local Linear
Attention, equations 7 and 8; Parallax, arXiv 2605.29157). Second moments take 4 n D^2 operations a row with bfloat16
keys (two terms).

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, N = B H Tq rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import Cost, Inputs, Problem
from ...pairwise.visibility import Visibility
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from .compact import Shape, add_splits, room_for, width_of
from .plan import Ranges, masked, ranges_of, row_tensor, splits_of, strides

WIDEST = 128
"""Most features of a key if a system is solved: its matrix stays in the registers of one program."""
TOLERANCE = 1e-6
"""Tolerance of conjugate gradients if the solver has none."""
FULL = 16
"""Fewest keys of a split, in units of D: a split stores D^2 numbers."""

MOMENTS = TileTable(
    "local_linear_decode_moments",
    {
        (64, 2): Tiles(keys=64),
        (128, 2): Tiles(keys=32, warps=8),
        (64, 4): Tiles(keys=32),
        (128, 4): Tiles(keys=16, warps=8),
    },
    others=(Tiles(keys=128, warps=8), Tiles(keys=32)),
)
TABLE = TileTable(
    "local_linear_decode", {(256, 4): Tiles(keys=32, stages=3)}, others=(Tiles(keys=32), Tiles(keys=64, stages=3))
)
SOLVE = TileTable("local_linear_decode_solve", {(64, 4): Tiles(warps=4, stages=1), (128, 4): Tiles(warps=8, stages=1)})


def fits(problem: Problem) -> bool:
    """Return whether the system to solve, if any, is narrow enough."""
    return problem.dim <= WIDEST or problem.spec.solver.name == "learned"


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass and the bytes of a split's moments."""
    rows = problem.batch * problem.heads * problem.queries
    solved = problem.spec.solver.name != "learned"
    pairs = 6 * problem.dim + 2 * problem.value_dim + (4 * problem.dim**2 if solved else 2 * problem.value_dim)
    return Cost(rows * problem.keys * pairs, 4 * rows * problem.dim * (problem.dim if solved else 2))


def run(inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
    """Return the output [B, H, Tq, Dv] in the dtype of the values; no diagnostics."""
    assert inputs.x is not None
    assert inputs.y is not None
    solver = inputs.spec.solver
    tol, limit = getattr(solver, "tol", None), getattr(solver, "max_iter", None)
    how = {"learned": 0, "cg": 1, "cholesky": 2}.get(solver.name, 3)
    steps = (TOLERANCE if tol is None else tol, 4 * inputs.x.shape[-1] if limit is None else limit)
    tensors = (inputs.x, inputs.y, inputs.v, inputs.scale, inputs.ridge, inputs.probe)
    return decode(*tensors, inputs.visible, how, *steps, raw=inputs.raw), None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    factor: float | Tensor,
    ridge: float | Tensor,
    probe: Tensor | None,
    visible: Visibility,
    how: int = 3,
    tol: float = TOLERANCE,
    limit: int = 4 * WIDEST,
    raw: bool = False,
) -> Tensor:
    """Return the local linear attention of few queries, [B, H, Tq, Dv].

    Args:
        q, k, v: [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv], of one dtype.
        factor: factor of the products, a number or [B, H, Tq].
        ridge: a number, or [B, H, Tq, 1 or D].
        probe: [B, H, Tq, D], -t if it is given, else None.
        how: 1 for conjugate gradients, 2 for elimination, 3 for both in turn; ignored with a probe.
        tol, limit: tolerance and most steps of conjugate gradients.
        raw: whether vectors may be non-finite (or beyond 2^56) anywhere: rows that see one become NaN. Otherwise
            only vectors that no row sees may be non-finite.

    Raises:
        ArgumentError: neither a probe nor a way to solve.
    """
    if probe is None and how == 0:
        raise ArgumentError("local_linear_decode: the learned solver needs params={'probe': r}, r [B, H, Tq, D].")
    ranges = ranges_of(visible, q.device)
    scale, by = (1.0, row_tensor(factor, q)) if isinstance(factor, Tensor) else (float(factor), None)
    number, own = (0.0, _vectors(ridge, q)) if isinstance(ridge, Tensor) else (float(ridge), None)
    probe = None if probe is None else _vectors(probe, q)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    numbers = (scale, number, how, tol, limit, ranges.most, raw)
    return _decode(q, k, v, by, own, probe, ranges.low, ranges.high, ranges.mask, *numbers)


def _vectors(x: Tensor, q: Tensor) -> Tensor:
    """Return vectors of rows as float32 [B, H, Tq, n], contiguous."""
    return x.to(torch.float32).expand(*q.shape[:3], x.shape[-1]).contiguous()


def _run(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, ridge: Tensor | None, probe: Tensor | None, *rest: Any
) -> Tensor:
    low, high, mask, scale, number, how, tol, limit, most, raw = rest
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    if q.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    call = _Call(q, k, v, factor, scale, Ranges(low, high, mask, most))
    if probe is not None:
        call.probed(probe, out, raw)
    else:
        mean, state, spread = call.moments()
        slope = call.solved(spread, mean, ridge, number, how, tol, limit)
        call.tilted(slope, mean, state, out, raw)
    return out


_decode = torch.library.custom_op(
    "regard::triton_local_linear_decode",
    _run,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? ridge, Tensor? probe, Tensor low, Tensor high, "
    "Tensor? mask, float scale, float number, SymInt how, float tol, SymInt limit, SymInt most, bool raw) -> Tensor",
)


@_decode.register_fake
def _(q, k, v, *rest):
    return v.new_empty(*q.shape[:3], v.shape[-1])


class _Call:
    """What the kernels of one call share, and their launches."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, scale: float, ranges: Ranges) -> None:
        self.q, self.k, self.v, self.factor, self.scale, self.ranges = q, k, v, factor, scale, ranges
        self.rows, self.dim = q.shape[:3], q.shape[-1]
        self.flags = {"GIVEN": factor is not None, "MASKED": masked(ranges)}

    def _shape(self, one: bool = False) -> Shape:
        return Shape.of(self.q, self.k, one)

    def _new(self, *shape: int) -> Tensor:
        return self.q.new_empty(*shape, dtype=torch.float32)

    def moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (mean [N, D], (m, sum w) [N, 2], covariance [N, D, D]) of the weighted keys of every row."""
        from .local_linear_kernels import merge_moments_kernel, moments_kernel

        q, k, ranges, shape = self.q, self.k, self.ranges, self._shape(one=True)
        tiles = MOMENTS.pick(self.dim, k.dtype)
        if self.flags["MASKED"]:  # the matrix leaves few registers
            tiles = replace(tiles, keys=max(16, tiles.keys // 2))
        total, least = self.rows.numel(), max(1, max(FULL, 4 * shape.group) * self.dim // tiles.keys)
        splits = splits_of(q.device, shape.programs, room_for(ranges.most, tiles.keys), 1, least)
        moment, mean = self._new(splits, total, self.dim, self.dim), self._new(splits, total, self.dim)
        state = self._new(splits, total, 2)
        widths = {"D": self.dim, "WIDTH": width_of(q)}
        launch(
            moments_kernel, (shape.programs, splits), q, k, self.factor, *ranges.tensors, moment, mean, state,
            *shape.sizes, self.scale, *strides(q), *strides(k), *ranges.strides, total,
            tiles=tiles, **widths, KEYS=tiles.keys, MOST=shape.most, **self.flags,
        )  # fmt: skip
        if splits == 1:
            return mean[0], state[0], moment[0]
        spread, centre, whole = self._new(*moment.shape[1:]), self._new(*mean.shape[1:]), self._new(total, 2)
        launch(
            merge_moments_kernel, (total, -(-self.dim // 16)), moment, mean, state, spread, centre, whole, splits,
            total,
            tiles=Tiles(warps=4, stages=1), **widths, PANEL=16,
        )  # fmt: skip
        return centre, whole, spread

    def solved(
        self, spread: Tensor, mean: Tensor, ridge: Tensor | None, number: float, how: int, tol: float, limit: int
    ) -> Tensor:
        """Return t [N, D]."""
        from .local_linear_kernels import solve_kernel

        slope, shape = torch.empty_like(mean), self._shape(one=True)
        launch(
            solve_kernel, (shape.programs,), self.q, spread, mean, ridge, slope, *shape.sizes, number, tol, limit,
            *strides(self.q),
            tiles=SOLVE.pick(self.dim, torch.float32), D=self.dim, WIDTH=width_of(self.q),
            RIDGE=0 if ridge is None else ridge.shape[-1], GRADIENTS=how in (1, 3), DIRECT=how in (2, 3),
        )  # fmt: skip
        return slope

    def _pass(self) -> tuple[Tiles, Shape, int, dict[str, int]]:
        """Return tiles, sizes, splits and widths of a pass over keys and values."""
        tiles = TABLE.pick(max(self.dim, self.v.shape[-1]), self.k.dtype)
        shape = self._shape()
        splits = splits_of(self.q.device, shape.programs, room_for(self.ranges.most, tiles.keys), shape.rows)
        widths = {"D": self.dim, "WIDTH": width_of(self.q), "DV": self.v.shape[-1], "WIDTH_V": width_of(self.v)}
        return tiles, shape, splits, {**widths, "ROWS": shape.rows, "KEYS": tiles.keys, "MOST": shape.most}

    def _strides(self) -> tuple[int, ...]:
        return (*strides(self.q), *strides(self.k), *strides(self.v), *self.ranges.strides)

    def tilted(self, slope: Tensor, mean: Tensor, state: Tensor, out: Tensor, raw: bool) -> None:
        """Compute the output of solved rows."""
        from .local_linear_kernels import tilted_kernel

        tiles, shape, splits, widths = self._pass()
        part = out[None] if splits == 1 else self._new(splits, *out.shape)
        launch(
            tilted_kernel, (shape.programs, splits), self.q, self.k, self.v, self.factor, *self.ranges.tensors, slope,
            mean, state, part, *shape.sizes, self.scale, *self._strides(), part.stride(0),
            tiles=tiles, **widths, **self.flags, RAW=raw,
        )  # fmt: skip
        add_splits(part, out)

    def probed(self, probe: Tensor, out: Tensor, raw: bool) -> None:
        """Compute the output of rows whose t is given."""
        from .local_linear_kernels import merge_probed_kernel, probed_kernel

        tiles, shape, splits, widths = self._pass()
        total = self.rows.numel()
        part, state = self._new(splits, total, 2, out.shape[-1]), self._new(splits, total, 4)
        launch(
            probed_kernel, (shape.programs, splits), self.q, self.k, self.v, self.factor, *self.ranges.tensors, probe,
            part, state, *shape.sizes, self.scale, *self._strides(), total,
            tiles=tiles, **widths, **self.flags, RAW=raw,
        )  # fmt: skip
        launch(
            merge_probed_kernel, (total,), part, state, out, splits, total,
            tiles=Tiles(warps=4, stages=1), DV=out.shape[-1], WIDTH=width_of(out),
        )  # fmt: skip
