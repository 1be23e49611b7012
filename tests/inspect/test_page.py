"""Figures and the page: complete, self-contained, safe against what is in the text; what must be told apart can be."""

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from seen import HOSTILE, Elements, count, pixels

from regard.inspect.figures import Curve, attention_map, line_style, loss_curves
from regard.inspect.measures import AttentionMaps
from regard.inspect.report import Page, Part, Sample, Section, render, viewer_data
from regard.inspect.tables import Table, visible

PNG = b"\x89PNG\r\n\x1a\nnot really"


def maps(labels: str = "abc") -> AttentionMaps:
    n = len(labels)
    weights = torch.rand(2, 3, n, n, generator=torch.Generator().manual_seed(0)).tril()
    weights[0, 0, -1, 0] = 0.0
    weights[1, 2, -1, 0] = -1e-9
    return AttentionMaps(tuple(labels), weights, (weights != 0).sum(-1).float())


def page(text: str = "text", **changes: object) -> Page:
    sample = Sample(prompt=text, continuation=text, how=text)
    section = Section(title=text, facts={text: text}, sample=sample, picture=PNG, caption=text, maps=maps(text))
    table = Table(header=(text, "bits"), rows=((text, "1.25"),), note=text)
    parts = [Part(title=text, text=text), Part(title=text, table=table, picture=PNG, caption=text)]
    sections = [section, Section(title="broken", failure=text)]
    given: dict[str, Any] = {"parts": parts, "sections": sections, **changes}
    return Page(title=text, introduction=text, settings={text: {text: text}}, **given)


def test_everything_that_was_given_is_there_and_nothing_is_loaded_from_elsewhere() -> None:
    html = render(page("some words"))
    found = Elements(html)
    assert found.text.count("some words") >= 12
    assert "1.25" in found.text
    assert "broken" in found.text
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


TABLE = Table(header=("model", "bits"), rows=(("a|b", "1.5"), ("[red]c", "2")), note="A [b] note.")


def test_markdown() -> None:
    lines = ["| model | bits |", "|---|---:|", "| a\\|b | 1.5 |", "| [red]c | 2 |", "", "A [b] note.", ""]
    assert TABLE.markdown() == "\n".join(lines)
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


SIGNATURE = b"\x89PNG\r\n\x1a\n"


def inner(png: bytes) -> np.ndarray:
    """The cells of the map itself: a part of the picture inside its lower left triangle."""
    image = pixels(png)
    height, width = image.shape[:2]
    return image[int(0.7 * height) : int(0.85 * height), int(0.15 * width) : int(0.3 * width)].reshape(-1, 3)


def drawn_maps(weights: torch.Tensor) -> AttentionMaps:
    n = weights.shape[-1]
    return AttentionMaps(tuple("x" * n), weights[None, None], (weights != 0).sum(-1).float()[None, None])


def curve(name: str, last: float) -> Curve:
    return Curve(name=name, steps=(1, 2, 3), bits=(6.0, 5.0, last), held_out_steps=(3,), held_out_bits=(last,))


def test_loss_curves_shows_every_curve_and_is_the_same_again() -> None:
    curves = [curve(f"m{i}", 2.0 + 0.2 * i) for i in range(4)]
    png = loss_curves(curves, baseline=2.1, baseline_name="5-gram")
    assert png == loss_curves(curves, baseline=2.1, baseline_name="5-gram")
    assert all(count(pixels(png), line_style(i)[0]) for i in range(4))


def test_a_curve_far_above_the_baseline_is_not_cut_off() -> None:
    colour = np.array([0x00, 0x72, 0xB2])
    for last in (1.9, 9.0):
        image = pixels(loss_curves([curve("m", last)], baseline=2.0, baseline_name="b"))
        _, columns = np.nonzero((image == colour).all(-1))
        # the dot of the last step, right of the legend
        assert (columns > 0.9 * image.shape[1]).sum() > 10, last


def test_a_curve_that_begins_above_the_axes_is_cut_there() -> None:
    colour = np.array([0x00, 0x72, 0xB2])
    begun = Curve(name="m", steps=(1, 3), bits=(50.0, 4.0), held_out_steps=(1, 3), held_out_bits=(50.0, 4.0))
    image = pixels(loss_curves([begun], baseline=2.0, baseline_name="b"))
    rows, columns = np.nonzero((image == colour).all(-1))
    assert rows[columns > 0.75 * image.shape[1]].min() > 0.12 * image.shape[0]
    left = rows[columns < 0.35 * image.shape[1]]
    assert not len(left) or left.min() > 0.12 * image.shape[0]


def test_styles_differ() -> None:
    assert len({line_style(i) for i in range(24)}) == 24


def test_zero_is_white_and_small_is_not() -> None:
    n = 12
    zero = torch.eye(n)
    small = torch.where(torch.ones(n, n).tril() > 0, 1e-30, 0.0) + torch.eye(n)
    assert (inner(attention_map(drawn_maps(zero), 0, 0, title="zero")) == 255).mean() > 0.95
    assert (inner(attention_map(drawn_maps(small), 0, 0, title="small")) == 255).mean() < 0.05


def test_negative_weights_have_another_colour() -> None:
    ones = torch.ones(12, 12).tril() / 4
    blue = inner(attention_map(drawn_maps(ones), 0, 0, title="plus")).mean(0)
    orange = inner(attention_map(drawn_maps(-ones), 0, 0, title="minus")).mean(0)
    assert blue[2] > blue[0] + 30
    assert orange[0] > orange[2] + 30


@pytest.mark.parametrize("n", [1, 2, 200])
def test_sizes_and_rows_without_weight(n: int) -> None:
    assert attention_map(drawn_maps(torch.zeros(n, n)), 0, 0, title="none").startswith(SIGNATURE)


def test_labels_that_a_font_cannot_show() -> None:
    assert visible("a \n\x07b") == "a␣↵·b"
    names = AttentionMaps(("$", "\n", "\\", "^"), torch.eye(4)[None, None], torch.ones(1, 1, 4))
    assert attention_map(names, 0, 0, title="$x$ and _ and %").startswith(SIGNATURE)
    names = AttentionMaps((r"$\frac$",), torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1))  # as a formula, an error
    assert attention_map(names, 0, 0, title=r"$\frac$").startswith(SIGNATURE)
