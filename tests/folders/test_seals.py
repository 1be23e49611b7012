"""Seals: what a list of files may name, and what it must."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import COMMANDS, change_json, digest, reseal
from mistakes import refuses

from regard.training import load_model
from regard.training.storage.checkpoints import fault

pytestmark = pytest.mark.timeout(120)
ZEROS = [0, "0" * 64]


def named(name: str, value: object = ZEROS) -> Callable[[dict], None]:
    """A change of a seal: it also lists `name`."""
    return lambda sealed: sealed["files"].update({name: value})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (named("/dev/zero"), "lists '/dev/zero', which is not the name of a file in the folder"),
        (named("../../text.txt"), "which is not the name of a file in the folder"),
        (named(".."), "which is not the name of a file in the folder"),
        (named("a\0b"), "which is not the name of a file in the folder"),
        (named("a\\b"), "which is not the name of a file in the folder"),
        (named("pipe"), "pipe is not a regular file"),
        (named("link"), "link is not a regular file"),
        (named("folder"), "folder is not a regular file"),
        (named("absent"), "absent is missing"),
        (named("config.json", 7), "cannot be read"),
        (named("config.json", [True, None]), "config.json differs"),
        (lambda sealed: {**sealed, "files": {}}, "does not list model.safetensors"),
        (lambda sealed: {**sealed, "files": []}, "cannot be read"),
        (lambda sealed: {**sealed, "step": 3}, "belongs to step 3"),
        (lambda sealed: ["model"], "COMPLETE.json cannot be read"),
    ],
)
def test_a_seal_names_files_of_its_folder_only(run_folder: Path, change: Callable, reason: str) -> None:
    folder = run_folder / "checkpoint-4"
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to(folder / "config.json")
    if reason.startswith("folder"):
        (folder / "folder").mkdir()
    sealed = json.loads((folder / "COMPLETE.json").read_text())
    (folder / "COMPLETE.json").write_text(json.dumps(change(sealed) or sealed))
    assert reason in (fault(folder) or "")


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "config.json", "tokenizer.json", "optimizer.pt", "scheduler.pt", "trainer_state.json"),
        "rng_state.pth",
    ],
)
def test_a_resealed_checkpoint_without_a_file_is_passed_over(run_folder: Path, regard: Callable, name: str) -> None:
    for step in (2, 4):
        (run_folder / f"checkpoint-{step}" / name).unlink()
    reseal(run_folder)
    missing = name.replace("rng_state.pth", "rng_state*.pth")
    error = regard(*COMMANDS["resume"](run_folder)).error
    assert f"skipping checkpoint-4: COMPLETE.json does not list {missing}" in error
    assert (run_folder / "summary.json").exists()


def test_a_seal_that_is_a_pipe_or_a_device(run_folder: Path) -> None:
    manifest = run_folder / "checkpoint-4" / "COMPLETE.json"
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        manifest.unlink()
        make(manifest)
        assert fault(manifest.parent) == "COMPLETE.json cannot be read"
        manifest.rmdir() if manifest.is_dir() else None
        manifest.touch()


def hollow(path: Path) -> int:
    """Make a file four TiB long that takes next to nothing on the disk; return its size."""
    with open(path, "ab") as file:
        file.truncate(1 << 42)
    return 1 << 42


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="holes cannot be seen here")
@pytest.mark.parametrize("name", ["model/model.safetensors", "model/extra", "checkpoint-4/optimizer.pt"])
def test_files_that_were_never_written_are_not_read(run_folder: Path, regard: Callable, name: str) -> None:
    size = hollow(run_folder / name)
    folder, name = (run_folder / name).parent, Path(name).name
    change_json(folder / "COMPLETE.json", named(name, [size, "0" * 64]))
    assert f"{name} has {size} bytes, of which " in (fault(folder) or "")


def test_metrics_that_were_never_written_are_not_read(run_folder: Path, regard: Callable) -> None:
    hollow(run_folder / "metrics.jsonl")
    result = regard(*COMMANDS["resume"](run_folder))
    assert result.code == 1
    assert "metrics.jsonl has 4398046511104 bytes, of which " in result.err


def test_what_trainer_would_read_besides(run_folder: Path) -> None:
    (run_folder / "checkpoint-4" / "notes.txt").write_text("mine")
    assert fault(run_folder / "checkpoint-4") is None
    (run_folder / "checkpoint-4" / "scaler.pt").write_bytes(b"")
    assert fault(run_folder / "checkpoint-4") == "scaler.pt was not there when it was written"


def test_the_model_is_sealed(run_folder: Path, regard: Callable) -> None:
    model = run_folder / "model"
    listed = json.loads((model / "COMPLETE.json").read_text())["files"]
    free = ("COMPLETE.json", "README.md")  # the card may be edited
    assert listed == {path.name: digest(path) for path in model.iterdir() if path.name not in free}
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-3] ^= 1  # one bit of one number
    (model / "model.safetensors").write_bytes(weights)
    for command in ("eval", "generate"):
        assert "is damaged: model.safetensors differs from what was written" in regard(command, run_folder).error
    (model / "COMPLETE.json").unlink()  # as a model of another program has none
    load_model(run_folder, call="test")


@pytest.mark.parametrize("name", ["config.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"])
def test_what_a_run_began_with_does_not_change(run_folder: Path, regard: Callable, name: str) -> None:
    path = run_folder / name
    path.write_text(path.read_text() + "\n")
    assert f"{path} differs from what was written when the run began" in regard(*COMMANDS["resume"](run_folder)).error


@pytest.fixture
def shards(run_folder: Path) -> Path:
    """The model without a seal, in two files."""
    folder = run_folder / "model"
    (folder / "COMPLETE.json").unlink()
    model, _ = load_model(folder, call="test")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) * 2 // 3)
    assert len([*folder.glob("model-*.safetensors")]) == 2
    return folder


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("../model-00001-of-00002.safetensors", "expected a .safetensors file in the same folder"),
        ("/dev/zero", "expected a .safetensors file in the same folder"),
        ("pytorch_model.bin", "expected a .safetensors file in the same folder"),
        (7, "expected a .safetensors file in the same folder"),
        ("pipe.safetensors", "pipe.safetensors is not a regular file"),
        ("zero.safetensors", "zero.safetensors is not a regular file"),
        ("absent.safetensors", "No such file"),
        ("model-00002-of-00002.safetensors", "is not in the file that model.safetensors.index.json names"),
    ],
)
def test_places_of_weights(shards: Path, place: object, reason: str) -> None:
    os.mkfifo(shards / "pipe.safetensors")
    (shards / "zero.safetensors").symlink_to("/dev/zero")
    index = shards / "model.safetensors.index.json"
    change_json(index, lambda table: table["weight_map"].update({min(table["weight_map"]): place}))
    refuses(reason, load_model, shards.parent, call="eval")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100000])
def test_an_index_that_cannot_be_read(shards: Path, content: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content)
    refuses(r"cannot load the model in .*index", load_model, shards.parent, call="eval")
