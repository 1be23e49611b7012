"""`regard reproduce mosaic-kernels`: every weighting trained, as defined and as released, counted and judged."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from tiny_runs import checked

from regard.models import MemoryMosaicForCausalLM
from regard_recipes.mosaic import mosaic_kernels as recipe
from regard_recipes.mosaic.mosaic_kernels import DEFINED, HARD
from regard_recipes.mosaic.released_weightings import FORMS, use_released

made = partial(checked, "mosaic-kernels")


def cell(name: str, layers: int = 1, k: int | None = None, form: str = DEFINED) -> dict[str, object]:
    return {"layers": layers, "model": name, "k": k, "form": form, "rate": 5e-3}


def model(kind: dict[str, object]) -> MemoryMosaicForCausalLM:
    torch.manual_seed(0)
    found = MemoryMosaicForCausalLM(made("quick").model_config(kind, 20))
    if kind["form"] in FORMS:
        use_released(found, kind["model"], kind["form"])
    return found


def test_what_is_trained_at_other_depths_than_the_first() -> None:
    deep = [each for each in made(ks=(16, 32, 64), rates=(1e-3, 5e-3)).cells() if each["layers"] == 4]
    assert len(deep) == 2 * 8
    assert all(each["form"] == DEFINED and each["k"] in (None, 32) for each in deep)


def test_the_size_of_the_paper() -> None:
    """Tables 3 and 5: twelve heads of 64 channels, 2688 slots; 12 C^2 a block beside the embeddings of 50304 tokens."""
    paper = made("paper", device="cpu")
    assert (paper.layers, paper.rates) == ((1, 8, 12), (5e-3, 1e-3))
    assert (paper.context, paper.batch, paper.steps) == (512, 512, 80_000)
    with torch.device("meta"):
        found = MemoryMosaicForCausalLM(paper.model_config(cell("biweight"), 50304))
    assert found.config.persistent_slots == 2688
    assert sum(w.numel() for w in found.parameters()) == pytest.approx(50304 * 768 + 12 * 768**2, rel=0.01)


def test_a_bandwidth_that_is_too_narrow_is_seen_in_empty_rows() -> None:
    windows = torch.randint(20, (3, 14), generator=torch.Generator().manual_seed(0))
    narrow = model(cell("normrelu"))
    with torch.no_grad():
        narrow.model.layers[0].contextual.numbers.log_h.fill_(math.log(1e-3))
    found = recipe.inside(narrow, windows)
    assert recipe.inside(model(cell("normrelu")), windows)["empty"] < 0.1
    assert found["empty"] > 0.4  # all but exact repetitions of the last tokens
    assert found["rows"] == [{"kind": "head", "block": 0, "head": head, "h": 0.001} for head in (0, 1)]


def test_what_is_counted_inside() -> None:
    """Softmax weighs every pair; the fast program sees one less and leaves the second row empty."""
    windows = torch.randint(20, (2, 10), generator=torch.Generator().manual_seed(0))
    whole = recipe.inside(model(cell("softmax", 2)), windows)
    assert whole["support"] == pytest.approx(np.arange(1, 10).mean())
    assert whole["empty"] == 0
    assert [(row["block"], row["head"]) for row in whole["rows"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["sharpness"] for row in whole["rows"]] == pytest.approx(4 * [math.e**2], rel=1e-4)
    near = recipe.inside(model(cell("topk-uniform", 1, 3)), windows)
    assert near["support"] == pytest.approx(np.minimum(np.arange(1, 10), 3).mean())
    fast = recipe.inside(model(cell("relumax", form="fast")), windows)
    assert fast["support"] is None
    assert fast["empty"] == pytest.approx(1 / 9)
    trained = model(cell("relumax")).train()
    assert [row["margin"] for row in recipe.inside(trained, windows)["rows"]] == [1.0, 1.0]
    assert trained.training


def test_keys_of_uniform_weights_learn_only_with_a_gradient() -> None:
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    for form, learns in ((DEFINED, True), (HARD, False)):
        found = model(cell("topk-uniform", 1, 3, form))
        found(input_ids=tokens, labels=tokens).loss.backward()
        gradient = found.model.layers[0].contextual.keys.proj.weight.grad
        assert (gradient is not None and bool(gradient.abs().max() > 0)) == learns
