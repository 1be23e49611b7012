"""Reading text: the folder rule, the split, files that are no text; sampling is a pure function of (seed, step)."""

import random
from pathlib import Path

import pytest
import torch
from mistakes import refuses

from regard.training import SampledWindows, load_text, split_text, window_starts


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
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"fine until \xff\xfe", "not UTF-8 (byte 0xff at offset 11)"),
        (b"cut \xc3", "byte 0xc3 at offset 4"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert message in refuses("bad", load_text, path)


def test_paths_that_hold_no_text(tmp_path: Path) -> None:
    refuses("does not exist", load_text, tmp_path / "nowhere.txt")
    (tmp_path / "x.png").write_bytes(b"")
    refuses("holds no text files", load_text, tmp_path)


def test_the_split_is_by_position_in_characters() -> None:
    assert split_text("éüöäßabcde", 0.1) == ("éüöäßabcd", "e")
    assert split_text("abcdefgh", 0.5) == ("abcd", "efgh")
    refuses("validation", split_text, "abcdefgh", 2.0)


def test_starts_depend_on_seed_and_step_alone() -> None:
    torch.manual_seed(1)
    first = window_starts(3, 7, 40, 1000)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, window_starts(3, 7, 40, 1000))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[:5], window_starts(3, 7, 5, 1000))
    assert not torch.equal(first, window_starts(3, 8, 40, 1000))
    assert not torch.equal(first, window_starts(4, 7, 40, 1000))
    # (1, 23) and (12, 3) must not be one and the same
    assert not torch.equal(window_starts(1, 23, 9, 1000), window_starts(12, 3, 9, 1000))


def test_starts_are_uniform_and_reach_both_ends() -> None:
    counts = torch.zeros(10)
    for step in range(500):
        counts += torch.bincount(window_starts(0, step, 8, 10), minlength=10)
    # 4000 draws over 10 cells: chi-squared with 9 degrees of freedom stays below 33.7 with p = 1 - 1e-4
    assert ((counts - 400) ** 2 / 400).sum() < 33.7


def test_examples_do_not_depend_on_the_order_of_reading() -> None:
    data = SampledWindows(torch.arange(100, dtype=torch.int32), context=8, steps=6, per_step=4, seed=5)
    assert len(data) == 24
    in_order = [data[i]["input_ids"] for i in range(24)]
    order = list(range(24))
    random.Random(0).shuffle(order)
    again = SampledWindows(torch.arange(100, dtype=torch.int32), context=8, steps=60, per_step=4, seed=5)
    for i in order:
        window = again[i]["input_ids"]
        assert torch.equal(window, in_order[i])
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 8))  # a stretch of the text
        assert torch.equal(again[i]["labels"], window)
        assert window.dtype == torch.int64


def test_a_text_of_one_context_has_one_window() -> None:
    data = SampledWindows(torch.arange(8), context=8, steps=1, per_step=3, seed=0)
    assert [data[i]["input_ids"].tolist() for i in range(3)] == [list(range(8))] * 3
