"""`regard reproduce NAME --estimate`: parameters, tokens and operations of a run; torch counts them too."""

from pathlib import Path

import pytest
import torch
from tiny_runs import configured
from torch.utils.flop_counter import FlopCounterMode

from regard.cli import main
from regard.recipes import recipes
from regard_recipes.lib.trained import TrainedRecipe, estimate, used

TRAINED = [name for name, kind in sorted(recipes.items()) if issubclass(kind, TrainedRecipe)]


@pytest.mark.parametrize("size", ["quick", "small"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_of_trained_models_has_an_estimate(name: str, size: str) -> None:
    recipe = configured(name, size)
    rows = estimate(recipe).rows
    assert sum(int(row[1]) for row in rows[:-1]) == int(rows[-1][1]) == sum(map(recipe.seeds_of, recipe.cells()))
    tokens = sum(int(row[1]) * float(row[3]) for row in rows[:-1])
    assert tokens == pytest.approx(float(rows[-1][3]), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_page_has_what_the_full_sizes_need(name: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "cookbook" / "full-size-on-a-gpu.md"
    if recipes.get(name).by_size["paper"]:
        row = estimate(configured(name, "paper")).rows[-1][1:]
        assert f"| `{name}` | {' | '.join(row)} |" in page.read_text()


@pytest.mark.parametrize(("name", "model"), [("lla-pretraining", "softmax"), ("iclm-parity", "transformer")])
def test_the_operations_are_those_that_torch_counts(name: str, model: str) -> None:
    """Short windows, whose attention scores hardly count."""
    recipe = configured(name, models=(model,), width=128, context=16)
    trained, _ = recipe.untrained({"model": model, "rate": recipe.rates[0]})
    tokens = torch.zeros(4, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        trained(input_ids=tokens, labels=tokens).loss.backward()
    assert 6 * used(trained) * tokens.numel() == pytest.approx(counted.get_total_flops(), rel=0.1)


def test_options_and_recipes_that_train_nothing(capsys: pytest.CaptureFixture) -> None:
    assert main(["reproduce", "stories", "--quick", "--estimate", "--steps", "100", "--seeds", "5"]) == 0
    out = capsys.readouterr().out
    assert "Transformer" in out
    assert "all runs; the largest model     20" in out.replace("model          ", "model     ")
    assert estimate(configured("mosaic-kernels")).header[0] == "layers, model, k, form"
    assert main(["reproduce", "dispersion", "--estimate"]) == 2
    assert "dispersion: --estimate: the recipe does not train models by steps, so run it." in capsys.readouterr().err
    assert main(["reproduce", "stories", "--estimate", "--steps", "0"]) == 2
    assert "--steps is 0" in capsys.readouterr().err
