"""Draw the figures of docs/tutorial.md: `python docs/make_tutorial_figures.py`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard

FIGURES = Path(__file__).with_name("figures")
BANDWIDTHS = (0.15, 0.4, 1.2)
FITS = {
    "average": "gaussian*fixed*euclidean",
    "line, ridge 1": "gaussian*fixed*euclidean*linear(ridge=1.0)",
    "line, ridge 0.01": "gaussian*fixed*euclidean*linear(ridge=0.01)",
}
"""Label and spec of the curves of tutorial-lines.png."""
RULES = {
    "fixed": "fixed(bias=1.0)",
    "adaptive": "adaptive",
    "anchored": "anchored(margin=1.0)",
    "nearest": "nearest(k=5)",
}
"""Each thresholding rule, with the parameters that tutorial-grid.png shows."""
ROW = torch.linspace(-2, 2, 21, dtype=torch.float64)
"""Keys of tutorial-grid.png; the query is 0."""


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    """Return the keys and the noisy values of the tutorial."""
    draw = torch.Generator().manual_seed(1)
    keys = torch.rand(count, generator=draw, dtype=torch.float64).mul(4).sub(2).sort().values
    return keys, (2 * keys).sin() + 0.5 * keys + 0.2 * torch.randn(count, generator=draw, dtype=torch.float64)


def predict(spec: str, bandwidth: float, queries: Tensor) -> Tensor:
    """Return what a spec predicts at the queries from the data of the tutorial."""
    keys, values = (x[None, None, :, None] for x in data())
    return regard.attention(queries[None, None, :, None], keys, values, spec, scale=bandwidth**-2)[0, 0, :, 0]


def everywhere(model: str, queries: Tensor) -> Tensor:
    """Return the prediction of one linear model for all queries: "mesa" or "linear"; a constant feature is appended."""
    keys, values = data()
    k, q = (torch.stack([x, torch.ones_like(x)], -1)[None, None] for x in (keys, queries))
    v = values[None, None, :, None]
    if model == "mesa":
        return regard.mesa_attention(q, k, v, ridge=1e-6, is_causal=False)[0][0, 0, :, 0]
    return regard.linear_attention(q, k, v, "linear", is_causal=False)[0][0, 0, :, 0] / len(keys)


def grid(kernel: str, rule: str, bandwidth: float) -> Tensor | None:
    """Return the weights of the keys ROW for the query 0, or None where kernel and rule do not go together.

    Kernels of the score itself have no bandwidth: they are shown for unit vectors at the angles ROW, in radians.
    """
    if not regard.registries()["kernel"].get(kernel)().ranked:
        specs = {"linear": "linear*fixed(bias=1.0)*cosine", "geometric": "geometric*fixed*cosine"}
        return _weights(specs.get(kernel, kernel), _unit(ROW), None) if rule == "fixed" else None
    rule = "fixed" if kernel == "gaussian" and rule == "fixed" else RULES[rule]
    try:
        return _weights(f"{kernel}*{rule}*euclidean", ROW[:, None], bandwidth**-2)
    except regard.checks.ArgumentError:
        return None


def _unit(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _weights(spec: str, keys: Tensor, scale: float | None) -> Tensor:
    """Return the weights of keys [n, D] for the query in the middle of ROW."""
    if spec == "clipped-geometric":
        keys = keys * 300**0.5  # up to its limit
    rows = keys[None, None]
    how: dict[str, Any] = {"scale": scale, "impl": "reference", "return_diagnostics": True}
    return regard.attention(rows[:, :, len(ROW) // 2 :][:, :, :1], rows, rows, spec, **how)[1].weights[0, 0, 0]


def maps(count: int = 24) -> dict[str, Tensor]:
    """Return the causal weights [count, count] of the same queries and keys under four specs."""
    draw = torch.Generator().manual_seed(3)
    steps = torch.randn(1, 1, count, 8, generator=draw, dtype=torch.float64)
    keys = torch.nn.functional.normalize(steps.cumsum(2), dim=-1)
    specs = ("softmax", "biweight", "gaussian*nearest(k=4)", "local-linear[biweight]")
    found = {}
    for spec in specs:
        seen = regard.attention(
            keys, keys, keys, spec, is_causal=True, scale=8.0, impl="reference", return_diagnostics=True
        )[1]
        weights = seen.weights if seen.effective_weights is None else seen.effective_weights
        found[spec] = weights[0, 0]
    return found


def _save(figure: Any, folder: Path, name: str) -> None:
    figure.savefig(folder / f"tutorial-{name}.png", dpi=90, metadata={"Software": None})


def draw_fits(folder: Path) -> None:
    """Write tutorial-average.png, tutorial-lines.png and tutorial-everywhere.png."""
    from matplotlib import pyplot as plt

    queries = torch.linspace(-2, 2, 201, dtype=torch.float64)
    curves = {
        "average": {f"h = {h}": predict(FITS["average"], h, queries) for h in BANDWIDTHS},
        "lines": {label: predict(spec, 0.8, queries) for label, spec in FITS.items()},
        "everywhere": {
            "Mesa: least squares": everywhere("mesa", queries),
            "linear attention, divided by n": everywhere("linear", queries),
            "local lines, h = 0.4": predict(FITS["line, ridge 0.01"], 0.4, queries),
        },
    }
    for name, each in curves.items():
        figure, axis = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
        axis.plot(*data(), "k.", markersize=4, label="pairs")
        for label, values in each.items():
            axis.plot(queries, values, label=label, linewidth=1.5)
        axis.set(xlabel="key, query", ylabel="value")
        axis.legend(fontsize=8, frameon=False)
        _save(figure, folder, name)
        plt.close(figure)


def draw_grid(folder: Path) -> None:
    """Write tutorial-grid.png: every kernel under every thresholding rule, with three bandwidths."""
    from matplotlib import pyplot as plt

    kernels, rules = regard.registries()["kernel"].names(), regard.registries()["bandwidth"].names()
    kernels = [name for name in kernels if name != "polynomial"]  # epanechnikov, biweight and triweight are polynomials
    size = {"figsize": (1.5 * len(kernels), 1.4 * len(rules)), "sharex": True, "layout": "constrained"}
    figure, axes = plt.subplots(len(rules), len(kernels), **size)
    for i, rule in enumerate(rules):
        for j, kernel in enumerate(kernels):
            axis = axes[i][j]
            curves = {f"h = {h}": grid(kernel, rule, h) for h in BANDWIDTHS}
            for label, weights in curves.items():
                if weights is not None:
                    axis.plot(ROW, weights, ".-", markersize=2, linewidth=1, label=label)
            if not axis.lines:
                axis.text(0.5, 0.5, "not defined", ha="center", va="center", fontsize=7, transform=axis.transAxes)
            axis.tick_params(labelsize=6)
            axis.set_yticks([])
            if i == 0:
                axis.set_title(kernel, fontsize=8)
        axes[i][0].set_ylabel(rule, fontsize=8)
    axes[rules.index("fixed")][0].legend(fontsize=6, frameon=False, loc="upper left")
    _save(figure, folder, "grid")
    plt.close(figure)


def draw_maps(folder: Path) -> None:
    """Write tutorial-maps.png: causal weights of one call under four specs."""
    from matplotlib import pyplot as plt

    found = maps()
    figure, axes = plt.subplots(1, len(found), figsize=(9.6, 2.7), layout="constrained")
    for axis, (spec, weights) in zip(axes, found.items(), strict=True):
        image = axis.imshow(weights, cmap="RdBu_r", vmin=-1, vmax=1)
        axis.set_title(spec, fontsize=8)
        axis.set(xlabel="key", xticks=[], yticks=[])
    axes[0].set_ylabel("query")
    figure.colorbar(image, ax=axes, shrink=0.8, label="weight")
    _save(figure, folder, "maps")
    plt.close(figure)


def draw(folder: Path = FIGURES) -> None:
    """Write all figures of the tutorial."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(exist_ok=True)
    draw_fits(folder)
    draw_grid(folder)
    draw_maps(folder)


if __name__ == "__main__":
    draw()
