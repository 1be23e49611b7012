"""A whole run: what lies in the folder, what resumes bit for bit, and what is refused before work is lost."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from regard.checks import ArgumentError
from regard.models import language_models
from regard.training import load_model, train
from regard.training.fields import to_mapping
from regard.training.storage.checkpoints import checkpoints, fault, last_complete

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
        *("config.json", "run.json", "summary.json", "metrics.jsonl", "tokenizer", "model", "run.lock"),
        *("checkpoint-6", "checkpoint-7"),
    }
    assert not list(out.rglob("*.bin"))  # no pickled weights or arguments
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    first = lines[0]
    assert first["tokens"] == 2 * 16
    assert first["bits_per_char"] == pytest.approx(first["loss"] / 0.6931471805599453)  # one token a character
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
        assert model.config.use_cache is True  # Trainer switches it off while it trains
        assert AutoTokenizer.from_pretrained(out / folder)("the")["input_ids"]


def test_empty_rows_are_logged_where_there_can_be_any(tiny: Callable, silent: Console) -> None:
    """A threshold above every score leaves all rows empty, one below every score none."""
    for out, spec, rate in (
        ("high", "biweight*fixed(bias=-50)", 1.0),
        ("low", "biweight*fixed(bias=50)", 0.0),
        ("free", "biweight", None),
    ):
        config = tiny(out=tiny().out / out, spec=(spec,), steps=1)
        train(config, console=silent)
        assert metrics(config.out)[0].get("empty_rows") == rate


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


def test_half_and_half_equals_straight(tiny: Callable, straight: Path, tmp_path: Path, silent: Console) -> None:
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
        torch.load(folder / "checkpoint-8" / "optimizer.pt", weights_only=True)["state"] for folder in (straight, out)
    ]
    for key, state in optimizers[0].items():
        assert all(torch.equal(state[name], optimizers[1][key][name]) for name in state)


@pytest.mark.parametrize("crash", [4, 6, 8])
def test_the_first_mean_after_a_resume_counts_the_steps_before(
    tiny: Callable, tmp_path: Path, silent: Console, crash: int
) -> None:
    """Checkpoints at 3, 6, 9 and logs at 1, 5, 10: the log at 5 or 10 is the mean since the last one, bit for bit."""
    sizes = {"steps": 10, "log_every": 5, "save_every": 3, "eval_every": 99}
    train(tiny(out=tmp_path / "whole", **sizes), console=silent)
    halves = tiny(out=tmp_path / "halves", **sizes)
    with pytest.raises(SystemError):
        train(halves, console=silent, callbacks=[Crash(crash)])
    train(tiny(out=tmp_path / "halves", resume=True, **sizes), console=silent)
    assert metrics(tmp_path / "halves") == metrics(tmp_path / "whole")


def test_damaged_checkpoints_are_passed_over(tiny: Callable, straight: Path, silent: Console, tmp_path: Path) -> None:
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
    config.data.write_text(config.data.read_text()[:-4])
    tokenizer = config.out / "tokenizer" / "tokenizer.json"
    whole = tokenizer.read_text()
    tokenizer.write_text(whole[:-9])
    with pytest.raises(ArgumentError, match=r"tokenizer.json differs from what was written when the run began"):
        train(tiny(steps=5, resume=True), console=silent)
    tokenizer.write_text(whole)
    for folder in checkpoints(config.out):
        (folder / "COMPLETE.json").unlink()
    with pytest.raises(ArgumentError, match="no complete checkpoint"):
        train(tiny(steps=5, resume=True), console=silent)
    (config.out / "run.json").write_text('{"format": 99}')
    with pytest.raises(ArgumentError, match="has run format 99, this version reads 1"):
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
    with pytest.raises(ArgumentError, match=r"is damaged: model.safetensors differs from what was written"):
        load_model(config.out, call="eval")
    (config.out / "model" / "COMPLETE.json").unlink()
    with pytest.raises(ArgumentError, match="cannot load the model in"):
        load_model(config.out, call="eval")
    # a pickle beside it is not an alternative
    torch.save({}, config.out / "model" / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(ArgumentError, match="cannot load the model in"):
        load_model(config.out, call="eval")


def test_models_whose_weights_do_not_fit(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=1)
    train(config, console=silent)
    path = config.out / "model" / "model.safetensors"
    (config.out / "model" / "COMPLETE.json").unlink()  # the seal would say it first
    sound = load_file(path)
    name = next(name for name in sound if "layers" in name and sound[name].dim() == 2)
    missing = {key: value for key, value in sound.items() if key != name}
    extra = {**sound, "stowaway": torch.zeros(1)}
    shapes = {**sound, name: sound[name][:-1].contiguous()}
    holes = {**sound, name: torch.full_like(sound[name], torch.nan)}
    for tensors, reason in (
        (missing, "missing"),
        (extra, "unexpected"),
        (shapes, name),
        (holes, "not finite"),
    ):
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(ArgumentError, match=reason) as caught:
            load_model(config.out, call="eval")
        assert "\n" not in str(caught.value)
    save_file(sound, path, metadata={"format": "pt"})
    load_model(config.out, call="eval")


def test_accumulated_batches_are_one_batch(tiny: Callable, tmp_path: Path, silent: Console) -> None:
    whole = tiny(out=tmp_path / "whole", batch=4, eval_every=9)
    parts = tiny(out=tmp_path / "parts", batch=1, accumulate=4, eval_every=9)
    for config in (whole, parts):
        train(config, console=silent)
    for one, four in zip(metrics(whole.out), metrics(parts.out), strict=True):
        assert one == pytest.approx(four, rel=2e-5)
    other = weights(parts.out / "model")
    for name, value in weights(whole.out / "model").items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=2e-5)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=12, warmup=0.25, learning_rate=0.02, final_learning_rate=0.1, eval_every=99)
    train(config, console=silent)
    rates = [line["learning_rate"] for line in metrics(config.out)]
    want = [0.0, 0.02 / 3, 0.04 / 3]
    want += [0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 9)) / 2) for i in range(9)]
    assert rates == pytest.approx(want)


def test_bfloat16_keeps_float32_weights(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=2, dtype="bfloat16")
    exact = tiny(steps=2, out=config.out.parent / "exact")
    losses = [train(c, console=silent).loss for c in (config, exact)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert {value.dtype for value in weights(config.out / "model").values()} == {torch.float32}


def test_tensorboard_hears_what_is_logged(tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    class Writer:
        scalars: ClassVar[list] = []

        def __init__(self, folder: str) -> None:
            assert Path(folder).name == "tensorboard"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, step))

        def add_text(self, *_: object) -> None: ...
        def flush(self) -> None: ...
        def close(self) -> None: ...

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_tensorboard_available", lambda: True)
    train(tiny(steps=3), console=silent)
    assert {("train/bits_per_char", 1), ("train/support", 3), ("eval/loss", 3)} <= set(Writer.scalars)


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(tiny: Callable) -> None:
    screen, log = io.StringIO(), io.StringIO()
    train(tiny(steps=3), console=Console(file=screen, force_terminal=True, width=150), label="local-linear[x]")
    assert "local-linear[x]" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    train(tiny(steps=3, overwrite=True), console=Console(file=log, width=40), label="local-linear[x]")
    lines = log.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *(f"step {i}/3  local-linear[x]" for i in (1, 2, 3)),
        "step 3/3  held out",
    ]
    assert all("bits/char" in line and "tokens/s" in line and "support" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", language_models.names())
def test_two_processes_equal_one_with_twice_the_batch(
    name: str, tiny: Callable, tmp_path: Path, silent: Console
) -> None:
    one = tiny(batch=4, model=name, layers=2)
    train(one, console=silent)
    two = tiny(out=tmp_path / "two", batch=2, model=name, layers=2)
    file = tmp_path / "two.json"
    file.write_text(json.dumps(to_mapping(two)))
    program = tmp_path / "program.py"
    program.write_text("import sys; from regard.cli import main; sys.exit(main(sys.argv[1:]))")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    subprocess.run(
        [sys.executable, *command, "train", "--config", str(file)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for alone, together in zip(metrics(one.out), metrics(two.out), strict=True):
        for line in (alone, together):
            line.pop("eval_support", None)  # of the first batch of windows, which is not as large
        assert alone == pytest.approx(together, rel=2e-5)
    for name, value in weights(one.out / "model").items():
        torch.testing.assert_close(value, weights(two.out / "model")[name], rtol=0, atol=2e-5)
