"""Reading text: the folder rule, the split, and files that are no text."""

from pathlib import Path

import pytest
from mistakes import refuses

from regard.checks import ArgumentError
from regard.training import load_text, split_text


def test_a_folder_is_read_in_sorted_order_with_newlines_between(tmp_path: Path) -> None:
    for name, content in {
        "b.md": b"bee",
        "a.txt": b"ay\n",
        "sub/c.py": b"sea",
        "sub.txt": b"under",
        "picture.png": b"\xff\xd8",
        ".hidden.txt": b"hidden",
        ".git/d.txt": b"hidden too",
        "run/run.lock": b"",
        "run/config.json": b"what a run wrote",
        "empty.txt": b"",
        "Z.TXT": b"zed",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    text = load_text(tmp_path)
    assert text.content == "zed\nay\nbee\nsea\nunder"
    assert text.files == 6  # the empty one was read too
    assert text.path == tmp_path.resolve()


def test_one_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "strange.suffix"
    path.write_bytes("\ufeffline\r\nünï\x00 🎉".encode())
    assert load_text(path).content == "line\r\nünï\x00 🎉"


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "abc.txt"
    path.write_text("abc")
    # FIPS 180-4's own example
    assert load_text(path).sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b" \n\n", "is empty"), (b"fine until \xff\xfe", "not UTF-8 (byte 0xff at offset 11)")],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match="bad") as caught:
        load_text(path)
    assert message in str(caught.value)


def test_paths_that_hold_no_text(tmp_path: Path) -> None:
    refuses("does not exist", load_text, tmp_path / "nowhere.txt")
    (tmp_path / "x.png").write_bytes(b"")
    refuses("holds no text files", load_text, tmp_path)


def test_the_split_is_by_position_in_characters() -> None:
    assert split_text("éüöäßabcde", 0.1) == ("éüöäßabcd", "e")
    assert split_text("abcdefgh", 0.5) == ("abcd", "efgh")
    refuses("validation", split_text, "abcdefgh", 2.0)
