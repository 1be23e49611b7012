"""Checkpoints, which count as complete once a list of their files has been written.

`COMPLETE.json` (the seal) holds the size and SHA-256 of every file, and is written last. A crash, a full disk or a kill
at any moment therefore leaves a checkpoint that can be verified, or one that is skipped as incomplete. The saved model
has the same seal. It detects damage, not malice: the contents are checked when they are read (`saved_model`,
`resuming`).
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from safetensors import SafetensorError

from ..errors import TrainingStopped, expect, one_line
from .files import is_plain_name, regular_size

MANIFEST = "COMPLETE.json"
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
_MOST_MANIFEST = 1 << 24
_TOKENIZER = ("tokenizer.json",)
_OF_MODEL = (("model.safetensors", "model.safetensors.index.json"), ("config.json",), _TOKENIZER)
_OF_CHECKPOINT = (
    *_OF_MODEL,
    *((name,) for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state*.pth")),
)
"""What a seal must list: one match of each group of patterns."""
_READ_BY_TRAINER = (".bin", ".pt", ".pth", ".safetensors")


def step_of(folder: Path | None) -> int:
    """Return the step in a checkpoint folder's name, 0 without a checkpoint."""
    if folder is None:
        return 0
    match = _NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """Return all checkpoint folders of a run, complete or not, oldest first."""
    paths = (path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name))
    return sorted((path for path in paths if path.is_dir() and not path.is_symlink()), key=step_of)


def seal(folder: Path) -> None:
    """Flush every file of a checkpoint or a saved model to the disk, and mark the folder as complete."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    listed = {path.name: fingerprint(path, flush=True) for path in files}
    step = {"step": step_of(folder)} if _NAME.fullmatch(folder.name) else {}
    write_atomically(folder / MANIFEST, json.dumps({**step, "files": listed}, indent=1))


def fault(folder: Path, *, tokenizer: bool = True) -> str | None:
    """Return why a checkpoint or a sealed model, with a `tokenizer` or without, cannot be used; None if it can."""
    is_checkpoint = _NAME.fullmatch(folder.name) is not None
    needed = [one for one in (_OF_CHECKPOINT if is_checkpoint else _OF_MODEL) if tokenizer or one != _TOKENIZER]
    try:
        listed = _listed(folder, is_checkpoint)
        for patterns in needed:
            listed_one = any(fnmatchcase(name, pattern) for name in listed for pattern in patterns)
            expect(listed_one, f"{MANIFEST} does not list {patterns[0]}")
        for path in sorted(folder.iterdir()) if is_checkpoint else ():
            read = path.is_dir() or path.suffix in _READ_BY_TRAINER
            expect(not read or path.name in listed, f"{path.name} was not there when it was written")
        for name, (size, _) in listed.items():  # all sizes before any file is read
            expect(regular_size(folder / name, links=False) == size, f"{name} differs from what was written")
        for name, entry in listed.items():
            expect(fingerprint(folder / name) == entry, f"{name} differs from what was written")
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return str(error)
    return None


def _listed(folder: Path, is_checkpoint: bool) -> dict[str, list[object]]:
    """Return the size and the digest of every file that a seal lists; raise ValueError for a seal that does not fit."""
    try:
        expect(regular_size(folder / MANIFEST, links=False) <= _MOST_MANIFEST, "too large")
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = {name: [size, digest] for name, (size, digest) in manifest["files"].items()}
        step = manifest.get("step")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{MANIFEST} cannot be read") from None
    fits = not is_checkpoint or (step == step_of(folder) and not isinstance(step, bool))
    expect(fits, f"{MANIFEST} belongs to step {step!r}")
    for name in listed:
        expect(is_plain_name(name), f"{MANIFEST} lists {name!r}, which is not the name of a file in the folder")
    return listed


def last_complete(run: Path) -> tuple[Path | None, list[str]]:
    """Return the newest valid checkpoint, and one line about each newer one."""
    skipped: list[str] = []
    tokenizer = (run / "tokenizer").is_dir()  # a run on a task has none
    for folder in reversed(checkpoints(run)):
        reason = fault(folder, tokenizer=tokenizer)
        if reason is None:
            return folder, skipped
        skipped.append(f"skipping {folder.name}: {reason}")
    return None, skipped


def last_good(run: Path) -> str:
    """Return the end of a message: which checkpoint is the last good one, and how to continue from it."""
    folder, _ = last_complete(run)
    if folder is None:
        return "there is no checkpoint yet"
    return f"the last good checkpoint is {folder}; continue with: regard train --resume --out {run}"


@contextmanager
def writing(path: Path, run: Path) -> Iterator[None]:
    """Turn the errors of a failed write into TrainingStopped, with the reason and the last good checkpoint of `run`."""
    try:
        yield
    except TrainingStopped:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError
        reason = getattr(error, "strerror", None) or _refusal(path) or one_line(error)
        raise TrainingStopped(f"cannot write {path}: {reason}; {last_good(run)}") from error


@contextmanager
def sealing(folder: Path, run: Path, keep: int, *, main: bool) -> Iterator[None]:
    """Seal the checkpoint that is written inside the block, and delete all but the newest `keep`. A failed write is
    TrainingStopped and leaves no folder. Other processes than the `main` one only take part in the write."""
    try:
        with writing(folder, run):
            yield
            if main:
                # a pickle of the arguments, which is never read
                (folder / "training_args.bin").unlink(missing_ok=True)
                seal(folder)
    except TrainingStopped:
        shutil.rmtree(folder, ignore_errors=True)  # make room
        raise
    for older in checkpoints(run)[:-keep] if main else ():
        shutil.rmtree(older)


def _refusal(folder: Path) -> str | None:
    """Return why the system cannot write to an incomplete checkpoint, by appending to its files, or None."""
    if not _NAME.fullmatch(folder.name) or (folder / MANIFEST).exists():
        return None
    for path in folder.glob("*"):
        try:
            with open(path, "ab", buffering=0) as file:
                file.write(b"\0" * 4096)
        except OSError as error:
            return error.strerror
    return None


def go_back(checkpoint: Path) -> None:
    """Delete what a run wrote after a checkpoint: the summary, and later checkpoints, which are incomplete."""
    run = checkpoint.parent
    with writing(run, run):
        for folder in checkpoints(run):
            if step_of(folder) > step_of(checkpoint):
                shutil.rmtree(folder)
        (run / "summary.json").unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves either the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to another file
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # flushes the rename
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_summary(run: Path, summary: dict[str, object]) -> None:
    """Write the result of a run, or raise TrainingStopped."""
    path = run / "summary.json"
    with writing(path, run):
        write_atomically(path, json.dumps(summary, indent=1))


def fingerprint(path: Path, *, flush: bool = False) -> list[int | str]:
    """Return [size in bytes, SHA-256] of a file, with `flush` after writing it to the disk."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]
