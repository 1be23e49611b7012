"""Figures as PNG files, drawn without a display and without pyplot's global state.

Colours are the colour-blind safe palette of Okabe and Ito. More than six curves also differ in line style.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import extra_imports
from .measures import AttentionMaps

with extra_imports():
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
    from matplotlib.figure import Figure
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
    axes.set_xlim(left=0)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("bits per character")
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
    weights = maps.weights[layer, head].double().numpy()
    support = maps.support[layer, head].double().numpy()
    figure = Figure(figsize=(8.0, 6.8), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    _draw_weights(left, weights, figure)
    _label_tokens(left, maps.labels)
    _draw_support(right, support)
    figure.suptitle(f"{title}, layer {layer + 1} head {head + 1}", x=0.02, ha="left", fontsize=12)
    return png(figure)


def weights_on_text(weights: Mapping[str, Tensor], labels: Sequence[str], *, title: str) -> bytes:
    """Return a PNG of the weights of one query under several specs: a row of bars over the tokens for each spec.

    Args:
        weights: name of a spec to weights [T]; a weight of exactly zero has no bar and a grey token.
        labels: T tokens, the last of which is the query.
        title: of the figure.
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
    axes.set_ylabel("query")
    axes.set_xlabel("key")
    axes.xaxis.set_label_position("top")


def _label_tokens(axes: Axes, labels: Sequence[str]) -> None:
    """Write the tokens along both sides, at most 72, evenly spaced."""
    every = -(-len(labels) // 72)
    ticks = range(0, len(labels), every)
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


def visible(token: str) -> str:
    """Return a token with signs for spaces and line ends, and dots for other unprintable characters."""
    signs = {" ": "␣", "\n": "↵", "\t": "→", "\r": "↵"}
    return "".join(signs.get(c, c if c.isprintable() else "·") for c in token)


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
