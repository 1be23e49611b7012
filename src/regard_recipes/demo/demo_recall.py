"""The second part of the demo: which mechanisms can recall a value by its key.

Small models without feed-forward layers learn multi-query associative recall (`regard.tasks.mqar`): a sequence lists
pairs of keys and values and then asks for the value of each key.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from regard.models import HybridConfig, HybridForCausalLM
from regard.tasks.mqar import MQAR
from regard.training.task import TaskBudget, score_task, train_on_task

from ..lib.display import lines, pivot
from ..lib.recipe import frame_of

TASK = MQAR(tokens=64, length=32, pairs=4)
ALL = "keys and values of all tokens"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax attention": (ALL, {"mixers": "softmax"}),
    "local linear attention": (ALL, {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms"}),
    "linear attention": ("one matrix per head", {"mixers": "elu"}),
    "linear attention and FwPKM": (
        "one matrix per head; a table of 256 slots, written while it reads",
        {"mixers": "elu", "memories": "FwPKM@1", "memory_options": {"fwpkm": {"sub_keys": 16, "chunk_size": 8}}},
    ),
}
"""Models by name: what each keeps of the tokens before, and fields of its configuration."""


def recall(name: str, *, steps: int, seed: int) -> dict[str, Any]:
    """Train one of `MODELS` until it recalls 99 % of the values, at most `steps` steps, and score it.

    Returns:
        What results.json says of the model: `accuracy` on the validation split after `steps`, and the `final` one on
        the test split; `seconds` of training, with scores.
    """
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
    accuracy = score_task(model, TASK, examples=256)["accuracy"]
    return {
        "name": name, "steps": tuple(step for step, _ in scored),
        "accuracy": tuple(scores["accuracy"].mean for _, scores in scored), "final": accuracy.mean,
        "standard_error": accuracy.standard_error, "seconds": seconds, "parameters": model.num_parameters(),
    }  # fmt: skip


def recall_table(results: Sequence[Mapping[str, Any]], seed: str) -> Any:
    """Return a table with a row for each model."""
    rows = frame_of({**one, "last": one["steps"][-1]} for one in results)
    return pivot(rows, {"name": "model"}, {
        "accuracy": "{final:.3f} ± {standard_error:.3f}", "steps": "{last:.0f}", "training": "{seconds:.0f} s",
        "memory of earlier tokens": lambda rows: MODELS[rows["name"].iloc[0]][0], "parameters": "{parameters:,.0f}",
    }, note=(
        f"Accuracy on {TASK.pairs} pairs in {TASK.length} tokens, ± its standard error over test examples; one seed "
        f"({seed}). Guessing one of the values of the sequence gives {TASK.floor(count=256)['accuracy']:.2f}. Training "
        f"ends at 0.99 on validation examples."))  # fmt: skip


def recall_curves(results: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a PNG of accuracy against steps."""
    rows = frame_of(results).explode(["steps", "accuracy"]).astype({"steps": int})
    return lines({"": rows}, "steps", {"accuracy": "accuracy"}, "name", x_label="step")
