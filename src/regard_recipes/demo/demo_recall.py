"""The second part of the demo: which mechanisms can recall a value by its key.

Small models without feed-forward layers learn multi-query associative recall (`regard.tasks.mqar`): a sequence lists
pairs of keys and values and then asks for the value of each key.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.inspect.tables import Table
from regard.models import HybridConfig, HybridForCausalLM
from regard.tasks.mqar import MQAR
from regard.training.task import TaskBudget, score_task, train_on_task

TASK = MQAR(tokens=64, length=32, pairs=4)
ALL = "keys and values of all tokens"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax attention": (ALL, {"mixers": "softmax"}),
    "local linear attention": (ALL, {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms"}),
    "linear attention": ("one matrix a head", {"mixers": "elu"}),
    "linear attention and FwPKM": (
        "one matrix a head; a table of 256 slots, written while it reads",
        {"mixers": "elu", "memories": "FwPKM@1", "memory_options": {"fwpkm": {"sub_keys": 16, "chunk_size": 8}}},
    ),
}
"""Models by name: what each keeps of the tokens before, and fields of its configuration."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """What one model has learned: `accuracy` on the validation split after `steps`, and the `final` one on the test
    split; `seconds` of training, with scores."""

    name: str
    steps: tuple[int, ...]
    accuracy: tuple[float, ...]
    final: float
    standard_error: float
    seconds: float
    parameters: int

    @property
    def brief(self) -> str:
        """Return the result in a few words."""
        return f"accuracy {self.final:.3f} after {self.steps[-1]} steps, {self.seconds:.0f} s"


def recall(name: str, *, steps: int, seed: int) -> Recall:
    """Train one of `MODELS` until it recalls 99 % of the values, at most `steps` steps, and score it."""
    config = HybridConfig(
        vocab_size=TASK.vocabulary, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, feed_forward="none",
        initializer_range=0.05,  # the usual 0.02 suits wider models: with it, these take much longer
        **MODELS[name][1],
    )  # fmt: skip
    torch.manual_seed(seed)
    model = HybridForCausalLM(config)
    budget = TaskBudget(
        steps=steps, batch=64, learning_rate=3e-3, seed=seed, eval_every=max(1, steps // 10), stop_at=0.99
    )
    start = time.perf_counter()
    scored = train_on_task(model, TASK, budget).scored
    seconds = time.perf_counter() - start
    found = score_task(model, TASK, examples=256)["accuracy"]
    return Recall(
        name=name, steps=tuple(step for step, _ in scored), seconds=seconds, parameters=model.num_parameters(),
        accuracy=tuple(scores["accuracy"].mean for _, scores in scored), final=found.mean,
        standard_error=found.standard_error,
    )  # fmt: skip


def recall_table(found: Sequence[Recall], seed: int) -> Table:
    """Return a table with a row for each model."""
    rows = [
        (one.name, f"{one.final:.3f} ± {one.standard_error:.3f}", str(one.steps[-1]), f"{one.seconds:.0f} s",
         MODELS[one.name][0], f"{one.parameters:,}") for one in found
    ]  # fmt: skip
    note = (
        f"Accuracy on {TASK.pairs} pairs in {TASK.length} tokens, ± its standard error over test examples; one seed "
        f"({seed}). Guessing one of the values of the sequence gives {TASK.floor(count=256)['accuracy']:.2f}. Training "
        f"ends at 0.99 on validation examples."
    )
    return Table(("model", "accuracy", "steps", "training", "keeps of earlier tokens", "parameters"), tuple(rows), note)


def recall_curves(found: Sequence[Recall]) -> bytes:
    """Return a PNG of accuracy against steps."""
    import pandas as pd

    from ..lib.display import lines

    rows = [{"model": one.name, "step": step, "accuracy": score}
            for one in found for step, score in zip(one.steps, one.accuracy, strict=True)]  # fmt: skip
    return lines({"": pd.DataFrame(rows)}, "step", {"accuracy": "accuracy"}, "model")
