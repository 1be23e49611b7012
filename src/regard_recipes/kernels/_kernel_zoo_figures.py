"""The figures of the kernel zoo, as PNG."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from regard.grammar import Spec
from regard.inspect.figures import COLOURS, line_style, png

from ..lib.display import plain_axes

GREY = ("#bdbdbd", "#dedede", "#ffffff")  # background where one, two, three keys have a weight
FINE = 8  # times as many points a side as the plane has, where the edges of the support are looked for
# What the adaptive rule makes of the named powers, for the titles.
ENTMAX = {"epanechnikov": "sparsemax", "biweight": "1.5-entmax", "triweight": "4/3-entmax"}
COLUMNS = 5  # as many kernels know several rules

numbers = partial(np.array, dtype=float)  # stored numbers as an array; None is NaN


def kernels(shapes: Sequence[Any]) -> bytes:
    """Draw every kernel above its slope: those of the distance together, those of the score each by itself."""
    near, far = ([row for row in shapes if (row.over == "distance") == close] for close in (True, False))
    figure = Figure(figsize=(6.0 + 2.9 * len(far), 6.4), dpi=120, layout="constrained")
    grid: Any = figure.subplots(2, 1 + len(far), width_ratios=[2, *[1] * len(far)], squeeze=False)
    for column, rows in enumerate([near, *([row] for row in far)]):
        for number, row in enumerate(rows):
            colour, style = line_style(number)
            for axes, y in zip(grid[:, column], (row.value, row.slope), strict=True):
                axes.plot(row.x, numbers(y), color=colour, linestyle=style, linewidth=1.8, label=row.kernel)
                size = np.abs(numbers(y))
                if column and np.nanmax(size) > 20 * max(np.nanquantile(size, 0.75), 1e-12):
                    axes.set_yscale("log")  # what grows without bound would flatten the rest
        grid[0, column].set(title=rows[0].kernel, ylabel="K(z)")
        grid[1, column].set(xlabel="score z", ylabel="slope K'(z)")
    grid[0, 0].set(title="of the distance, each of mass 1", ylabel="K(u)")
    grid[1, 0].set(xlabel="distance u", ylabel="slope K'(u)", ylim=(-2.2, 2.2))
    for axes in grid.flat:
        plain_axes(axes)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)
    return png(figure)


def planes(products: Sequence[Any], weights: Callable[..., Any]) -> bytes:
    """Draw the weight of the first of [0, u1, u2] over the plane, and its support; `weights` is `kernel_zoo.plane`."""

    def draw(axes: Axes, row: Any) -> None:
        edge, weight = row.edge, numbers(row.plane)
        fine = FINE * len(weight)
        support = (weights(Spec.parse(row.spec), edge, row.unit, fine) != 0).sum(-1).numpy()
        axes.imshow(weight, origin="lower", extent=(-edge, edge, -edge, edge), cmap="cividis", vmin=0, vmax=1)
        if weight.min() == weight.max():
            axes.text(0, 0, f"{weight.min():g} everywhere", color="white", ha="center", va="center", fontsize=8)
        if support.min() < support.max():
            side = np.linspace(-edge, edge, fine)
            axes.contour(side, side, support, levels=[1.5, 2.5], colors="white", linewidths=1.0, linestyles=[":", "-"])
        axes.set(xlabel="u1", ylabel="u2")

    figure = _multiples(products, draw, 2.35)
    edges = {"-": "three keys | two keys have weight", ":": "two keys | one key has weight"}
    marks = [Line2D([], [], color="#777777", linestyle=style, label=label) for style, label in edges.items()]
    figure.legend(handles=marks, loc="outside lower left", frameon=False, ncols=2)
    label = "weight of the key with score 0, among scores [0, u1, u2]"
    figure.colorbar(figure.axes[0].images[0], ax=figure.axes, location="right", shrink=0.4, aspect=30, label=label)
    return png(figure)


def lines(products: Sequence[Any]) -> bytes:
    """Draw the weights of the scores (t, 0, -t) and their slopes; the background says how many keys have weight."""

    def draw(axes: Axes, row: Any) -> None:
        weights, slopes = numbers(row.line), numbers(row.slopes)
        t = np.linspace(-row.edge, row.edge, len(weights))
        count = (weights != 0).sum(-1)
        for size in (1, 2):
            axes.fill_between(t, 0, 1, where=count == size, color=GREY[size - 1], linewidth=0, step="mid",
                              transform=axes.get_xaxis_transform())  # fmt: skip
        for j in range(3):
            axes.plot(t, slopes[:, j], color=COLOURS[j], linewidth=0.9, linestyle="--")
            axes.plot(t, weights[:, j], color=COLOURS[j], linewidth=1.9)
        axes.set_ylim(min(-1.05, 1.05 * weights.min()), max(1.05, 1.05 * weights.max()))
        axes.set(xlabel="t")
        plain_axes(axes)

    figure = _multiples(products, draw, 2.2)
    marks = [
        *(Line2D([], [], color=COLOURS[j], linewidth=1.9, label=f"weight of the score {s}")
          for j, s in enumerate(("t", "0", "−t"))),
        Line2D([], [], color="#555555", linewidth=0.9, linestyle="--", label="its slope by t"),
        *(Patch(facecolor=GREY[n - 1], edgecolor="#999999", label=f"keys with weight: {n}") for n in (1, 2, 3)),
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower left", frameon=False, ncols=4)
    return png(figure)


def _multiples(products: Sequence[Any], draw: Callable[[Axes, Any], None], size: float) -> Figure:
    """Return a figure with a panel for each product, rule by rule; kernels that know one rule only come last."""
    known, rules = Counter(p.kernel for p in products), list(dict.fromkeys(p.rule for p in products))
    shown = sorted(products, key=lambda p: (known[p.kernel] == 1, rules.index(p.rule)))
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(size * COLUMNS + 1.2, (size + 0.35) * rows + 0.5), dpi=110, layout="constrained")
    grid: Any = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes, product in zip(grid.flat, shown, strict=False):
        entmax = ENTMAX.get(product.kernel) if product.rule == "adaptive" else ""
        numbers = product.spec.partition("(")[2].partition(")")[0] if product.rule in product.spec else ""
        more = ", ".join(filter(None, (entmax, numbers, f"scores × {product.unit:g}" if product.unit != 1 else "")))
        axes.set_title(f"{product.kernel} × {product.rule}" + (f"\n({more})" if more else ""), fontsize=9)
        axes.tick_params(labelsize=7)
        draw(axes, product)
    for axes in grid.flat[len(shown) :]:
        axes.set_axis_off()
    return figure
