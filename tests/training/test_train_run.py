"""A whole run: what lies in the folder, what resumes bit for bit, what is refused, and what local linear models log."""

import io
import json
import math
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mistakes import refuses
from rich.console import Console
from steps import At, crash, logged, metrics, same_model, same_up_to_rounding, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.integrations import integration_utils

from regard.training import load_model, train
from regard.training.data.tokenizers import bpe_tokenizer
from regard.training.quiet import unconverged_once
from regard.training.storage.checkpoints import checkpoints, fault, last_complete

SIZES = {"steps": 8, "save_every": 4, "accumulate": 2}


@pytest.fixture
def straight(run: Callable, tmp_path: Path) -> Path:
    """A run of eight steps without interruption."""
    run(out=tmp_path / "straight", **SIZES)
    return tmp_path / "straight"


def test_the_run_folder(tiny: Callable, run: Callable, out: Path) -> None:
    summary = run(steps=7, keep=2)
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "run.json", "summary.json", "metrics.jsonl", "tokenizer", "model", "run.lock"),
        *("checkpoint-6", "checkpoint-7"),
    }
    assert not list(out.rglob("*.bin"))  # no pickled weights or arguments
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    first = lines[0]
    assert first["tokens"] == 2 * 16
    assert first["bits_per_char"] == pytest.approx(first["loss"] / math.log(2))  # one token a character
    content = tiny().data.read_text()
    learned = content[: len(content) - round(len(content) * 0.1)]
    assert first["bits_per_byte"] == pytest.approx(first["bits_per_char"] * len(learned) / len(learned.encode()))
    assert 1 <= first["support"] <= 8.5  # softmax would have (16 + 1) / 2
    assert not {"empty_rows", "negative_mass", "solver_iterations", "solver_residual", "unconverged"} & set(first)
    assert json.loads((out / "summary.json").read_text())["loss"] == summary.loss
    assert (summary.step, summary.parameters) == (7, sum(w.numel() for w in weights(out / "model").values()))
    for folder in ("model", "checkpoint-7"):
        model = AutoModelForCausalLM.from_pretrained(out / folder)
        assert model.config.mixers == ["biweight"]
        assert model.config.use_cache is True  # Trainer switches it off while it trains
        assert AutoTokenizer.from_pretrained(out / folder)("the")["input_ids"]


def test_empty_rows_are_logged_where_there_can_be_any(run: Callable, tmp_path: Path) -> None:
    """A threshold above every score leaves all rows empty, one below every score none."""
    for bias, rate in ((-50, 1.0), (50, 0.0)):
        run(out=tmp_path / str(bias), spec=(f"biweight*fixed(bias={bias})",), steps=1)
        assert metrics(tmp_path / str(bias))[0]["empty_rows"] == rate


def test_two_runs_are_bit_equal(run: Callable, straight: Path, out: Path, default_dtype: Callable) -> None:
    torch.manual_seed(99)  # whatever the program drew before
    default_dtype(torch.float64)
    run(**SIZES)
    assert torch.get_default_dtype() == torch.float64
    assert metrics(out) == metrics(straight)
    same_model(straight, out)


def test_half_and_half_equals_straight(run: Callable, refused: Callable, straight: Path, out: Path) -> None:
    refused("crash", At(6, crash), error=SystemError, **SIZES)  # two steps past the checkpoint are lost
    assert [line["step"] for line in metrics(out)][-1] == 6
    torch.manual_seed(99)
    run(resume=True, **SIZES)
    assert metrics(out) == metrics(straight)
    same_model(straight, out)
    states = [torch.load(folder / "checkpoint-8/optimizer.pt", weights_only=True) for folder in (straight, out)]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


@pytest.mark.parametrize("step", [4, 6, 8])
def test_the_first_mean_after_a_resume_counts_the_steps_before(run, refused, tmp_path, out, step):
    """Checkpoints at 3, 6, 9 and logs at 1, 5, 10: the log at 5 or 10 is the mean since the last one, bit for bit."""
    sizes = {"steps": 10, "log_every": 5, "save_every": 3, "eval_every": 99}
    run(out=tmp_path / "whole", **sizes)
    refused("crash", At(step, crash), error=SystemError, **sizes)
    run(resume=True, **sizes)
    assert metrics(out) == metrics(tmp_path / "whole")


def test_damaged_checkpoints_are_passed_over(tiny: Callable, straight: Path) -> None:
    (straight / "summary.json").unlink()
    damaged = straight / "checkpoint-8" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    reason = "skipping checkpoint-8: model.safetensors differs from what was written"
    assert last_complete(straight) == (straight / "checkpoint-4", [reason])
    log = io.StringIO()
    train(tiny(out=straight, resume=True, **SIZES), console=Console(file=log, width=200))
    assert reason in log.getvalue()
    assert fault(straight / "checkpoint-8") is None  # written again, whole
    for name, reason in (("optimizer.pt", "optimizer.pt is missing"), ("COMPLETE.json", "COMPLETE.json is")):
        (straight / "checkpoint-8" / name).unlink()
        assert reason in (fault(straight / "checkpoint-8") or "")


def test_more_steps_after_the_end(run: Callable, refused: Callable, out: Path) -> None:
    run(steps=3)
    refused("has finished 3 steps; give a larger --steps", steps=3, resume=True)
    assert run(steps=5, resume=True).step == 5
    assert [line["step"] for line in metrics(out) if "loss" in line] == [1, 2, 3, 4, 5]


def test_resume_refuses_another_run(run: Callable, refused: Callable, out: Path, text_file: Path) -> None:
    again = {"steps": 5, "resume": True}
    refused("holds no run", **again)
    run(steps=3)
    refused(r"--width is 8 but the run in .* began with 16; only --steps, --device, --report-to and", width=8, **again)
    text_file.write_text(text_file.read_text() + "more")
    refused("is not the one the run", **again)
    text_file.write_text(text_file.read_text()[:-4])
    for folder in checkpoints(out):
        (folder / "COMPLETE.json").unlink()
    refused("no complete checkpoint", **again)


def test_a_folder_that_exists(run: Callable, refused: Callable, tmp_path: Path, out: Path) -> None:
    out.mkdir()
    run(steps=1)  # an empty folder is fine
    refused("--resume, replace it with --overwrite", steps=1)
    (out / "notes.md").write_text("mine")
    before = (out / "run.json").stat().st_mtime_ns
    refused("nonsense", steps=2, overwrite=True, spec=("nonsense",))  # a mistake deletes nothing
    assert (out / "run.json").stat().st_mtime_ns == before
    run(steps=2, overwrite=True)
    assert (out / "notes.md").read_text() == "mine"
    assert len(metrics(out)) == 2
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    refused("holds no run; choose another folder", out=foreign, overwrite=True)
    assert (foreign / "thesis.tex").exists()
    (tmp_path / "file").write_text("")
    refused("is a file", out=tmp_path / "file")
    refused(r"cannot write to --out .*: Not a directory", out=tmp_path / "file" / "run")


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        (10, "has 9 tokens to train on, less than one --context 16"),
        (100, r"held-out part of .* has 10 tokens, less than one --context 16"),
        (0, "is empty"),
    ],
)
def test_texts_that_are_too_short(refused: Callable, tmp_path: Path, out: Path, characters: int, message: str) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * characters)
    refused(message, data=path)
    assert not out.exists()  # nothing was begun


def test_models_that_cannot_be_loaded(run: Callable, tmp_path: Path, out: Path) -> None:
    refuses("neither a run nor a model", load_model, tmp_path, call="eval")
    run(steps=1)
    path = out / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    (out / "model" / "COMPLETE.json").unlink()
    refuses("cannot load the model in", load_model, out, call="eval")
    torch.save({}, out / "model" / "pytorch_model.bin")  # a pickle beside it is not an alternative
    path.unlink()
    refuses("cannot load the model in", load_model, out, call="eval")


def test_accumulated_batches_are_one_batch(run: Callable, tmp_path: Path) -> None:
    run(out=tmp_path / "whole", batch=4, eval_every=9)
    run(out=tmp_path / "parts", batch=1, accumulate=4, eval_every=9)
    same_up_to_rounding(tmp_path / "whole", tmp_path / "parts")


def test_the_learning_rate_warms_up_and_falls_along_a_cosine(run: Callable, out: Path) -> None:
    run(steps=12, warmup=0.25, learning_rate=0.02, final_learning_rate=0.1, eval_every=99)
    rates = [line["learning_rate"] for line in metrics(out)]
    want = [0.0, 0.02 / 3, 0.04 / 3]
    want += [0.02 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 9)) / 2) for i in range(9)]
    assert rates == pytest.approx(want)


def test_bfloat16_keeps_float32_weights(run: Callable, tmp_path: Path, out: Path) -> None:
    losses = [run(steps=2, dtype="bfloat16").loss, run(steps=2, out=tmp_path / "exact").loss]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert {value.dtype for value in weights(out / "model").values()} == {torch.float32}


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_tensorboard_hears_what_is_logged(run: Callable, out: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(steps=2, save_every=1, report_to=("tensorboard",))
    run(steps=3, save_every=1, resume=True, report_to=("tensorboard",))
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    logged = {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(logged)
    assert [event.step for event in events.Scalars("eval/loss")] == [3]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_other_trackers_hear_what_is_logged(run, refused, monkeypatch, name):
    told = []

    class Tracker(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            told.append((args.run_name, args.project))

        def on_log(self, args, state, control, logs=None, **_):
            told.append((state.global_step, "support" in logs))

    if find_spec(name) is None:
        missing = f"--report-to {name} needs the package {name}, which is not installed; pip install {name}"
        refused(missing, report_to=(name,))
    monkeypatch.setattr("regard.training.validation.find_spec", lambda name: True)
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, name, Tracker)
    run(steps=2, eval_every=9, report_to=(name,))
    assert told[:3] == [("run", "regard"), (1, True), (2, True)]


def test_a_terminal_shows_a_bar_and_a_file_shows_lines(tiny: Callable) -> None:
    screen, log = io.StringIO(), io.StringIO()
    train(tiny(steps=3), console=Console(file=screen, force_terminal=True, width=150), label="local-linear[x]")
    assert "local-linear[x]" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    train(tiny(steps=3, overwrite=True), console=Console(file=log, width=40), label="local-linear[x]")
    lines = log.getvalue().splitlines()
    steps = [f"step {i}/3  local-linear[x]" for i in (1, 2, 3)]
    assert [line.split(":")[0] for line in lines] == [*steps, "step 3/3  held out"]
    assert all("bits/char" in line and "tokens/s" in line and "support" in line for line in lines)


def test_a_run_with_the_tokenizer_of_a_folder_resumes_without_the_folder(run, text_file, tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bpe_tokenizer(text_file.read_text()).save_pretrained("words")
    run(tokenizer="words", context=8, steps=2)
    shutil.rmtree("words")
    model, tokenizer = load_model(str(out))
    assert len(tokenizer) == model.config.vocab_size > 258
    assert run(tokenizer="words", context=8, steps=4, resume=True).step == 4


def test_a_run_with_a_learned_ridge(tiny: Callable) -> None:
    log = io.StringIO()
    config = tiny(spec=("softmax", "local-linear[biweight]"), layers=2, ridge="learned(start=0.2)", qk_norm="rms")
    train(config, console=Console(file=log, width=200))
    lines = [line for line in logged(config.out) if "loss" in line]
    assert len(lines) == 6
    for line in lines:
        assert 0 < line["density"] <= 1
        assert line["negative_mass"] > 0
        assert 0 <= line["solver_residual"] < 1e-2
        assert line["unconverged"] == 0 <= line["solver_iterations"]
    shown = [line for line in log.getvalue().splitlines() if "held out" not in line]
    assert all("negative 0." in line and "solver steps" in line for line in shown)
    model = AutoModelForCausalLM.from_pretrained(config.out / "model")
    assert model.config.ridges == ["fixed", "learned(start=0.2)"]
    assert model.config.qk_norm == "rms"
    assert model.model.layers[1].self_attn.ridge_proj.weight.abs().max() > 1e-4  # it began at 0


def test_systems_that_do_not_converge_are_shown_once(tiny: Callable) -> None:
    log = io.StringIO()
    config = tiny(spec=("gaussian*linear(ridge=0.0001,solver=cg(max_iter=1))",), heads=1, steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        train(config, console=Console(file=log, width=400))
    said = [line for line in log.getvalue().splitlines() if "systems did not converge" in line]
    assert len(said) == 1
    assert "Shown once" in said[0]
    assert "solver=cholesky" in said[0]
    assert all(line["unconverged"] > 0 for line in logged(config.out) if "loss" in line)


def test_other_warnings_go_where_they_went() -> None:
    said: list[str] = []

    def run() -> None:
        with unconverged_once(said.append):
            warnings.warn("another", UserWarning, stacklevel=1)
            for _ in range(3):
                warnings.warn("x: some systems did not converge (y)", RuntimeWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="another") as caught:
        run()
    assert len(said) == 1
    assert [str(w.message) for w in caught] == ["another"]
    with pytest.warns(RuntimeWarning, match="did not converge"):  # as before, outside
        warnings.warn("x: some systems did not converge (y)", RuntimeWarning, stacklevel=1)
