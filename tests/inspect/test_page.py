"""The page: complete, self-contained, and safe against what is in the text."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from regard.inspect.measures import AttentionMaps
from regard.inspect.report import Page, Sample, Section, render, viewer_data
from regard.inspect.tables import Table

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
PNG = b"\x89PNG\r\n\x1a\nnot really"


def maps(labels: str = "abc") -> AttentionMaps:
    n = len(labels)
    weights = torch.rand(2, 3, n, n, generator=torch.Generator().manual_seed(0)).tril()
    weights[0, 0, -1, 0] = 0.0
    weights[1, 2, -1, 0] = -1e-9
    return AttentionMaps(tuple(labels), weights, (weights != 0).sum(-1).float())


def page(text: str = "text", **changes: object) -> Page:
    section = Section(
        title=text,
        facts={text: text},
        sample=Sample(prompt=text, continuation=text, how=text),
        picture=PNG,
        caption=text,
        maps=maps(text),
    )
    values: dict[str, object] = {
        "title": text,
        "introduction": text,
        "table": Table(header=(text, "bits"), rows=((text, "1.25"),), note=text),
        "curves": PNG,
        "curves_caption": text,
        "sections": [section, Section(title="broken", failure=text)],
        "settings": {text: {text: text}},
    }
    return Page(**{**values, **changes})  # type: ignore[arg-type]


class Elements(HTMLParser):
    """All elements with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.data = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = "data" if dict(attrs).get("id") == "v-data" else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.text.append(data)


def test_everything_that_was_given_is_there() -> None:
    found = Elements(render(page("some words")))
    text = " ".join(found.text)
    assert text.count("some words") >= 12
    assert "1.25" in text
    assert "broken" in text
    images = [attrs["src"] for tag, attrs in found.elements if tag == "img"]
    assert images == ["data:image/png;base64," + base64.b64encode(PNG).decode()] * 2


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = render(page())
    found = Elements(html)
    assert not re.search(r"https?://|@import|url\(", html)
    for tag, attrs in found.elements:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attrs or str(attrs["src"]).startswith("data:image/png;base64,")
        assert "href" not in attrs or str(attrs["href"]).startswith("#")


def test_links_lead_somewhere() -> None:
    found = Elements(render(page()))
    places = {attrs["id"] for _, attrs in found.elements if "id" in attrs}
    links = [str(attrs["href"])[1:] for tag, attrs in found.elements if tag == "a"]
    assert len(links) == 4
    assert set(links) <= places


def test_text_stays_text() -> None:
    plain, hostile = Elements(render(page())), Elements(render(page(HOSTILE)))
    spans = ("span",)  # labels make as many elements as before; the script makes more only when it runs
    count = [[tag for tag, _ in found.elements if tag not in spans] for found in (plain, hostile)]
    assert count[0] == count[1]
    assert HOSTILE in "".join(hostile.text)
    assert json.loads(hostile.data)[0]["labels"] == list(HOSTILE)


def test_without_maps_there_is_no_viewer() -> None:
    found = Elements(render(page(sections=[Section(title="only words")], curves=None)))
    assert not [tag for tag, _ in found.elements if tag in ("canvas", "script", "img")]


def test_the_viewer_has_the_weights() -> None:
    given = maps("abcde")
    data = viewer_data("name", given)
    codes = np.frombuffer(base64.b64decode(data["codes"]), dtype=np.int8).reshape(2, 3, 15).astype(float)
    assert (data["name"], data["layers"], data["heads"]) == ("name", 2, 3)
    for layer in range(2):
        for head in range(3):
            largest = data["largest"][layer][head]
            weights = given.weights[layer, head].numpy()
            for i in range(5):  # row i begins after the rows of 1, 2, ..., i weights
                row = codes[layer, head, i * (i + 1) // 2 : (i + 1) * (i + 2) // 2]
                assert ((row == 0) == (weights[i, : i + 1] == 0)).all()
                decoded = np.sign(row) * (row / 127) ** 2 * largest
                # half a code, doubled by the square, and the least code for tiny weights
                assert decoded == pytest.approx(weights[i, : i + 1], abs=1.1 / 127 * largest)


def test_the_viewer_takes_heads_without_weight() -> None:
    data = viewer_data("none", AttentionMaps(("a",), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)))
    assert base64.b64decode(data["codes"]) == b"\0"
    assert data["largest"] == [[0.0]]
