"""Checks of a training run before its text is read: numbers, specs, and the model at its sizes."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_type_hints

from ..errors import ArgumentError, require, suggestion
from .config import LARGEST, MOST_LAYERS, TrainConfig, check_seed
from .fields import flag, from_text, read_spec

if TYPE_CHECKING:
    from .. import Spec
    from ..models import RegardConfig
    from ..tasks import TokenTask

_LEAST = {
    **dict.fromkeys(("layers", "width", "heads", "kv_heads", "mlp_width", "window", "steps", "batch", "accumulate"), 1),
    **dict.fromkeys(("log_every", "eval_every", "eval_examples", "save_every", "keep"), 1),
    **dict.fromkeys(("context", "eval_tokens"), 2),  # one token to see and one to predict
    "weight_decay": 0,
}
"""The smallest value of each option that has one."""


_OF_TASKS = ("setting", "task_option", "metric", "stop_at", "eval_examples")
_OF_TEXTS = ("tokenizer", "validation", "log_every", "eval_tokens")
"""Options that only a run on a task, or on a text, takes."""


def validate(config: TrainConfig, call: str = "train", *, new: bool = True) -> None:
    """Check all that can be checked without reading the text: numbers, heads, names of specs and tokenizer.

    With `new`, also check what a new run needs: a text, the device, and an implementation for each spec at these sizes.
    """
    _check_numbers(config, call)
    if new and config.data is None and config.task is None:
        hint = "give --data FILE, --data FOLDER or --data datasets:NAME, or a task with --task NAME"
        raise ArgumentError(f"{call}: no training text; {hint}.")
    if new and not config.resume:  # earlier versions began runs with options of the other kind, without a use
        kind = "a text; omit it" if config.task else "a task; give --task NAME or omit it"
        for name in _OF_TEXTS if config.task else _OF_TASKS:
            same = getattr(config, name) == getattr(TrainConfig, name)
            require(same, call, f"{flag(name)} is for runs on {kind}.")
    if config.task is not None:
        check_task(config, call)
    check_data(config, call)
    both = config.resume and config.overwrite
    require(not both, call, "--resume continues the run, --overwrite deletes it; give one of them.")
    require(bool(config.spec), call, "--spec is empty; give a spec such as softmax.")
    specs = _specs(config, call)
    if new:
        from .data.tokenizers import TOKENIZERS, is_elsewhere

        if not (config.resume or is_elsewhere(config.tokenizer)):  # a run has a copy of its tokenizer
            TOKENIZERS.get(config.tokenizer)
        for tracker in config.report_to:
            missing = f"--report-to {tracker} needs the package {tracker}, which is not installed"
            require(find_spec(tracker) is not None, call, f"{missing}; pip install {tracker}.")
        from .device import resolve_device

        resolve_device(config.device, call=call)
    _check_rules(config, specs, call)
    from .models import check_model, has_field  # imports transformers, which takes seconds

    _check_heads(config, call, rotary=has_field(config.model, "rope_theta"))
    if new:
        _check_sizes(config, specs, check_model(config, call), call)


def check_data(config: TrainConfig, call: str) -> None:
    """Check that options of data sets come with a data set, and that a stream has a tokenizer to begin with."""
    from .data.documents import is_dataset

    if not is_dataset(config.data):
        for name in ("split", "subset", "text_column", "stream"):
            absent = getattr(config, name) in (None, False)
            require(absent, call, f"{flag(name)} is for data sets; give --data datasets:NAME with it.")
    learned = f"--tokenizer {config.tokenizer} is learned from all of the text, but --stream reads it once, in order"
    fits = not (config.stream and config.tokenizer in ("char", "bpe"))
    require(fits, call, f"{learned}; choose --tokenizer byte or gpt2.")


def check_task(config: TrainConfig, call: str) -> TokenTask:
    """Return the task of a run; raise `ArgumentError` for a mistake in its options, or one that it does not take."""
    from ..checks import within
    from ..tasks.tokens import settable, token_task

    require(config.data is None, call, "--task and --data were both given; give one of them.")
    plain = config.accumulate == 1 and config.dtype == "float32" and not config.report_to and not config.shard
    require(plain, call, "a run on a task takes none of --accumulate, --dtype, --report-to and --shard; omit them.")
    kind: Any = token_task(call, "--task", config.task)
    hints, names = get_type_hints(kind), settable(kind)
    changes: dict[str, Any] = {}
    for word in config.task_option:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        expected = f"expected key=value with a field of the task.{suggestion(name, names)}"
        require(bool(equals) and name in names, call, f"--task-option is {word!r}, {expected}")
        require(name not in changes, call, f"--task-option {name} is given twice; give it once.")
        changes[name] = from_text(text.strip(), hints[name], f"{call}: --task-option {name}")
    option = "--task-option" if config.setting in kind.settings else "--setting"
    return within(call, option, lambda: kind.named(config.setting, **changes))


def _check_numbers(config: TrainConfig, call: str) -> None:
    def check(name: str, fits: bool, expected: str) -> None:
        require(fits, call, f"{flag(name)} is {getattr(config, name)}, expected {expected}.")

    for name, least in _LEAST.items():
        value = getattr(config, name)
        check(name, value is None or value >= least, f"at least {least}")  # NaN fails, too
        if value is not None and value > LARGEST:
            raise ArgumentError(f"{call}: {flag(name)} is {value:.3g}, expected at most {LARGEST}.")
    check("layers", config.layers <= MOST_LAYERS, f"at most {MOST_LAYERS}")
    for name in ("learning_rate", "clip"):
        check(name, 0 < getattr(config, name) < math.inf, "a finite number above 0")
    count = config.steps * config.per_step
    if count >= 2**63:
        sizes = f"--steps {config.steps}, --batch {config.batch} and --accumulate {config.accumulate}"
        raise ArgumentError(f"{call}: {sizes} make {count:.1e} sequences; give smaller ones.")
    check_seed(config.seed, call)
    check("stop_at", config.stop_at is None or math.isfinite(config.stop_at), "a finite number")
    for name in ("warmup", "final_learning_rate"):
        check(name, 0 <= getattr(config, name) <= 1, "a fraction from 0 to 1")
    check("validation", 0 < config.validation < 1, "a fraction between 0 and 1, both excluded")


def _specs(config: TrainConfig, call: str) -> list[Spec]:
    """Return the attention specs of a run, each once; other words in `config.spec` name token mixers."""
    specs: dict[Spec, None] = {}
    for word in config.spec:
        try:
            specs[read_spec(word, "--spec", call)] = None
        except ArgumentError:
            if not word:
                raise
            from ..models.hybrid.token_mixers import read_mixer  # imports transformers, which takes seconds

            read_mixer(word, call, "--spec")
    return list(specs)


def _check_heads(config: TrainConfig, call: str, *, rotary: bool) -> None:
    """Check that the heads divide the width, into even parts for rotary positions, and kv_heads the heads."""
    width, heads, kv_heads = config.width, config.heads, config.kv_heads
    part = 2 if rotary else 1
    require(width % part == 0, call, f"--width is {width}, expected an even number.")
    if width % (part * heads):
        problem = f"which gives heads of {width // heads} channels at --width {width}, expected an even number"
        problem = f"which does not divide --width {width}" if width % heads else problem
        hint = f"choose from {_divisors(width // part)}, or a --width that is a multiple of {part * heads}"
        raise ArgumentError(f"{call}: --heads is {heads}, {problem}; {hint}.")
    if config.share_query_key and kv_heads not in (None, heads):
        same = f"so --kv-heads {kv_heads} must equal --heads {heads}; omit --kv-heads"
        raise ArgumentError(f"{call}: --share-query-key uses the keys as queries, {same}.")
    if kv_heads is not None and heads % kv_heads:
        choices = f"which does not divide --heads {heads}; choose from {_divisors(heads)}"
        raise ArgumentError(f"{call}: --kv-heads is {kv_heads}, {choices}.")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)


def _check_rules(config: TrainConfig, specs: list[Spec], call: str) -> None:
    from ..nn import as_ridge, as_temperature

    rule = as_temperature(config.temperature, call, "--temperature")
    for spec in specs:
        rule.require(f"{call}: --temperature", spec)
    ridge = as_ridge(config.ridge, call, "--ridge")
    for spec in [spec for spec in specs if spec.degree] or specs:  # other specs have no ridge to learn
        ridge.require(f"{call}: --ridge", spec)


def _check_sizes(config: TrainConfig, specs: list[Spec], model: RegardConfig, call: str) -> None:
    """Check that some implementation computes every spec at the run's sizes."""
    for spec in specs:
        reason = _obstacle(config, spec, model, config.batch)
        if reason is None:
            continue
        batch = config.batch // 2
        while batch and _obstacle(config, spec, model, batch) is not None:
            batch //= 2
        hint = "a smaller --context, at any --batch"
        if batch:
            hint = f"a smaller --batch (such as {batch}) with a larger --accumulate, or a smaller --context"
        sizes = f"--batch {config.batch}, --heads {config.heads} and --context {config.context}"
        raise ArgumentError(f"{call}: --spec {spec} cannot be computed with {sizes}: {reason}. Give {hint}.")


def _obstacle(config: TrainConfig, spec: Spec, model: RegardConfig, batch: int) -> str | None:
    """Return why no implementation can train on `batch` sequences and measure their support, or None if one can."""
    import torch

    from .. import explain
    from .device import resolve_device

    dim = getattr(model, "head_dim", None) or config.width // config.heads
    for diagnostics in (False, True):  # training, then measuring the support
        plan = explain(
            spec,
            (batch, config.heads, config.context, dim),
            (batch, config.kv_heads or config.heads, config.context, dim),
            dtype=getattr(torch, config.dtype),
            device=resolve_device(config.device, call="train"),
            is_causal=True,
            exclude_self=config.exclude_self,
            window=config.window,
            return_diagnostics=diagnostics,
        )
        if all(reason is not None for _, reason, _ in plan.rows):
            name, reason, _ = plan.rows[-1]  # the reference, which only size can stop
            return f"{name} {reason}"
    return None
