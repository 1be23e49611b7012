"""Reports on trained models and on memory layers, each as one self-contained HTML file.

Images are inlined, and the attention viewer is a small script in the template. Each weight is stored as one signed
byte, so that zero differs from small and small weights stay visible:

    code = 0 if the weight is exactly zero, else sign(w) * max(1, round(127 sqrt(|w| / largest)))
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from torch import Tensor

from ..errors import extra_imports
from ..grammar import SolveStatus
from .gates import GateTrace
from .measures import AttentionMaps
from .slot_trace import HIT, SlotReadings, slot_rows
from .tables import Table, visible

with extra_imports():
    import numpy as np
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template

STRONG = 0.1
"""Threshold of `AttentionMaps.strong`, from appendix F.3 of Local Linear Attention (arXiv 2510.01450)."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, the text that was generated after it, and how it was sampled."""

    prompt: str
    continuation: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """The part of the page about one model.

    Attributes:
        title: name of the model.
        facts: short facts by name.
        picture, caption: a PNG and its caption.
        maps: weights for the viewer.
        layers: table of its layers (`layer_table`).
        failure: why the model has no results.
    """

    title: str
    facts: dict[str, str] = field(default_factory=dict)
    sample: Sample | None = None
    picture: bytes | None = None
    caption: str = ""
    maps: AttentionMaps | None = None
    layers: Table | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the page about all models: a text, a table, and a PNG with its caption; each may be missing."""

    title: str
    text: str = ""
    table: Table | None = None
    picture: bytes | None = None
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page on models: parts about all models, a section per model, and groups of settings by name."""

    title: str
    introduction: str
    parts: Sequence[Part]
    sections: Sequence[Section]
    settings: dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class MemoryPage:
    """The page on memory layers: retrieved slots and gates of texts, by title, and paragraphs below these titles."""

    title: str
    introduction: str
    slots: Mapping[str, SlotReadings] = field(default_factory=dict)
    gates: Mapping[str, GateTrace] = field(default_factory=dict)
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def render(page: Page) -> str:
    """Return the page as HTML, with all text escaped."""
    viewer = [viewer_data(s.title, s.maps) for s in page.sections if s.maps is not None]
    return _template("report.html.j2").render(page=page, viewer=viewer)


def render_memory(page: MemoryPage, *, reach: int = 10) -> str:
    """Return the page as HTML, with all text escaped and `reach` tokens of context on each side of a writing token."""

    def part(title: str, **content: Any) -> dict[str, Any]:
        return {"title": title, "notes": page.notes.get(title, ()), "steps": (), "layers": (), **content}

    parts = [part(title, steps=_retrieved(trace, reach)) for title, trace in page.slots.items()]
    parts += [part(title, layers=_gates(trace)) for title, trace in page.gates.items()]
    return _template("memory.html.j2").render(page=page, parts=parts, hit=HIT)


def _template(name: str) -> Template:
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("regard.inspect"), autoescape=True, **options)
    environment.filters["png"] = lambda image: "data:image/png;base64," + base64.b64encode(image).decode()
    return environment.get_template(name)


def viewer_data(name: str, maps: AttentionMaps) -> dict[str, Any]:
    """Return the data of one model for the viewer: the lower triangles of all heads, row by row, as base64."""
    weights = maps.weights.double().numpy()
    layers, heads, n = weights.shape[:3]
    largest = np.abs(weights).max(axis=(2, 3), initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)[..., None, None]
    size = np.maximum(1, np.rint(127 * np.sqrt(np.abs(weights) / unit)))
    rows, columns = np.tril_indices(n)
    triangle = np.where(weights == 0, 0, np.sign(weights) * size).astype(np.int8)[:, :, rows, columns]
    return {
        "name": name,
        "labels": list(maps.labels),
        "layers": layers,
        "heads": heads,
        "largest": [[float(f"{value:.6g}") for value in row] for row in largest],
        "codes": base64.b64encode(np.ascontiguousarray(triangle).tobytes()).decode(),
    }


def layer_table(maps: AttentionMaps) -> Table:
    """Return a table of a model's attention layers: support sizes, negative weights and solver statistics.

    These are means over heads and queries (of the residual, the maximum). Local linear layers add solver columns.
    """
    header: tuple[str, ...]
    header = ("layer", "keys with weight", "of the visible", f"with weight above {STRONG:g}", "negative weight")
    note, rows = "Means over heads and queries of one text.", list[tuple[str, ...]]()
    for layer, support in enumerate(maps.support):
        density = "-" if maps.density is None else f"{100 * _mean(maps.density[layer]):.0f}%"
        strong, negative = _mean(maps.strong(STRONG)[layer]), _mean(maps.negative_mass()[layer])
        rows.append((str(layer + 1), f"{_mean(support):.1f}", density, f"{strong:.1f}", f"{negative:.3f}"))
    if any(maps.solver):
        header += ("solver steps", "residual", "not converged")
        rows = [(*row, *_solver_cells(statistics)) for row, statistics in zip(rows, maps.solver, strict=True)]
        note += " Residual: the largest |b - A t| / |b| of the local linear systems; not converged: how many of them."
    return Table(header, tuple(rows), note)


def _solver_cells(statistics: Mapping[str, Tensor]) -> tuple[str, ...]:
    if not statistics:
        return "-", "-", "-"
    failed = statistics["status"] == SolveStatus.UNCONVERGED
    steps, worst = f"{_mean(statistics['iterations']):.1f}", f"{float(statistics['residual'].max()):.1e}"
    return steps, worst, f"{int(failed.sum())} of {failed.numel()}"


def _mean(x: Tensor) -> float:
    return float(x.double().mean())


def _retrieved(trace: SlotReadings, reach: int) -> list[dict[str, Any]]:
    """Return the retrieved slots of every querying token, with all layers together."""
    names = dict(zip(trace.tokens, trace.labels, strict=True))
    rows = sorted(slot_rows(trace, reach=reach), key=lambda row: row["position"])  # stable: layers stay in order
    steps = []
    for _, group in groupby(rows, key=lambda row: row["position"]):
        slots = list(group)
        for row in slots:
            row.update({name: visible(row[name]) for name in ("before", "query", "target", "after")})
        answer = slots[0]["answer"]
        label = "?" if answer is None else visible(names.get(answer, str(answer)))
        hits = sum(row["hit"] for row in slots)
        steps.append({"token": visible(slots[0]["token"]), "answer": label, "hits": hits, "rows": slots})
    return steps


def _gates(trace: GateTrace) -> list[dict[str, Any]]:
    return [
        {"name": name, "mean": sum(gates) / max(1, len(gates)), "tokens": list(zip(trace.labels, gates, strict=True))}
        for name, gates in zip(trace.layers, trace.gates.tolist(), strict=True)
    ]
