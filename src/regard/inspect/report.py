"""A page to look inside: one self-contained HTML file, without a server, a network, or other files beside it.

The images are inlined. The attention viewer at the end is some hand-written JavaScript in the template; the
weights go into the page as one signed byte each:

    code = 0 where the weight is exactly zero, else sign(w) * max(1, round(127 sqrt(|w| / largest)))

so that zero stays distinguishable from small, and the square root keeps small weights visible.
"""

from __future__ import annotations

import base64
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from .measures import AttentionMaps
from .tables import Table


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Generated text.

    Attributes:
        prompt: what was given.
        continuation: what the model wrote.
        how: a sentence about how it was sampled.
    """

    prompt: str
    continuation: str
    how: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page says of one model.

    Attributes:
        title: its name.
        facts: short facts, name to value.
        sample: text that it wrote, if any.
        picture: a PNG, with `caption`, if any.
        maps: its weights, for the viewer, if any.
        layers: what its layers are like, if known (`summary.layer_table`).
        failure: why there is nothing to see, if so.
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
class Page:
    """The whole page.

    Attributes:
        title, introduction: of the page.
        table: the main result.
        curves: a PNG, with `curves_caption`.
        sections: one per model.
        settings: groups of settings, each a name and a mapping.
    """

    title: str
    introduction: str
    table: Table
    curves: bytes | None
    curves_caption: str
    sections: Sequence[Section]
    settings: dict[str, dict[str, str]]


def render(page: Page) -> str:
    """The page as HTML. All text is escaped."""
    source = importlib.resources.files(__package__).joinpath("templates/report.html.j2").read_text("utf-8")
    # autoescape by hand: jinja2 decides by the file's suffix only where it loads files itself
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["png"] = lambda image: "data:image/png;base64," + base64.b64encode(image).decode()
    viewer = [viewer_data(s.title, s.maps) for s in page.sections if s.maps is not None]
    return environment.from_string(source).render(page=page, viewer=viewer)


def viewer_data(name: str, maps: AttentionMaps) -> dict[str, Any]:
    """What the viewer needs of one model: the lower triangles of all heads, row by row, as base64."""
    weights = maps.weights.double().numpy()
    layers, heads, n = weights.shape[:3]
    largest = np.abs(weights).max(axis=(2, 3), initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)[..., None, None]
    size = np.maximum(1, np.rint(127 * np.sqrt(np.abs(weights) / unit)))
    codes = np.where(weights == 0, 0, np.sign(weights) * size).astype(np.int8)
    rows, columns = np.tril_indices(n)
    triangle = codes[:, :, rows, columns]
    return {
        "name": name,
        "labels": list(maps.labels),
        "layers": layers,
        "heads": heads,
        "largest": [[float(f"{value:.6g}") for value in row] for row in largest],
        "codes": base64.b64encode(np.ascontiguousarray(triangle).tobytes()).decode(),
    }
