"""Figures as PNG files, drawn without a display and without pyplot's global state.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; where they run out, the line style
changes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .measures import AttentionMaps

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":")
LEAST_WEIGHT = 1e-3
"""Smaller weights are drawn as this one, so that they still differ from weights that are exactly zero."""
# Both begin well away from white: white is kept for weights that are exactly zero.
_POSITIVE = LinearSegmentedColormap.from_list("weight", ["#cfe3f2", "#5a9bd0", "#0b4f8a", "#03213f"])
_NEGATIVE = LinearSegmentedColormap.from_list("minus", ["#fbe0cc", "#e58b4a", "#a3450d", "#4a1c02"])
_HIDDEN = ListedColormap(["#ececec"])


@dataclass(frozen=True)
class Curve:
    """The course of one model's training, in bits per character.

    Attributes:
        name: for the legend.
        steps, bits: the training loss.
        held_out_steps, held_out_bits: the loss on held-out text, at least one; the last is the final result.
    """

    name: str
    steps: tuple[int, ...]
    bits: tuple[float, ...]
    held_out_steps: tuple[int, ...]
    held_out_bits: tuple[float, ...]


def line_style(place: int) -> tuple[str, str]:
    """(colour, line style) of the curve at a place; all different for the first 24."""
    return COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % len(STYLES)]


def loss_curves(curves: Sequence[Curve], *, baseline: float, baseline_name: str) -> bytes:
    """Bits per character against steps: training loss thin, held-out loss with dots, the baseline dashed.

    The axis ends at twice the baseline or above the highest final result: the first steps, near log2 of the
    vocabulary, would flatten what is worth seeing.

    Returns:
        A PNG.
    """
    figure = Figure(figsize=(9.0, 4.8), dpi=140, layout="constrained")
    axes = figure.add_subplot()
    for place, curve in enumerate(curves):
        colour, style = line_style(place)
        axes.plot(curve.steps, curve.bits, color=colour, linestyle=style, linewidth=0.9, alpha=0.45)
        axes.plot(
            curve.held_out_steps,
            curve.held_out_bits,
            color=colour,
            linestyle=style,
            linewidth=1.8,
            marker="o",
            markersize=4,
            label=f"{curve.name}: {curve.held_out_bits[-1]:.3f}",
        )
        last = curve.held_out_steps[-1], curve.held_out_bits[-1]
        axes.plot(*last, color=colour, marker="o", markersize=4, clip_on=False)  # at the edge, and whole
    named = f"{baseline_name}: {baseline:.3f}"
    axes.axhline(baseline, label=named, color="#333333", linestyle=(0, (6, 3)), linewidth=1.3)
    lowest = min([baseline, *(b for c in curves for b in (*c.bits, *c.held_out_bits))])
    highest = max([2.0 * baseline, *(1.15 * c.held_out_bits[-1] for c in curves)])
    axes.set_ylim(lowest - 0.1 * baseline, highest)
    axes.margins(x=0)
    _name_ends(axes, curves)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("bits per character")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="held out (dots); training (thin)", frameon=False, loc="outside upper center", ncols=3)
    return png(figure)


def _name_ends(axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each curve's name beside its last point, moved up where the name below would be covered."""
    last, (low, high) = -np.inf, axes.get_ylim()
    gap = 0.04 * (high - low)
    for place, curve in sorted(enumerate(curves), key=lambda pair: pair[1].held_out_bits[-1]):
        last = max(last + gap, curve.held_out_bits[-1])
        axes.annotate(
            f" {curve.name}", (curve.held_out_steps[-1], last), xytext=(6, 0), textcoords="offset points",
            color=line_style(place)[0], va="center", fontsize=9, annotation_clip=False,
        )  # fmt: skip


def attention_map(maps: AttentionMaps, layer: int, head: int, *, title: str) -> bytes:
    """One head's weights, queries down and keys across, with the support size of every row beside it.

    White: exactly zero. Shades: the size of the weight on a logarithmic scale, blue positive, orange
    negative. Grey: keys that come later and cannot be seen.

    Returns:
        A PNG.
    """
    weights = maps.weights[layer, head].double().numpy()
    support = maps.support[layer, head].double().numpy()
    figure = Figure(figsize=(8.0, 6.8), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _draw_weights(left, weights, figure)
    _label_tokens(left, maps.labels)
    _draw_support(right, support)
    figure.suptitle(f"{title}, layer {layer + 1} head {head + 1}", x=0.02, ha="left", fontsize=12)
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
    axes.set_ylabel("query")
    axes.set_xlabel("key")
    axes.xaxis.set_label_position("top")


def _label_tokens(axes: Axes, labels: Sequence[str]) -> None:
    """Write the tokens along both sides; every one up to 72, beyond that evenly thinned."""
    every = -(-len(labels) // 72)
    places = range(0, len(labels), every)
    names = [visible(labels[i]) for i in places]
    style: dict[str, Any] = {"fontsize": 7 if len(labels) > 40 else 9, "family": "monospace"}
    axes.set_xticks(places, names, **style)
    axes.set_yticks(places, names, **style)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)


def _draw_support(axes: Axes, support: np.ndarray) -> None:
    rows = np.arange(len(support))
    axes.barh(rows, rows + 1, color="#ececec", height=1.0, label="visible")
    axes.barh(rows, support, color="#0b4f8a", height=0.8, label="weight not zero")
    axes.set_xlabel("keys per query")
    axes.xaxis.set_label_position("top")
    axes.tick_params(axis="x", top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.spines[["bottom", "right"]].set_visible(False)
    axes.legend(
        loc="upper right",
        fontsize=7,
        frameon=False,
        title=f"mean {support.mean():.1f}\nof {(len(support) + 1) / 2:.1f} visible",
    )


def visible(token: str) -> str:
    """A token that can be seen and that every font has: blanks and line ends as signs, the rest of the
    unprintable as a dot, no mathematical markup."""
    signs = {" ": "␣", "\n": "↵", "\t": "→", "\r": "↵", "$": r"\$"}
    return "".join(signs.get(c, c if c.isprintable() else "·") for c in token)


def png(figure: Figure) -> bytes:
    """The figure as a PNG without a date, so that equal data give equal bytes."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()
