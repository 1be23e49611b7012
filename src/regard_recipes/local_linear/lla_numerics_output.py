"""Tables, figures and sentences of the numerics recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.tables import Table

from .lla_numerics import BLOCK, EMULATED, NumericsConfig
from .lla_numerics_schemes import SCHEMES

Records = Sequence[dict[str, Any]]
GREY = "#777777"
BARS = {0.1: 0.016, 0.01: 0.056}
"""Ridge to the relative error that outputs of bfloat16 inputs on anisotropic keys should stay below."""
ROW = 5.0
"""A row's error should stay below so many times the tolerance, the root mean square below it."""


def select(records: Records, dtype: str) -> list[dict[str, Any]]:
    """The records of one dtype."""
    return [record for record in records if record["dtype"] == dtype]


def tables(config: NumericsConfig, records: Records) -> dict[str, Table]:
    """Errors against budgets first, then the schemes, then what the solver said."""
    return {
        "Relative error of the output": by_budget(records, "relative"),
        "Absolute error of the output (root mean square)": by_budget(records, "absolute"),
        "Largest relative error of a row": by_budget(records, "worst_row"),
        "Relative error from bfloat16 inputs, beside emulated bfloat16 schemes": by_scheme(config, records),
        "Iterations, residuals and statuses": by_solver(config, records),
    }


def _label(record: dict[str, Any]) -> str:
    return f"{record['family']}, ridge {record['ridge']:g}, {record['dtype']}"


def _said(x: float | None) -> str:
    return "–" if x is None else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def by_budget(records: Records, what: str) -> Table:
    """A row for every case, a column for every budget."""
    names = list(records[0]["budgets"])
    rows = [(_label(r), *(_said(r["budgets"][name][what]) for name in names)) for r in records]
    note = (
        "Against a float64 Cholesky solution of the same (rounded) inputs; steps and tolerances of conjugate gradients."
    )
    return Table(("", *names), tuple(rows), note)


def by_scheme(config: NumericsConfig, records: Records) -> Table:
    """A row for every case: regard, the floor, and the schemes after all their steps and after as many as the paper
    finds enough."""
    shown = [str(n) for n in (16, EMULATED) if n == EMULATED or n in config.steps]
    rows = []
    for record in select(records, "bfloat16"):
        cells = [record["budgets"]["default"], record["rounding"], record["floor"]]
        cells += [record["schemes"][name][n] for name in SCHEMES for n in shown]
        rows.append((f"{record['family']}, ridge {record['ridge']:g}", *(_with_lost(cell) for cell in cells)))
    header = ("", "regard, default", "rounding", "floor", *(f"{name}, {n}" for name in SCHEMES for n in shown))
    note = (
        "rounding: a dense float32 solution whose output is rounded once. floor: one whose last two products (slopes; "
        "weights times values) are in emulated bfloat16. "
        "The schemes, with numbers of steps, multiply in emulated bfloat16 throughout; q-centred is the paper's. "
        "[n]: rows not finite, left out."
    )
    return Table(header, tuple(rows), note)


def _with_lost(cell: dict[str, Any]) -> str:
    return _said(cell["relative"]) + (f" [{cell['not_finite']}]" if cell["not_finite"] else "")


def by_solver(config: NumericsConfig, records: Records) -> Table:
    """A row for every case: mean and largest iterations and the largest residual by tolerance, and the statuses."""
    names = [*(f"tol {tol:g}" for tol in config.tols), "default", "auto"]
    rows = []
    for record in records:
        cells = [record["budgets"][name] for name in names]
        said = [
            f"{c['iterations']['mean']:.3g} ({c['iterations']['max']}); {_said(c['residual']['max'])}" for c in cells
        ]
        rows.append((_label(record), *said, _statuses(cells)))
    note = "Mean (largest) iterations of a row; largest true relative residual of a row."
    return Table(("", *names, "statuses"), tuple(rows), note)


def _statuses(cells: Sequence[dict[str, Any]]) -> str:
    """What is not OK, over some budgets."""
    counts: dict[str, int] = {}
    for cell in cells:
        for name, count in cell["status"].items():
            counts[name] = counts.get(name, 0) + count
    bad = [f"{count} {name}" for name, count in counts.items() if name != "OK"]
    return ", ".join(bad) or "all OK"


# Sentences ---------------------------------------------------------------------------------------------------


def notes(config: NumericsConfig, records: Records) -> tuple[str, ...]:
    """What holds of the bars, what tolerances give, and where the schemes fail."""
    made = [f"T = {config.length}, D = {config.dim}, heads of each kind of data: {config.draws}, seed {config.seed}."]
    low = select(records, "bfloat16")
    for record in low:
        if record["family"] == "anisotropic" and record["ridge"] in BARS:
            made.append(_against_bar(record, BARS[record["ridge"]]))
    made.append(_against_floor(low))
    made += [_tolerance(records, tol) for tol in config.tols]
    made.append(_unconverged(records))
    return tuple(made)


def _against_bar(record: dict[str, Any], bar: float) -> str:
    own = record["budgets"]["default"]["relative"]
    last = str(EMULATED)
    theirs = ", ".join(f"{name} {_with_lost(record['schemes'][name][last])}" for name in SCHEMES)
    return (
        f"Anisotropic keys, bfloat16 inputs, ridge {record['ridge']:g}: relative error {_said(own)}, bar {bar:g}: "
        f"{'holds' if own is not None and own <= bar else 'does not hold'}. Floor "
        f"{_said(record['floor']['relative'])}; emulated schemes after {last} steps: {theirs}."
    )


def _against_floor(low: Records) -> str:
    own = lambda r, name: r["budgets"]["default"]["relative"] / r[name]["relative"]  # noqa: E731
    most = {name: max(own(r, name) for r in low) for name in ("rounding", "floor")}
    return (
        f"From bfloat16 inputs regard's error is at most {most['rounding']:.3g} times that of rounding the output "
        f"alone, and {most['floor']:.2g} times the floor."
    )


def _tolerance(records: Records, tol: float) -> str:
    """Whether the residual's bound carries over to the output."""
    cells = [r["budgets"][f"tol {tol:g}"] for r in select(records, "float32")]
    square = max(cell["relative"] for cell in cells)
    row = max(cell["worst_row"] for cell in cells)
    holds = square <= tol and row <= ROW * tol
    return (
        f"tol {tol:g}, float32: relative error at most {square / tol:.2g} times it, that of a row {row / tol:.2g} "
        f"times (bars 1 and {ROW:g}: {'hold' if holds else 'do not hold'})."
    )


def _unconverged(records: Records) -> str:
    lost = [
        f"{_label(r)} {name}: {cell['status']['UNCONVERGED']}"
        for r in records
        for name, cell in r["budgets"].items()
        if not name.startswith("steps") and "UNCONVERGED" in cell["status"]
    ]
    return f"Rows that did not converge to their tolerance: {'; '.join(lost) or 'none'}."


# Figures -----------------------------------------------------------------------------------------------------


def figures(config: NumericsConfig, records: Records) -> dict[str, bytes]:
    """Errors against steps, and iterations along the sequence."""
    return {
        "lla-numerics-steps.png": against_steps(config, records),
        "lla-numerics-iterations.png": along(config, records),
    }


def _panels(config: NumericsConfig, records: Records) -> tuple[Figure, dict[tuple[str, float], Any]]:
    """A panel for every kind of data (across) and ridge (down)."""
    size = (3.0 * len(config.families) + 0.6, 2.5 * len(config.ridges) + 0.9)
    drawing = Figure(figsize=size, dpi=100, layout="constrained")
    grid: Any = drawing.subplots(len(config.ridges), len(config.families), sharex=True, sharey="row", squeeze=False)
    axes = {(f, r): grid[i][j] for i, r in enumerate(config.ridges) for j, f in enumerate(config.families)}
    for (family, ridge), place in axes.items():
        place.set_title(f"{family}, ridge {ridge:g}", fontsize=8)
        place.tick_params(labelsize=7)
        place.grid(color="#dddddd", linewidth=0.5)
        place.spines[["top", "right"]].set_visible(False)
    return drawing, axes


def _legend(drawing: Figure, axes: dict[tuple[str, float], Any]) -> None:
    handles, labels = next(iter(axes.values())).get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def against_steps(config: NumericsConfig, records: Records) -> bytes:
    """Relative error against steps of conjugate gradients, both axes logarithmic."""
    drawing, axes = _panels(config, records)
    for record in records:
        place, low = axes[record["family"], record["ridge"]], record["dtype"] == "bfloat16"
        own = [record["budgets"][f"steps {n}"]["relative"] for n in config.steps]
        colour, marker = (COLOURS[1], "s") if low else (COLOURS[0], "o")
        name = f"regard, {record['dtype']}"
        place.plot(config.steps, own, color=colour, marker=marker, markersize=3, linewidth=1.3, label=name)
        if low:
            for colour, (name, found) in zip(
                (COLOURS[3], COLOURS[4], COLOURS[2]), record["schemes"].items(), strict=True
            ):
                points = [(int(n), cell["relative"]) for n, cell in found.items() if cell["relative"] is not None]
                x, y = zip(*points, strict=True) if points else ((), ())
                place.plot(x, y, color=colour, linestyle="--", linewidth=1.0, label=f"{name} (bfloat16, emulated)")
            place.axhline(record["floor"]["relative"], color=GREY, linestyle=":", label="floor")
        place.set(xscale="log", yscale="log")
    for family in config.families:
        axes[family, config.ridges[-1]].set_xlabel("steps of conjugate gradients")
    for ridge in config.ridges:
        axes[config.families[0], ridge].set_ylabel("relative error")
    _legend(drawing, axes)
    return png(drawing)


def along(config: NumericsConfig, records: Records) -> bytes:
    """Iterations by block of rows in float32: the mean as a line, the largest dotted."""
    drawing, axes = _panels(config, records)
    names = [*(f"tol {tol:g}" for tol in config.tols), "default"]
    for record in select(records, "float32"):
        place = axes[record["family"], record["ridge"]]
        for at, name in enumerate(names):
            blocks = record["budgets"][name]["iterations"]["blocks"]
            x = [BLOCK * i + BLOCK / 2 for i in range(len(blocks))]
            colour = COLOURS[at % len(COLOURS)]
            place.plot(
                x, [b["mean"] for b in blocks], color=colour, marker="o", markersize=2, linewidth=1.2, label=name
            )
            place.plot(x, [b["max"] for b in blocks], color=colour, linestyle=":", linewidth=0.9)
        place.set_ylim(bottom=0)
    for family in config.families:
        axes[family, config.ridges[-1]].set_xlabel("position")
    for ridge in config.ridges:
        axes[config.families[0], ridge].set_ylabel("iterations")
    _legend(drawing, axes)
    return png(drawing)
