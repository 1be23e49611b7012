"""Metrics of a task (`regard.tasks`) for a language model: teacher-forced, and free-running where it can generate."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, nan, sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from ...checks import ArgumentError, flag, instance, require, whole
from ...inspect.capture import eval_mode
from ...tasks import TokenExample, TokenTask, collate

CALL = "score_task"


@dataclass(frozen=True)
class TaskScore:
    """The values of one metric, one for each example that has it."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean over examples."""
        return fmean(self.values)

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean; NaN for a single example, or where a value is not finite."""
        count = len(self.values)
        return stdev(self.values) / sqrt(count) if count > 1 and isfinite(self.mean) else nan

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.standard_error:.4f} (n = {len(self.values)})"


def score_task(
    model: PreTrainedModel,
    task: TokenTask,
    *,
    split: str = "test",
    seed: int = 0,
    examples: int = 256,
    batch: int = 32,
    generate: bool = False,
) -> dict[str, TaskScore]:
    """Score a language model on examples of a task.

    Args:
        model: a causal language model with at least as many tokens as the task.
        task: the task.
        split, seed: of the examples 0 to `examples` - 1.
        batch: examples at a time.
        generate: also let the model write the answer to the prompt, greedily, from its own earlier tokens: the metrics
            "free-running accuracy" and "free-running exact" (all tokens of an answer are right).

    Returns:
        The scores by metric: those of `task.scores`, "loss" and "loss on PART" in nats per label, and the free-running
        ones. A metric that no example has is left out.

    Raises:
        ArgumentError: a model with too few tokens or positions, or `generate` for a task whose answers do not continue
            its prompts or a model that cannot generate.

    Cost: a forward pass over each example; with `generate` one token at a time after each prompt.
    """
    instance(CALL, "task", task, TokenTask, "a task of tokens")
    for name, value in (("examples", examples), ("batch", batch)):
        whole(CALL, name, value, 1, 2**40)
    flag(CALL, "generate", generate)
    check_vocabulary(CALL, model, task)
    if generate and not model.can_generate():
        raise ArgumentError(f"{CALL}: generate=True needs a model that can generate, got {type(model).__name__}.")
    drawn = task.examples(seed, range(examples), split)
    values: dict[str, list[float]] = {}
    with torch.no_grad(), eval_mode(model):
        for start in range(0, examples, batch):
            for example, logits in _forward(model, drawn[start : start + batch]):
                asked = example.asked
                losses = cross_entropy(logits, example.labels, reduction="none")  # 0 where there is no label
                nats = {"loss": asked} | {f"loss on {part}": asked & at for part, at in example.parts.items()}
                means = {name: float(losses[at].mean()) for name, at in nats.items() if at.any()}
                for metric, number in {**task.scores(logits, example), **means}.items():
                    values.setdefault(metric, []).append(number)
        for example, answer in _written(model, drawn, batch) if generate else ():
            right = answer == example.answer
            values.setdefault("free-running accuracy", []).append(float(right.float().mean()))
            values.setdefault("free-running exact", []).append(float(right.all()))
    return {metric: TaskScore(tuple(each)) for metric, each in values.items()}


def check_vocabulary(call: str, model: PreTrainedModel, task: TokenTask) -> None:
    """Check that a model has a token for each of a task's."""
    size = model.config.vocab_size
    few = f"model has {size} tokens, but the task {task.name} has {task.vocabulary}."
    require(size >= task.vocabulary, call, few)


def check_metric(call: str, task: TokenTask, metric: str, split: str, examples: int) -> None:
    """Check that one of the examples 0 to `examples` - 1 has a metric that needs no generation."""
    known: set[str] = set()
    for index in range(examples):
        example = task.example(0, index, split)
        known |= {"loss", *(f"loss on {part}" for part, at in example.parts.items() if (at & example.asked).any())}
        known |= {*task.scores(task.oracle(example), example)}
        if metric in known:
            return
    raise ArgumentError(f"{call}: the task has no metric {metric!r}; it has {', '.join(sorted(known))}.")


def check_stop(call: str, task: TokenTask, metric: str, stop_at: float | None) -> None:
    """Check that a metric is larger for better answers if training ends once it is at least `stop_at`."""
    problem = f"stop_at is {stop_at}, but metric {metric!r} is smaller for better answers"
    require(stop_at is None or not task.is_error(metric), call, f"{problem}; choose another metric, or omit stop_at.")


def _forward(model: PreTrainedModel, examples: list[TokenExample]) -> Iterator[tuple[TokenExample, Tensor]]:
    """Yield each example with the logits [T, vocabulary] that predict its labels."""
    batch = {name: x.to(model.device) for name, x in collate(examples).items() if name != "labels"}
    logits = model(**embedded(model, batch), use_cache=False).logits.float().cpu()
    for example, row in zip(examples, logits, strict=True):
        moved = row[: len(example.tokens)].roll(1, 0)
        moved[0].zero_()  # nothing predicts the first token
        yield example, moved


def embedded(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with the sum of both embeddings as `inputs_embeds` where it has two tokens at a position."""
    if "beside" not in batch:
        return batch
    table = model.get_input_embeddings()
    rest = {name: x for name, x in batch.items() if name not in ("input_ids", "beside")}
    return {**rest, "inputs_embeds": table(batch["input_ids"]) + table(batch["beside"])}


def _written(model: PreTrainedModel, examples: list[TokenExample], batch: int) -> Iterator[tuple[TokenExample, Tensor]]:
    """Yield each example with what the model wrote after its prompt; prompts of one length are a batch."""
    if any(example.prompt is None for example in examples):
        raise ArgumentError(f"{CALL}: generate=True needs answers that continue their prompts; this task has none.")
    sizes = lambda e: (e.prompt, len(e.answer))  # noqa: E731
    settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for (prompt, answer), group in groupby(sorted(examples, key=sizes), sizes):
        same = list(group)
        for start in range(0, len(same), batch):
            part = same[start : start + batch]
            tokens = torch.stack([example.tokens[:prompt] for example in part]).to(model.device)
            mask = torch.ones_like(tokens)
            out = model.generate(tokens, attention_mask=mask, min_new_tokens=answer, max_new_tokens=answer, **settings)
            yield from zip(part, out[:, prompt:].cpu(), strict=True)
