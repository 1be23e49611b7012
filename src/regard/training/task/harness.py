"""Tasks of the Language Model Evaluation Harness (the package lm-eval) on a model in memory; needs the extra `eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import ArgumentError
from ..errors import one_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def harness_scores(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    limit: int | None,
    batch: int,
    folder: Path | None,
) -> tuple[list[tuple[str, str, float, float | None]], str]:
    """Return scores of a causal language model on tasks of lm-eval, as (task, metric, value, standard error or None),
    and the token from which the first token of a text without a context is predicted.

    Of each task the first `limit` examples are used (None: all), `batch` at a time; `folder` holds YAML files of
    further tasks. Raises `ArgumentError` if lm-eval is not installed, a task is unknown, or its data cannot be loaded.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        needs = f"--lm-eval needs the package lm-eval ({error}); install it with pip install 'regard[eval]'"
        raise ArgumentError(f"eval: {needs}.") from None
    manager = TaskManager(include_path=None if folder is None else str(folder))
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown:
        raise ArgumentError(f"eval: --lm-eval: unknown task {unknown[0]!r}; `lm-eval ls tasks` lists them.")
    judge: Any = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch)
    with one_error(f"eval: --lm-eval {' '.join(tasks)}"):
        found = simple_evaluate(model=judge, tasks=list(tasks), limit=limit, task_manager=manager, log_samples=False)
    scores = []
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, comma, choice = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                spread = metrics.get(f"{metric}_stderr,{choice}")
                scores.append((task, metric, value, spread if isinstance(spread, float) else None))
    return scores, tokenizer.decode(judge.prefix_token_id)
