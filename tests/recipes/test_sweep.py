"""Sweeps from a TOML file: the grid, its mistakes, and what a run is continued with."""

import json
import pickle
import re
from pathlib import Path

import pytest
from mistakes import error_of, refuses

from regard.cli import main
from regard_recipes.lib.recipe import check_shared
from regard_recipes.lib.results import Journal
from regard_recipes.sweep.sweep import Sweep

GRID = """
[task]
name = "sort"
setting = "quick"
symbols = [3, 4]
least = 2
most = 3

[train]
seeds = 2
rates = [1e-3, 1e-2]
steps = 4
batch = 2
examples = 4

[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2

[models.softmax]
mixers = "softmax"

[models.mosaic]
kind = "memory-mosaic"
"""


def sweep(folder: Path, text: str = GRID) -> Sweep:
    file = folder / "grid.toml"
    file.write_text(text)
    return Sweep.configure(file=file, out=folder / "out", workers=0)


def test_the_grid(tmp_path: Path) -> None:
    made = sweep(tmp_path)
    check_shared(made)
    cells = made.cells()
    assert len(cells) == 2 * 2 * 2
    assert {cell["task"] for cell in cells} == {"symbols 3", "symbols 4"}
    assert {cell["rate"] for cell in cells} == {1e-3, 1e-2}
    assert (made.seeds, made.steps) == (2, 4)
    task = made.training_tasks()["symbols 4"]
    assert type(made.make_model("mosaic", task)).__name__ == "MemoryMosaicForCausalLM"


def test_a_run_continues_only_with_the_same_file(tmp_path: Path) -> None:
    """Whatever its order: models are shown in that of the file; the options that a journal keeps have none."""
    made, other = sweep(tmp_path), sweep(tmp_path, "\n\n".join(reversed(GRID.split("\n\n"))))
    assert made.trained == tuple(reversed(other.trained)) == ("softmax", "mosaic")
    assert pickle.loads(pickle.dumps(other)).trained == other.trained
    assert made.content == other.content == json.dumps(made.table, sort_keys=True)  # as in journals of earlier versions
    Journal.open(made, []).begin({})
    before = Journal.open(made, []).header["config"]
    assert Journal.open(other, ["--again"]).header["command"] == "regard reproduce sweep"
    moved = (tmp_path / "grid.toml").rename(tmp_path / "moved.toml")
    assert Journal.open(Sweep.configure(file=moved, out=tmp_path / "out"), []).header["config"] == before
    changed = sweep(tmp_path, GRID.replace("mixers", "feed_forward = 'none'\nmixers"))
    refuses("unfinished run with other options", Journal.open, changed, [])


def test_a_file_is_named_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep(tmp_path)
    assert main(["reproduce", "sweep", "--estimate", "--file", str(tmp_path / "grid.toml")]) == 0
    assert "symbols 4, mosaic" in capsys.readouterr().out


def test_a_setting_is_an_axis_and_an_error_chooses_no_rate(tmp_path: Path) -> None:
    grid = GRID.replace('"sort"', '"regbench"').replace('"quick"', '["quick", "paper-1k"]')
    grid = re.sub("(symbols|least|most) = .*\n", "", grid)
    made = sweep(tmp_path, grid.replace("[train]", "[train]\nmetric = 'valid'"))
    check_shared(made)
    assert {task: made.training_tasks()[task].automata for task in made.training_tasks()} == {
        "setting quick": 0, "setting paper-1k": 1000
    }  # fmt: skip
    wrong = sweep(tmp_path, grid.replace("[train]", "[train]\nmetric = 'L1'"))
    refuses("metric 'L1' is smaller .* learning rate with the largest is taken", check_shared, wrong)


def test_the_grid_of_the_page(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tasks.md"
    (grid,) = re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    made = sweep(tmp_path, grid)
    check_shared(made)
    assert len(made.cells()) == 2 * 2 * 2
    assert {cell["model"] for cell in made.cells()} == {"softmax", "biweight"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[train]", "[trian]", "unknown key 'trian'. Did you mean 'train'"),
        ('name = "sort"', 'name = "sorted"', "Did you mean 'sort'"),
        ('setting = "quick"', 'setting = "quik"', "Did you mean 'quick'"),
        ("symbols = [3, 4]", "symbol = 3", "unknown key 'symbol'. Did you mean 'symbols'"),
        ("symbols = [3, 4]", "symbols = [3, 1]", "symbols"),
        ("symbols = [3, 4]", "symbols = []", "symbols is an empty list"),
        ('name = "sort"', 'name = "cone-regression"', "not a token task"),
        ("steps = 4", "metric = 'loss'", "unknown metric 'loss'"),
        ("hidden_size = 16", "vocab_size = 9", "[models.softmax]: vocab_size is set by the task"),
        ("steps = 4", "step = 4", "unknown key 'step'. Did you mean 'steps'"),
        ("steps = 4", 'steps = "many"', "steps"),
        ("steps = 4", 'metric = "acuracy"', "unknown metric 'acuracy'. Did you mean 'accuracy'"),
        ('mixers = "softmax"', 'mixers = "sofmax"', "sofmax"),
        ('kind = "memory-mosaic"', 'kind = "mosaic"', "mosaic"),
        ("hidden_size = 16", "hidden_sise = 16", "hidden_sise"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GRID
    told = error_of(lambda: check_shared(sweep(tmp_path, GRID.replace(old, new))))
    assert "reproduce: sweep" in told
    assert said in told
    assert not (tmp_path / "out").exists()
