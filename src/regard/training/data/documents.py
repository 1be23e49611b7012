"""Documents of a data set that the package `datasets` reads (docs/language-models.md), and windows of a stream of them.

Of a stream, the first documents are held out: those with at least four characters per token of evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...checks import ArgumentError, require
from ..errors import one_error
from ..storage.files import read_text
from .text import Source
from .tokenizers import encode_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..config import DataOptions, TrainConfig

PREFIX = "datasets:"
POSITION_FILE = "stream.json"
"""File of a checkpoint: the position in the stream from which the run continues."""
_KINDS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"), ".parquet": "parquet", ".csv": "csv",
    **dict.fromkeys((".txt", ".text"), "text"),
}  # fmt: skip


def is_dataset(data: Path | None) -> bool:
    """Return whether `--data` names a data set."""
    return str(data).startswith(PREFIX)


def open_documents(options: TrainConfig, *, call: str) -> Source:
    """Measure the documents of a data set; raise `ArgumentError` if they cannot be read or hold no text."""
    name = str(options.data).removeprefix(PREFIX)
    path = Path(name).expanduser()
    local = path.exists() or any(mark in name for mark in "*?[")  # on this machine
    rows = _load(options, str(path) if local else name, local, call)
    column = _column(rows, options, call)
    path = Path(f"{PREFIX}{path.resolve() if local else name}")
    documents = Documents(rows.select_columns([column]), column, f"{call}: {options.data}")
    if not options.stream:
        return Source.of(path, 0, lambda: iter(documents), documents=True, call=call)
    held_out: list[str] = []
    most, size = 4 * max(options.eval_tokens, options.context), 0
    for text in documents:
        held_out.append(text)
        size += len(text)
        if size >= most:
            break
    documents.begin = documents.rows.state_dict()
    source = Source.of(path, 0, lambda: iter(held_out), documents=True, call=call)
    return replace(source, stream=documents)


def _load(options: DataOptions, name: str, local: bool, call: str) -> Any:
    """Return the `Dataset` of some options, or with `stream` the `IterableDataset`."""
    if find_spec("datasets") is None:
        needs = f"--data {options.data} needs the package datasets"
        raise ArgumentError(f"{call}: {needs}, which is not installed; pip install 'regard[data]'.")
    import datasets

    split, stream = options.split or "train", options.stream
    kind = next((_KINDS[suffix] for suffix in Path(name).suffixes if suffix in _KINDS), None)
    absent = f"{name} does not exist; give a file, a folder or a name on the Hugging Face Hub"
    require(local or (kind is None and not name.startswith((".", "/", "~"))), call, f"--data {options.data}: {absent}.")
    with one_error(f"{call}: cannot load --data {options.data}, split {split}"):
        if local and any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            splits: Any = datasets.load_from_disk(name)
            rows = splits[split] if isinstance(splits, dict) else splits
            return rows.to_iterable_dataset() if stream else rows
        files = {"path": kind, "data_files": name} if local and not Path(name).is_dir() else {"path": name}
        return datasets.load_dataset(**files, name=options.subset, split=split, streaming=stream)


def _column(rows: Iterable[dict[str, Any]], options: DataOptions, call: str) -> str:
    """Return the column that holds the text; raise `ArgumentError` if there are no rows, or no such column."""
    with one_error(f"{call}: cannot read --data {options.data}"):
        first = next(iter(rows), None)
    require(first is not None, call, f"--data {options.data} has no rows, so there is no text to train on.")
    columns = list(first or ())
    column = options.text_column or "text"
    others = f"no column {column!r}; give one of its columns with --text-column: {', '.join(columns)}"
    require(column in columns, call, f"--data {options.data} has {others}.")
    return column


class Documents:
    """The documents in the one column of a `Dataset` or an `IterableDataset`, in order; errors begin with `where`."""

    def __init__(self, rows: Any, column: str, where: str) -> None:
        self.rows, self.column, self.where = rows, column, where
        self.begin: Any = None

    def __iter__(self) -> Iterator[str]:
        with one_error(self.where):
            for number, row in enumerate(self.rows):
                text = row[self.column]
                if text is not None and not isinstance(text, str):
                    what = f"column {self.column!r} of row {number} holds {type(text).__name__}, expected text"
                    raise ArgumentError(f"{self.where}: {what}; choose another with --text-column.")
                if text and not text.isspace():
                    yield text

    def after(self, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield documents endlessly from a reader position (default `begin`), each with the position before it."""
        state = self.begin if state is None else state
        while True:
            self.rows.load_state_dict(state)
            empty = True
            for text in self:
                yield text, state
                empty, state = False, self.rows.state_dict()
            few = "all documents are held out; give more, or smaller --eval-tokens and --context"
            require(not empty or state != self.begin, self.where, f"{few}.")
            state = self.begin


class StreamedWindows(Dataset):
    """Map-style dataset of the windows of an endless stream of documents, each followed by an end-of-text token, to be
    read in order. Arguments and items are as in `SampledWindows`, with an `IterableDataset` behind the documents.

    A position is (state before a document, tokens of that document before the window), or None for the first window.
    """

    def __init__(
        self, documents: Documents, tokenizer: PreTrainedTokenizerBase, *, context: int, steps: int, per_step: int
    ) -> None:
        self.documents, self.tokenizer, self.context = documents, tokenizer, context
        self.steps, self.per_step = steps, per_step
        self._positions: dict[int, Any] = {}  # the latest windows with which a step begins
        self._seek(0, None)

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < self._next:
            self._seek(0, None)
        while self._next < index:
            self._advance()
        window = self._advance().long()
        return {"input_ids": window, "labels": window}

    def save(self, folder: Path, step: int) -> None:
        """Write the position at which a step begins to a checkpoint."""
        window = step * self.per_step
        while self._next < window:  # other processes read the rest of the step before
            self._advance()
        (folder / POSITION_FILE).write_text(json.dumps({"window": window, "place": self._positions[window]}))

    def load(self, folder: Path) -> None:
        """Continue at the position in a checkpoint; raise `ArgumentError` if it cannot be read."""
        with one_error(f"train: cannot continue from {folder}: {POSITION_FILE}"):
            saved = json.loads(read_text(folder / POSITION_FILE))
            state, offset = saved["place"]
            self._seek(int(saved["window"]), (state, int(offset)))

    def _seek(self, window: int, position: Any) -> None:
        self._next, self._windows = window, self._read(position)
        self._positions[window] = position

    def _advance(self) -> Tensor:
        window, position = next(self._windows)
        self._next += 1
        if self._next % self.per_step == 0:
            self._positions[self._next] = position
            self._positions.pop(self._next - 4 * self.per_step, None)  # batches are read one or two ahead
        return window

    def _read(self, position: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield windows from a position on, int32 [C], each with the position after it."""
        state, skip = position or (None, 0)
        left = torch.empty(0, dtype=torch.int32)
        for text, before in self.documents.after(state):
            tokens = torch.cat(list(encode_chunks(self.tokenizer, [text], documents=True)))
            left, skip = torch.cat([left, tokens[skip:]]), 0
            while len(left) >= self.context:
                window, left = left[: self.context], left[self.context :]
                yield window, (before, len(tokens) - len(left))
