"""Run folders that someone changed: sealing them again, as who means harm would."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

GENERATE = ("--prompt", "line ", "--max-new-tokens", 12, "--temperature", 0, "--device", "cpu")
COMMANDS = {
    "generate": lambda run: ("generate", run, *GENERATE),
    "eval": lambda run: ("eval", run, "--device", "cpu"),
    "resume": lambda run: ("train", "--resume", "--out", run, "--steps", 6),
}
"""What reads a run folder: from the folder to the words of the command line."""


def answer(result: Any) -> list[str]:
    """What a command says, without the lines that name a speed or a folder."""
    return [line for line in result.out.splitlines() if not line.startswith(("speed", "run folder", "Try:"))]


def some(cases: Iterable[str], *quick: str) -> list[Any]:
    """The names of cases for `parametrize`; those that are not among `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in cases]


def digest(path: Path) -> list[int | str]:
    """Size and SHA-256 of a file."""
    content = path.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def reseal(run: Path) -> None:
    """Write new seals that fit the files of a run folder as they are now."""
    for manifest in run.glob("*/COMPLETE.json"):
        files = [path for path in manifest.parent.iterdir() if path.is_file() and path != manifest]
        sealed = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**sealed, "files": {path.name: digest(path) for path in files}}))
    described = json.loads((run / "run.json").read_text())
    if "files" in described:
        described["files"] = {name: digest(run / name) for name in described["files"] if (run / name).is_file()}
        (run / "run.json").write_text(json.dumps(described))


def change_json(path: Path, change: dict[str, Any] | Callable[[Any], Any]) -> None:
    """Give fields of a JSON file other values, or change its content in place or to what `change` returns."""
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, **change} if isinstance(change, dict) else change(table) or table))
