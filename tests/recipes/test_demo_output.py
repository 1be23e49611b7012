"""The folder of the demo: which may be written, what is removed, and the parts of the results."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from mistakes import refuses

from regard_recipes.demo import demo_output
from regard_recipes.demo.demo_output import begin, check_out, folder_name, table


def marked(folder: Path, **more: object) -> Path:
    """An earlier demo's folder."""
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"made_by": "regard demo", **more}))
    return folder


def test_folders_that_may_be_written(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "new", tmp_path / "far" / "away", tmp_path / "empty", marked(tmp_path / "earlier")):
        check_out(out, "demo")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "empty"]


@pytest.mark.parametrize("content", [None, "not json", "[1]", '{"made_by": "someone else"}'])
def test_what_is_not_a_demo_is_left_alone(tmp_path: Path, content: str | None) -> None:
    out, file = tmp_path / "mine", tmp_path / "mine" / "thesis.txt"
    out.mkdir()
    file.write_text("years of work")
    if content is not None:
        (out / "results.json").write_text(content)
    refuses("demo: --out .* is not empty .*nothing was deleted", check_out, out, "demo")
    refuses("demo: --out .* is a file", check_out, file, "demo")
    refuses("demo: --out .* cannot be written", check_out, file / "below", "demo")
    assert file.read_text() == "years of work"


def test_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 5 * 2**20))
    refuses("demo: the disk of --out .* has 5 MiB free; 64 are needed", check_out, tmp_path / "out", "demo")


def test_begin_removes_the_earlier_demo_and_nothing_else(tmp_path: Path) -> None:
    out, elsewhere = marked(tmp_path / "out", finished=True), tmp_path / "elsewhere"
    for folder in (elsewhere, out / "figures"):
        folder.mkdir()
    (out / "runs").symlink_to(elsewhere)
    for path in (elsewhere / "precious", out / "figures" / "old.png", out / "report.html", out / "table.md"):
        path.write_text("old")
    (out / "notes.md").write_text("mine")
    begin(out, "line\r\nline\n", "demo")
    left = sorted(str(p.relative_to(out)) for p in out.rglob("*"))
    assert left == ["figures", "notes.md", "results.json", "text.txt"]
    assert (out / "text.txt").read_bytes() == b"line\r\nline\n"
    assert json.loads((out / "results.json").read_text())["finished"] is False
    assert (elsewhere / "precious").exists()  # a link is not followed
    check_out(out, "demo")


def test_a_folder_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    refuses("demo: cannot write to --out .*: Permission denied", begin, tmp_path / "out", "text", "demo")


def test_folder_names() -> None:
    assert folder_name(0, "softmax") == "1-softmax"
    assert folder_name(3, "triweight*anchored(margin=1.0)") == "4-triweight-anchored-margin-1-0"
    assert folder_name(1, "../../etc") == "2-etc"
    assert len(folder_name(9, "x" * 500)) < 80


def test_the_table_of_a_model_that_stopped() -> None:
    base = {"name": "5-gram", "bits_per_char": 1.9, "train_seconds": 0.25, "tokens_per_second": 1e6}
    stopped = {"spec": "softmax", "run": "runs/1-softmax", "failure": "disk full"}
    result = {"settings": {"seed": "7"}, "text": {}, "installation": {}, "visible_keys": 64.5, "seconds": 1.0,
              "baseline": base, "recall": [], "models": [stopped]}  # fmt: skip
    found = table(result)
    assert found.rows == (("5-gram", "1.900", "–", "0.2 s", "1,000,000", "–", "–"), ("softmax", "stopped", *"–––––"))
    assert "one seed (7)" in found.note
    assert demo_output.page(result, {}).sections[0].failure == "Training stopped: disk full"
