"""Complete checkpoints: what `Trainer` wrote counts only once a list of its files lies beside it.

`COMPLETE.json` holds the size and SHA-256 of every file and is written last, under another name, flushed to
the disk and renamed. A crash, a full disk or a kill at any moment therefore leaves either a checkpoint
that verifies or one that is recognised as incomplete and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from .errors import TrainingStopped

MANIFEST = "COMPLETE.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """All checkpoint folders of a run, complete or not, oldest first."""
    folders = [path for path in run.glob("checkpoint-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(folders, key=step_of)


def seal(folder: Path) -> None:
    """Flush every file of a checkpoint to the disk and mark it complete.

    Raises:
        OSError: the disk refused.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    listed = {str(path.relative_to(folder)): _fingerprint(path, flush=True) for path in files}
    write_atomically(folder / MANIFEST, json.dumps({"step": step_of(folder), "files": listed}, indent=1))


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used, or None if it is complete and unchanged."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, (size, digest) in listed.items():
            if (folder / name).stat().st_size != size or _fingerprint(folder / name) != [size, digest]:
                return f"{name} differs from what was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None


def last_complete(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and one line for each newer one that does not."""
    skipped: list[str] = []
    for folder in reversed(checkpoints(run)):
        reason = fault(folder)
        if reason is None:
            return folder, skipped
        skipped.append(f"skipping {folder.name}: {reason}")
    return None, skipped


def last_good(run: Path) -> str:
    """Which checkpoint is the last good one and how to go on from it, as the end of a message."""
    folder, _ = last_complete(run)
    if folder is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {folder}; continue with: regard train --resume --out {run}"


@contextmanager
def writing(path: Path, run: Path) -> Iterator[None]:
    """Turn whatever a refused write raises into one clear error.

    Raises:
        TrainingStopped: naming `path`, the reason, and the last good checkpoint of `run`.
    """
    try:
        yield
    except TrainingStopped:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise TrainingStopped(f"cannot write {path}: {reason}; {last_good(run)}") from error


def remove_after(run: Path, step: int) -> None:
    """Delete the checkpoints of later steps (they are incomplete, and would be written again)."""
    for folder in checkpoints(run):
        if step_of(folder) > step:
            shutil.rmtree(folder)


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints. Call after the newest was sealed."""
    for folder in checkpoints(run)[:-keep]:
        shutil.rmtree(folder)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is either the old one or the new one, never half of it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself lives in the folder
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _fingerprint(path: Path, *, flush: bool = False) -> list[int | str]:
    """[size in bytes, SHA-256]; with `flush`, after the file has reached the disk."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]
