"""Figures as PNG files, drawn without a display and without pyplot's global state.

Colours are the colour-blind safe palette of Okabe and Ito. More than six curves also differ in line style.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import extra_imports
from .gates import BINS, GateTrace, histogram
from .measures import AttentionMaps
from .slot_trace import HIT, SlotReadings
from .tables import visible

with extra_imports():
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text
    from matplotlib.ticker import FixedFormatter, FuncFormatter, MaxNLocator


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":")
LEAST_WEIGHT = 1e-3
"""Smaller weights are drawn as this one, distinct from weights that are exactly zero."""
# Neither includes white, which stands for weights that are exactly zero.
_POSITIVE = LinearSegmentedColormap.from_list("weight", ["#cfe3f2", "#5a9bd0", "#0b4f8a", "#03213f"])
_NEGATIVE = LinearSegmentedColormap.from_list("minus", ["#fbe0cc", "#e58b4a", "#a3450d", "#4a1c02"])
_HIDDEN = ListedColormap(["#ececec"])
_GATES = LinearSegmentedColormap.from_list("gate", ["#ffffff", "#f6c99f", "#D55E00"])
_HIT, _MISS, _EMPTY = "#a6dbc9", "#f4f1ea", "#ffffff"
ACROSS = 6
"""Most histograms side by side."""


@dataclass(frozen=True)
class Curve:
    """Loss curve of one model, in bits per character: training loss, and loss on held-out text, whose last is the final
    result."""

    name: str
    steps: tuple[int, ...]
    bits: tuple[float, ...]
    held_out_steps: tuple[int, ...]
    held_out_bits: tuple[float, ...]


def line_style(number: int) -> tuple[str, str]:
    """Return (colour, line style) of a curve by number, all different for the first 24."""
    return COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)]


def loss_curves(curves: Sequence[Curve], *, baseline: float, baseline_name: str) -> bytes:
    """Return a PNG of bits per character against steps: training loss thin, held-out loss with dots, baseline dashed.

    The axis ends at twice the baseline or above the highest final result, to cut off the high loss of the first steps.
    """
    figure = Figure(figsize=(9.0, 4.8), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    dots: dict[str, Any] = {"marker": "o", "markersize": 4}
    for number, curve in enumerate(curves):
        colour, style = line_style(number)
        axes.plot(curve.steps, curve.bits, color=colour, linestyle=style, linewidth=0.9, alpha=0.45)
        held_out: dict[str, Any] = {"linewidth": 1.8, "label": f"{curve.name}: {curve.held_out_bits[-1]:.3f}", **dots}
        axes.plot(curve.held_out_steps, curve.held_out_bits, color=colour, linestyle=style, **held_out)
        last = curve.held_out_steps[-1], curve.held_out_bits[-1]
        axes.plot(*last, color=colour, clip_on=False, **dots)  # not clipped at the edge
    name = f"{baseline_name}: {baseline:.3f}"
    axes.axhline(baseline, label=name, color="#333333", linestyle=(0, (6, 3)), linewidth=1.3)
    lowest = min([baseline, *(b for c in curves for b in (*c.bits, *c.held_out_bits))])
    highest = max([2.0 * baseline, *(1.15 * c.held_out_bits[-1] for c in curves)])
    axes.set_ylim(lowest - 0.1 * baseline, highest)
    axes.margins(x=0)
    _name_ends(axes, curves)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlim=(0, None), xlabel="optimiser step", ylabel="bits per character")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="held out (dots); training (thin)", frameon=False, loc="outside upper center", ncols=3)
    return png(figure)


def _name_ends(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each curve's name next to its last point, moved up where it would cover the name below."""
    last, (low, high) = -np.inf, axes.get_ylim()
    gap = 0.04 * (high - low)
    for number, curve in sorted(enumerate(curves), key=lambda pair: pair[1].held_out_bits[-1]):
        last = max(last + gap, curve.held_out_bits[-1])
        axes.annotate(
            f" {curve.name}", (curve.held_out_steps[-1], last), xytext=(6, 0), textcoords="offset points",
            color=line_style(number)[0], va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def attention_map(maps: AttentionMaps, layer: int, head: int, *, title: str) -> bytes:
    """Return a PNG of one head's weights, queries down and keys across, with each query's support size at the side.

    White is exactly zero, blue positive, orange negative, with the size on a logarithmic scale. Grey keys are masked.
    """
    figure = Figure(figsize=(8.0, 6.8), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _draw_weights(left, maps.weights[layer, head].double().numpy(), figure)
    _label_tokens(left, maps.labels)
    _draw_support(right, maps.support[layer, head].double().numpy())
    figure.suptitle(f"{title}, layer {layer + 1} head {head + 1}", x=0.02, ha="left", fontsize=12)
    return png(figure)


def weights_on_text(weights: Mapping[str, Tensor], labels: Sequence[str], *, title: str) -> bytes:
    """Return a PNG of the weights [T] of one query, the last token, under several specs: a row of bars for each spec.

    A weight of exactly zero has no bar and a grey token.
    """
    figure = Figure(figsize=(11.0, 1.2 * len(weights) + 0.8), dpi=140, layout="constrained")
    rows = figure.subplots(len(weights), 1, squeeze=False)[:, 0]
    for number, (axes, (name, row)) in enumerate(zip(rows, weights.items(), strict=True)):
        bars, colour = row.double().numpy(), line_style(number)[0]
        axes.bar(range(len(bars)), bars, color=colour, width=0.85)
        support = int(np.count_nonzero(bars))
        axes.set_title(f"{name}: {support} of {len(bars)} weights are not zero", loc="left", fontsize=9, color=colour)
        axes.set_ylim(min(0.0, 1.1 * bars.min()), 1.1 * max(bars.max(), LEAST_WEIGHT))
        axes.set_xticks(range(len(labels)))
        names = axes.set_xticklabels([visible(label) for label in labels], family="monospace", fontsize=8)
        for name_of_key, weight in zip(names, bars, strict=True):
            name_of_key.set_color("black" if weight else "#b0b0b0")
        axes.tick_params(axis="x", length=0)
        axes.tick_params(axis="y", labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.005)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    return png(figure)


def _draw_weights(axes: Axes, weights: np.ndarray, figure: Figure) -> None:
    n = len(weights)
    later = np.ma.masked_where(np.tril(np.ones((n, n), bool)), np.ones((n, n)))
    axes.imshow(later, cmap=_HIDDEN, interpolation="nearest")
    size = np.abs(weights)
    norm = LogNorm(LEAST_WEIGHT, max(float(size.max(initial=0.0)), 10 * LEAST_WEIGHT), clip=True)
    for sign, colours in ((1, _POSITIVE), (-1, _NEGATIVE)):
        shown = np.ma.masked_where(~(sign * weights > 0), size)
        if shown.count():
            image = axes.imshow(shown, cmap=colours, norm=norm, interpolation="nearest")
            label = "weight" if sign > 0 else "negative weight"
            figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.01, label=label)
    axes.set(xlabel="key", ylabel="query")
    axes.xaxis.set_label_position("top")


def _label_tokens(axes: Axes, labels: Sequence[str]) -> None:
    """Write the tokens along both sides, at most 72, evenly spaced."""
    ticks = range(0, len(labels), -(-len(labels) // 72))
    names = [visible(labels[i]) for i in ticks]
    style: dict[str, Any] = {"fontsize": 7 if len(labels) > 40 else 9, "family": "monospace"}
    axes.set_xticks(ticks, names, **style)
    axes.set_yticks(ticks, names, **style)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)


def _draw_support(axes: Axes, support: np.ndarray) -> None:
    rows = np.arange(len(support))
    axes.barh(rows, rows + 1, color="#ececec", height=1.0, label="visible")
    axes.barh(rows, support, color="#0b4f8a", height=0.8, label="nonzero weight")
    axes.set_xlabel("keys per query")
    axes.xaxis.set_label_position("top")
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines[["bottom", "right"]].set_visible(False)
    title = f"mean {support.mean():.1f}\nof {(len(support) + 1) / 2:.1f} visible"
    axes.legend(loc="upper right", fontsize=7, frameon=False, title=title)


def gate_text(trace: GateTrace, *, title: str, columns: int = 100) -> bytes:
    """Return a PNG of the text, once for every memory layer, in lines of `columns` characters, with the background of
    each token coloured by its gate."""
    lines = wrap(trace.labels, columns)
    height = 0.19 * len(lines) + 0.5
    figure = Figure(figsize=(0.105 * columns + 1.4, height * len(trace.layers) + 0.5), dpi=110, layout="constrained")
    panels: Any = figure.subplots(len(trace.layers), 1, squeeze=False)
    for axes, name, gates in zip(panels[:, 0], trace.layers, trace.gates.numpy(), strict=True):
        _draw_text(axes, lines, gates, columns)
        axes.set_title(f"{name}: mean gate {float(np.nanmean(gates)):.2f}", loc="left", fontsize=9)
    bar: dict[str, Any] = {"location": "right", "shrink": 0.6, "aspect": 30, "label": "gate"}
    figure.colorbar(ScalarMappable(Normalize(0, 1), _GATES), ax=list(panels[:, 0]), **bar)
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
    shown: dict[str, Any] = {"cmap": _GATES, "norm": Normalize(0, 1), "aspect": "auto", "interpolation": "nearest"}
    axes.imshow(np.ma.masked_invalid(background), **shown)


def gate_histograms(gates: Mapping[str, Mapping[str, Tensor]], *, title: str) -> bytes:
    """Return a PNG of a histogram of every memory layer's gates, with a row per layer and a column per model. `gates`
    has, by model and layer, gates of any shape [...], or their shares [10] in the bins."""
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
                written = [position for writer in slot.writers[:1] for position in (writer.query, writer.target)]
                text = " > ".join(visible(trace.labels[position]) for position in written) or "never written"
                colour = _HIT if trace.hit(reading, slot) else _MISS if slot.writers else _EMPTY
                _draw_slot(axes, columns.index(reading.position), top + index, text, slot.weight, colour)
        axes.text(-0.6, top + height / 2 - 0.5, layer, rotation=90, ha="center", va="center", fontsize=8)
        axes.axhline(top - 0.5, color="#333333", linewidth=0.8)
        top += height
    axes.set(xlim=(-0.75, max(1, len(columns)) - 0.5), ylim=(max(1, top) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), [_next(trace, at) for at in columns], fontsize=8, family="monospace")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, left=False, labelleft=False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{title}\ngreen: {HIT}, the target is the true next token", loc="left", fontsize=10)
    return png(figure)


def _draw_slot(axes: Axes, column: int, row: int, text: str, weight: float, colour: str) -> None:
    axes.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="#cccccc", lw=0.5))
    axes.text(column - 0.44, row, text, ha="left", va="center", fontsize=6.5, family="monospace", clip_on=True)
    axes.text(column + 0.45, row, f"{weight:.2f}", ha="right", va="center", fontsize=6, color="#555555")


def _next(trace: SlotReadings, position: int) -> str:
    """Return the querying token and the expected next one."""
    answer = trace.answer(next(r for r in trace.readings if r.position == position))
    labels = dict(zip(trace.tokens, trace.labels, strict=True))
    return f"{visible(trace.labels[position])} > {visible(labels.get(answer, '?')) if answer is not None else '?'}"


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG without a date, so that equal data give equal bytes. Only the numbers that matplotlib
    writes at an axis, such as powers of ten, are read as formulas."""
    texts, named = set(figure.findobj(Text)), (FixedFormatter, FuncFormatter)
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        if not isinstance(axis.get_major_formatter(), named):
            texts -= set(axis.get_ticklabels(which="both"))
    for text in texts:
        text.set_parse_math(False)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
