"""The text of the demo: where it comes from, how it is cut, and what is refused."""

import sys
from pathlib import Path

import pytest

from regard.checks import ArgumentError
from regard_recipes.demo import demo_text
from regard_recipes.demo.demo_text import first_paragraph, join_topics, prepare, python_manual


def prepared(data: Path | None, **changes: int) -> demo_text.Material:
    return prepare(data, **{"context": 16, "excerpt": 8, **changes}, call="demo")  # type: ignore[arg-type]


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("".join(f"{i} bottles on the wall.\n\n" for i in range(40)), encoding="utf-8")
    return path


def test_topics_in_order_and_every_paragraph_once() -> None:
    topics = {"b": "two\n\nshared\n  words\n\nthree\n", "a": "one\n\nshared words\n", "c": "two\n\n\n\nthree"}
    assert join_topics(topics) == "one\n\nshared words\n\n\ntwo\n\nthree\n"


def test_the_manual_is_english_and_the_same_again() -> None:
    pytest.importorskip("pydoc_data.topics")
    text = python_manual("demo")
    assert text == python_manual("demo")
    assert len(text) > 200_000
    assert text.count(" the ") > 2000
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    assert len(set(filter(None, paragraphs))) == len(list(filter(None, paragraphs)))


def test_without_the_manual_the_message_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ArgumentError, match=r"demo: .*pydoc_data.topics.*--data FILE"):
        prepared(None)


def test_the_end_is_held_out_and_the_excerpt_starts_a_paragraph(story: Path) -> None:
    text = story.read_text(encoding="utf-8")
    found = prepared(story)
    assert found.content == text
    assert text.endswith(found.held_out)
    assert len(found.held_out) == pytest.approx(len(text) / 10, abs=1)
    learned = found.tokenizer.decode(found.train_tokens.tolist())
    assert learned + found.held_out == text
    assert found.tokenizer.decode(found.held_out_tokens.tolist()) == found.held_out
    assert found.described()["source"] == str(story)
    assert "\n\n" + found.excerpt in found.held_out
    assert len(found.excerpt) == 8
    assert found.tokenizer.decode(found.excerpt_tokens.tolist()) == found.excerpt


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ab\n\n  cdef", "cde"), ("ab\n\ncd", "ab\n"), ("abcdef", "abc"), ("ab\n\n\n\n", "ab\n"), ("ab", "ab")],
)
def test_first_paragraph(text: str, expected: str) -> None:
    assert first_paragraph(text, 3) == expected


def test_a_long_text_is_cut_and_says_so(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_text, "LONGEST", 500)
    monkeypatch.setattr(demo_text, "MOST_HELD_OUT", 20)
    found = prepared(story)
    assert found.content == story.read_text(encoding="utf-8")[:500]
    assert len(found.held_out) == 20
    assert "the first 500 of 990 characters" in found.source


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"), (b" \n\n ", "empty"), (b"caf\xe9 " * 500, "not UTF-8"), (None, "does not exist"),
        (b"too short a text", "16 characters; .* give a text of 160 or more"),
    ],
)  # fmt: skip
def test_texts_that_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=f"demo: .*{message}") as caught:
        prepared(path)
    assert "\n" not in str(caught.value)
