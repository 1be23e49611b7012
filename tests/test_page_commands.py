"""Commands of `regard` in the README and on the pages run, one after the other, on a small text with small sizes."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import regard
from pages import commands

__all__ = ["regard"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
RUN = {"train", "eval", "generate", "list", "doctor"}
"""Commands that are run; tests/recipes runs `reproduce` and `demo`."""
ELSEWHERE = {"docs/hub-and-evaluation.md": "tests/peers/test_lm_eval.py", "docs/several-devices.md": "torchrun"}
"""Pages whose commands other tests run."""
SMALL = {
    "--layers": "4", "--width": "16", "--heads": "2", "--context": "16", "--steps": "2", "--batch": "2",
    "--eval-tokens": "64", "--eval-every": "2", "--save-every": "2",
}  # fmt: skip


def pages() -> list[str]:
    """Return the pages, relative to the repository, with commands to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = [page.relative_to(ROOT).as_posix() for page in found if any(words[0] in RUN for words in commands(page))]
    return [name for name in names if name not in ELSEWHERE]


def small(words: list[str]) -> list[str]:
    """Return a command that trains with small sizes in place of those it names."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in SMALL or word == "--stop-at":
            next(rest)
        else:
            kept.append(word)
    left_out = ("--context", "--eval-tokens") if "--task" in words else ()
    sizes = [part for option in SMALL.items() if option[0] not in left_out for part in option]
    return [*kept, *sizes, "--device", "cpu"]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what the commands name: a text, a folder, data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    lines = [f"The line {i} says {i * i % 97} and no more, Once \n" for i in range(300)]
    for name in ("FILE", "FILE_OR_FOLDER", "my-texts/one.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps({"story": line}) + "\n" for line in lines))
    return tmp_path


@pytest.mark.parametrize("page", pages())
def test_the_commands_of_a_page_run(page: str, texts: Path, regard: Callable) -> None:
    for words in commands(ROOT / page):
        if words[0] not in RUN or "--help" in words:
            continue
        if any(word.startswith(("datasets:Salesforce", "datasets:shards")) for word in words):
            continue  # from the Hub; and a pattern of files, which tests/training/test_train_datasets.py reads
        if any(word.startswith("datasets:") for word in words):
            pytest.importorskip("datasets", reason="needs the extra data")
        done = regard(*(small(words) if words[0] == "train" else words))
        assert done.code == 0, f"regard {shlex.join(words)}: {done.err}"
