"""Draw docs/figures, the weight curves and a fit by averages and by lines: `python docs/make_figures.py`."""

from pathlib import Path

import torch
from torch import Tensor

import regard

FIGURES = Path(__file__).with_name("figures")
FITS = {
    "average (softmax weights by distance)": "gaussian*fixed(h=0.15)*euclidean",
    "line (the same weights)": "gaussian*fixed(h=0.15)*euclidean*linear(ridge=0.0001)",
}
"""Label and spec of the curves of fits.png."""
PANELS = {
    "dense": {"softmax": "softmax", "shift-cosine": "shift-cosine"},
    "sparse: exact zeros": {
        "sparsemax": "sparsemax",
        "biweight": "biweight",
        "triweight": "triweight",
        "top-k softmax, k = 9": "gaussian*nearest(k=9)",
    },
    "local linear, all keys on one side": {
        "softmax": "softmax",
        "local linear, ridge 0.01": "gaussian*linear(ridge=0.01)",
        "the same, biweight": "biweight*linear(ridge=0.01)",
    },
}
"""Title of a panel, then the label and the spec of each curve."""
FIRST = {"local linear, all keys on one side": 0.0}
"""The lowest angle of a key, where it is not -180 degrees."""
SCALE = 8.0


def curve(text: str, first: float = -180.0, step: float = 5.0) -> tuple[Tensor, Tensor]:
    """Return (angles in degrees, weights) of unit keys from the angle `first` to 180, seen by one query at angle 0."""
    angle = torch.arange(first, 180 + step / 2, step, dtype=torch.float64)
    key = torch.stack((angle.deg2rad().cos(), angle.deg2rad().sin()), -1)[None, None]
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    spec = regard.Spec.parse(text)
    scale = SCALE if spec.takes_scale else None
    how = {"scale": scale, "impl": "reference", "return_diagnostics": True}
    rows = regard.attention(query, key, key, spec, **how)[1]
    weights = rows.weights if rows.effective_weights is None else rows.effective_weights
    return angle, weights[0, 0, 0]


def fit(text: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (keys, values, predictions at the keys) of noisy values of a curve at keys in [0, 1]."""
    noise = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key = torch.linspace(0, 1, 60, dtype=torch.float64)
    value = (3 * key).exp() / 8 + 0.1 * noise
    rows = key[None, None, :, None]
    return key, value, regard.attention(rows, rows, value[None, None, :, None], text)[0, 0, :, 0]


def draw(folder: Path = FIGURES) -> None:
    """Write the figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(exist_ok=True)
    figure, axes = plt.subplots(1, len(PANELS), figsize=(10.4, 2.8), layout="constrained")
    for axis, (title, curves) in zip(axes, PANELS.items(), strict=True):
        for label, text in curves.items():
            axis.plot(*curve(text, FIRST.get(title, -180.0)), label=label, linewidth=1.5)
        axis.axhline(0, color="0.7", linewidth=0.6, zorder=0)
        axis.set(title=title, xlabel="angle between query and key, degrees", xlim=(-100, 130), xticks=[-90, 0, 90])
        axis.set_ylim(top=1.25 * axis.get_ylim()[1])
        axis.legend(fontsize=8, frameon=False, loc="upper right")
    axes[0].set_ylabel("weight")
    figure.savefig(folder / "weights.png", dpi=100, metadata={"Software": None})
    plt.close(figure)

    figure, axis = plt.subplots(figsize=(5.2, 2.8), layout="constrained")
    for label, text in FITS.items():
        key, value, predicted = fit(text)
        axis.plot(key, predicted, label=label, linewidth=1.5)
    axis.plot(key, value, "k.", markersize=3, label="values")
    axis.set(xlabel="key, query", ylabel="value")
    axis.legend(fontsize=8, frameon=False)
    figure.savefig(folder / "local-linear.png", dpi=100, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw()
