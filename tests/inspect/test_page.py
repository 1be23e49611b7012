"""The page: complete, self-contained, and safe against what is in the text; and tables in every print."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from seen import HOSTILE, Elements

from regard.inspect.measures import AttentionMaps
from regard.inspect.report import Page, Part, Sample, Section, render, viewer_data
from regard.inspect.tables import Table

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
        "parts": [
            Part(title=text, text=text),
            Part(
                title=text,
                table=Table(header=(text, "bits"), rows=((text, "1.25"),), note=text),
                picture=PNG,
                caption=text,
            ),
        ],
        "sections": [section, Section(title="broken", failure=text)],
        "settings": {text: {text: text}},
    }
    return Page(**{**values, **changes})  # type: ignore[arg-type]


def test_everything_that_was_given_is_there_and_nothing_is_loaded_from_elsewhere() -> None:
    html = render(page("some words"))
    found = Elements(html)
    text = found.text
    assert text.count("some words") >= 12
    assert "1.25" in text
    assert "broken" in text
    assert found.every("src") == ["data:image/png;base64," + base64.b64encode(PNG).decode()] * 2
    assert not re.search(r"https?://|@import|url\(", html)
    assert not {"link", "iframe", "object", "embed", "base"} & set(found.tags)
    assert len(found.every("href")) == 4
    assert set(found.every("href")) <= {f"#{name}" for name in found.every("id")}
    without = Elements(render(page(sections=[Section(title="only words")], parts=[])))
    assert not {"canvas", "script", "img"} & set(without.tags)


def test_text_stays_text() -> None:
    plain, hostile = Elements(render(page())), Elements(render(page(HOSTILE)))
    # labels make as many elements as before; the script makes more only when it runs
    assert [tag for tag in plain.tags if tag != "span"] == [tag for tag in hostile.tags if tag != "span"]
    assert HOSTILE in hostile.text
    assert json.loads(hostile.data)[0]["labels"] == list(HOSTILE)


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
    data = viewer_data("none", AttentionMaps(("a",), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)))
    assert (base64.b64decode(data["codes"]), data["largest"]) == (b"\0", [[0.0]])


# One table in its prints ----------------------------------------------------------------------------------------------


TABLE = Table(header=("model", "bits"), rows=(("a|b", "1.5"), ("[red]c", "2")), note="A [b] note.")


def test_markdown() -> None:
    assert TABLE.markdown() == "\n".join(
        ["| model | bits |", "|---|---:|", "| a\\|b | 1.5 |", "| [red]c | 2 |", "", "A [b] note.", ""]
    )


def test_markdown_without_a_note_keeps_rows_to_one_line() -> None:
    assert Table(header=("m",), rows=(("a\nb",),)).markdown() == "| m |\n|---|\n| a b |\n"


def test_rich_prints_every_cell_as_it_is() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(TABLE.rich("Title [a]"))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("Title [a]", "model", "bits", "a|b", "1.5", "[red]c", "A [b] note."):
        assert text in printed


def test_ragged_rows_are_refused() -> None:
    with pytest.raises(AssertionError):
        Table(header=("a", "b"), rows=(("1",),))
