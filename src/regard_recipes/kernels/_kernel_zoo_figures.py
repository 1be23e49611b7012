"""The figures of the kernel zoo, as PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from regard.inspect.figures import COLOURS, line_style, png

from .kernel_zoo import Product, Shape

GREY = ("#bdbdbd", "#dedede", "#ffffff")
"""Background where one, two, three keys have a weight."""
ENTMAX = {"epanechnikov": "sparsemax", "biweight": "1.5-entmax", "triweight": "4/3-entmax"}
"""What the adaptive rule makes of the named powers, for the titles."""


def kernels(shapes: Sequence[Shape]) -> bytes:
    """Every kernel above, its slope below: those of distance together, those of the score each by itself."""
    near = [s for s in shapes if s.over == "distance"]
    far = [s for s in shapes if s.over != "distance"]
    figure = Figure(figsize=(6.0 + 2.9 * len(far), 6.4), dpi=120, layout="constrained")
    grid: Any = figure.subplots(2, 1 + len(far), width_ratios=[2, *[1] * len(far)], squeeze=False)
    for place, shape in enumerate(near):
        colour, style = line_style(place)
        label = " = ".join(shape.names)
        for axes, y in zip(grid[:, 0], (shape.value, shape.slope), strict=True):
            axes.plot(shape.x, y, color=colour, linestyle=style, linewidth=1.8, label=label)
    grid[0, 0].set(title="of the distance, each of mass 1", ylabel="K(u)")
    grid[1, 0].set(xlabel="distance u", ylabel="slope K'(u)", ylim=(-2.2, 2.2))
    for column, shape in enumerate(far, start=1):
        for axes, y in zip(grid[:, column], (shape.value, shape.slope), strict=True):
            axes.plot(shape.x, y, color=COLOURS[0], linewidth=1.8)
            _bounded(axes, np.asarray(y))
        grid[0, column].set(title=" = ".join(shape.names), ylabel="K(z)")
        grid[1, column].set(xlabel="score z", ylabel="slope K'(z)")
    for axes in grid.flat:
        _plain(axes)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, frameon=False)
    return png(figure)


def _bounded(axes: Axes, y: np.ndarray) -> None:
    """Let what grows without bound leave the panel instead of flattening the rest."""
    largest, common = float(np.nanmax(np.abs(y))), float(np.nanquantile(np.abs(y), 0.75))
    if largest > 20 * max(common, 1e-12):
        axes.set_yscale("log")


def planes(products: Sequence[Product]) -> bytes:
    """The weight of the first of the scores [0, u1, u2] over the plane, with the edges of the support."""
    images: list[Any] = []

    def draw(axes: Axes, product: Product) -> None:
        assert product.plane is not None
        support = product.edges().numpy()
        edge, weight = product.edge, product.plane.numpy()
        side = np.linspace(-edge, edge, len(support))
        image = axes.imshow(
            weight, origin="lower", extent=(-edge, edge, -edge, edge), cmap="cividis", vmin=0, vmax=1, aspect="equal"
        )
        images.append(image)
        if weight.min() == weight.max():
            axes.text(0, 0, f"{weight.min():g} everywhere", color="white", ha="center", va="center", fontsize=8)
        if support.min() < support.max():
            axes.contour(side, side, support, levels=[1.5, 2.5], colors="white", linewidths=1.0, linestyles=[":", "-"])
        axes.set(xlabel="u1", ylabel="u2")

    figure = _multiples(products, draw, 2.35)
    marks = [
        Line2D([], [], color="#777777", linestyle="-", label="three keys | two keys have weight"),
        Line2D([], [], color="#777777", linestyle=":", label="two keys | one key has weight"),
    ]
    figure.legend(handles=marks, loc="outside lower left", frameon=False, ncols=2)
    figure.colorbar(
        images[0], ax=figure.axes, location="right", shrink=0.4, aspect=30,
        label="weight of the key with score 0, among scores [0, u1, u2]",
    )  # fmt: skip
    return png(figure)


def lines(products: Sequence[Product]) -> bytes:
    """The weights of the scores (t, 0, -t) with their slopes; the background says how many keys have weight."""

    def draw(axes: Axes, product: Product) -> None:
        assert product.line is not None
        assert product.slopes is not None
        t = np.linspace(-product.edge, product.edge, len(product.line))
        weights, slopes = product.line.numpy(), product.slopes.numpy()
        count = (weights != 0).sum(-1)
        for size in (1, 2):
            axes.fill_between(t, 0, 1, where=count == size, color=GREY[size - 1], linewidth=0, step="mid",
                              transform=axes.get_xaxis_transform())  # fmt: skip
        for j in range(3):
            axes.plot(t, slopes[:, j], color=COLOURS[j], linewidth=0.9, linestyle="--")
            axes.plot(t, weights[:, j], color=COLOURS[j], linewidth=1.9)
        axes.set_ylim(min(-1.05, 1.05 * weights.min()), max(1.05, 1.05 * weights.max()))
        axes.set(xlabel="t")
        _plain(axes)

    figure = _multiples(products, draw, 2.2)
    marks = [
        *(Line2D([], [], color=COLOURS[j], linewidth=1.9, label=f"weight of the score {s}")
          for j, s in enumerate(("t", "0", "−t"))),
        Line2D([], [], color="#555555", linewidth=0.9, linestyle="--", label="its slope by t"),
        *(Patch(facecolor=GREY[n - 1], edgecolor="#999999", label=f"keys with weight: {n}") for n in (1, 2, 3)),
    ]  # fmt: skip
    figure.legend(handles=marks, loc="outside lower left", frameon=False, ncols=4)
    return png(figure)


def _multiples(products: Sequence[Product], draw: Callable[[Axes, Product], None], size: float) -> Figure:
    """One panel a product: rules down and kernels across, then the kernels that know one rule only."""
    alive = [p for p in products if p.line is not None]
    many = list(dict.fromkeys(p.kernel for p in alive if sum(q.kernel == p.kernel for q in alive) > 1))
    rules = list(dict.fromkeys(p.rule for p in alive if p.kernel in many))
    single = [p for p in alive if p.kernel not in many]
    columns = max(len(many), 1)
    rows = len(rules) + -(-len(single) // columns)
    figure = Figure(figsize=(size * columns + 1.2, (size + 0.35) * rows + 0.5), dpi=110, layout="constrained")
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    places = {(p.kernel, p.rule): p for p in products}
    for row, rule in enumerate(rules):
        for column, kernel in enumerate(many):
            _panel(grid[row, column], places[kernel, rule], draw)
    rest = list(grid[len(rules) :].flat)
    for axes, product in zip(rest, single, strict=False):
        _panel(axes, product, draw)
    for axes in rest[len(single) :]:
        axes.set_axis_off()
    return figure


def _panel(axes: Axes, product: Product, draw: Callable[[Axes, Product], None]) -> None:
    named = ENTMAX.get(product.kernel) if product.rule == "adaptive" else None
    numbers = product.spec.partition("(")[2].partition(")")[0] if product.rule in product.spec else ""
    more = [named, numbers, f"scores × {product.unit:g}" if product.unit != 1 else None]
    said = ", ".join(part for part in more if part)
    title = f"{product.kernel} × {product.rule}" + (f"\n({said})" if said else "")
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    if product.line is None:
        axes.text(0.5, 0.5, "no meaning", ha="center", va="center", transform=axes.transAxes, color="#777777")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        return
    draw(axes, product)


def _plain(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
