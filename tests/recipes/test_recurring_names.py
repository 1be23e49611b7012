"""`regard reproduce recurring-names`: gates by place, and verdicts on rows made by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import checked, tiny

from regard.tasks.recurring_names import NAMES
from regard_recipes.fwpkm import recurring_names as recipe

made = partial(checked, "recurring-names")


def test_gates_are_those_of_the_tokens_before() -> None:
    """The gate at a name counts for the thing after it; here a gate is 1 at names and 0 elsewhere."""
    own = made("quick")
    (task,) = own.training_tasks().values()
    torch.manual_seed(0)
    model = own.make_model("window and FwPKM", task)
    names = {task.words.numbers[name] for name in NAMES}

    def trace(_: Any, tokens: Any, labels: Any) -> Any:
        gates = torch.tensor([[float(int(token) in names) for token in tokens]])
        return type("Trace", (), {"gates": gates})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "gate_trace", trace)
        found = {row["place"]: row["gate"] for row in recipe.gate_rows(model, task, 6)}
    assert found == {"new": 1.0, "near": 1.0, "far": 1.0, "other tokens": 0.0}
    assert all(0 < row["gate"] < 1 for row in recipe.gate_rows(model, task, 2))


def test_a_frozen_memory_is_scored_beside_a_written_one() -> None:
    own, results = tiny("recurring-names")
    tests = results.select(kind="test", metric="loss on far")
    assert set(zip(tests["model"], tests["memory"], strict=True)) == {
        ("all tokens", ""), ("window", ""), ("window and FwPKM", "written"), ("window and FwPKM", "frozen"),
    }  # fmt: skip
    assert set(own.tables(results)) == {"What recurs", "Training", "Gates"}
