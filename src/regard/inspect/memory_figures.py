"""Figures of memory layers: gates over a text, histograms of gates, and retrieved slots with their hits."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import extra_imports
from .figures import COLOURS, png, visible
from .gates import BINS, GateTrace, histogram
from .slot_trace import HIT, SlotReadings

with extra_imports():
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle


GATES = LinearSegmentedColormap.from_list("gate", ["#ffffff", "#f6c99f", "#D55E00"])
"""Colours from a closed to an open gate."""
ACROSS = 6
"""Most histograms side by side."""
HIT_COLOUR, MISS_COLOUR, EMPTY_COLOUR = "#a6dbc9", "#f4f1ea", "#ffffff"


def gate_text(trace: GateTrace, *, title: str, columns: int = 100) -> bytes:
    """Return a PNG of the text, once for every memory layer, with the background of each token coloured by its gate.

    Args:
        columns: characters per line.
    """
    lines = wrap(trace.labels, columns)
    height = 0.19 * len(lines) + 0.5
    figure = Figure(figsize=(0.105 * columns + 1.4, height * len(trace.layers) + 0.5), dpi=110, layout="constrained")
    panels: Any = figure.subplots(len(trace.layers), 1, squeeze=False)
    for axes, name, gates in zip(panels[:, 0], trace.layers, trace.gates.numpy(), strict=True):
        _draw_text(axes, lines, gates, columns)
        axes.set_title(f"{name}: mean gate {float(np.nanmean(gates)):.2f}", loc="left", fontsize=9)
    bar: dict[str, Any] = {"location": "right", "shrink": 0.6, "aspect": 30, "label": "gate"}
    figure.colorbar(ScalarMappable(Normalize(0, 1), GATES), ax=list(panels[:, 0]), **bar)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def wrap(labels: Sequence[str], columns: int) -> list[list[tuple[str, int]]]:
    """Return lines of up to `columns` pairs (character, number of its token); line ends of the text end a line."""
    lines: list[list[tuple[str, int]]] = [[]]
    for token, label in enumerate(labels):
        for char in label:
            if len(lines[-1]) >= columns:
                lines.append([])
            lines[-1].append((char, token))
            if char == "\n":
                lines.append([])
    return lines if lines[-1] else lines[:-1] or [[]]


def _draw_text(axes: Axes, lines: Sequence[Sequence[tuple[str, int]]], gates: np.ndarray, columns: int) -> None:
    background = np.full((len(lines), columns), np.nan)
    for row, line in enumerate(lines):
        for column, (char, token) in enumerate(line):
            background[row, column] = gates[token]
            if not char.isspace():
                axes.text(column, row, visible(char), ha="center", va="center", fontsize=6.5, family="monospace")
    axes.set_axis_off()
    shown: dict[str, Any] = {"cmap": GATES, "norm": Normalize(0, 1), "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(np.ma.masked_invalid(background), **shown)


def gate_histograms(gates: Mapping[str, Mapping[str, Tensor]], *, title: str) -> bytes:
    """Return a PNG of a histogram of every memory layer's gates, with a row per layer and a column per model.

    Args:
        gates: by model and layer, gates of any shape [...], or their shares [10] in the bins.
    """
    depth = max(map(len, gates.values()), default=1)
    across = max(1, min(len(gates), ACROSS))
    rows = max(1, depth * -(-len(gates) // across))
    figure = Figure(figsize=(1.9 * across + 0.8, 1.5 * rows + 0.9), dpi=120, layout="constrained")
    grid: Any = figure.subplots(rows, across, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat:
        axes.set_axis_off()
    for index, (model, layers) in enumerate(gates.items()):
        for row, (layer, values) in enumerate(layers.items()):
            axes = grid[index // across * depth + row, index % across]
            axes.set_axis_on()
            shares = values.double().numpy() if values.shape == (BINS,) else histogram(values.flatten()).numpy()
            axes.bar((np.arange(BINS) + 0.5) / BINS, shares, width=1 / BINS, color=COLOURS[0], edgecolor="white")
            axes.set(xlim=(0, 1), ylim=(0, 1))
            axes.set_title(f"{model}\n{layer}" if row == 0 else layer, fontsize=8)
            axes.tick_params(labelsize=7)
            axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("gate", fontsize=9)
    figure.supylabel("share of tokens", fontsize=9)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def slot_figure(trace: SlotReadings, *, title: str) -> bytes:
    """Return a PNG with a column for every querying token and a cell for every retrieved slot.

    A cell shows what the latest write stored ("query token > target token"), green if the target is the next token.
    """
    columns = list(dict.fromkeys(reading.position for reading in trace.readings))
    heights = {layer: max(len(r.slots) for r in trace.readings if r.layer == layer) for layer in trace.layers}
    rows = sum(heights.values())
    figure = Figure(figsize=(1.15 * len(columns) + 2.2, 0.24 * rows + 1.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    top = 0
    for layer, height in heights.items():
        for reading in (r for r in trace.readings if r.layer == layer):
            for index, slot in enumerate(reading.slots):
                hit = trace.hit(reading, slot)
                written = [position for writer in slot.writers[:1] for position in (writer.query, writer.target)]
                text = " > ".join(visible(trace.labels[position]) for position in written) or "never written"
                colour = HIT_COLOUR if hit else MISS_COLOUR if slot.writers else EMPTY_COLOUR
                _cell(axes, columns.index(reading.position), top + index, text, slot.weight, colour)
        axes.text(-0.6, top + height / 2 - 0.5, layer, rotation=90, ha="center", va="center", fontsize=8)
        axes.axhline(top - 0.5, color="#333333", linewidth=0.8)
        top += height
    axes.set(xlim=(-0.75, max(1, len(columns)) - 0.5), ylim=(max(1, top) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), [_next(trace, at) for at in columns], fontsize=8, family="monospace")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, left=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}\ngreen: {HIT}, the target is the true next token", loc="left", fontsize=10)
    return png(figure)


def _cell(axes: Axes, column: int, row: int, text: str, weight: float, colour: str) -> None:
    axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="#cccccc", lw=0.5))
    axes.text(column - 0.44, row, text, ha="left", va="center", fontsize=6.5, family="monospace", clip_on=True)
    axes.text(column + 0.45, row, f"{weight:.2f}", ha="right", va="center", fontsize=6, color="#555555")


def _next(trace: SlotReadings, position: int) -> str:
    """Return the querying token and the expected next one."""
    reading = next(r for r in trace.readings if r.position == position)
    answer = trace.answer(reading)
    labels = dict(zip(trace.tokens, trace.labels, strict=True))
    return f"{visible(trace.labels[position])} > {visible(labels.get(answer, '?')) if answer is not None else '?'}"
