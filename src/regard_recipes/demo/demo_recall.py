"""The second part of the demo: which mechanisms can recall a value by its key.

Small models without feed-forward layers learn multi-query associative recall (`regard.tasks.mqar`): a sequence lists
pairs of keys and values and then asks for the value of each key.
"""

from __future__ import annotations

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
MODELS: dict[str, dict[str, Any]] = {
    "softmax attention": {"mixers": "softmax"},
    "local linear attention": {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms"},
    "linear attention": {"mixers": "elu"},
    "linear attention and FwPKM": {
        "mixers": "elu", "memories": "FwPKM@1", "memory_options": {"fwpkm": {"sub_keys": 16, "chunk_size": 8}},
    },
}  # fmt: skip
KEEPS = {
    "softmax attention": "keys and values of all tokens",
    "local linear attention": "keys and values of all tokens",
    "linear attention": "one matrix a head",
    "linear attention and FwPKM": "one matrix a head; a table of 256 slots, written while it reads",
}
"""What each model keeps of the tokens before."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """What one model has learned.

    Attributes:
        name: of the model.
        steps, accuracy: the steps after which the validation split was scored, and the scores.
        final, standard_error: accuracy on the test split.
        seconds: of training, with scores.
        parameters: of the model.
    """

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
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "feed_forward": "none"}
    # first weights of 0.02 suit wider models: with them, these take much longer
    config = HybridConfig(vocab_size=TASK.vocabulary, initializer_range=0.05, **sizes, **MODELS[name])
    torch.manual_seed(seed)
    model = HybridForCausalLM(config)
    budget = TaskBudget(
        steps=steps, batch=64, learning_rate=3e-3, seed=seed, eval_every=max(1, steps // 10), stop_at=0.99
    )
    start = time.perf_counter()
    progress = train_on_task(model, TASK, budget)
    seconds = time.perf_counter() - start
    found = score_task(model, TASK, examples=256)["accuracy"]
    return Recall(
        name=name, steps=tuple(step for step, _ in progress.scored),
        accuracy=tuple(scores["accuracy"].mean for _, scores in progress.scored), final=found.mean,
        standard_error=found.standard_error,
        seconds=seconds, parameters=model.num_parameters(),
    )  # fmt: skip


def recall_table(found: Sequence[Recall], seed: int) -> Table:
    """Return a table with a row for each model."""
    floor = TASK.floor(count=256)["accuracy"]
    rows = []
    for one in found:
        accuracy = f"{one.final:.3f} ± {one.standard_error:.3f}"
        cells = (one.name, accuracy, str(one.steps[-1]), f"{one.seconds:.0f} s", KEEPS[one.name])
        rows.append((*cells, f"{one.parameters:,}"))
    note = (
        f"Accuracy on {TASK.pairs} pairs in {TASK.length} tokens, ± its standard error over test examples; one seed "
        f"({seed}). Guessing one of the values of the sequence gives {floor:.2f}. Training ends at 0.99 on validation "
        f"examples."
    )
    return Table(("model", "accuracy", "steps", "training", "keeps of earlier tokens", "parameters"), tuple(rows), note)


def recall_curves(found: Sequence[Recall]) -> bytes:
    """Return a PNG of accuracy against steps."""
    import pandas as pd

    from ..lib.display import lines

    rows = [{"model": one.name, "step": step, "accuracy": score}
            for one in found for step, score in zip(one.steps, one.accuracy, strict=True)]  # fmt: skip
    return lines({"": pd.DataFrame(rows)}, "step", {"accuracy": "accuracy"}, "model")
