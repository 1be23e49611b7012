"""A report on trained models as one self-contained HTML file.

Images are inlined, and the attention viewer is a small script in the template. Each weight is stored as one signed
byte, so that zero differs from small and small weights stay visible:

    code = 0 if the weight is exactly zero, else sign(w) * max(1, round(127 sqrt(|w| / largest)))
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import extra_imports
from .measures import AttentionMaps
from .tables import Table

with extra_imports():
    import numpy as np
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template


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
        layers: table of its layers (`summary.layer_table`).
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
    """The whole page: parts about all models, a section per model, and groups of settings by name."""

    title: str
    introduction: str
    parts: Sequence[Part]
    sections: Sequence[Section]
    settings: dict[str, dict[str, str]]


def render(page: Page) -> str:
    """Return the page as HTML, with all text escaped."""
    viewer = [viewer_data(s.title, s.maps) for s in page.sections if s.maps is not None]
    return template("report.html.j2").render(page=page, viewer=viewer)


def template(name: str) -> Template:
    how: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=PackageLoader("regard.inspect"), autoescape=True, **how)
    environment.filters["png"] = lambda image: "data:image/png;base64," + base64.b64encode(image).decode()
    return environment.get_template(name)


def viewer_data(name: str, maps: AttentionMaps) -> dict[str, Any]:
    """Return the data of one model for the viewer: the lower triangles of all heads, row by row, as base64."""
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
