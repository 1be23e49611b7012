"""Local linear attention with few queries: the keys are split between programs.

Covariance form: t = (C + ridge)^-1 (q - mean), e_j = (k_j - mean) . t, o = sum_j p_j (1 + e_j) v_j. A given t
(Parallax) takes one pass over the keys (`compact_kernels`), a solved t three: `means_kernel` stores every row's scores
and gathers its mass and the mean of its keys; `weights_kernel` turns scores into weights p; `moments_kernel` gathers
the covariance, of two query heads together; `solve_kernel` solves the system of a row, by conjugate gradients or, if
these do not converge, by elimination; `corrected_kernel` multiplies p (1 + e) of all heads of a key head with its
values.

With D = Dv and bfloat16 a solved t reads 8 D bytes a key where softmax reads 4 D, and moves 20 bytes a row and key of
scores and weights, and 8 D^2 a row and split of second moments. A split holds at least 16 D keys. With bfloat16
keys p (k - mean) is multiplied in two terms, within 2^-16; second moments take 3 n D^2 operations a row if D > 64, else
4 n D^2. One term would do where weights are spread, but not where few keys have weight (`benchmarks/gpu_moments.py`).

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, N = B H Tq rows.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...pairwise.diagnostics import Diagnostics
from ...pairwise.dispatch import Cost, Inputs, Problem
from ...pairwise.visibility import Visibility
from ..runtime.call import Form
from ..runtime.launch import launch
from ..runtime.operators import operator, rows_together
from ..runtime.span import Span
from ..runtime.tiles import Tiles, TileTable
from .compact import Decoding, add_splits, merged, most_keys, of_rows, processors

WIDEST = 128  # maximum features of a key if a system is solved: its matrix stays in the registers of one program
TOLERANCE = 1e-6  # tolerance of conjugate gradients if the solver has none
FULL = 16  # minimum keys of a split, in units of D: a split stores D^2 numbers
PAIR = 2  # rows whose moments a program gathers from the same keys
FILL = (2, 1)  # programs of `moments_kernel` on a multiprocessor, for up to 64 features and more

MOMENTS = TileTable(
    "local_linear_decode_moments",
    {(128, 2): Tiles(keys=64, stages=3), (128, 4): Tiles(keys=16, warps=8)},
    others=(Tiles(keys=64, stages=2), Tiles(keys=128, stages=3)),
)
MEANS = TileTable("local_linear_decode_means", {(128, 2): Tiles(keys=64, stages=3), (128, 4): Tiles(keys=16, stages=3)})
CHUNK = Tiles(rows=32, keys=4096, warps=8, stages=1)  # splits, and weights, that a program reads at once
TABLE = TileTable("local_linear_decode", {(256, 4): Tiles(keys=32, stages=3)})
SOLVE = TileTable("local_linear_decode_solve", {(64, 4): Tiles(warps=4, stages=1), (128, 4): Tiles(warps=8, stages=1)})


def fits(problem: Problem) -> bool:
    """Return whether the system to solve, if any, is narrow enough."""
    return problem.dim <= WIDEST or problem.spec.solver.name == "learned"


def cost(problem: Problem) -> Cost:
    """Return the operations of the forward pass and the bytes of weights and a split's moments."""
    rows, dim = problem.batch * problem.heads * problem.queries, problem.dim
    solved = problem.spec.solver.name != "learned"
    pairs = 6 * dim + 2 * problem.value_dim
    pairs += (3 if dim > 64 else 4) * dim**2 if solved else 2 * problem.value_dim
    return Cost(rows * problem.keys * pairs, 4 * rows * (problem.keys + dim**2 if solved else 2 * dim))


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
    q: Tensor, k: Tensor, v: Tensor, factor: float | Tensor, ridge: float | Tensor, probe: Tensor | None,
    visible: Visibility, how: int = 3, tol: float = TOLERANCE, limit: int = 4 * WIDEST, raw: bool = False,
) -> Tensor:  # fmt: skip
    """Return the local linear attention of few queries, [B, H, Tq, Dv]; `raw` as in `compact.decode`. The ridge is a
    number or [B, H, Tq, 1 or D]. `probe` [B, H, Tq, D] is -t, or None to solve for it: `how` is 1 for conjugate
    gradients with a tolerance and a limit of steps, 2 for elimination, 3 for both in turn."""
    assert how > 0 or probe is not None  # a call without a probe has been refused
    span = Span.of(visible, q, by_keys=False)
    (by, scale), (per_row, number), (probe, _) = of_rows(factor, q), of_rows(ridge, q), of_rows(probe, q)
    q, k, v = (rows_together(x) for x in (q, k, v))
    seen = span.low, span.high, span.mask
    return _decode(q, k, v, by, per_row, probe, *seen, scale, number, how, tol, limit, most_keys(visible), raw)


def _run(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, ridge: Tensor | None, probe: Tensor | None, *rest: Any
) -> Tensor:
    low, high, mask, scale, number, how, tol, limit, most, raw = rest
    out = v.new_empty(*q.shape[:3], v.shape[-1])
    if q.numel() == 0 or k.shape[2] == 0:
        return out.zero_()
    call = Decoding(q, k, v, scale if factor is None else factor, Span(low, high, low, low, mask), most, raw)
    tiles = TABLE.pick(call.width, call.dtype)
    if probe is not None:
        merged(call, probe, out, tiles)
    else:
        from .local_linear_kernels import corrected_kernel, solve_kernel

        means = MEANS.pick(call.form.dim, call.dtype)
        block = max(tiles.keys, means.keys, MOMENTS.pick(call.form.dim, call.dtype).keys)
        (form, grid, _), room = call.shared(tiles), ((call.keys + block - 2) // block + 1) * block
        z, mean, moment = _moments(call, means, block, room)
        slope, narrow = torch.empty_like(mean), Form(*call.form[:2])
        launch(
            solve_kernel, (call.rows,), call.matrices[0], moment, mean, ridge, slope, *call.row_sizes, len(moment),
            call.rows, number, tol, limit, tiles=SOLVE.pick(narrow.dim, torch.float32),
            RIDGE=0 if ridge is None else ridge.shape[-1], GRADIENTS=how in (1, 3), DIRECT=how in (2, 3), FORM=narrow,
        )  # fmt: skip
        part = out[None] if grid[1] == 1 else call.blank(grid[1], *out.shape)
        launch(
            corrected_kernel, grid, call.matrices, call.factor, call.span.pointers, z, slope, mean, part,
            *call.row_sizes, *call.span.steps, room, part.stride(0), tiles=tiles, BLOCK=block, FORM=form,
        )  # fmt: skip
        add_splits(part, out)
    return out


_decode = operator(
    "local_linear_decode", _run,
    "(Tensor q, Tensor k, Tensor v, Tensor? factor, Tensor? ridge, Tensor? probe, Tensor low, Tensor high, "
    "Tensor? mask, float scale, float number, SymInt how, float tol, SymInt limit, SymInt most, bool raw) -> Tensor",
    lambda q, k, v, *_: v.new_empty(*q.shape[:3], v.shape[-1]),
)  # fmt: skip


def _moments(call: Decoding, tiles: Tiles, block: int, room: int) -> tuple[Tensor, ...]:
    """Return (weights [N, room], mean [N, D], S [splits, N, D, D]) of the keys of every row."""
    from .local_linear_kernels import means_kernel, moments_kernel, weights_kernel

    dim, total, (heads, group, queries) = call.form.dim, call.rows, call.row_sizes
    keys = (*call.matrices[:2], call.matrices[1])  # values are not read
    if group * queries == 1:  # no tensor cores
        tiles = replace(tiles, keys=min(tiles.keys, 32))
    form, grid, _ = call.shared(tiles)
    form = form._replace(value_dim=0, value_wide=0)
    z, mean = call.blank(total, room), call.blank(total, dim)
    part, state = call.blank(grid[1], total, dim), call.blank(grid[1], total, 2)
    steps, where = call.span.steps, {"BLOCK": block}
    launch(
        means_kernel, grid, keys, call.factor, call.span.pointers, z, part, state, heads, group, queries, *steps, room,
        total, tiles=tiles, FORM=form, **where,
    )  # fmt: skip
    # rows of a program must see the same keys, unless all keys are finite
    alone = call.dtype == torch.float32 or queries > 1 or group % PAIR or (form.raw and form.masked == 2)
    rows, tiles = 1 if alone else PAIR, MOMENTS.pick(dim, call.dtype)
    tiles = replace(tiles, warps=rows * tiles.warps)
    form = form._replace(own=rows, tile=tiles.keys, factors=False)
    launch(
        weights_kernel, (total, -(-room // CHUNK.keys)), call.span.pointers, z, part, state, mean, heads, group,
        queries, steps[0], room, grid[1], total, tiles=CHUNK, CHUNK=CHUNK.keys, PARTS=CHUNK.rows, FORM=form, **where,
    )  # fmt: skip
    programs = total // rows
    splits = max(1, min(FILL[dim > 64] * processors(call.q.device) // programs, room // max(block, FULL * dim)))
    moment = call.blank(splits, total, dim, dim)
    launch(
        moments_kernel, (programs, splits), keys, call.span.pointers, z, mean, moment, heads, group, queries,
        steps[0], room, total, tiles=tiles, FORM=form._replace(raw=False), **where,
    )  # fmt: skip
    return z, mean, moment
