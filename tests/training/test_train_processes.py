"""Runs in two processes, started by torchrun or accelerate: the numbers of one process with batches twice as large."""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from mistakes import refuses
from programs import python
from safetensors.torch import load_file
from steps import logged, same_model, same_up_to_rounding

from regard.models import language_models
from regard.training import TrainConfig, rerun, train
from regard.training.device import shard

pytestmark = pytest.mark.slow
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
)
TINY = "--context 16 --spec biweight --layers 1 --width 16 --heads 2 --log-every 1 --eval-every 3 --save-every 3"


def two(*arguments: str, launch: tuple[str, ...] = TORCHRUN, code: int = 0) -> str:
    """What a command prints in two processes, which must end with this exit code."""
    return python(*launch, *arguments, timeout=300, code=code, OMP_NUM_THREADS="1")


def losses(out: Path) -> list[float]:
    return [line["loss"] if "loss" in line else line["eval_loss"] for line in logged(out)]


def command(text_file: Path, out: Path, **changes: int) -> list[str]:
    sizes = {"steps": 6, "batch": 2, "eval-tokens": 64, **changes}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return ["-m", "regard", "train", "--data", str(text_file), "--out", str(out), "--device", "cpu",
            *TINY.split(), *flags]  # fmt: skip


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra data")
def test_two_processes_read_a_stream_as_one_does(run, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    lines = tmp_path / "lines.txt"
    lines.write_text(text_file.read_text().replace(" ", "\n"))
    run(out=tmp_path / "one", batch=4, data=Path(f"datasets:{lines}"), stream=True, tokenizer="byte")
    words = [word.replace(str(lines), f"datasets:{lines}") for word in command(lines, tmp_path / "two")]
    two(*words, "--stream", "--tokenizer", "byte")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    places = [(tmp_path / name / "checkpoint-3" / "stream.json").read_text() for name in ("one", "two")]
    assert places[0] == places[1]


@pytest.mark.parametrize("name", language_models.names())
def test_two_processes_are_one_with_twice_the_batch(name: str, run: Callable, text_file: Path, tmp_path: Path) -> None:
    sizes = {"model": name, "layers": 2}
    run(out=tmp_path / "one", batch=4, **sizes)
    assert two(*command(text_file, tmp_path / "two"), "--model", name, "--layers", "2").count("run folder") == 1
    same_up_to_rounding(tmp_path / "one", tmp_path / "two", 1e-5 if name == "transformer" else 2e-5)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    run(out=tmp_path / "accumulated", batch=2, accumulate=2, **sizes)
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


@pytest.mark.parametrize("options", [(), ("--shard",)], ids=["whole", "sharded"])
def test_accelerate_launch_starts_the_same(run, text_file, tmp_path, options):
    run(out=tmp_path / "one", batch=4)
    two(*command(text_file, tmp_path / "two"), *options, launch=ACCELERATE)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)


def test_two_processes_resume(text_file: Path, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    for out in (straight, broken):
        two(*command(text_file, out))
    (broken / "summary.json").unlink()  # as if it had been killed after step 3
    for part in ("checkpoint-6", "model"):
        shutil.rmtree(broken / part)
    two("-m", "regard", "train", "--resume", "--out", str(broken))
    assert losses(broken) == losses(straight)
    same_model(straight, broken)


def test_processes_that_disagree(text_file: Path, tmp_path: Path) -> None:
    script = tmp_path / "disagree.py"
    words = command(text_file, tmp_path / "run")[3:]
    script.write_text(
        f"import os, sys\nfrom regard.cli import main\n"
        f"sys.exit(main(['train', *{words!r}, '--seed', os.environ['RANK']]))\n"
    )
    assert two(str(script), code=1).count("--seed is 1 in process 1, but 0 in process 0") == 2
    assert not (tmp_path / "run").exists()


SHARDED = """
import sys
from regard.cli import main
from regard.training import trainer
split = trainer.shard
def watched(model):
    split(model)
    weights = list(model.parameters())
    print("holds", sum(w.to_local().numel() for w in weights), "of", sum(w.numel() for w in weights), flush=True)
trainer.shard = watched
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("option", ["--layers=2", "--option=memories=FwPKM@0"])
def test_a_sharded_model_is_one_with_twice_the_batch(text_file: Path, tmp_path: Path, option: str) -> None:
    """Losses, weights and optimiser states are those of one process, and so are the files; it continues bit for bit."""
    one, both, broken = tmp_path / "one", tmp_path / "both", tmp_path / "broken"
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    python(*command(text_file, one, batch=4), option, timeout=300)
    shown = two(str(script), *command(text_file, both)[2:], option, "--shard")
    parts = [line.split() for line in shown.splitlines() if line.startswith("holds")]
    whole = int(parts[0][3])
    assert sum(int(part[1]) for part in parts) == whole
    assert all(0.3 < int(part[1]) / whole < 0.7 for part in parts)
    assert losses(both) == pytest.approx(losses(one), abs=1e-5)
    names = [{path.name for path in (run / "checkpoint-6").iterdir()} - {"rng_state.pth"} for run in (one, both)]
    assert names[0] == names[1] - {"rng_state_0.pth", "rng_state_1.pth"}
    for file in ("model/model.safetensors", "checkpoint-6/model.safetensors"):
        torch.testing.assert_close(load_file(both / file), load_file(one / file), rtol=0, atol=1e-5)
    states = [torch.load(run / "checkpoint-6" / "optimizer.pt", weights_only=True) for run in (one, both)]
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=1e-5)

    shutil.copytree(both, broken)
    for part in ("checkpoint-6", "model"):
        shutil.rmtree(broken / part)
    two("-m", "regard", "train", "--resume", "--out", str(broken))
    assert losses(broken) == losses(both)
    same_model(both, broken)


def test_a_sharded_run_stops_at_a_number_that_is_not_finite(text_file: Path, tmp_path: Path) -> None:
    words = [*command(text_file, tmp_path / "run"), "--learning-rate", "1e30", "--clip", "1e30", "--shard"]
    said = two(*words, code=1)
    assert said.count("regard train: error: the ") == 2
    assert "first non-finite tensor: " in said
    assert rerun(tmp_path / "run" / "non-finite") is not None


def test_what_several_processes_cannot_do(tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refuses("ACCELERATE_USE_FSDP is set; unset it, and give --shard", train, tiny())
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    refuses("--shard splits the model over several processes, got 1", train, tiny(shard=True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses("--shard does not take --optimizer muon", train, tiny(shard=True, optimizer="muon"))
    model = torch.nn.Module()
    model.gate = torch.nn.Parameter(torch.tensor(1.0))
    refuses("parameter gate has no axes and cannot be split", shard, model)
    from regard.training.task.run import train_task

    refuses("a run on a task takes one process, got 2", train_task, TrainConfig(task="mqar", out=tmp_path / "task"))


@pytest.mark.parametrize("name", ["context_parallel", "fsdp"])
def test_examples_of_several_processes(name: str, tmp_path: Path) -> None:
    """Each compares its numbers with those of one process."""
    script = Path(__file__).parents[2] / "examples" / f"{name}.py"
    assert two(str(script), str(tmp_path / "checkpoint")).count("equal those of one process") == 2
