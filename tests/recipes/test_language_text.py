"""The text of recipes and of the demo: where it comes from, how it is cut, and what is refused."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import refuses

from regard_recipes.demo.demo_train import first_paragraph, without_last_word
from regard_recipes.lib import language_text
from regard_recipes.lib.language_text import join_topics, python_manual, read_text

characters: Any = partial(read_text, tokenizer="char", call="demo")


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
    refuses("demo: .*pydoc_data.topics.*--data FILE", characters, None, context=16)


def test_a_text_is_split_and_encoded(tmp_path: Path) -> None:
    content = "".join(f"line {i:4} of a text\n" for i in range(5000))
    file = tmp_path / "text.txt"
    file.write_text(content, encoding="utf-8")
    read = partial(read_text, file, "byte", measured=100, call="test")
    text = read(context=8)
    assert "".join(text.words(text.held_out_tokens)) == content[-10_000:] == content[-len(content) // 10 :]
    whole = language_text.windows(text.held_out_tokens, 8)
    assert whole[:3].tolist() == text.held_out_tokens[:24].reshape(3, 8).tolist()
    assert len(whole) == 1250
    assert text.vocabulary == len(text.tokenizer) == 258
    assert len(text.choice_tokens) == 0
    text = read(context=16, choice=32)
    assert len(text.choice_tokens) == 32
    assert "".join(text.words(torch.cat((text.choice_tokens, text.held_out_tokens)))) == content[-10_000:]
    assert len(read(context=16, choice=10**6).choice_tokens) == 10_000 // 3
    for context, choice in ((20_000, 0), (33, 32)):
        refuses(f"each part must have at least a context of {context}", read, context=context, choice=choice)
    refuses("does not exist", read_text, tmp_path / "none", "byte", context=16, measured=64, call="test")


def test_a_long_text_is_cut_and_says_so(story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_text, "LEAST", 20)
    found = characters(story, context=16, longest=500)
    assert found.content == story.read_text(encoding="utf-8")[:500]
    assert len(found.held_out) == 20
    assert found.tokenizer.decode(found.train_tokens.tolist()) + found.held_out == found.content
    assert found.tokenizer.decode(found.held_out_tokens.tolist()) == found.held_out
    assert found.described["source"] == f"{story}, the first 500 of 990 characters"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("ab\n\n  cdef", "cde"), ("ab\n\ncd", "ab\n"), ("abcdef", "abc"), ("ab\n\n\n\n", "ab\n"), ("ab", "ab")],
)
def test_first_paragraph(text: str, expected: str) -> None:
    assert text[first_paragraph(text, 3)] == expected


def test_prompts_end_with_a_word() -> None:
    shortened = [without_last_word(text) for text in ("on day 3 th", "a longword", "word")]
    assert shortened == ["on day 3", "a longword", "word"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"), (b" \n\n ", "empty"), (b"caf\xe9 " * 500, "not UTF-8"), (None, "does not exist"),
        (b"too short a text", "text.txt has 16 characters, .* give about 160 tokens or more"),
    ],
)  # fmt: skip
def test_texts_that_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    refuses(f"demo: .*{message}", characters, path, context=16)
