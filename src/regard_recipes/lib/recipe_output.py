"""What a recipe leaves behind: a folder that the next run of the same recipe may replace.

NAME.json    every number behind tables and figures, with versions, hardware, date, command and config; it also marks
             the folder
NAME.md      the tables as Markdown
NAME-*.png   figures
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError
from regard.doctor import report as installation
from regard.recipes import Findings

MADE_BY = "regard reproduce"


def check_out(out: Path, call: str) -> None:
    """May a recipe write to `out`? Nothing is changed.

    Raises:
        ArgumentError: it is a file, holds what no recipe wrote, or cannot be written.
    """
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{call}: --out {out} is a file; give a folder.")
    home = out.absolute()
    while not home.exists():
        home = home.parent
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise ArgumentError(f"{call}: --out {out} cannot be written; choose another folder.")
    if out.is_dir() and any(out.iterdir()) and not any(_is_result(path) for path in out.glob("*.json*")):
        raise ArgumentError(
            f"{call}: --out {out} is not empty and holds no result of `{MADE_BY}`; choose another folder (nothing "
            f"was deleted)."
        )


def _is_result(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text.split("\n", 1)[0] if path.suffix == ".jsonl" else text)
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("made_by") == MADE_BY


def write(out: Path, name: str, config: Any, findings: Findings, argv: list[str], seconds: float) -> None:
    """Figures, tables, and last the JSON. Other files in the folder stay.

    Raises:
        ArgumentError: the disk refused.
    """
    record = {
        "made_by": MADE_BY,
        "recipe": name,
        "command": shlex.join(["regard", "reproduce", name, *argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "config": {field.name: _plain(getattr(config, field.name)) for field in fields(config)},
        "installation": {**installation(), "hardware": hardware()},
        **findings.data,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, picture in findings.figures.items():
            (out / file).write_bytes(picture)
        (out / f"{name}.md").write_text(_markdown(name, record["command"], findings), encoding="utf-8")
        (out / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"reproduce: cannot write to --out {out}: {error.strerror or error}.") from None


def hardware() -> dict[str, str]:
    """The processor's name and how many of its cores there are."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass  # not Linux
    return {"processor": model, "cores": str(os.cpu_count()), "threads": os.environ.get("OMP_NUM_THREADS", "not set")}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def _markdown(name: str, command: str, findings: Findings) -> str:
    parts = [f"# {name}", f"Made by `{command}`.", *findings.notes]
    for title, table in findings.tables.items():
        parts += [f"## {title}", table.markdown().strip()]
    return "\n\n".join(parts) + "\n"
