"""The command line: one path through it, and every mistake as one line that says what is possible."""

import gc
import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from programs import python

from regard.checks import ArgumentError
from regard.cli import COMMANDS
from regard.cli.options import parse
from regard.models import language_models
from regard.registry import Registry
from regard.training import TrainConfig, TrainingInterrupted, TrainingStopped

TINY = "--context 16 --layers 1 --width 16 --heads 2 --batch 2 --device cpu".split()  # noqa: SIM905


def test_train_eval_generate(regard: Callable, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = regard("train", "--data", text_file, "--out", out, "--steps", 4, "--spec", "biweight", *TINY)
    assert trained.code == 0
    assert "bits/character" in trained.out
    assert "step 4/4" in trained.err  # progress, as lines since this is no terminal
    assert "Traceback" not in trained.err
    summary = json.loads((out / "summary.json").read_text())

    first, second = regard("eval", out), regard("eval", out)
    assert first.code == 0
    quiet = [line for line in first.out.splitlines() if not line.startswith("speed")]
    assert quiet == [line for line in second.out.splitlines() if not line.startswith("speed")]
    assert f"{summary['loss']:.6f} nats/token" in first.out
    perplexity = f"{math.exp(summary['loss']):.4f} per token; the first token is not predicted (no prefix token)"
    assert f"perplexity          {perplexity}\n" in first.out
    assert f"bits per character  {summary['bits_per_char']:.6f}" in first.out
    assert f"bits per byte       {summary['bits_per_byte']:.6f}" in first.out
    assert f"support             {summary['support']:.2f} keys" in first.out

    words = ("generate", out, "--prompt", "line ", "--max-new-tokens", 12, "--device", "cpu")
    texts = [regard(*words, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("line ")
    assert len(texts[0]) == len("line ") + 12 + 1
    noted = regard(*words, "--prompt", "ñ")
    assert noted.code == 0
    assert noted.err == "regard generate: note: the model does not know 'ñ'; read as <unk>\n"


def test_eval_on_another_text(regard: Callable, trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("line 3 says 漢 and no more\n" * 3)
    result = regard("eval", trained, "--data", other, "--context", 8, "--stride", 2)
    assert result.code == 0
    assert "over 77 tokens" in result.out  # 26 characters three times, all but the first
    assert "unknown characters  3 (each counted as one token <unk>)" in result.out
    assert regard("eval", trained / "model", "--data", other).code == 0


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("".join(f"'{i} says' {i * i % 97}'s 'more\n" for i in range(70)), "'"),  # quoted for the shell
        ("acgt" * 200, "acgt"),  # neither a blank nor a new line
        ("a\n" * 300, "a"),
        ("-a\n" * 300, None),  # only what would be read as an option
    ],
)
def test_what_is_proposed_at_the_end_works(regard: Callable, tmp_path: Path, text: str, prompt: str | None) -> None:
    data, out = tmp_path / "text.txt", tmp_path / "a run"
    data.write_text(text)
    proposed = regard("train", "--data", data, "--out", out, "--steps", 1, *TINY).out.splitlines()[-1]
    words = shlex.split(proposed.removeprefix("Try: regard "))
    assert words[:2] == ["generate", str(out)]
    assert words[2:3] == ([] if prompt is None else ["--prompt"])
    assert (prompt or "") in words[-1]
    short = ("--max-new-tokens", 3, "--device", "cpu")
    for command in (words, words[:2]):  # without a prompt too
        result = regard(*command, *short)
        assert result.code == 0
        assert "does not know" not in result.err
        assert set(result.out) <= set(text + "\n")


def test_sizes_that_evaluation_cannot_take(regard: Callable, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    too_large = Mock(side_effect=ArgumentError("attention: too large."))
    monkeypatch.setattr("regard.training.evaluation.evaluate", too_large)
    error = regard("eval", trained, "--batch", 3).error
    assert error == "regard eval: error: with --batch 3 and --context 16: attention: too large."


def test_a_flag_wins_over_the_file(regard: Callable, text_file: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(
        f'data = "{text_file}"\nsteps = 3\nseed = 7\ncontext = 16\nlayers = 1\nwidth = 16\nheads = 2\n'
        f'batch = 2\nspec = ["relumax"]\nlearning-rate = 1e-2\nout = "{out}"\n'
    )
    assert regard("train", "--config", file, "--steps", 2).code == 0
    saved = json.loads((out / "config.json").read_text())
    expected = {"steps": 2, "seed": 7, "spec": ["relumax"], "learning_rate": 0.01}
    expected["weight_decay"] = TrainConfig().weight_decay
    assert {key: saved[key] for key in expected} == expected
    # a run's own config is a config file too, and --resume needs nothing but the folder
    assert regard("train", f"--config={out / 'config.json'}", "--out", tmp_path / "other").code == 0
    assert regard("train", "--resume", "--out", out, "--steps", 3).code == 0
    assert json.loads((out / "summary.json").read_text())["step"] == 3


def test_help_of_everything(regard: Callable) -> None:
    from tyro._docstrings import get_field_docstring

    top = regard("--help")
    assert top.code == 0
    assert all(f"\n  {name} " in top.out for name in COMMANDS)
    assert regard().out == top.out
    for name in COMMANDS:
        result = regard(name, "--help")
        assert result.code == 0, name
        assert f"regard {name}" in result.out
    assert all(get_field_docstring(TrainConfig, field.name, ()) for field in fields(TrainConfig))
    train = " ".join(regard("train", "--help").out.replace("│", " ").split())
    for field in fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')} " in train
    assert "Optimiser steps. (default: 1000)" in train
    assert "--config FILE.toml" in train
    assert "(default: softmax)" in train
    for group in ("data", "model", "optimiser", "run"):
        assert f" {group} options " in train


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "regard: error: unknown command 'trian'. Did you mean 'train'?"),
        ("frobnicate", "Choose from: demo, train, eval, generate, reproduce, list, doctor."),
        ("train --stps 3", "regard train: error: unknown option --stps. Did you mean '--steps'"),
        ("train --steps x", "regard train: error: --steps is 'x', expected an integer."),
        ("train --steps", "regard train: error: --steps expects a value."),
        ("train --clip x", "--clip is 'x', expected a number."),
        ("train --dtype int8", "Expected one of ('float32', 'bfloat16')."),
        ("train extra", "unexpected argument 'extra'"),
        ("train --config", "--config expects a file"),
        ("train --config none.toml", "config file none.toml does not exist"),
        ("train --data nowhere.txt", "nowhere.txt does not exist"),
        ("train --data {text} --spec biwait", "--spec: "),
        ("train --data {text} --context 1000", "held-out part of {text} has"),
        ("demo --seed 5000000000 --data {text}", "demo: error: --seed is 5000000000, expected 0 to 4294967295."),
        ("train --data {text} --option", "--option expects a value."),
        ("eval", "regard eval: error: RUN is missing."),
        ("eval nowhere", "nowhere does not exist"),
        ("eval {text}", "{text} is a file; give a run folder"),
        ("generate {text}", "{text} is a file; give a run folder"),
        ("eval {run} --stride 16", "error: --stride is 16, expected 1 to 15"),
        ("eval {run} --data {text} --split test", "--split is for data sets; give --data datasets:NAME with it"),
        ("eval {run} --data datasets:nowhere.csv", "nowhere.csv does not exist"),
        ("eval {run} --context 9999", "less than one context of 9999"),
        ("eval {run}/model", "give the text with --data"),
        ("generate {run} --prompt=", "the prompt is empty"),
        ("list kernelz", "Did you mean 'kernels'"),
        ("list kernels presets", "expected one kind"),
        ("doctor please", "takes no arguments"),
        ("train {base} --window 1" + "0" * 30, "--window is 1e+30, expected at most 2147483647."),
        ("train {base} --steps 2000000000 --batch 2000000000 --accumulate 2000000000", "sequences; give smaller"),
        ("train {base} --weight-decay inf", "--weight-decay is inf, expected at most 2147483647."),
        ("train {base} --width 2000000000", "a number is too large"),
        ("train {base} --option head_dim=1" + "0" * 21, "a number is too large|head_dim is 1000000000000000000000, "),
        ("train {base} --config {deep_json}", "nested too deeply|not valid JSON"),
        ("train {base} --config {deep_toml}", "nested too deeply|not valid TOML"),
        ("train {base} --spec gaussian*nearest(k=1e400)", "k is inf"),
        ("generate {run} --max-new-tokens 1" + "0" * 21, "--max-new-tokens is 1e+21, expected at most 2147483647."),
        ("train --config {key_toml}", "error: unknown key 'step' in {key_toml}. Did you mean 'steps'"),
    ],
)
def test_a_mistake_is_one_line(regard, text_file, trained, tmp_path, words, message):
    places = {"text": text_file, "run": trained, "tmp": tmp_path}
    places["base"] = f"--data {text_file} {' '.join(TINY)} --steps 1"
    files = {"key.toml": "step = 3", "deep.json": "[" * 100_000, "deep.toml": f"spec={'[' * 100_000}{']' * 100_000}"}
    for name, content in files.items():
        places[name.replace(".", "_")] = tmp_path / name
        (tmp_path / name).write_text(content)
    arguments = words.format(**places).split()
    if arguments[0] == "train" and "--out" not in arguments and words not in ("train --steps", "train --config"):
        arguments += ["--out", str(tmp_path / "run")]
    result = regard(*arguments)
    assert result.code == 2
    assert result.error.startswith("regard")
    assert any(part in result.error for part in message.format(**places).split("|"))
    assert result.out == ""
    assert not (tmp_path / "run").exists()


def test_a_device_that_is_not_there(regard: Callable, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    result = regard("train", "--data", text_file, "--device", "cuda")
    assert result.code == 2
    assert result.error == "regard train: error: device 'cuda' is not available here; available: cpu."


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (TrainingStopped("cannot write\nx"), 1, "regard train: error: cannot write x"),
        (TrainingInterrupted("interrupted after step 2"), 130, "regard train: interrupted after step 2"),
        (KeyboardInterrupt(), 130, "regard train: interrupted"),
        (OSError(28, "No space left"), 2, "regard train: error: [Errno 28] No space left"),
        (RecursionError(), 2, "regard train: error: the input is nested too deeply."),
        (MemoryError(), 2, "regard train: error: there is not enough memory for these sizes (MemoryError)."),
    ],
)
def test_what_ends_a_command_has_its_exit_code(regard, text_file, monkeypatch, error, code, said):
    monkeypatch.setattr("regard.training.run.train", Mock(side_effect=error))
    result = regard("train", "--data", text_file, "--device", "cpu")
    assert (result.code, result.err) == (code, f"{said}\n")


def test_list_shows_all_that_is_registered(regard: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    import regard as package

    everything = regard("list", "all").out
    assert "\nmodels:\n    `regard list models` shows them\n" in everything  # which takes seconds
    for kind, registry in package.registries().items():
        assert registry.names()
        for name in registry.names():
            assert f"\n  {name}" in everything, (kind, name)
    for name, preset in package.presets().items():
        assert f"\n  {name:<19}{'*'.join(preset.parts())}\n" in everything
    assert "\n  biweight           biweight*adaptive\n" in everything
    default, presets = regard("list").out, regard("list", "presets").out
    assert default.startswith(presets)
    assert set(default.removeprefix(presets).split(": ")[1].rstrip(".\n").split(", ")) >= {"all", "kernels", "models"}
    assert regard("list", "kernel").out == regard("list", "kernels").out
    assert regard("list", "kernels").out in everything

    class Fresh:
        """A thing of today. It has more to say."""

    shelf: Registry = Registry("toy")
    shelf.register("fresh")(Fresh)
    monkeypatch.setattr(package, "registries", lambda: {"toy": shelf})
    assert regard("list", "toys").out == "toys:\n  fresh  A thing of today.\n"


def test_list_shows_models_and_mixers_with_their_options(regard: Callable) -> None:
    from regard.models import token_mixers

    shown = regard("list", "token-mixers").out
    for name, mixer in token_mixers.items():
        assert f"\n  {name} " in shown
        assert all(f"{option}=" in shown for option in mixer.defaults)
    shown = regard("list", "models").out
    for name, entry in language_models.items():
        assert entry.about in shown.split(f"\n  {name} ")[1].split("\n  t")[0]
    transformer = shown.split("\n  transformer ")[1].split("\n  iclm")[0].split("\n  memory-mosaic")[0]
    assert "flags: --kv-heads, --mlp-width, --window, --temperature, --ridge, --qk-norm" in transformer
    assert "feed_forward=swiglu, norm=rms" in transformer
    assert "head_dim=none" in transformer
    assert "tie_word_embeddings=true" in transformer
    assert "vocab_size" not in shown
    assert "hidden_size" not in shown
    assert regard("list", "model").out == shown
    # a full stop in a formula does not end the summary
    assert "\n  dot  q . K (equation 6)." in regard("list", "slot-scores").out


@pytest.mark.parametrize("words", [
    "--option a=1 b=2 --spec c d", "--option a=1 --seed 0 --spec c,d --option=b=2", "--mixers=c,d --option a=1 b=2",
])  # fmt: skip
def test_options_may_stand_together_or_apart(words: str) -> None:
    config = parse(TrainConfig, words.split(), command="train")
    assert (config.option, config.spec) == (("a=1", "b=2"), ("c", "d"))


def test_doctor_tells_what_can_run_and_why_not(regard: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.pairwise import dispatch

    result = regard("doctor")
    assert result.code == 0
    assert f"torch         {torch.__version__}" in result.out
    assert "reference  can run" in result.out
    monkeypatch.setattr(dispatch, "implementations", lambda: [("warp", "no warp drive on this machine")])
    assert "warp  cannot run: no warp drive on this machine" in regard("doctor").out


@pytest.mark.parametrize(
    ("interpreted", "cuda", "says"),
    [("0", False, "installed, but no CUDA device"), ("1", False, "can run"), ("0", True, "can run")],
)
def test_doctor_asks_for_a_device_for_triton(interpreted, cuda, says, monkeypatch):
    from regard import doctor
    from regard.pairwise import dispatch

    monkeypatch.setattr(dispatch, "implementations", lambda: [("triton", None)])
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert doctor._implementations() == {"triton": says}


def test_a_missing_extra_is_named(regard: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("regard.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert regard("doctor").code == regard("list", "kernels").code == 0  # which need no model
    result = regard("train", "--help")
    assert (result.code, result.error) == (2, "regard train: error: tyro is not installed; pip install 'regard[lm]'")
    for name in [name for name in sys.modules if name.startswith("regard_recipes.lib.reproduce")]:
        monkeypatch.delitem(sys.modules, name)
    assert "tyro is not installed; pip install 'regard[recipes]'" in regard("reproduce", "errata").error


@pytest.mark.slow
def test_recipes_whose_extra_is_not_installed() -> None:
    """One line that names the command, without a warning, and never a part of the recipes."""
    wrong = ("reproduce", "reproduce errata", "reproduce --help", "list recipes")
    program = (
        "import contextlib, sys; sys.modules['numpy'] = None\n"
        "from regard.cli import main\n"
        "with contextlib.redirect_stderr(sys.stdout):\n"
        f"    assert [main(words.split()) for words in {wrong!r}] == [2] * {len(wrong)}\n"
        "    assert main(['list', 'all']) == 0\n"
    )
    line = "numpy is not installed; pip install 'regard[recipes]'"
    found = python("-W", "ignore::UserWarning", "-c", program)  # torch has a warning of its own
    *lines, rest = found.split("\n", len(wrong))
    assert lines == [f"regard {words.split()[0]}: error: {line}" for words in wrong]
    assert f"\nrecipes:\n    {line}\n" in rest
    assert "Warning" not in rest


HEAVY = ("torch", "transformers", "accelerate", "tokenizers", "matplotlib", "numba", "regard_recipes.long_text.needle")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        *((words, ()) for words in ("--help", "--version", "list --help", "doctor --help", "trian")),
        *((f"{name} --help", ()) for name in ("demo", "train", "eval", "generate")),
        ("train --stps 3", ()),
        ("doctor", ("torch",)),
        ("list presets", ("torch",)),
        ("list slot-scores", ("torch",)),
        ("list", ("torch",)),
        ("list all", ("torch", "regard_recipes.long_text.needle")),
        ("reproduce --help", ("torch", "regard_recipes.long_text.needle")),
        ("reproduce needle --help", ("torch", "regard_recipes.long_text.needle")),
    ],
)
def test_what_is_not_imported(words: str, wanted: tuple[str, ...]) -> None:
    """What is slow to import waits until a model is needed; numba only until doctor asks whether it is there."""
    program = f"main({words.split()!r})\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    found = python("-c", f"import sys; from regard.cli import main\n{program}")
    assert set(found.splitlines()[-1].split()) == set(wanted)


def test_a_damaged_line_of_metrics_is_left_out(regard: Callable, text_file: Path, tmp_path: Path) -> None:
    """As after a power cut: NULs where a line should be, and half a line at the end."""
    out = tmp_path / "run"
    words = ("train", "--data", text_file, "--out", out, *TINY, "--log-every", 1, "--save-every", 2)
    assert regard(*words, "--steps", 4).code == 0
    file = out / "metrics.jsonl"
    first, second, *rest = file.read_bytes().splitlines(keepends=True)
    damaged = [b"\0" * 40 + b"\n", b'{"step": "2"}\n', b"\xff\n", b"[" * 100_000 + b"\n"]
    file.write_bytes(b"".join([first, *damaged, *rest, second[:9]]))
    (out / "summary.json").unlink()
    resumed = regard("train", "--resume", "--out", out, "--steps", 6)
    assert resumed.code == 0
    assert "metrics.jsonl: removed 4 damaged lines" in resumed.err
    steps = [json.loads(line)["step"] for line in file.read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("words", [["doctor", "--help"], ["list", "nothing-of-this-name"]])
def test_garbage_is_collected_again_after_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from regard.cli import main

    main(words)
    assert gc.isenabled()
