"""Numerics of local linear attention: how the error of its output falls with steps of conjugate gradients, in float32
and from bfloat16 inputs (Local Linear Attention paper, appendix E, Table 2).

The paper states neither data nor ridge of its Table 2; here both vary (docs/local-linear-results.md has the kinds of
data). The truth is a dense float64 Cholesky solution of the inputs after rounding to their dtype. For bfloat16 inputs
regard is compared with emulations of schemes that multiply in bfloat16 (`lla_numerics_schemes`).
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.grammar import SolveStatus
from regard.grammar.solvers import Auto, ConjugateGradient, Solver
from regard.pairwise.local_linear_attention import local_linear_attention

from ..lib.claims import Claim, claims_of, exact
from ..lib.display import MISSING, Show, ToText, lines, means, panels, pivot, stat
from ..lib.recipe import Cell, Frame, Recipe, Results, select, significant, stacked
from .lla_numerics_schemes import SCHEMES, Data, floors_of, outputs, rounded

BLOCK = 128  # rows to one number of the iterations by block
EMULATED = 64  # steps of the emulated schemes at most, the last column of the paper's Table 2
REGARD = "regard"
DTYPES = ("float32", "bfloat16")
TARGETS = {0.1: 0.016, 0.01: 0.056}  # ridge to the relative error of bfloat16 inputs with anisotropic keys
FAMILIES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normal": lambda q, k, at: (q, k),
    "normalised": lambda q, k, at: (q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)),
    "anisotropic": lambda q, k, at: (q, k[1:] * torch.logspace(0.3, -0.7, k.shape[-1]) + 2 * k[:1]),
    "recall": lambda q, k, at: (k[(at * torch.arange(1, len(k) + 1)).long()] + 0.1 * q, k),
}
"""Queries and keys from normal ones and uniform numbers; the anisotropic keys from one row more."""


def draw(config: "Numerics", family: str, head: int, seed: int = 0) -> Data:
    """Return one head of a kind of data in float32, a function of seed, kind and head."""
    key = (seed * len(FAMILIES) + list(FAMILIES).index(family)) * 1_000_003 + head
    generator = torch.Generator().manual_seed(key)
    normal = lambda rows: torch.randn(rows, config.dim, generator=generator)  # noqa: E731
    q, v, k = normal(config.length), normal(config.length), normal(config.length + (family == "anisotropic"))
    q, k = FAMILIES[family](q, k, torch.rand(config.length, generator=generator))
    return q, k, v


def budgets(config: "Numerics") -> dict[str, Solver]:
    """Return name to solver: steps, tolerances, conjugate gradients by default, and what "auto" does."""
    made: dict[str, Solver] = {f"steps {n}": ConjugateGradient(max_iter=n) for n in config.steps}
    made |= {f"tol {tol:g}": ConjugateGradient(tol=tol) for tol in config.tols}
    return made | {"default": ConjugateGradient(), "auto": Auto()}


def errors(outputs: Tensor, truth: Tensor) -> dict[str, Any]:
    """Return of outputs [H, T, D] the root mean square error, the same relative to the truth's, the largest relative
    error of a row, and how many rows are not finite; those are left out of the others."""
    finite = outputs.isfinite().all(-1)
    off, size = (outputs.double() - truth)[finite], truth[finite]
    numbers: dict[str, Any] = dict.fromkeys(("absolute", "relative", "worst_row"))
    if len(off):
        rows = off.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-300)
        measured = (off.square().mean().sqrt(), off.norm() / size.norm(), rows.max())
        numbers = dict(zip(numbers, map(significant, measured), strict=True))
    return {**numbers, "not_finite": int((~finite).sum())}


def run_regard(
    heads: Sequence[Data], dtype: str, ridge: float, solver: Solver, truth: Tensor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return errors with the solver's iterations, true relative residuals and statuses, and iterations by block."""
    q, k, v = (torch.stack(parts)[None].to(getattr(torch, dtype)) for parts in zip(*heads, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # too few steps are the point
        out, diagnostics = local_linear_attention(
            q, k, v, ridge=ridge, solver=solver, is_causal=True, impl="blocked", return_diagnostics=True
        )
    steps, residual, status = (diagnostics.solver[name][0] for name in ("iterations", "residual", "status"))
    blocks = [{"position": (i + 0.5) * BLOCK, "mean_steps": significant(part.mean()), "max_steps": int(part.max())}
              for i, part in enumerate(steps.split(BLOCK, -1))]  # fmt: skip
    return errors(out[0], truth) | {
        "mean_steps": significant(steps.mean()), "max_steps": int(steps.max()),
        "mean_residual": significant(residual.mean()), "max_residual": significant(residual.max()),
        **{kind.name: int((status == kind).sum()) for kind in SolveStatus},
    }, blocks  # fmt: skip


class Numerics(Recipe, name="lla-numerics"):
    """Error of local linear attention against solver steps, in float32 and bfloat16, beside bfloat16 schemes."""

    families: tuple[str, ...] = ("normal", "normalised", "anisotropic", "recall")  # Kinds of data.
    ridges: tuple[float, ...] = (1.0, 0.1, 0.01)  # Ridges, relative to the kernel weight.
    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # Budgets of conjugate gradients, in steps.
    tols: tuple[float, ...] = (1e-2, 1e-3, 1e-4)  # Budgets of conjugate gradients, in relative residuals.
    length: int = 1024  # Positions.
    dim: int = 64  # Channels of queries, keys and values.
    draws: int = 2  # Independent heads of every kind of data.
    choices: ClassVar = {"families": tuple(FAMILIES)}
    limits: ClassVar = {
        "length": (2, 4096), "dim": (1, 128), "draws": (1, 64), "seeds": (1, 1), "ridges": (1e-6, 1e6),
        "steps": (1, 4 * EMULATED), "tols": (1e-7, 1.0),
    }  # fmt: skip
    by_size: ClassVar = {
        "quick": {"length": 256, "dim": 32, "draws": 1},
        # the steps of Table 2, and the heads of the prefill beside it; the paper does not state the positions
        "paper": {"steps": (1, 2, 4, 8, 16, 32, 64), "dim": 128, "draws": 32},
    }

    def cells(self) -> list[Cell]:
        return [{"data": family, "dtype": dtype} for family in self.families for dtype in DTYPES]

    @torch.no_grad()
    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        low = cell["dtype"] == "bfloat16"
        heads = [draw(self, cell["data"], head, seed) for head in range(self.draws)]
        if low:
            heads = [(rounded(q), rounded(k), rounded(v)) for q, k, v in heads]
        floors = floors_of(heads, self.ridges) if low else {}
        steps = [*(n for n in self.steps if n < EMULATED), EMULATED]
        for ridge, truth in outputs(heads, self.ridges, torch.float64).items():
            for name, solver in budgets(self).items():
                measured, blocks = run_regard(heads, cell["dtype"], ridge, solver, truth)
                common = {"ridge": ridge, "method": REGARD, "budget": name}
                yield {"kind": "budget", **common, **measured}
                yield from ({"kind": "block", **common, **block} for block in blocks)
            for name, outs in floors.items():
                yield {"kind": "floor", "ridge": ridge, "method": name, **errors(outs[ridge], truth)}
            for name, scheme in SCHEMES.items() if low else ():
                for of_heads in zip(*(scheme(*head, ridge, steps) for head in heads), strict=True):
                    row = {"kind": "scheme", "ridge": ridge, "method": name, "step": of_heads[0][0]}
                    yield {**row, **errors(torch.stack([rounded(out) for _, out in of_heads]), truth)}

    def claims(self, results: Results) -> list[Claim]:
        solved = results.select(kind="budget")
        default = select(solved, dtype="bfloat16", budget="default", data="anisotropic").set_index("ridge")["relative"]
        by_tol = {tol: select(solved, dtype="float32", budget=f"tol {tol:g}") for tol in self.tols}
        worst = lambda column: {f"tol {tol:g}": exact(float(rows[column].max() / tol)) for tol, rows in by_tol.items()}  # noqa: E731
        lost = solved[~solved["budget"].str.startswith("steps")]["UNCONVERGED"].sum()
        words = "bfloat16 inputs with anisotropic keys have a relative error of at most {:g}"
        return claims_of("regard's targets", [
            *((f"ridge {ridge:g}", words.format(TARGETS[ridge]), exact(error), "at most", TARGETS[ridge],
               "Relative error.") for ridge, error in default.items() if ridge in TARGETS),
            ("float32", "A tolerance bounds the relative error of the output", worst("relative"), "at most", 1,
             "Largest relative error over the tolerance."),
            ("float32", "Five times a tolerance bounds the relative error of a row", worst("worst_row"), "at most", 5,
             "Largest relative error of a row over the tolerance."),
            ("all data", "Every row converges to its tolerance", exact(float(lost)), "at most", 0,
             "Rows that do not."),
        ], digits=4)  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        solved, frame = results.select(kind="budget"), results.frame
        index = ["data", "ridge", "dtype"]
        note = "Against a float64 Cholesky solution of the same (rounded) inputs; budgets of conjugate gradients."
        by_budget = lambda column: pivot(solved, index, {"": scientific(column)}, columns="budget", note=note)  # noqa: E731
        made = {title: by_budget(column) for title, column in (
            ("Relative error of the output", "relative"),
            ("Absolute error of the output (root mean square)", "absolute"),
            ("Largest relative error of a row", "worst_row"))}  # fmt: skip
        beside = [select(solved, budget="default"), select(frame, kind="floor"), select(frame, step=[16, EMULATED])]
        low = select(stacked(beside), dtype="bfloat16")
        steps = low["step"].map(lambda step: "" if step != step else f", {step:g}")
        made["Relative error from bfloat16 inputs, beside emulated bfloat16 schemes"] = pivot(
            low.assign(method=low["method"] + steps), ["data", "ridge"], {"": scientific("relative", lost=True)},
            columns="method",
            note="rounding: a dense float32 solution rounded once. floor: one whose last two products are in emulated "
            "bfloat16. The schemes, with numbers of steps, multiply in it throughout; q-centred is the paper's. [n]: "
            "rows not finite, left out.",
        )  # fmt: skip
        steps_of = means("{mean_steps:.3g} ({max_steps:g})")
        solver: Show = lambda rows: f"{steps_of(rows)}; {scientific('max_residual')(rows)}"  # noqa: E731
        limited = solved[~solved["budget"].str.startswith("steps")]
        note = "Mean (largest) iterations of a row; largest true relative residual of a row."
        made["Iterations and residuals"] = pivot(limited, index, {"": solver}, columns="budget", note=note)
        statuses = {kind.name: stat(kind.name, "sum", "{:g}") for kind in SolveStatus if kind.name in limited}
        made["Rows by status"] = pivot(limited, index, statuses, note="Over all tolerances, the default and auto.")
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        in_steps = results.frame["budget"].str.startswith("steps", na=False)
        runs = select(results.frame[in_steps], kind="budget")
        runs = runs.assign(step=runs["budget"].str.removeprefix("steps ").astype(float))
        course = stacked([runs, results.select(kind="scheme")])
        course = course.assign(line=course["method"] + course["dtype"].where(course["method"] == REGARD, "").radd(" "))
        along = select(results.frame[~in_steps], kind="block")
        along = along.assign(line=along["budget"] + ", " + along["dtype"])
        over = partial(panels, title="{data}, ridge {ridge:g}")
        error, mean, wrap = {"relative": "relative error"}, {"mean_steps": "mean iterations"}, len(self.ridges)
        return {
            "steps": lines(over(course), "step", error, "line", x_label="steps", log_x=True, log_y=True, wrap=wrap),
            "iterations": lines(over(along), "position", mean, "line", wrap=wrap),
        }

    def notes(self, results: Results) -> list[str]:
        low = select(results.frame, dtype="bfloat16").set_index(["data", "ridge"])
        default = select(low, kind="budget", budget="default")["relative"]
        most = {name: (default / select(low, method=name)["relative"]).max() for name in ("rounding", "floor")}
        return [
            f"T = {self.length}, D = {self.dim}, {self.draws} heads of each kind of data, seed {self.seed}.",
            f"From bfloat16 inputs regard's error is at most {most['rounding']:.3g} times that of rounding the output "
            f"alone, and {most['floor']:.2g} times the floor.",
        ]


def scientific(column: str, lost: bool = False) -> ToText:
    """Format a number as 1.2e-3, with the count of non-finite rows."""

    def show(rows: Frame) -> str:
        x, gone = rows[column].iloc[0], rows["not_finite"].iloc[0]
        text = MISSING if x is None or x != x else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e+")
        return f"{text} [{gone:g}]" if lost and gone else text

    return show
