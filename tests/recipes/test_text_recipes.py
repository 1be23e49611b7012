"""Recipes that train language models on a text: the best rate is taken, and verdicts follow the numbers."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import configured, stored
from torch.nn.functional import cross_entropy

from regard.models import HybridForCausalLM
from regard.models.base.catalogue import model_of
from regard.recipes import recipes
from regard_recipes.fwpkm.slot_use import slots_read
from regard_recipes.lib.claims import NOT_TESTABLE
from regard_recipes.lib.recipe import Results, frame_of
from regard_recipes.lib.text_recipe import TextRecipe
from regard_recipes.local_linear.lla_pretraining import PLAIN, RIDGES, weights_seen
from regard_recipes.sparse_attention.out_of_distribution import losses_along, stories, windows

TEXTS = [name for name, kind in recipes.items() if isinstance(kind, type) and issubclass(kind, TextRecipe)]
FACTS = {"floor": 3.0}


def results(rows: list[dict[str, Any]]) -> Results:
    """Return results with two seeds of every row, the second a little higher."""
    numbers = ("test", "loss", "density", "lowest", "highest", "coverage")
    both = [{**row, "seed": seed, **{name: row[name] + seed / 1e4 for name in numbers if name in row}}
            for row in rows for seed in (0, 1)]  # fmt: skip
    return Results(frame_of(both), FACTS, {})


def run(model: str, rate: float = 1e-3, held_out: float = 2.0, **found: Any) -> dict[str, Any]:
    return {"kind": "run", "model": model, "rate": rate, "held_out": held_out, **found}


def test_each_model_has_the_rate_with_the_least_validation_loss() -> None:
    rows = [run("softmax", 1e-3, 2.5, test=2.1), run("softmax", 3e-3, 2.2, test=2.4),
            run("relumax", 1e-3, 2.3, test=2.6), run("relumax", 3e-3, math.nan, test=math.nan)]  # fmt: skip
    made = configured("out-of-distribution")
    chosen = made.chosen(results(rows))
    assert dict(zip(chosen["model"], chosen["rate"], strict=True)) == {"softmax": 3e-3, "relumax": 1e-3}
    assert made.gap(results(rows), "relumax", "softmax").mean == pytest.approx(0.2)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", ["small", "paper"])
def test_every_known_model_can_be_made(name: str, size: str) -> None:
    """Those too that are trained only where --models names them."""
    made = configured(name, size)
    made = configured(name, size, models=tuple(made.known))
    left_out = set(made.known) - {cell["model"] for cell in made.cells()}
    assert left_out <= ({"iclm-full-matched"} if size == "paper" else set())  # larger than its rival at that size
    for cell in made.cells():
        config = made.model_config(cell, 300)
        with torch.device("meta"):
            assert model_of(config)(config).config.hidden_size == made.width


@pytest.mark.parametrize(
    ("name", "floor"),
    [("lla-pretraining", "floor"), ("mosaic-kernels", "floor"), ("out-of-distribution", "other floor")],
)
def test_models_that_predict_no_better_than_frequencies_decide_nothing(name: str, floor: str) -> None:
    made, found = stored(name)
    unlearned = replace(found, facts={**found.facts, floor: 0.0})
    assert {claim.verdict for claim in made.claims(unlearned)} == {NOT_TESTABLE}


def made_model(recipe: str, name: str, **sizes: Any) -> HybridForCausalLM:
    torch.manual_seed(0)
    return HybridForCausalLM(configured(recipe, width=16, **sizes).model_config({"model": name}, 50)).eval()


def test_weights_of_softmax_are_counted_as_by_hand() -> None:
    net, tokens = made_model("lla-pretraining", PLAIN), torch.randint(0, 50, (2, 12))
    found = weights_seen(net, tokens)
    with torch.no_grad():
        half = [weights[:, :, 6:] for weights in net(input_ids=tokens, output_attentions=True).attentions]
    assert found["density"] == pytest.approx(sum(float((s > 0.1).sum(-1).float().mean()) for s in half) / len(half))
    assert (found["negative"], found["lowest"]) == (0.0, 0.0)
    assert found["highest"] == pytest.approx(max(float(s.max()) for s in half), rel=1e-5)
    assert len(RIDGES) == 3


def test_losses_along_a_window_are_those_of_its_tokens() -> None:
    net, tokens = made_model("lla-pretraining", PLAIN), torch.randint(0, 50, (3, 9))
    with torch.no_grad():
        wanted = [float(cross_entropy(net(tokens[:, :t]).logits[:, -1], tokens[:, t])) for t in range(1, 9)]
    assert losses_along(net, tokens, batch=2).tolist() == pytest.approx(wanted, rel=1e-4)
    assert windows(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_stories_are_the_same_every_time() -> None:
    text = stories(2000)
    assert len(text) >= 2000 - 1
    assert text == stories(2000)
    assert " ." not in text


def test_slots_are_counted_as_by_hand() -> None:
    net = made_model("slot-use", "batch norm, many slots", sub_keys=4, top_k=2, memory_dim=8)
    memory = next(m for m in net.modules() if type(m).__name__ == "ProductKeyMemory")
    seen: list[torch.Tensor] = []
    with memory.q_norm.register_forward_hook(lambda module, given, out: seen.append(out.detach())):
        found = slots_read(net, torch.randint(0, 50, (3, 8)), batch=2)
    queries = torch.cat([each.flatten(0, -2) for each in seen]).view(24, 4, 2, -1)
    scores = torch.einsum("thcd,hcnd->thcn", queries, memory.keys.detach())
    joint = (scores[:, :, 0, :, None] + scores[:, :, 1, None]).flatten(2)
    slots = joint.topk(2).indices.flatten().bincount(minlength=16).double()
    assert found["coverage"] == float((slots > 0).double().mean())
    assert found["reads"] == slots.sum() / 16 == 12.0
    assert found["even"] == pytest.approx(1 - (15 / 16) ** 192)
    share = slots / slots.sum()
    assert found["kl"] == pytest.approx(float((share * (share * 16).clamp(min=1e-300).log()).sum()))
