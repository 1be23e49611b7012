"""Numerics of local linear attention: how the error of its output falls with steps of conjugate gradients, in float32
and from bfloat16 inputs (Local Linear Attention paper, appendix E, Table 2).

The paper states neither data nor ridge of its Table 2; here both vary. The truth is a float64 Cholesky solution, formed
densely, of the inputs as they are after rounding to their dtype, so that what is seen is the method's own error. For
bfloat16 inputs regard stands beside emulations of schemes that multiply in bfloat16 (`lla_numerics_schemes`): the
paper's, which centres at the query, and the covariance form with and without centred keys.

Data of one head, T positions and D channels, values normal:

    normal       queries and keys N(0, I)
    normalised   the same on the unit sphere
    anisotropic  keys with standard deviations from 2 down to 1/5, all moved by one vector of norm near 2 sqrt(D)
    recall       a query is a key it sees, moved by N(0, 1/100)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.grammar import SolveStatus
from regard.grammar.solvers import Auto, ConjugateGradient, Solver
from regard.pairwise.local_linear_attention import local_linear_attention
from regard.recipes import Findings, Progress, recipes

from .lla_numerics_schemes import SCHEMES, dense, low_output, output, rounded

CALL = "reproduce: lla-numerics"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCK = 128
"""Rows to one number of the iterations by block."""
EMULATED = 64
"""Steps of the emulated schemes at most, the last column of the paper's Table 2."""
DIGITS = 4
"""Significant ones, of the numbers in the JSON file."""


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Measure the error of local linear attention against solver steps, tolerance, ridge and precision."""

    out: Path = Path("lla-numerics-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    quick: bool = False
    """Small: options that are not given otherwise take values that need a few seconds."""
    families: tuple[str, ...] = ("normal", "normalised", "anisotropic", "recall")
    """Kinds of data."""
    ridges: tuple[float, ...] = (1.0, 0.1, 0.01)
    """Ridges, relative to the kernel weight."""
    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Budgets of conjugate gradients, in steps."""
    tols: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    """Budgets of conjugate gradients, in relative residuals."""
    length: int = 1024
    """Positions."""
    dim: int = 64
    """Channels of queries, keys and values."""
    draws: int = 2
    """Independent heads of every kind of data."""
    seed: int = 0
    """Decides all data."""


QUICK: dict[str, Any] = {"length": 256, "dim": 32, "draws": 1}
"""What `quick` makes of the defaults."""

Data = tuple[Tensor, Tensor, Tensor]
"""q, k, v [T, D]."""


def _normal(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


def _normalised(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)


def _anisotropic(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return q, k[1:] * torch.logspace(0.3, -0.7, k.shape[-1]) + 2 * k[:1]


def _recall(q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    seen = (at * torch.arange(1, len(k) + 1)).long()
    return k[seen] + 0.1 * q, k


FAMILIES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normal": _normal,
    "normalised": _normalised,
    "anisotropic": _anisotropic,
    "recall": _recall,
}
"""Queries and keys from normal ones and uniform numbers; the anisotropic keys from one row more."""


def draw(config: NumericsConfig, family: str, head: int) -> Data:
    """One head of a kind of data, float32: a function of seed, kind and head."""
    key = (config.seed * len(FAMILIES) + list(FAMILIES).index(family)) * 1_000_003 + head
    generator = torch.Generator().manual_seed(key)
    normal = lambda rows: torch.randn(rows, config.dim, generator=generator)  # noqa: E731
    q, v, k = normal(config.length), normal(config.length), normal(config.length + (family == "anisotropic"))
    q, k = FAMILIES[family](q, k, torch.rand(config.length, generator=generator))
    return q, k, v


@dataclass(frozen=True)
class Case:
    """One kind of data in one dtype, rounded to it and held as float32, with what is true of it.

    Attributes:
        heads: the data.
        truth: by ridge, outputs [H, T, D] in float64.
        floors: for bfloat16 only; by name and ridge, outputs of dense float32 solutions: "rounding", rounded once, and
            "floor", their last stage in emulated bfloat16.
    """

    family: str
    dtype: str
    heads: tuple[Data, ...]
    truth: dict[float, Tensor]
    floors: dict[str, dict[float, Tensor]]


def prepare(config: NumericsConfig, family: str, dtype: str) -> Case:
    """Draw and solve densely."""
    low = dtype == "bfloat16"
    drawn = (draw(config, family, head) for head in range(config.draws))
    heads = tuple((rounded(q), rounded(k), rounded(v)) if low else (q, k, v) for q, k, v in drawn)

    truth = outputs(heads, config.ridges, torch.float64, output)
    if not low:
        return Case(family, dtype, heads, truth, {})
    once = {ridge: rounded(out) for ridge, out in outputs(heads, config.ridges, torch.float32, output).items()}
    floor = outputs(heads, config.ridges, torch.float32, low_output)
    return Case(family, dtype, heads, truth, {"rounding": once, "floor": floor})


def outputs(
    heads: Sequence[Data], ridges: Sequence[float], dtype: torch.dtype, form: Callable[..., Tensor]
) -> dict[float, Tensor]:
    """By ridge, outputs [H, T, D] in the `form` given, from systems solved densely in `dtype`."""
    solved = [dense(q, k, ridges, dtype) for q, k, _ in heads]
    return {
        ridge: torch.stack([form(*head, t[ridge]) for head, t in zip(heads, solved, strict=True)]) for ridge in ridges
    }


def budgets(config: NumericsConfig) -> dict[str, Solver]:
    """Name to solver: steps, tolerances, conjugate gradients by default, and what "auto" does."""
    made: dict[str, Solver] = {f"steps {n}": ConjugateGradient(max_iter=n) for n in config.steps}
    made |= {f"tol {tol:g}": ConjugateGradient(tol=tol) for tol in config.tols}
    return made | {"default": ConjugateGradient(), "auto": Auto()}


def errors(found: Tensor, truth: Tensor) -> dict[str, Any]:
    """Of outputs [H, T, D]: root mean square, the same relative to the truth's, the largest relative error of a row,
    and how many rows are not finite; those are left out of the others."""
    finite = found.isfinite().all(-1)
    off, size = (found.double() - truth)[finite], truth[finite]
    rows = off.norm(dim=-1) / size.norm(dim=-1).clamp(min=1e-300)
    return {
        "absolute": _digits(off.square().mean().sqrt()) if len(off) else None,
        "relative": _digits(off.norm() / size.norm()) if len(off) else None,
        "worst_row": _digits(rows.max()) if len(off) else None,
        "not_finite": int((~finite).sum()),
    }


def _digits(x: Tensor | float) -> float:
    return float(f"{float(x):.{DIGITS}g}")


def run_regard(case: Case, ridge: float, solver: Solver) -> dict[str, Any]:
    """Errors and the solver's statistics: iterations, true relative residuals, how many rows had which status."""
    dtype = DTYPES[case.dtype]
    q, k, v = (torch.stack(parts)[None].to(dtype) for parts in zip(*case.heads, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # too few steps are the point
        out, found = local_linear_attention(
            q, k, v, ridge=ridge, solver=solver, is_causal=True, impl="blocked", return_diagnostics=True
        )
    steps, residual, status = (found.solver[name][0] for name in ("iterations", "residual", "status"))
    parts = steps.split(BLOCK, -1)
    return errors(out[0], case.truth[ridge]) | {
        "iterations": {
            "mean": _digits(steps.mean()),
            "max": int(steps.max()),
            "blocks": [{"mean": _digits(part.mean()), "max": int(part.max())} for part in parts],
        },
        "residual": {"mean": _digits(residual.mean()), "max": _digits(residual.max())},
        "status": {kind.name: int((status == kind).sum()) for kind in SolveStatus if bool((status == kind).any())},
    }


def run_scheme(case: Case, ridge: float, name: str, steps: Sequence[int]) -> dict[str, Any]:
    """Errors of an emulated scheme by step."""
    found: dict[int, list[Tensor]] = {step: [] for step in steps}
    for head in case.heads:
        for step, out in SCHEMES[name](*head, ridge, steps):
            found[step].append(rounded(out))
    return {str(step): errors(torch.stack(outs), case.truth[ridge]) for step, outs in found.items()}


def measure(config: NumericsConfig, progress: Progress) -> list[dict[str, Any]]:
    """A record for every kind of data, dtype and ridge."""
    records = []
    for family in config.families:
        for dtype in DTYPES:
            progress(f"{family}, {dtype}")
            case = prepare(config, family, dtype)
            for ridge in config.ridges:
                record: dict[str, Any] = {"family": family, "dtype": dtype, "ridge": ridge}
                record["budgets"] = {name: run_regard(case, ridge, own) for name, own in budgets(config).items()}
                if dtype == "bfloat16":
                    progress(f"{family}, emulations, ridge {ridge:g}")
                    record |= {name: errors(of[ridge], case.truth[ridge]) for name, of in case.floors.items()}
                    steps = [*(n for n in config.steps if n < EMULATED), EMULATED]
                    record["schemes"] = {name: run_scheme(case, ridge, name, steps) for name in SCHEMES}
                records.append(record)
    return records


@recipes.register("lla-numerics")
class Numerics:
    """Error of local linear attention against solver steps, in float32 and bfloat16, beside bfloat16 schemes."""

    Config: ClassVar[type[Any]] = NumericsConfig

    @staticmethod
    def run(config: NumericsConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = effective(config)
        check(config)
        with torch.no_grad():
            records = measure(config, progress)
        progress("drawing")
        from . import lla_numerics_output as shown

        used = {f.name: getattr(config, f.name) for f in fields(config)}
        return Findings(
            {"config": {**used, "out": str(config.out)}, "records": records},
            shown.tables(config, records),
            shown.figures(config, records),
            shown.notes(config, records),
        )


def effective(config: NumericsConfig) -> NumericsConfig:
    """The config with what `quick` says in place of defaults."""
    defaults = NumericsConfig()
    left = {name for name in QUICK if getattr(config, name) == getattr(defaults, name)}
    return replace(config, **{name: QUICK[name] for name in left}) if config.quick else config


def check(config: NumericsConfig) -> None:
    """The numbers are in range.

    Raises:
        ArgumentError: one is not, or a kind of data is unknown.
    """
    for name, least, most in (("length", 2, 4096), ("dim", 1, 128), ("draws", 1, 64)):
        if not least <= getattr(config, name) <= most:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected {least} to {most}.")
    if not 0 <= config.seed < 2**31:
        raise ArgumentError(f"{CALL}: --seed is {config.seed}, expected 0 to {2**31 - 1}.")
    for name, low, high in (("ridges", 1e-6, 1e6), ("steps", 1, 4 * EMULATED), ("tols", 1e-7, 1.0)):
        for number in getattr(config, name) or (0,):
            if not low <= number <= high:
                raise ArgumentError(f"{CALL}: --{name} has {number:g}, expected numbers from {low:g} to {high:g}.")
    unknown = [name for name in config.families if name not in FAMILIES]
    if unknown or not config.families:
        raise ArgumentError(f"{CALL}: --families is {config.families}, expected some of {', '.join(FAMILIES)}.")
    for name in ("families", "ridges", "steps", "tols"):
        if len(set(getattr(config, name))) < len(getattr(config, name)):
            raise ArgumentError(f"{CALL}: --{name} names one twice; name every one once.")
