"""Documents of a data set that the package `datasets` reads: files on this machine, or a name on the Hugging Face Hub.

A data set is named `datasets:NAME`, where NAME is a file (JSON, JSON lines, Parquet, CSV or text, perhaps compressed),
a pattern such as `data/*.jsonl`, a folder of such files or of `save_to_disk`, or else a name on the Hub. A line of a
text file is a document. Documents without any text are left out.

Of a stream, the first documents are held out: those with at least four characters per token of evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import ArgumentError, require
from ..errors import one_error
from .stream import Documents
from .text import Source

if TYPE_CHECKING:
    from ..config import DataOptions, TrainConfig

PREFIX = "datasets:"
_KINDS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"), ".parquet": "parquet", ".csv": "csv",
    **dict.fromkeys((".txt", ".text"), "text"),
}  # fmt: skip


def is_dataset(data: Path | None) -> bool:
    """Return whether `--data` names a data set."""
    return str(data).startswith(PREFIX)


def open_documents(options: TrainConfig, *, call: str) -> Source:
    """Measure the documents of a data set.

    Raises:
        ArgumentError: the package `datasets` is not installed, the data cannot be read, or they hold no text.
    """
    rows = _load(options, call)
    column = _column(rows, options, call)
    name, local = _name(options)
    path = Path(f"{PREFIX}{Path(name).resolve()}") if local else Path(f"{PREFIX}{name}")
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


def _load(options: DataOptions, call: str) -> Any:
    """Return the `Dataset` of some options, or with `stream` the `IterableDataset`."""
    if find_spec("datasets") is None:
        needs = f"--data {options.data} needs the package datasets"
        raise ArgumentError(f"{call}: {needs}, which is not installed; pip install 'regard[data]'.")
    import datasets

    name, local = _name(options)
    split, stream = options.split or "train", options.stream
    kind = next((_KINDS[suffix] for suffix in Path(name).suffixes if suffix in _KINDS), None)
    absent = f"{name} does not exist; give a file, a folder or a name on the Hugging Face Hub"
    require(local or (kind is None and not name.startswith((".", "/", "~"))), call, f"--data {options.data}: {absent}.")
    with one_error(f"{call}: cannot load --data {options.data}, split {split}"):
        if local and any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json")):
            found: Any = datasets.load_from_disk(name)
            rows = found[split] if isinstance(found, dict) else found
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


def _name(options: DataOptions) -> tuple[str, bool]:
    """Return the name without its prefix, and whether it is on this machine."""
    name = str(options.data).removeprefix(PREFIX)
    path = Path(name).expanduser()
    local = path.exists() or any(mark in name for mark in "*?[")
    return (str(path) if local else name), local
