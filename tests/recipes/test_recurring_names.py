"""`regard reproduce recurring-names`: gates by place, and verdicts on rows made by hand."""

from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import checked, tiny, verdicts

from regard.tasks.recurring_names import NAMES
from regard_recipes.fwpkm import recurring_names as recipe

made = partial(checked, "recurring-names")
LOWERS = "A written memory lowers the loss on what recurs beyond the window"
OPENS = "Gates spike on names"
FACTS = {"floors": {"names": {"accuracy": 0.1}}}


def rows(written: float, frozen: float, window: float, gate: float, validation: float = 0.9) -> list[dict[str, Any]]:
    """What three seeds of each model would leave: nats on far names, and gates there; elsewhere gates are 0.3."""
    found: list[dict[str, Any]] = []
    for seed in range(3):
        for model, memory, nats in (
            ("window", "", window), ("window and FwPKM", "written", written), ("window and FwPKM", "frozen", frozen),
        ):  # fmt: skip
            cell = {"task": "names", "model": model, "rate": 3e-3, "seed": seed}
            score = {"test": "names", "metric": "loss on far", "score": nats + 0.001 * seed * (memory == "")}
            found.append({**cell, "kind": "test", "memory": memory, **score})
            if memory != "frozen":
                found.append({**cell, "kind": "run", "validation": validation})
        for place in recipe.PLACES:
            value = gate if place == "far" else 0.3
            cell = {"task": "names", "model": "window and FwPKM", "rate": 3e-3, "seed": seed}
            found.append({**cell, "kind": "gate", "place": place, "gate": value})
    return found


def test_verdicts_follow_the_numbers() -> None:
    own = made(models=("window", "window and FwPKM"))
    told = verdicts(own, rows(0.2, 4.0, 3.0, 0.6), FACTS)
    assert told[LOWERS] == ("holds", "less frozen -3.800 ± 0.000; less window alone -2.801 ± 0.002")
    assert told[OPENS][0] == "holds"
    told = verdicts(own, rows(3.5, 4.0, 3.0, 0.2), FACTS)
    assert (told[LOWERS][0], told[OPENS][0]) == ("fails", "fails")
    told = verdicts(own, rows(0.2, 4.0, 3.0, 0.6, validation=0.1), FACTS)
    assert {verdict for verdict, _ in told.values()} == {"not testable at this size"}


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
