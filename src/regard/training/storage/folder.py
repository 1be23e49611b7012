"""The run folder: what lies in it, and how it is begun, continued, deleted and read back.

config.json      the TrainConfig; can be given to --config
run.json         versions, size and digest of the text, and those of config.json and the files in tokenizer/
tokenizer/       loads with AutoTokenizer.from_pretrained
metrics.jsonl    one JSON object per logged step
checkpoint-N/    what is needed to continue after step N, sealed by COMPLETE.json
model/           the trained model with its tokenizer, sealed as well; loads with AutoModelForCausalLM.from_pretrained
summary.json     the result on the whole held-out text
tensorboard/     where TensorBoard is installed
run.lock         locked while a run writes here
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import ArgumentError
from ..config import TrainConfig
from ..fields import from_mapping, read_mapping, to_mapping
from ..validation import validate
from .checkpoints import MANIFEST, checkpoints, fault, fingerprint, last_complete, seal, write_atomically, writing
from .files import MOST_JSON, is_plain_name, regular_size
from .lock import LOCK
from .saved_tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..data.text import Text

FORMAT = 1
_MAY_CHANGE = (
    "data",
    "steps",
    "device",
    "out",
    "resume",
    "overwrite",
)  # the text itself is compared by digest
_FILES = ("config.json", "run.json", "summary.json", "metrics.jsonl")
_OURS = (*_FILES, *(name + ".tmp" for name in _FILES), "tokenizer", "model", "model.tmp", "tensorboard")


def check_out(config: TrainConfig, *, call: str) -> None:
    """Before anything is written: may this run begin in `config.out`?

    Raises:
        ArgumentError: the folder is not empty and the config does not say what to do about it, or it is
            not a run of ours and would be deleted, or a link lies where the run would write.
    """
    out = config.out
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{call}: --out {out} is a file; give a folder.")
    try:
        empty = not out.is_dir() or all(path.name == LOCK for path in out.iterdir())
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read --out {out}: {error.strerror}.") from None
    _check_links(out, call)
    if config.resume or empty:
        return
    if not _holds_run(out):
        raise ArgumentError(
            f"{call}: --out {out} is not empty and holds no run; choose another folder (nothing was deleted)."
        )
    if not config.overwrite:
        begun = (out / "run.json").is_file()
        what = "holds a run already; continue it with --resume" if begun else "holds the beginnings of a run"
        raise ArgumentError(f"{call}: --out {out} {what}, replace it with --overwrite, or choose another folder.")


def _check_links(out: Path, call: str) -> None:
    """Check that what a run writes lies in its folder: a folder from elsewhere may hold links to the user's files.

    Raises:
        ArgumentError: a name that a run uses is a link.
    """
    for path in sorted([*out.glob("checkpoint-*"), *(out / name for name in _OURS)]):
        if path.is_symlink():
            raise ArgumentError(
                f"{call}: {path} is a link; a run writes into its own folder only, replace the link by what it points "
                "to, or delete it."
            )


def begin(config: TrainConfig, text: Text, tokenizer: PreTrainedTokenizerBase, *, call: str) -> None:
    """Create the folder, deleting the former run where the config says so, and write what will not change.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    out = config.out
    try:
        if config.overwrite and _holds_run(out):
            _delete_run(out)
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(out / "tokenizer")
        saved = replace(config, data=text.path, resume=False, overwrite=False)
        write_atomically(out / "config.json", json.dumps(to_mapping(saved), indent=1))
        write_atomically(out / "run.json", json.dumps({**_describe(text), "files": _written(out)}, indent=1))
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {out}: {error.strerror or error}.") from None


def saved_config(out: Path, *, call: str) -> TrainConfig:
    """Return the config of the run in a folder, which lies where it was read.

    Raises:
        ArgumentError: there is no run, or its config cannot be read, is not valid, or differs from what was written.
    """
    if not (out / "config.json").is_file() or not (out / "run.json").is_file():
        others = [str(path.parent) for path in out.parent.glob("*/run.json")]
        hint = f" Runs beside it: {', '.join(sorted(others))}." if others else ""
        if _holds_run(out):
            hint = " One was stopped while it began or was deleted; start anew with --overwrite."
        raise ArgumentError(f"{call}: {out} holds no run.{hint}")
    listed = _read_run(out, call=call).get("files", {})
    if "config.json" in listed:
        _check_unchanged(out, "config.json", listed, call)
    table = read_mapping(out / "config.json", call=call)
    found = from_mapping(TrainConfig(), table, call=call, source=str(out / "config.json"))
    found = replace(found, out=out, resume=False, overwrite=False)
    validate(found, f"{call}: {out / 'config.json'}", here=False)
    return found


def _read_run(out: Path, *, call: str) -> dict[str, Any]:
    """Return what `run.json` says.

    Raises:
        ArgumentError: it cannot be read, is of another format, or holds other things than were written.
    """
    table = read_mapping(out / "run.json", call=call)
    written = table.get("format")
    if written != FORMAT or isinstance(written, (bool, float)):
        raise ArgumentError(f"{call}: {out} has run format {written!r}, this version reads {FORMAT}.")
    text, listed = table.get("text"), table.get("files", {})
    if not isinstance(text, dict) or not isinstance(text.get("sha256"), str):
        raise ArgumentError(f"{call}: {out / 'run.json'} does not say which text the run was trained on.")
    if not isinstance(listed, dict):
        raise ArgumentError(f"{call}: files in {out / 'run.json'} is {listed!r}, expected a table.")
    return table


def _check_unchanged(out: Path, name: str, listed: dict[str, Any], call: str) -> None:
    """Check that a file is the one the run began with.

    Raises:
        ArgumentError: it is missing or differs.
    """
    try:
        same = regular_size(out / name) < MOST_JSON and fingerprint(out / name) == listed[name]
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read {out / name}: {error.strerror or error}.") from None
    if not same:
        raise ArgumentError(
            f"{call}: {out / name} differs from what was written when the run began; put the former one back."
        )


def check_resume(config: TrainConfig, text: Text, *, call: str) -> tuple[Path, list[str]]:
    """The checkpoint from which the run in `config.out` continues, and a line per checkpoint passed over.

    Raises:
        ArgumentError: the config or the text is not the one the run began with, there is no complete
            checkpoint, or nothing is left to do.
    """
    out = config.out
    now, then = to_mapping(config), to_mapping(saved_config(out, call=call))
    for name in now:
        if name not in _MAY_CHANGE and now[name] != then[name]:
            raise ArgumentError(
                f"{call}: --{name.replace('_', '-')} is {now[name]!r} but the run in {out} began with "
                f"{then[name]!r}; only --steps, --device and the path of --data may change on --resume."
            )
    check_text(out, text, call=call)
    folder, skipped = last_complete(out)
    if folder is None:
        why = f" ({'; '.join(skipped)})" if skipped else ""
        raise ArgumentError(f"{call}: {out} holds no complete checkpoint{why}; start anew with --overwrite.")
    reached = int(folder.name.rpartition("-")[2])
    if reached > config.steps or (reached == config.steps and (out / "summary.json").is_file()):
        raise ArgumentError(
            f"{call}: the run in {out} has finished {reached} steps; give a larger --steps to train on."
        )
    return folder, skipped


def check_text(out: Path, text: Text, *, call: str) -> None:
    """The text is the one the run in `out` began with.

    Raises:
        ArgumentError: its digest differs.
    """
    then = _read_run(out, call=call)["text"]
    if then["sha256"] != text.sha256:
        raise ArgumentError(
            f"{call}: the text in {text.path} is not the one the run in {out} was trained on "
            f"({len(text.content)} characters now, {then.get('characters')} then)."
        )


def saved_tokenizer(out: Path, *, call: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with which the run in `out` began.

    Raises:
        ArgumentError: it cannot be read, or differs from what was written.
    """
    listed = _read_run(out, call=call).get("files", {})
    for name in listed:
        if name.startswith("tokenizer/") and is_plain_name(name.removeprefix("tokenizer/")):
            _check_unchanged(out, name, listed, call)
    tokenizer = load_tokenizer(out / "tokenizer", call=call)
    if tokenizer.pad_token is None:
        raise ArgumentError(f"{call}: the tokenizer in {out / 'tokenizer'} has no pad_token, which Trainer needs.")
    return tokenizer


def save_model(out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Write `model/`, whole or not at all.

    Raises:
        TrainingStopped: the disk refused.
    """
    final, temporary = out / "model", out / "model.tmp"
    try:
        with writing(final, out):
            shutil.rmtree(temporary, ignore_errors=True)
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            seal(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load_model(path: Path, *, call: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and tokenizer of a run folder (its `model/`, else its last complete checkpoint), or of a
    folder written by `save_pretrained`. Only safetensors and JSON are read, and no code of the folder runs.

    Raises:
        ArgumentError: no such folder, a model that cannot be read (see `saved_model.read_model`) or differs from what
            was sealed, or a tokenizer with more tokens than the model knows.
    """
    from ..quiet import quiet_transformers
    from .saved_model import read_model

    folder = _model_folder(path, call)
    reason = fault(folder) if (folder / MANIFEST).exists() else None
    if reason is not None:
        raise ArgumentError(
            f"{call}: the model in {folder} is damaged: {reason}; delete the folder, and the last checkpoint is used. "
            f"If you changed it on purpose, delete its {MANIFEST}."
        )
    with quiet_transformers():
        model, tokenizer = read_model(folder, call=call), load_tokenizer(folder, call=call)
    most = max(tokenizer.get_vocab().values(), default=0)
    if most >= model.config.vocab_size:
        raise ArgumentError(
            f"{call}: the tokenizer in {folder} has tokens up to {most}, its model knows 0 to "
            f"{model.config.vocab_size - 1}; they do not belong together."
        )
    return model, tokenizer


def _model_folder(path: Path, call: str) -> Path:
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"{call}: {path} is a file; give a run folder, which is the --out of a training run.")
    if not path.is_dir():
        raise ArgumentError(f"{call}: {path} does not exist; give the --out folder of a training run.")
    if (path / "run.json").is_file():
        folder: Path | None = path / "model"
        if not (path / "model").is_dir():
            folder, _ = last_complete(path)
        if folder is None:
            raise ArgumentError(f"{call}: the run in {path} has saved no model and no checkpoint yet.")
        return folder
    if (path / "model.safetensors").is_file() or (path / "model.safetensors.index.json").is_file():
        return path
    raise ArgumentError(f"{call}: {path} holds neither a run nor a model in safetensors.")


def _holds_run(out: Path) -> bool:
    """Return whether a run of ours lies in the folder, or what is left of one that was stopped while it began or was
    deleted: the lock is the first file that is written and is never deleted."""
    return (out / "run.json").is_file() or (out / LOCK).is_file()


def _delete_run(out: Path) -> None:
    """Delete what a run wrote, and nothing else that lies in the folder."""
    for path in [*checkpoints(out), *(out / name for name in _OURS)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _written(out: Path) -> dict[str, list[int | str]]:
    """Return size and digest of the files that do not change while the run goes on."""
    files = [out / "config.json", *sorted(path for path in (out / "tokenizer").iterdir() if path.is_file())]
    return {path.relative_to(out).as_posix(): fingerprint(path) for path in files}


def _describe(text: Text) -> dict[str, Any]:
    import torch
    import transformers

    from ..._version import __version__

    return {
        "format": FORMAT,
        "versions": {
            "regard": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "text": {
            "path": str(text.path),
            "sha256": text.sha256,
            "files": text.files,
            "characters": len(text.content),
            "bytes": len(text.content.encode()),
        },
    }
