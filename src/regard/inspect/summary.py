"""A table of a model's attention layers: support sizes, negative weights and solver statistics."""

from torch import Tensor

from ..grammar import SolveStatus
from .measures import AttentionMaps
from .tables import Table

NONE = "-"
STRONG = 0.1
"""Threshold of `AttentionMaps.strong`, from appendix F.3 of Local Linear Attention (arXiv 2510.01450)."""


def layer_table(maps: AttentionMaps) -> Table:
    """Return a table of one row per layer, with means over heads and queries (of the residual, the maximum).

    There are solver columns if some layer is local linear.
    """
    solved = any(maps.solver)
    header = ("layer", "keys with weight", "of the visible", f"with weight above {STRONG:g}", "negative weight")
    solver = ("solver steps", "residual", "not converged") if solved else ()
    rows = [_row(maps, layer, solved) for layer in range(maps.weights.shape[0])]
    note = "Means over heads and queries of one text."
    if solved:
        note += " Residual: the largest |b - A t| / |b| of the local linear systems; not converged: how many of them."
    return Table(header=(*header, *solver), rows=tuple(rows), note=note)


def _row(maps: AttentionMaps, layer: int, solved: bool) -> tuple[str, ...]:
    density = None if maps.density is None else maps.density[layer]
    cells = (
        str(layer + 1),
        f"{_mean(maps.support[layer]):.1f}",
        NONE if density is None else f"{100 * _mean(density):.0f}%",
        f"{_mean(maps.strong(STRONG)[layer]):.1f}",
        f"{_mean(maps.negative_mass()[layer]):.3f}",
    )
    if not solved or not (statistics := maps.solver[layer]):
        return (*cells, NONE, NONE, NONE) if solved else cells
    failed = statistics["status"] == SolveStatus.UNCONVERGED
    steps, worst = f"{_mean(statistics['iterations']):.1f}", f"{float(statistics['residual'].max()):.1e}"
    return (*cells, steps, worst, f"{int(failed.sum())} of {failed.numel()}")


def _mean(x: Tensor) -> float:
    return float(x.double().mean())
