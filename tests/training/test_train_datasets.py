"""Data sets as the text of a run: local files, packing, streams, refusals; memory does not grow with the text."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from peak import on_linux
from programs import python
from steps import At, crash, same_model

from regard.training import TrainingStopped
from regard.training.data.documents import StreamedWindows
from regard.training.data.tokenizers import byte_tokenizer
from regard.training.fields import to_mapping

needed = pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra data")
DOCUMENTS = [f"Number {i} of the documents: {'é' * (i % 7)} is {i * i}." for i in range(120)]
STREAM = {"stream": True, "tokenizer": "byte", "eval_tokens": 64}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of JSON lines, among them some without text."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    path = tmp_path / "documents.jsonl"
    rows = [{"text": text, "number": i} for i, text in enumerate(DOCUMENTS)]
    rows[50:50] = [{"text": None, "number": -1}, {"text": " \n", "number": -2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tokens(texts: list[str]) -> list[int]:
    """Each document in bytes, with the end of text."""
    tokenizer = byte_tokenizer()
    return [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]


class Seen:
    """Keeps the trainer's data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from regard.training import run

        trainer = run._trainer
        monkeypatch.setattr(run, "_trainer", lambda *given: self.keep(trainer(*given)))

    def keep(self, trainer):
        self.trained, self.held_out = trainer.train_dataset, trainer.held_out
        return trainer


@needed
def test_a_data_set_is_measured_as_its_text(run, lines, tmp_path, regard):
    """One document is the text of a file, but for the end of text that follows it."""
    out = run(tokenizer="byte", steps=1).out
    text, table = tmp_path / "one.txt", tmp_path / "one.jsonl"
    text.write_text(" ".join(DOCUMENTS))
    table.write_text(json.dumps({"words": text.read_text()}) + "\n")
    found = []
    for data in ([text], [f"datasets:{table}", "--text-column", "words"]):
        shown = regard("eval", out, "--stride", 1, "--data", *data).out
        found.append(float(shown.split("loss")[1].split()[0]))
    assert found[0] != found[1]
    assert abs(found[0] - found[1]) < 0.01
    error = regard("eval", out, "--data", f"datasets:{lines}", "--text-column", "x").err
    assert "has no column 'x'; give one of its columns with --text-column: text, number" in error


@needed
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "text", "folder", "saved"])
def test_documents_are_packed_in_order(kind, run, lines, tmp_path, monkeypatch):
    import datasets

    data = datasets.Dataset.from_dict({"text": DOCUMENTS})
    path = lines if kind == "jsonl" else tmp_path / f"data.{kind}"
    if kind == "parquet":
        data.to_parquet(path)
    elif kind == "csv":
        data.to_csv(path)
    elif kind == "text":
        path = tmp_path / "data.txt"
        path.write_text("\n".join(DOCUMENTS))
    elif kind == "folder":
        path.mkdir()
        lines.rename(path / "train.jsonl")
    elif kind == "saved":
        data.save_to_disk(path)
    seen = Seen(monkeypatch)
    run(data=Path(f"datasets:{path}"), tokenizer="byte", eval_tokens=10**6, steps=1)
    characters = sum(map(len, DOCUMENTS))
    learned, so_far = [], 0
    for text in DOCUMENTS:
        if so_far < characters - round(characters * 0.1):
            learned.append(text)
        so_far += len(text)
    assert seen.trained.tokens.tolist() == tokens(learned)
    assert seen.held_out.tolist() == tokens(DOCUMENTS[len(learned) :])


@needed
def test_a_run_on_documents_resumes_and_is_evaluated(run, refused, lines, out, regard):
    given = {"data": Path(f"datasets:{lines}"), "text_column": "text"}
    summary = run(steps=3, **given)
    assert run(steps=4, resume=True, **given).step == 4
    assert summary.loss > 0
    assert "nats/token" in regard("eval", out, "--device", "cpu").out
    lines.write_text(lines.read_text() + json.dumps({"text": "more", "number": 7}) + "\n")
    refused("is not the one the run", steps=5, resume=True, **given)


@needed
def test_a_stream_is_read_in_order_and_again(run: Callable, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    run(data=Path(f"datasets:{lines}"), steps=1, **STREAM)
    assert isinstance(seen.trained, StreamedWindows)
    held, size = 0, 0
    while size < 4 * 64:
        size, held = size + len(DOCUMENTS[held]), held + 1
    assert seen.held_out.tolist() == tokens(DOCUMENTS[:held])[:64]
    rest = tokens(DOCUMENTS[held:])
    want = (rest * 3)[: len(rest) * 2 // 16 * 16]
    seen.trained.steps = 10**6
    windows = [seen.trained[i]["input_ids"] for i in range(len(want) // 16)]
    assert torch.cat(windows).tolist() == want
    assert torch.equal(seen.trained[5]["input_ids"], windows[5])  # back to an earlier one


@needed
@pytest.mark.slow
@pytest.mark.parametrize("crash_at", [4, 6, 7])
def test_a_stream_continues_at_its_place(run, refused, lines, tmp_path, out, monkeypatch, crash_at):
    given = {"data": Path(f"datasets:{lines}"), "steps": 8, "save_every": 2, "accumulate": 2, "context": 64, **STREAM}
    run(out=tmp_path / "straight", **given)
    refused("crash", At(crash_at, crash), error=SystemError, **given)
    read = []
    advance = StreamedWindows._advance
    monkeypatch.setattr(StreamedWindows, "_advance", lambda self: read.append(self._next) or advance(self))
    run(resume=True, **given)
    first = 4 * (crash_at // 2 * 2)
    assert read == list(range(first, 8 * 4))  # nothing before the place was read again
    same_model(tmp_path / "straight", out)
    places = [(path / "checkpoint-8" / "stream.json").read_text() for path in (tmp_path / "straight", out)]
    assert places[0] == places[1]


@needed
@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "has no rows|cannot load"),
        ([{"body": "x"}], {}, r"no column 'text'; give one of its columns with --text-column: body"),
        ([{"text": 3}], {}, "column 'text' of row 0 holds int, expected text; choose another"),
        ([{"text": None}, {"text": " "}], {}, "is empty; give a file, a folder or a dataset that holds text"),
        ([{"text": "x"}], {"split": "test"}, "cannot load --data .*, split test: .*test"),
        ([{"text": "x"}], {**STREAM}, "the held-out part of .* has 2 tokens, less than one --context 16"),
        ([{"text": "x" * 300}], {**STREAM}, "all documents are held out"),
        ([{"text": "x"}], {"stream": True}, "--tokenizer char is learned .* choose --tokenizer byte or gpt2"),
    ],
)
def test_data_without_text(rows: list, changes: dict, message: str, refused: Callable, lines: Path, out: Path) -> None:
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused(message, data=Path(f"datasets:{lines}"), **changes)


@needed
def test_a_file_that_does_not_exist(refused: Callable, lines: Path) -> None:
    refused("nowhere.jsonl does not exist; give a file, a folder or a name", data=Path("datasets:nowhere.jsonl"))
    lines.write_text('{"text": "x"}\n{"text": ')
    refused("cannot (load|read) --data datasets:", data=Path(f"datasets:{lines}"))


@needed
def test_a_stream_that_breaks_off(refused: Callable, lines: Path, out: Path) -> None:
    (lines.parent / "second.jsonl").write_text('{"text": ')
    pattern = Path(f"datasets:{lines.parent}/*.jsonl")
    message = "train: datasets:.*; the last good checkpoint is .*checkpoint-[0-9]+; continue with"
    refused(message, error=TrainingStopped, data=pattern, steps=500, save_every=20, eval_every=999, **STREAM)
    assert all((folder / "stream.json").exists() for folder in out.glob("checkpoint-*"))


def test_without_the_package(refused: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("regard.training.data.documents.find_spec", lambda name: None)
    missing = r"needs the package datasets, which is not installed; pip install 'regard\[data\]'"
    refused(missing, data=Path("datasets:x"))
    refused("--split is for data sets; give --data datasets:NAME", split="train")


PROGRAM = """
import sys, threading, time
from regard.cli import main

most = 0


def watch():  # pages of mapped files are left out: the system takes them back when memory is short
    global most
    while True:
        with open("/proc/self/status") as lines:
            most = max(most, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024)
        time.sleep(0.01)


threading.Thread(target=watch, daemon=True).start()
assert main(["train", "--config", sys.argv[1]]) == 0
print("peak", most)
"""
LINE = "the quick brown fox jumps over a lazy dog while seven wizards box"


def peak_of_a_run(tiny, data: Path | str, folder: Path, **changes) -> float:
    """Return the peak in MiB."""
    config = folder / "config.json"
    folder.mkdir()
    out = {"out": folder / "run", "steps": 2, "eval_every": 9, "validation": 1e-4, "tokenizer": "byte"}
    config.write_text(json.dumps(to_mapping(tiny(data=Path(data), **out, **changes))))
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072", "HF_HOME": str(folder / "hub")}
    return float(python("-W", "ignore", "-c", PROGRAM, config, **environment).split("peak ")[1])


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "data set", "stream"])
def test_the_peak_does_not_grow_with_the_text(tiny, tmp_path: Path, kind: str) -> None:
    """Of 48 MB, against 24 MB. (Arrow holds two blocks of 10 MB.) 24 million tokens more would take 92 MiB."""
    if kind != "text" and find_spec("datasets") is None:
        pytest.skip("needs the extra data")
    peaks = []
    for size in (24_000_000, 48_000_000):
        path = tmp_path / f"{size}.txt"
        path.write_text("".join(f"{i} {LINE}\n" for i in range(size // 75)))
        data = path if kind == "text" else f"datasets:{path}"
        peaks.append(peak_of_a_run(tiny, data, tmp_path / f"run-{size}", stream=kind == "stream"))
    assert peaks[1] < peaks[0] + 20
