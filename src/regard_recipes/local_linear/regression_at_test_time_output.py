"""Tables, figures and sentences of the test-time regression recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.tables import Table

from .regression_at_test_time import BAND, DRAWN, LLA, PROTOCOLS, SHOWN, RegressionConfig

Found = Sequence[dict[str, Any]]
PAPERS = (LLA, "softmax", "linear", "mesa")
"""The methods that the paper compares."""
NOTHING = 0.9
"""A whole error above this share of the zero predictor's is none to speak of."""
LONG = (8, 128)
"""(d, S) with segments that are long against d."""
GREY = "#777777"
STYLES: dict[str, tuple[str, str]] = {
    LLA: (COLOURS[0], "-"), "softmax": (COLOURS[0], "--"),
    "local-linear[biweight]": (COLOURS[1], "-"), "biweight": (COLOURS[1], "--"),
    "local-linear[relumax]": (COLOURS[2], "-"), "local-linear[triweight]": (COLOURS[3], "-"),
    "mesa": (COLOURS[4], "-."), "linear": (COLOURS[5], "-."), "elu": (COLOURS[5], ":"),
    "softmax+mesa": (COLOURS[4], ":"),
    "random": (GREY, "--"), "zero": (GREY, ":"), "oracle": ("#000000", ":"),
}  # fmt: skip
"""Degree 1 is solid, its local constant dashed in the same colour, linear states have dots in their lines."""


def shown(cell: dict[str, Any], name: str) -> dict[str, Any]:
    """What is shown of a method in a cell."""
    record: dict[str, Any] = cell["methods"][name][SHOWN[cell["protocol"]]]
    return record


def grid(found: Found, protocol: str) -> dict[tuple[int, int], dict[str, Any]]:
    """(d, S) to the cell without query noise."""
    clean = (cell for cell in found if cell["protocol"] == protocol and not cell["query_noise"])
    return {(cell["dim"], cell["segment"]): cell for cell in clean}


def share(cell: dict[str, Any], name: str, part: str = "whole") -> float:
    """Error in units of the zero predictor's."""
    own, zero = shown(cell, name)[part], shown(cell, "zero")[part]
    return math.nan if own is None else own[0] / zero[0]


def tables(config: RegressionConfig, found: Found) -> dict[str, Table]:
    """LLA against softmax first, then all methods in all cells, then the sweep."""
    made = {"Squared error of LLA in units of softmax attention's": against_softmax(config, found)}
    for protocol in PROTOCOLS:
        made[f"Squared error in units of the zero predictor's, {protocol}"] = whole(found, protocol)
    if any(cell["query_noise"] for cell in found):
        made["The same against query noise"] = noisy(found)
    return made


def against_softmax(config: RegressionConfig, found: Found) -> Table:
    """Rows of protocol, part and d; a column for every S."""
    rows = []
    for protocol, part in (*((p, part) for p in PROTOCOLS for part in ("later", "whole")), ("strictly-past", "late")):
        cells = grid(found, protocol)
        for d in config.dims:
            own = [_quotient(cells[d, s], part, SHOWN[protocol]) for s in config.segments]
            rows.append((f"{protocol}, {part}, d = {d}", *own))
    note = (
        f"Self-included: given; strictly past: chosen. Later: after the first segment; late: in the second halves of "
        f"those segments; whole: all positions. ± {BAND} standard errors."
    )
    return Table(("LLA / softmax", *(f"S = {s}" for s in config.segments)), tuple(rows), note)


def _quotient(cell: dict[str, Any], part: str, how: str) -> str:
    """LLA's error in units of softmax's, with its band."""
    pair = cell["methods"]["softmax"][how]["to_lla"][part]
    if pair is None:
        return "–"
    ratio, half = pair
    return f"{1 / ratio:.3g} ± {half / ratio**2:.1g}"


def whole(found: Found, protocol: str) -> Table:
    """A row for every cell, a column for every method."""
    cells = grid(found, protocol)
    names = list(next(iter(cells.values()))["methods"])
    names.remove("zero")
    rows = [(f"{d}, {s}", *(_said(share(cell, name)) for name in names)) for (d, s), cell in cells.items()]
    return Table(("d, S", *names), tuple(rows), f"All positions; {SHOWN[protocol]}.")


def noisy(found: Found) -> Table:
    """A row for every protocol, d and noise."""
    swept = {(cell["dim"], cell["segment"]) for cell in found if cell["query_noise"]}
    cells = [cell for cell in found if (cell["dim"], cell["segment"]) in swept]
    cells.sort(key=lambda cell: (PROTOCOLS.index(cell["protocol"]), cell["dim"], cell["query_noise"]))
    names = [name for name in cells[0]["methods"] if name in DRAWN and name != "zero"]
    rows = [
        (
            f"{cell['protocol']}, {cell['dim']}, {cell['segment']}, {cell['query_noise']:g}",
            *(_said(share(cell, name)) for name in names),
        )
        for cell in cells
    ]
    return Table(("protocol, d, S, query noise", *names), tuple(rows))


def _said(x: float) -> str:
    return f"{x:.3f}" if 0.001 <= x < 10 else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e")


def notes(config: RegressionConfig, found: Found) -> tuple[str, ...]:
    """What was measured beside what the paper says."""
    own, past = grid(found, "self-included"), grid(found, "strictly-past")
    later = [at for at in own if at[1] < config.length]
    wide = [at for at in later if at[0] >= 16]
    beaten = [at for at in wide if share(own[at], LLA, "later") < share(own[at], "softmax", "later")]
    least = lambda at, part: min(PAPERS, key=lambda name: share(own[at], name, part))  # noqa: E731
    first = [at for at in own if least(at, "first") == "mesa"]
    after = [at for at in later if least(at, "later") == "mesa"]
    made = [
        f"Noise {config.noise:g} on values. Given: every method's own scale, ridge {config.ridge:g}. Chosen: on "
        f"{config.held_out} sequences of another seed, the scale out of {_list(config.scales)} times its own and the "
        f"ridge out of {_list(config.ridges)}.",
        f"Self-included, after the first segment: LLA below softmax in {len(beaten)} of {len(wide)} cells with d >= 16"
        f"{_but(wide, beaten)}. Of {', '.join(PAPERS)}, Mesa has the least error in the first segment in {len(first)} "
        f"of {len(own)} cells{_but(own, first)}, after it in {len(after)} of {len(later)}.",
    ]
    made += [_long(at, cell) for at, cell in past.items() if at == LONG]
    return (*made, _hopeless(past, config.length))


def _long(at: tuple[int, int], cell: dict[str, Any]) -> str:
    """How much LLA gains where segments are long against d."""
    said = [f"{how} {_quotient(cell, part, how)}" for part in ("whole", "late") for how in ("given", "chosen")]
    return (
        f"Strictly past, (d, S) = {at}, LLA / softmax: all positions {said[0]}, {said[1]}; second halves of the later "
        f"segments {said[2]}, {said[3]}.{_radial(cell)}"
    )


def _radial(cell: dict[str, Any]) -> str:
    """The same for the kernel of distance, which the paper derives LLA with."""
    if "rbf" not in cell["methods"]:
        return ""
    base, ours = cell["methods"]["rbf"], cell["methods"]["local-linear[rbf]"]
    said = (f"{how} {ours[how]['whole'][0] / base[how]['whole'][0]:.3g}" for how in ("given", "chosen"))
    return f" The same with a Gaussian of the distance, local-linear[rbf] / rbf: all positions {', '.join(said)}."


def _hopeless(past: dict[tuple[int, int], dict[str, Any]], length: int) -> str:
    """Where nothing works once the map has changed."""
    best = {
        at: min((share(cell, name, "later"), name) for name in cell["methods"] if name not in ("oracle", "zero"))
        for at, cell in past.items()
        if at[1] < length
    }
    said = [f"{at} ({error:.2f}, {name})" for at, (error, name) in best.items() if error > NOTHING]
    return (
        f"Strictly past, after the first segment, no method is below {NOTHING:g} of the zero predictor's error at "
        f"(d, S) = {'; '.join(said) or 'none'}."
    )


def _list(numbers: Iterable[float]) -> str:
    return ", ".join(f"{x:g}" for x in numbers)


def _but(all_of: Iterable[Any], some: Sequence[Any]) -> str:
    rest = [str(at) for at in all_of if at not in some]
    return f" (not at (d, S) = {', '.join(rest)})" if rest else ""


def figures(config: RegressionConfig, found: Found) -> dict[str, bytes]:
    """The paper's figures 2, 3 and 6, the last once for each protocol, and the sweep."""
    name = "test-time-regression"
    made = {f"{name}-ratio.png": ratios(config, found)}
    wanted = [s for s in config.curve_segments if s in config.segments]
    if config.curve_dim in config.dims and wanted:
        rows = [[grid(found, protocol)[config.curve_dim, s] for s in wanted] for protocol in PROTOCOLS]
        made[f"{name}-curves.png"] = panels(rows, 4.0, 3.4)
    for protocol in PROTOCOLS:
        cells = grid(found, protocol)
        rows = [[cells[d, s] for s in config.segments] for d in config.dims]
        made[f"{name}-{protocol}.png"] = panels(rows, 2.5, 2.2)
    if any(cell["query_noise"] for cell in found):
        made[f"{name}-noise.png"] = sweep(config, found)
    return made


def panels(rows: Sequence[Sequence[dict[str, Any]]], width: float, height: float) -> bytes:
    """Errors by position with their bands, a panel a cell; the axis of errors is logarithmic."""
    size = (width * len(rows[0]) + 0.6, height * len(rows) + 0.9)
    drawing = Figure(figsize=size, dpi=100, layout="constrained")
    axes: Any = drawing.subplots(len(rows), len(rows[0]), sharex=True, sharey="row", squeeze=False)
    for line, row in zip(axes, rows, strict=True):
        for place, cell in zip(line, row, strict=True):
            _curves(place, cell)
    for place in axes[-1]:
        place.set_xlabel("position")
    for line in axes:
        line[0].set_ylabel("squared error")
    _legend(drawing, axes[0][0])
    return png(drawing)


def _curves(axes: Axes, cell: dict[str, Any]) -> None:
    for name, (colour, style) in STYLES.items():
        if name not in cell["methods"]:
            continue
        own = shown(cell, name)["curve"]
        middle, half = np.array(own["mean"]), np.array(own["half"])
        step = cell["length"] / len(middle)
        x = (np.arange(len(middle)) + 0.5) * step
        middle = np.where(middle > 0, middle, np.nan)
        axes.plot(x, middle, color=colour, linestyle=style, linewidth=1.0, label=name)
        axes.fill_between(x, np.maximum(middle - half, middle * 1e-2), middle + half, color=colour, alpha=0.2, lw=0)
    axes.set_yscale("log")
    _plain(axes, f"d = {cell['dim']}, S = {cell['segment']}\n{cell['protocol']} ({SHOWN[cell['protocol']]})")


def ratios(config: RegressionConfig, found: Found) -> bytes:
    """Summed error in units of LLA's against d, both axes logarithmic."""
    drawing = Figure(figsize=(2.6 * len(config.segments) + 0.6, 6.4), dpi=100, layout="constrained")
    axes: Any = drawing.subplots(2, len(config.segments), sharex=True, sharey="row", squeeze=False)
    for line, protocol in zip(axes, PROTOCOLS, strict=True):
        cells = grid(found, protocol)
        for place, s in zip(line, config.segments, strict=True):
            for name, (colour, style) in STYLES.items():
                if name in cells[config.dims[0], s]["methods"] and name not in ("zero", "oracle"):
                    pairs = np.array([shown(cells[d, s], name)["to_lla"]["whole"] for d in config.dims])
                    _banded(place, config.dims, pairs, colour, style, name)
            place.set(xscale="log", yscale="log", xticks=config.dims)
            place.set_xticks(config.dims, [str(d) for d in config.dims])
            place.minorticks_off()
            _plain(place, f"S = {s}, {protocol}\n({SHOWN[protocol]})")
        line[0].set_ylabel("summed error / LLA's")
    for place in axes[-1]:
        place.set_xlabel("d")
    _legend(drawing, axes[0][0])
    return png(drawing)


def sweep(config: RegressionConfig, found: Found) -> bytes:
    """Error in units of the zero predictor's against query noise, a panel for every protocol and d."""
    drawing = Figure(figsize=(2.8 * len(config.dims) + 0.6, 6.4), dpi=100, layout="constrained")
    axes: Any = drawing.subplots(2, len(config.dims), sharex=True, sharey="row", squeeze=False)
    for line, protocol in zip(axes, PROTOCOLS, strict=True):
        for place, d in zip(line, config.dims, strict=True):
            cells = [c for c in found if (c["protocol"], c["dim"], c["segment"]) == (protocol, d, config.noisy_segment)]
            cells.sort(key=lambda cell: cell["query_noise"])
            levels = [cell["query_noise"] for cell in cells]
            for name, (colour, style) in STYLES.items():
                if name in cells[0]["methods"]:
                    zero = [shown(cell, "zero")["whole"][0] for cell in cells]
                    pairs = np.array([shown(cell, name)["whole"] for cell in cells]) / np.array(zero)[:, None]
                    _banded(place, levels, pairs, colour, style, name)
            place.set(yscale="log")
            _plain(place, f"d = {d}, S = {config.noisy_segment}, {protocol}\n({SHOWN[protocol]})")
        line[0].set_ylabel("error / zero predictor's")
    for place in axes[-1]:
        place.set_xlabel("query noise")
    _legend(drawing, axes[0][0])
    return png(drawing)


def _banded(axes: Axes, x: Sequence[float], pairs: np.ndarray, colour: str, style: str, name: str) -> None:
    middle, half = pairs.T
    bars = (np.minimum(half, middle * 0.99), half)
    axes.errorbar(x, middle, yerr=bars, color=colour, linestyle=style, linewidth=1.3, capsize=2, label=name)


def _plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(color="#dddddd", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(drawing: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
