"""No code that lies in a folder runs, whatever standard input holds."""

import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import COMMANDS, answer, change_json, reseal

from regard.models import HybridForCausalLM
from regard.training import load_model

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer

def generate(*args, **kwargs):
    raise SystemExit("ran")
"""


class Yes(io.TextIOBase):
    """A standard input that says yes for ever."""

    def readline(self, *_: object) -> str:
        return "y\n"

    read = readline

    def isatty(self) -> bool:
        return True


class Boom:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.path, "ran"))


def poison(folder: Path, marker: Path) -> None:
    """Put a module into a folder, and its name into every file where transformers looks for one."""
    code = EVIL.format(marker=str(marker))
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    classes = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    tokenizer = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"], "AutoProcessor": "evil.Tokenizer"}
    names = {"tokenizer_class": "Evil", "processor_class": "Evil", "custom_generate": "custom_generate"}
    for name in ("processor_config.json", "preprocessor_config.json", "generation_config.json", "adapter_config.json"):
        (folder / name).write_text(json.dumps({"auto_map": {**classes, **tokenizer}, **names}))
    change_json(folder / "tokenizer_config.json", lambda table: {**table, **names, "auto_map": tokenizer})
    (folder / "chat_template.jinja").write_text("{{ cycler.__init__.__globals__.os.system('true') }}")
    if (folder / "config.json").exists():
        change_json(folder / "config.json", {"auto_map": {**classes, **tokenizer}})
    for name in ("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "scaler.pt"):
        (folder / name).write_bytes(pickle.dumps(Boom(marker), protocol=2))


@pytest.fixture
def marker(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the code in the run folder would write."""
    marker = tmp_path / "marker"
    for folder in (run_folder / "tokenizer", run_folder / "model", *run_folder.glob("checkpoint-*")):
        poison(folder, marker)
    for folder in run_folder.glob("checkpoint-*"):  # Trainer would stumble over it
        (folder / "scaler.pt").unlink()
        shutil.rmtree(folder / "custom_generate")
    reseal(run_folder)
    monkeypatch.setattr(sys, "stdin", Yes())
    return marker


def test_no_command_runs_code_of_the_folder(
    regard: Callable, run_folder: Path, marker: Path, command: Callable, right_answer: Callable
) -> None:
    result = regard(*command(run_folder))
    assert not marker.exists()
    assert "code" not in result.err.lower()  # nobody was asked
    assert result.code == 0, result.err
    assert answer(result) == right_answer(command)


def test_a_checkpoint_in_place_of_the_model(regard: Callable, run_folder: Path, marker: Path) -> None:
    (run_folder / "model").rename(run_folder / "other")
    assert regard("eval", run_folder, "--device", "cpu").code == 0
    assert not marker.exists()


def test_no_loader_runs_code_of_the_folder(run_folder: Path, marker: Path) -> None:
    model, tokenizer = load_model(run_folder / "model", call="test")
    assert type(model) is HybridForCausalLM
    assert type(tokenizer).__module__.startswith("transformers.")
    assert tokenizer.chat_template is None
    HybridForCausalLM.from_pretrained(run_folder / "model")
    assert not marker.exists()


def test_an_unknown_type_is_not_looked_for_in_the_folder(run_folder: Path, marker: Path, regard: Callable) -> None:
    change_json(run_folder / "model" / "config.json", {"model_type": "evil"})
    reseal(run_folder)
    assert "has type 'evil', which is unknown" in regard("eval", run_folder).error
    assert not marker.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_does_not_run(run_folder: Path, marker: Path, regard: Callable, name: str) -> None:
    (run_folder / "checkpoint-4" / name).write_bytes(pickle.dumps(Boom(marker), protocol=2))
    reseal(run_folder)
    assert f"{name}: cannot be read" in regard(*COMMANDS["resume"](run_folder)).error
    assert not marker.exists()
