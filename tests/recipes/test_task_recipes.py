"""Recipes that train on tasks: rates are chosen on the validation split, and verdicts need a model that has learned."""

import math
from typing import Any

import pandas as pd
import pytest
import tiny_runs
import torch

from regard.inspect.hooks import run_with_cache
from regard.recipes import recipes
from regard.tasks import MQAR, TokenTask
from regard_recipes.iclm.tinymath import ICLM, SEEN, TRANSFORMER, operand_rows
from regard_recipes.lib.recipe import Results
from regard_recipes.lib.task_recipe import TaskRecipe
from regard_recipes.local_linear.associative_recall import state_numbers

TASKS = [name for name, kind in recipes.items() if isinstance(kind, type) and issubclass(kind, TaskRecipe)]


def frame(validation: dict[tuple[str, float], float], test: dict[tuple[str, float], float]) -> Results:
    """Return results with two seeds for each (model, rate)."""
    rows: list[dict[str, Any]] = []
    for (model, rate), score in validation.items():
        for seed in (0, 1):
            cell = {"task": "4", "model": model, "rate": rate, "seed": seed}
            rows.append({**cell, "kind": "run", "validation": score, "steps": 10, "seconds": 1.0, "parameters": 5})
            rows.append({**cell, "kind": "curve", "step": 10, "validation": score})
            scored = {"kind": "test", "test": "4", "metric": "accuracy", "score": test[model, rate] + seed / 1e3}
            rows.append({**cell, **scored})
    return Results(pd.DataFrame(rows), {"floors": {"4": {"accuracy": 0.25}}}, {})


def recall(**changes: Any) -> Any:
    return tiny_runs.configured("associative-recall", **changes)


def test_each_model_has_the_rate_with_the_best_validation_score() -> None:
    validation = {("softmax", 1e-3): 0.9, ("softmax", 3e-3): 0.6, ("linear", 1e-3): 0.2, ("linear", 3e-3): 0.3}
    test = {("softmax", 1e-3): 0.7, ("softmax", 3e-3): 0.99, ("linear", 1e-3): 0.98, ("linear", 3e-3): 0.1}
    made = recall(models=("softmax", "linear"))
    scores = made.scores(frame(validation, test))
    assert dict(zip(scores["model"], scores["rate"], strict=True)) == {"softmax": 1e-3, "linear": 3e-3}
    assert made.gap(frame(validation, test), "linear", "softmax", test="4").mean == pytest.approx(-0.6)


def test_models_that_learned_nothing_decide_nothing() -> None:
    lla = "local linear, learned ridge"
    low = {(model, 1e-3): 0.26 for model in ("softmax", lla, "linear")}
    assert {claim.verdict for claim in recall().claims(frame(low, low))} == {"not testable at this size"}
    high = {**low, ("softmax", 1e-3): 0.95, (lla, 1e-3): 0.96}
    local, states = recall().claims(frame(high, high))
    assert (local.verdict, states.verdict) == ("holds", "holds")


@pytest.mark.parametrize("name", TASKS)
def test_models_and_sizes(name: str) -> None:
    """Every known model can be made at the size 'quick', and every training task has examples of each split."""
    made = tiny_runs.configured(name, models=())
    for task in made.training_tasks().values():
        for model in made.known:
            assert sum(p.numel() for p in made.make_model(model, task).parameters()) > 0
        for split in ("train", "validation", "test") if isinstance(task, TokenTask) else ():
            assert len(task.example(0, 0, split).tokens) > 1


def test_there_are_some() -> None:
    assert len(TASKS) >= 5


@pytest.mark.parametrize("name", ["tinymath", "in-context-regression"])
def test_the_fastest_device_can_be_asked_for(name: str) -> None:
    made = tiny_runs.make(name, device="auto")
    runs = [row for row in made.measure(made.cells()[0], 0) if row["kind"] == "run"]
    assert [math.isfinite(run["loss"]) for run in runs] == [True]


def test_slow_models_are_trained_where_they_are_named() -> None:
    kind = recipes.get("associative-recall")
    assert "Mamba" not in kind.configure().trained
    assert kind.configure(models=("softmax", "Mamba")).trained == ("softmax", "Mamba")
    assert "Mamba" in kind.configure("paper").trained
    made = kind.configure(models=("Mamba",), width=16, state=16)
    net = made.make_model("Mamba", MQAR(tokens=64, length=32, pairs=4))
    assert type(net).__module__.startswith("transformers.")
    assert net.config.state_size * 2 * 16 == 16**2  # a state as large as those of the other models


def test_few_and_many_pairs_are_one_task_of_one_length() -> None:
    task = recall(pairs=(2, 4)).training_tasks()["4"]
    found = task.examples(0, range(64))
    assert {len(example.tokens) for example in found} == {16}
    assert {int(example.asked.sum()) for example in found} == {2, 4}
    assert all(task.scores(task.oracle(example), example)["exact"] == 1 for example in found)
    short = next(example for example in found if example.asked.sum() == 2)
    assert not short.tokens[8:].any()


def test_states_have_the_size_that_the_table_says() -> None:
    """Keys and values of all tokens; a matrix, the sum of the keys for linear attention, the last three inputs of a
    convolution of queries, keys and values; Mesa has two matrices, of fewer channels."""
    made = recall(head=4, state=8, width=16)
    task, inputs = made.test_tasks("4")["4"], 3 * 3 * 8
    sizes = {"softmax": 2 * 16 * 4, "linear": 8 * 8 + 2 * 8 + 1, "delta rule": 64 + inputs,
             "gated delta rule": 64 + inputs, "Mesa": 2 * 6 * 6 + 3 * 3 * 6}  # fmt: skip
    for name, size in sizes.items():
        assert state_numbers(made.make_model(name, task), task) == pytest.approx(size, abs=1), name


def test_the_gated_delta_rule_keeps_most_of_its_state_at_first() -> None:
    made = recall()
    for layer in made.make_model("gated delta rule", made.training_tasks()["4"]).model.layers:
        net = layer.self_attn.net
        kept = (-net.A_log.exp() * torch.nn.functional.softplus(net.dt_bias)).exp()
        assert 0.9 - 1e-4 <= kept.item() <= 0.9991


@pytest.mark.parametrize(
    ("name", "stream", "point", "shift"),
    [(ICLM, "f", "f.0.attn.hook_pattern", 1), (ICLM, "phi", "phi.0.attn.hook_pattern", 0),
     (TRANSFORMER, "transformer", "layers.0.self_attn.hook_pattern", 1)],
)  # fmt: skip
def test_weight_on_the_operand_that_is_written(name: str, stream: str, point: str, shift: int) -> None:
    """The stored weight of the first head is the one that a loop over operands and earlier tokens finds, for a model
    that predicts ":" everywhere."""
    torch.manual_seed(0)
    made = tiny_runs.make("tinymath")
    task = made.training_tasks()[SEEN]
    model = made.make_model(name, task).eval()
    colon = 1e4 * torch.nn.functional.one_hot(torch.tensor(task.words.numbers[":"]), task.vocabulary)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits + colon)
    rows = list(operand_rows(model, task, 12))
    found = []
    for example in task.examples(0, range(12), "test"):
        output, cache = run_with_cache(model, example.tokens[None], lambda hook: hook == point)
        for place in example.parts["equation"].nonzero()[:, 0].tolist():
            predicted = output.logits[0, place - 1].argmax()
            # column c of f and of a Transformer has token c; of phi the one before, after a start token
            same = [c + 1 - shift for c in range(place) if example.tokens[c] == predicted]
            if same:
                found.append(sum(cache[point][0, 0, place - shift, c].item() for c in same))
    assert len(found) == 36
    row = next(row for row in rows if row["kind"] == "head" and row["stream"] == stream)
    assert (row["layer"], row["head"]) == (1, 1)
    assert row["predicted"] == pytest.approx(sum(found) / len(found), abs=1e-6)
    assert rows[-1]["words"][:2] == ["Story", ":"]
