"""Rows on disk: a journal that grows as cells are measured, and the record of a finished run.

NAME.jsonl   what was run; a line for each row as it is made, and one at the end of each cell; that the run is finished
NAME.json    the record: what was run, claims with verdicts, and all rows
"""

import json
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from io import RawIOBase
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError, require
from regard.doctor import report as installation
from regard.training.errors import expect, one_error, one_line
from regard.training.fields import from_mapping, to_mapping
from regard.training.storage.checkpoints import write_atomically
from regard.training.storage.files import LOCK

from .recipe import Cell, Recipe, Results, frame_of

MADE_BY = "regard reproduce"
Unit = tuple[Cell, int]
"""A cell and a seed."""
FREE = ("out", "workers", "quick", "file")
"""Options in which a continued run may differ; of a file, what it says is compared."""
GROWING = ("seeds", "close_seeds", "models", "rates", "tasks")
"""Options that a continued run may have more of: what is measured for one of them does not depend on the others."""


@dataclass
class Journal:
    """The file NAME.jsonl of a run: its first line and the rows of complete cells, each with `cell`, `seed`, `row`
    (from 0), `measured`, `of` (number of rows of this cell and seed) and `seconds` (of this cell and seed)."""

    path: Path
    header: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, made: Recipe, argv: Sequence[str]) -> "Journal":
        """Return the journal of a new run, or that in the folder: to continue, or with fewer of what is `GROWING`."""
        out = made.out or Path(f"{made.name}-out")
        check_out(out, made.call())
        path = out / f"{made.name}.jsonl"
        header = {
            "made_by": MADE_BY, "recipe": made.name, "command": shlex.join(["regard", "reproduce", made.name, *argv]),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "config": plain(to_mapping(made)),
            "installation": installation(),
        }  # fmt: skip
        before, lines, finished = read_journal(path) if path.exists() else (None, [], False)
        if before is None:
            return cls(path, header)
        defaults = {name: value for name, value in plain(to_mapping(type(made)())).items() if name not in GROWING}
        old, new = {**defaults, **before["config"]}, header["config"]  # an earlier version may lack options
        differs = [name for name in new if name not in FREE and old.get(name) != new[name]]
        if differs and all(name in GROWING and _grows(old.get(name), new[name]) for name in differs):
            return cls(path, header, lines)
        if finished:
            return cls(path, header)
        if differs:
            was = ", ".join(f"--{name.replace('_', '-')} {old.get(name)}" for name in differs)
            raise ArgumentError(
                f"{made.call()}: {path} is an unfinished run with other options ({was}); give the same options to "
                f"continue it, delete it, or choose another folder with --out."
            )
        return cls(path, before, lines)

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Write the first line of a new journal, or that of an old one with the rows of its complete cells alone. The
        file is replaced: a process that outlived an earlier run writes to the old one."""
        self.header["facts"] = plain(facts)
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in (self.header, *self.lines)))

    def finish(self, made: Recipe) -> Results:
        """Write the last line and return all rows in the order of seeds and cells, whichever was measured first."""
        _, self.lines, _ = read_journal(self.path)
        left = len(unfinished_units(made, self))
        require(left == 0, made.call(), f"{self.path} lacks the rows of {left} cells; give the command once more.")
        with writing(self.path), self.path.open("ab", buffering=0) as file:
            _write_line(file, {"finished": datetime.now(timezone.utc).isoformat(timespec="seconds")})
        order = {_key(plain(cell), 0): number for number, cell in enumerate(made.cells())}
        self.lines.sort(key=lambda line: (line["seed"], order[_key(line["cell"], 0)], line["row"]))
        return self.results()

    def results(self) -> Results:
        """Return the rows so far."""
        rows = [{**line["cell"], "seed": line["seed"], **line["measured"]} for line in self.lines]
        seconds = sum(line["seconds"] for line in self.lines if line["row"] == 0)
        return Results(frame_of(rows), self.header["facts"], {**self.header, "seconds": round(seconds, 1)})


def measure_into(path: Path, made: Recipe, unit: Unit) -> None:
    """Measure a cell with a seed and append each row to a journal as it is made; then a line that the cell is complete,
    without which its rows do not count."""
    cell, seed = unit
    common, count, begun = {"cell": plain(cell), "seed": seed}, 0, time.perf_counter()
    with writing(path):
        file = path.open("ab", buffering=0)
    with file:
        for count, row in enumerate(made.measure(cell, seed), start=1):
            with writing(path):
                _write_line(file, {**common, "row": count - 1, "measured": plain(row)})
        with writing(path):
            _write_line(file, {**common, "of": count, "seconds": round(time.perf_counter() - begun, 3)})


def _write_line(file: RawIOBase, line: Mapping[str, Any]) -> None:
    """Append a line in a single write, between which other processes may append theirs."""
    data = (json.dumps(line) + "\n").encode()
    if file.write(data) != len(data):
        raise OSError("no space left")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the errors of the disk into one that names what cannot be written."""
    try:
        yield
    except OSError as error:
        raise ArgumentError(f"reproduce: cannot write {path}: {error.strerror or error}.") from None


def read_journal(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]], bool]:
    """Return the header (None if there is none), the rows of complete cells, and whether the run was finished."""
    header, finished = None, False
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    ends: dict[str, dict[str, Any]] = {}  # of complete cells; rows that a continued run took over have them too
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the run was killed while it wrote this line
        if not isinstance(line, dict):
            continue
        if "made_by" in line:
            header = line
        elif "finished" in line:
            finished = True
        elif line.keys() >= {"cell", "seed"}:
            key = _key(line["cell"], line["seed"])
            if line.keys() >= {"row", "measured"}:
                rows[key, line["row"]] = line
            if line.keys() >= {"of", "seconds"}:
                ends[key] = {"of": line["of"], "seconds": line["seconds"]}
    cells = [([rows.get((key, number)) for number in range(end["of"])], end) for key, end in ends.items()]
    return header, [{**line, **end} for lines, end in cells if all(lines) for line in lines if line], finished


def unfinished_units(made: Recipe, journal: Journal) -> list[Unit]:
    """Return the cells that are still to be measured, all cells of one seed before those of the next."""
    done = {_key(line["cell"], line["seed"]) for line in journal.lines}
    units = [(cell, made.seed + offset) for cell in made.cells() for offset in range(made.seeds_of(cell))]
    units.sort(key=lambda unit: unit[1])
    return [(cell, seed) for cell, seed in units if _key(plain(cell), seed) not in done]


def load(kind: type[Recipe], folder: Path) -> tuple[Recipe, Results]:
    """Return a recipe and its rows from the record or else the journal in a folder."""
    record, journal = folder / f"{kind.name}.json", folder / f"{kind.name}.jsonl"
    source = record if record.exists() else journal
    require(source.exists(), kind.call(), f"{folder} holds neither {record.name} nor {journal.name}.")
    with one_error(f"{kind.call()}: cannot read {source}"):
        if source is record:
            stored = json.loads(record.read_text(encoding="utf-8"))
            expect({"rows", "config"} <= {*stored}, "it has no rows; it was written by an older version")
            rows = [dict(zip(stored["columns"], row, strict=True)) for row in stored["rows"]]
            about = {name: stored[name] for name in stored if name not in ("rows", "columns", "claims")}
            results = Results(frame_of(rows), stored["facts"], about)
        else:
            header, lines, _ = read_journal(journal)
            first = header or {}
            expect({"facts", "config"} <= {*first}, "it has no first line with facts and a configuration")
            results = Journal(journal, first, lines).results()
    return from_mapping(kind(), results.record["config"], call=kind.call(), source=str(source)), results


@contextmanager
def showing(name: str, folder: Path) -> Iterator[None]:
    """Turn the errors that unknown columns and values lead to into one that names the folder."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        where = f"reproduce: {name}: cannot show the rows in {folder}, which may be of another version"
        raise ArgumentError(f"{where}: {one_line(error)}.") from None


def plain(value: Any) -> Any:
    """Return data for JSON: None for numbers that are not finite, text for paths."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _grows(old: Any, new: Any) -> bool:
    """Return whether an option is a larger number (any if there was none), or has all former names and more."""
    if isinstance(new, int):
        return old is None or bool(new > old)
    return bool(old) and set(old) < set(new)


def _key(cell: Cell, seed: int) -> str:
    return json.dumps([cell, seed], sort_keys=True)


def check_out(out: Path, call: str, made_by: str = MADE_BY) -> Path:
    """Check that a command may write to `out`, without changing anything; return it, or what exists above."""
    require(out.is_dir() or not out.exists(), call, f"--out {out} is a file; give a folder.")
    home = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    usable = home.is_dir() and os.access(home, os.W_OK | os.X_OK)
    require(usable, call, f"--out {out} cannot be written; choose another folder.")
    empty = not out.is_dir() or all(path.name == LOCK for path in out.iterdir())
    holds = f"--out {out} is not empty and holds no result of `{made_by}`"
    ours = empty or any(_is_result(path, made_by) for path in out.glob("*.json*"))
    require(ours, call, f"{holds}; choose another folder (nothing was deleted).")
    return home


def _is_result(path: Path, made_by: str) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        header = json.loads(text.split("\n", 1)[0] if path.suffix == ".jsonl" else text)
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("made_by") == made_by
