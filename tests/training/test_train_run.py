"""A whole run: what lies in the folder, what resumes bit for bit, and what is refused before work is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from regard.checks import ArgumentError
from regard.training import load_model, train
from regard.training.checkpoints import checkpoints, fault, last_complete

TIMES = ("tokens_per_second", "eval_tokens_per_second", "eval_seconds")


def metrics(out: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


class Crash(TrainerCallback):
    """Ends the process, as far as the trainer can tell, at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == self.step:
            raise SystemError("crash")


@pytest.fixture
def straight(tiny: Callable, tmp_path: Path, silent: Console) -> Path:
    """A run of eight steps without interruption."""
    out = tmp_path / "straight"
    train(tiny(out=out, steps=8, save_every=4, accumulate=2), console=silent)
    return out


def test_the_run_folder(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=7, keep=2)
    summary = train(config, console=silent)
    out = config.out
    assert {path.name for path in out.iterdir()} - {"tensorboard"} == {
        *("config.json", "run.json", "summary.json", "metrics.jsonl", "tokenizer", "model"),
        *("checkpoint-6", "checkpoint-7"),
    }
    assert not list(out.rglob("*.bin"))  # no pickled weights or arguments
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    first = lines[0]
    assert first["tokens"] == 2 * 16
    assert first["bits_per_char"] == pytest.approx(
        first["loss"] / 0.6931471805599453
    )  # one token a character
    content = config.data.read_text()
    train_text = content[: len(content) - round(len(content) * 0.1)]
    ratio = len(train_text.encode()) / len(train_text)
    assert first["bits_per_byte"] == pytest.approx(first["bits_per_char"] / ratio)
    assert 1 <= first["support"] <= 8.5  # softmax would have (16 + 1) / 2
    assert json.loads((out / "summary.json").read_text())["loss"] == summary.loss
    assert (summary.step, summary.parameters) == (7, sum(w.numel() for w in weights(out / "model").values()))
    for folder in ("model", "checkpoint-7"):
        model = AutoModelForCausalLM.from_pretrained(out / folder)
        assert model.config.mixers == ["biweight"]
        assert AutoTokenizer.from_pretrained(out / folder)("the")["input_ids"]


def test_bits_of_a_byte_level_run(tiny: Callable, silent: Console) -> None:
    config = tiny(tokenizer="byte", steps=1)
    train(config, console=silent)
    line = metrics(config.out)[0]
    content = config.data.read_text()
    learnt = content[: len(content) - round(len(content) * 0.1)]
    assert line["bits_per_byte"] == pytest.approx(line["loss"] / 0.6931471805599453)
    assert line["bits_per_char"] == pytest.approx(line["bits_per_byte"] * len(learnt.encode()) / len(learnt))


def test_two_runs_are_bit_equal(tiny: Callable, straight: Path, tmp_path: Path, silent: Console) -> None:
    torch.manual_seed(99)  # whatever the program drew before
    train(tiny(out=tmp_path / "again", steps=8, save_every=4, accumulate=2), console=silent)
    assert metrics(tmp_path / "again") == metrics(straight)
    first, second = weights(straight / "model"), weights(tmp_path / "again" / "model")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_half_and_half_equals_straight(
    tiny: Callable, straight: Path, tmp_path: Path, silent: Console
) -> None:
    out = tmp_path / "halves"
    config = tiny(out=out, steps=8, save_every=4, accumulate=2)
    with pytest.raises(SystemError):
        train(config, console=silent, callbacks=[Crash(6)])  # two steps past the checkpoint are lost
    assert [line["step"] for line in metrics(out)][-1] == 6
    torch.manual_seed(99)
    train(tiny(out=out, steps=8, save_every=4, accumulate=2, resume=True), console=silent)
    assert metrics(out) == metrics(straight)
    first, second = weights(straight / "model"), weights(out / "model")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    optimizers = [
        torch.load(folder / "checkpoint-8" / "optimizer.pt", weights_only=True)["state"]
        for folder in (straight, out)
    ]
    for key, state in optimizers[0].items():
        assert all(torch.equal(state[name], optimizers[1][key][name]) for name in state)


def test_damaged_checkpoints_are_passed_over(
    tiny: Callable, straight: Path, silent: Console, tmp_path: Path
) -> None:
    (straight / "summary.json").unlink()
    damaged = straight / "checkpoint-8" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found, skipped = last_complete(straight)
    assert found == straight / "checkpoint-4"
    assert skipped == ["skipping checkpoint-8: model.safetensors differs from what was written"]
    console = Console(file=open(tmp_path / "log", "w"), width=200)  # noqa: SIM115
    train(tiny(out=straight, steps=8, save_every=4, accumulate=2, resume=True), console=console)
    console.file.close()
    assert "skipping checkpoint-8" in (tmp_path / "log").read_text()
    assert fault(straight / "checkpoint-8") is None  # written again, whole
    for name, reason in (("optimizer.pt", "optimizer.pt is missing"), ("COMPLETE.json", "COMPLETE.json is")):
        (straight / "checkpoint-8" / name).unlink()
        assert reason in (fault(straight / "checkpoint-8") or "")


def test_more_steps_after_the_end(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=3)
    train(config, console=silent)
    with pytest.raises(ArgumentError, match="has finished 3 steps; give a larger --steps"):
        train(tiny(steps=3, resume=True), console=silent)
    summary = train(tiny(steps=5, resume=True), console=silent)
    assert summary.step == 5
    assert [line["step"] for line in metrics(config.out) if "loss" in line] == [1, 2, 3, 4, 5]


def test_resume_refuses_another_run(tiny: Callable, silent: Console) -> None:
    with pytest.raises(ArgumentError, match="holds no run"):
        train(tiny(resume=True), console=silent)
    config = tiny(steps=3)
    train(config, console=silent)
    with pytest.raises(ArgumentError, match=r"--width is 8 but the run in .* began with 16"):
        train(tiny(steps=5, width=8, resume=True), console=silent)
    config.data.write_text(config.data.read_text() + "more")
    with pytest.raises(ArgumentError, match="is not the one the run"):
        train(tiny(steps=5, resume=True), console=silent)
    for folder in checkpoints(config.out):
        (folder / "COMPLETE.json").unlink()
    config.data.write_text(config.data.read_text()[:-4])
    with pytest.raises(ArgumentError, match="no complete checkpoint"):
        train(tiny(steps=5, resume=True), console=silent)


def test_a_folder_that_exists(tiny: Callable, tmp_path: Path, silent: Console) -> None:
    config = tiny(steps=1)
    config.out.mkdir()
    train(config, console=silent)  # an empty folder is fine
    with pytest.raises(ArgumentError, match="--resume, replace it with --overwrite"):
        train(config, console=silent)
    (config.out / "notes.md").write_text("mine")
    before = (config.out / "run.json").stat().st_mtime_ns
    with pytest.raises(ArgumentError, match="nonsense"):  # a mistake deletes nothing
        train(tiny(steps=2, overwrite=True, spec=("nonsense",)), console=silent)
    assert (config.out / "run.json").stat().st_mtime_ns == before
    train(tiny(steps=2, overwrite=True), console=silent)
    assert (config.out / "notes.md").read_text() == "mine"
    assert len(metrics(config.out)) == 2
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(ArgumentError, match="holds no run; choose another folder"):
        train(tiny(out=foreign, overwrite=True), console=silent)
    assert (foreign / "thesis.tex").exists()


def test_a_folder_that_cannot_be_written(tiny: Callable, tmp_path: Path, silent: Console) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="is a file"):
        train(tiny(out=tmp_path / "file"), console=silent)
    with pytest.raises(ArgumentError, match=r"cannot write to --out .*: Not a directory"):
        train(tiny(out=tmp_path / "file" / "run"), console=silent)


@pytest.mark.parametrize(
    ("characters", "changes", "message"),
    [
        (10, {}, "has 9 tokens to train on, less than one --context 16"),
        (100, {}, r"held-out part of .* has 10 tokens, less than one --context 16"),
        (0, {}, "is empty"),
    ],
)
def test_texts_that_are_too_short(
    tiny: Callable, tmp_path: Path, characters: int, changes: dict, message: str, silent: Console
) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * characters)
    with pytest.raises(ArgumentError, match=message):
        train(tiny(data=path, **changes), console=silent)
    assert not (tmp_path / "run").exists()  # nothing was begun


def test_models_that_cannot_be_loaded(tiny: Callable, tmp_path: Path, silent: Console) -> None:
    with pytest.raises(ArgumentError, match="does not exist"):
        load_model(tmp_path / "nowhere", call="eval")
    with pytest.raises(ArgumentError, match="neither a run nor a model"):
        load_model(tmp_path, call="eval")
    config = tiny(steps=1)
    train(config, console=silent)
    path = config.out / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ArgumentError, match="cannot load the model in"):
        load_model(config.out, call="eval")
    # a pickle beside it is not an alternative
    torch.save({}, config.out / "model" / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ArgumentError, match="cannot load the model in"):
        load_model(config.out, call="eval")
