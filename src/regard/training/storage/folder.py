"""The run folder: its contents, and how it is created, continued, deleted and read.

config.json      the TrainConfig; can be given to --config
run.json         versions, size and digest of the text, of config.json and of the files in tokenizer/
tokenizer/       loads with AutoTokenizer.from_pretrained
metrics.jsonl    one JSON object per logged step
checkpoint-N/    what is needed to continue after step N, sealed by COMPLETE.json
model/           the trained model with its tokenizer, also sealed; loads with AutoModelForCausalLM.from_pretrained
summary.json     the result on the whole held-out text
tensorboard/     with --report-to tensorboard
run.lock         locked while a run writes to the folder
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...checks import ArgumentError, require
from ..config import TrainConfig
from ..fields import flag, from_mapping, read_mapping, to_mapping
from ..validation import validate
from .checkpoints import MANIFEST, checkpoints, fault, fingerprint, last_complete, seal, write_atomically, writing
from .files import LOCK, MOST_JSON, is_plain_name, regular_size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..data.text import Source

FORMAT = 1
# the text itself is compared by digest
_MAY_CHANGE = ("data", "steps", "device", "out", "report_to", "resume", "overwrite")
_FILES = ("config.json", "run.json", "summary.json", "metrics.jsonl")
_OURS = ("non-finite", *_FILES, *(name + ".tmp" for name in _FILES), "tokenizer", "model", "model.tmp", "tensorboard")


def check_out(config: TrainConfig, *, call: str) -> None:
    """Check, before anything is written, that this run may begin in `config.out`: the folder is empty, or resume or
    overwrite is set and it holds a run, and there is no link where the run would write."""
    out = config.out
    require(not out.exists() or out.is_dir(), call, f"--out {out} is a file; give a folder.")
    try:
        empty = not out.is_dir() or all(path.name == LOCK for path in out.iterdir())
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read --out {out}: {error.strerror}.") from None
    # a folder from elsewhere may link to the user's files
    for path in sorted([*out.glob("checkpoint-*"), *(out / name for name in _OURS)]):
        message = f"{path} is a link, but a run only writes to its own folder; replace it by its target or delete it."
        require(not path.is_symlink(), call, message)
    if config.resume or empty:
        return
    holds = f"--out {out} is not empty and holds no run; choose another folder (nothing was deleted)."
    require(_holds_run(out), call, holds)
    if not config.overwrite:
        begun = (out / "run.json").is_file()
        what = "already holds a run; continue it with --resume" if begun else "holds the beginning of a run"
        raise ArgumentError(f"{call}: --out {out} {what}, replace it with --overwrite, or choose another folder.")


def text_source(text: Source) -> dict[str, Any]:
    """Return what `run.json` says of a text."""
    size = {"characters": text.characters, "bytes": text.bytes}
    return {"path": str(text.path), "sha256": text.sha256, "files": text.files, **size}


def task_source(name: str, settings: str) -> dict[str, Any]:
    """Return what `run.json` says of a task."""
    return {"path": f"task {name}", "sha256": hashlib.sha256(settings.encode()).hexdigest(), "settings": settings}


def begin(config: TrainConfig, source: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, *, call: str) -> None:
    """Create the folder, or delete the run in it if the config says so, and write the files that will not change; raise
    `ArgumentError` if it cannot be written. `source` is of `text_source` or `task_source`."""
    import torch
    import transformers

    out = config.out
    versions = {"regard": __version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
    try:
        if config.overwrite and _holds_run(out):  # delete what that run wrote, and nothing else
            for path in [*checkpoints(out), *(out / name for name in _OURS)]:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(out / "tokenizer")
        saved = replace(config, resume=False, overwrite=False)
        write_atomically(out / "config.json", json.dumps(to_mapping(saved), indent=1))
        files = [out / "config.json", *sorted(path for path in (out / "tokenizer").glob("*") if path.is_file())]
        digests = {path.relative_to(out).as_posix(): fingerprint(path) for path in files}  # these files do not change
        run = {"format": FORMAT, "versions": versions, "text": source, "files": digests}
        write_atomically(out / "run.json", json.dumps(run, indent=1))
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {out}: {error.strerror or error}.") from None


def saved_config(out: Path, *, call: str) -> TrainConfig:
    """Return the config of the run in a folder; raise `ArgumentError` if there is none, or one that is not valid."""
    if not (out / "config.json").is_file() or not (out / "run.json").is_file():
        others = [str(path.parent) for path in out.parent.glob("*/run.json")]
        hint = f" Runs next to it: {', '.join(sorted(others))}." if others else ""
        if _holds_run(out):
            hint = " One was stopped while it began or was deleted; start again with --overwrite."
        raise ArgumentError(f"{call}: {out} holds no run; give the --out folder of a run, or omit --resume.{hint}")
    _check_unchanged(out, "config.json", call)
    path = out / "config.json"
    config = from_mapping(TrainConfig(), read_mapping(path, call=call), call=call, source=str(path))
    config = replace(config, out=out, resume=False, overwrite=False)
    validate(config, f"{call}: {path}", new=False)
    return config


def _read_run(out: Path, *, call: str) -> dict[str, Any]:
    """Return the contents of `run.json` after checking their format."""
    table = read_mapping(out / "run.json", call=call)
    written = table.get("format")
    same = written == FORMAT and not isinstance(written, (bool, float))
    require(same, call, f"{out} has run format {written!r}, this version reads {FORMAT}.")
    text, listed = table.get("text"), table.get("files", {})
    known = isinstance(text, dict) and isinstance(text.get("sha256"), str)
    require(known, call, f"{out / 'run.json'} lacks the digest of the text that the run was trained on.")
    require(isinstance(listed, dict), call, f"files in {out / 'run.json'} is {listed!r}, expected a table.")
    return table


def _check_unchanged(out: Path, part: str, call: str) -> None:
    """Check that a file, or every file of a folder, is unchanged since the run began, if `run.json` lists it."""
    for name, written in _read_run(out, call=call).get("files", {}).items():
        if name != part and not (name.startswith(f"{part}/") and is_plain_name(name.removeprefix(f"{part}/"))):
            continue
        try:
            same = regular_size(out / name) < MOST_JSON and fingerprint(out / name) == written
        except OSError as error:
            raise ArgumentError(f"{call}: cannot read {out / name}: {error.strerror or error}.") from None
        require(same, call, f"{out / name} differs from what was written when the run began; restore the original.")


def check_resume(config: TrainConfig, source: dict[str, Any], *, call: str) -> tuple[Path, list[str]]:
    """Return the checkpoint from which a run continues, and a line about each skipped one; raise `ArgumentError` if the
    config or the source differs, no checkpoint is complete, or nothing is left to do."""
    out = config.out
    now, then = to_mapping(config), to_mapping(saved_config(out, call=call))
    for name in now:
        if name not in _MAY_CHANGE and now[name] != then[name]:
            began = f"the run in {out} began with {then[name]!r}"
            may = "only --steps, --device, --report-to and the path of --data may change on --resume"
            raise ArgumentError(f"{call}: {flag(name)} is {now[name]!r} but {began}; {may}.")
    check_source(out, source, call=call)
    folder, skipped = last_complete(out)
    if folder is None:
        why = f" ({'; '.join(skipped)})" if skipped else ""
        raise ArgumentError(f"{call}: {out} holds no complete checkpoint{why}; start again with --overwrite.")
    reached = int(folder.name.rpartition("-")[2])
    done = reached > config.steps or (reached == config.steps and (out / "summary.json").is_file())
    finished = f"the run in {out} has finished {reached} steps; give a larger --steps to continue."
    require(not done, call, finished)
    return folder, skipped


def check_source(out: Path, source: dict[str, Any], *, call: str) -> None:
    """Check by digest that the text or task is the one that the run in `out` began with."""
    then = _read_run(out, call=call)["text"]
    same = then["sha256"] == source["sha256"]
    if "settings" in source:
        early = re.sub(r", sha256='\w+'", "", source["settings"])  # earlier versions did not note the text of a task
        same = same or then["sha256"] == hashlib.sha256(early.encode()).hexdigest()
        other = f"the {source['path']} has other settings than when the run in {out} began"
        seen = f"{source['settings']} now, {then.get('settings')} then"
        require(same, call, f"{other} ({seen}); train it again with --overwrite.")
    else:
        other = f"the text in {source['path']} is not the one the run in {out} was trained on"
        seen = f"{source['characters']} characters now, {then.get('characters')} then"
        require(same, call, f"{other} ({seen}).")


def saved_tokenizer(out: Path, *, call: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the run in `out`; raise `ArgumentError` if it cannot be read or has changed."""
    from .saved_model import load_tokenizer

    _check_unchanged(out, "tokenizer", call)
    tokenizer = load_tokenizer(out / "tokenizer", call=call)
    message = f"the tokenizer in {out / 'tokenizer'} has no pad_token, which training needs."
    require(tokenizer.pad_token is not None, call, message)
    return tokenizer


def save_model(
    out: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None,
    weights: dict[str, Tensor] | None = None,
) -> Path:  # fmt: skip
    """Write `model/` completely, of a sharded model the `weights`; or raise TrainingStopped and write nothing."""
    final, temporary = out / "model", out / "model.tmp"
    try:
        with writing(final, out):
            shutil.rmtree(temporary, ignore_errors=True)
            model.save_pretrained(temporary, state_dict=weights)
            if tokenizer is not None:
                tokenizer.save_pretrained(temporary)
            seal(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def task_run(path: Path, *, call: str) -> TrainConfig | None:
    """Return the config of the run in a folder if it is on a task, else None; raise as `saved_config`."""
    config = saved_config(path, call=call) if (path / "run.json").is_file() else None
    return config if config is not None and config.task is not None else None


def load_task_model(path: Path, *, call: str) -> PreTrainedModel:
    """Return the model of a run on a task; raise `ArgumentError` if there is none, or none that is intact."""
    from .saved_model import read_model

    folder = path / "model"
    require(folder.is_dir(), call, f"the run in {path} has saved no model yet; it is saved when the run ends.")
    reason = fault(folder, tokenizer=False)
    require(reason is None, call, f"the model in {folder} is damaged: {reason}; train it again with --overwrite.")
    return read_model(folder, call=call)


def load_model(path: Path | str, *, call: str = "load_model") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and tokenizer of a run folder or of a folder written by `save_pretrained`; errors name `call`.

    Of a run folder, `model/` is read, or else its last complete checkpoint: safetensors and JSON alone, never code.

    Raises:
        ArgumentError: no such folder, a model that cannot be read (see `saved_model.read_model`) or that differs from
            its seal, or a tokenizer with more tokens than the model.
    """
    path = Path(path)
    if path.is_dir() and task_run(path, call=call) is not None:
        raise ArgumentError(f"{call}: the run in {path} is on a task, which has no text; `regard eval` scores it.")
    folder = _model_folder(path, call)
    reason = fault(folder) if (folder / MANIFEST).exists() else None
    hint = f"delete the folder to use the last checkpoint, or only its {MANIFEST} if you changed it on purpose"
    require(reason is None, call, f"the model in {folder} is damaged: {reason}; {hint}.")
    from .saved_model import load_tokenizer, read_model

    model, tokenizer = read_model(folder, call=call), load_tokenizer(folder, call=call)
    most, size = max(tokenizer.get_vocab().values(), default=0), model.config.vocab_size
    apart = f"has token ids up to {most}, but its model has 0 to {size - 1}; they do not belong together"
    require(most < size, call, f"the tokenizer in {folder} {apart}.")
    return model, tokenizer


def _model_folder(path: Path, call: str) -> Path:
    require(path.exists(), call, f"{path} does not exist; give the --out folder of a training run.")
    require(path.is_dir(), call, f"{path} is a file; give a run folder (the --out of a training run).")
    if (path / "run.json").is_file():
        folder = path / "model" if (path / "model").is_dir() else last_complete(path)[0]
        if folder is None:
            raise ArgumentError(f"{call}: the run in {path} has saved no model and no checkpoint yet.")
        return folder
    weights = any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    require(weights, call, f"{path} holds neither a run nor a model in safetensors.")
    return path


def _holds_run(out: Path) -> bool:
    """Return whether there is a run, or one stopped while it began or was deleted (the lock is written first)."""
    return (out / "run.json").is_file() or (out / LOCK).is_file()
