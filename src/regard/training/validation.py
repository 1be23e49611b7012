"""Checks of a training run that need no text: numbers, specs, the model at its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .config import LARGEST, MOST_LAYERS, TrainConfig, check_seed
from .sentences import read_sentence

if TYPE_CHECKING:
    from .. import Spec
    from ..models import RegardConfig


def validate(config: TrainConfig, call: str = "train", *, here: bool = True) -> None:
    """Check all that can be checked without reading the text.

    Args:
        config: the options of the run.
        call: the name of the call, for errors.
        here: also check what a new run needs here: a text, the device, and a model that can be computed.

    Raises:
        ArgumentError: a number out of its range, heads that do not divide, an unknown spec, tokenizer
            or device, or a spec that cannot be computed at these sizes.
    """
    model = ("layers", "width", "heads", "kv_heads", "mlp_width", "window")
    rhythm = ("log_every", "eval_every", "save_every", "keep")
    for name in (*model, "steps", "batch", "accumulate", *rhythm):
        _at_least(config, name, 1, call)
    if config.layers > MOST_LAYERS:
        raise ArgumentError(f"{call}: --layers is {config.layers}, expected at most {MOST_LAYERS}.")
    _at_least(config, "context", 2, call)  # one token to see and one to predict
    _at_least(config, "eval_tokens", 2, call)
    for name in ("learning_rate", "clip"):
        _above_zero(config, name, call)
    _at_least(config, "weight_decay", 0, call)
    if config.steps * config.per_step >= 2**63:
        raise ArgumentError(
            f"{call}: --steps {config.steps}, --batch {config.batch} and --accumulate {config.accumulate} make "
            f"{config.steps * config.per_step:.1e} windows of text; give smaller ones."
        )
    check_seed(config.seed, call)
    for name in ("warmup", "final_learning_rate"):
        _share(config, name, call, ends=True)
    _share(config, "validation", call, ends=False)
    if here and config.data is None:
        raise ArgumentError(f"{call}: no text to learn from; give --data FILE or --data FOLDER.")
    if config.resume and config.overwrite:
        raise ArgumentError(f"{call}: --resume continues the run, --overwrite deletes it; give one of them.")
    if not config.spec:
        raise ArgumentError(f"{call}: --spec names nothing; give a sentence such as softmax.")
    specs = _specs(config.spec, call)
    _check_names(config, call, here=here)
    _check_rules(config, specs, call)
    from .models import check_model, has_field  # imports transformers, which takes seconds

    _check_heads(config, call, rotary=has_field(config.model, "rope_theta"))
    if here:
        _check_sizes(config, specs, check_model(config, call), call)


def _specs(words: Sequence[str], call: str) -> list[Spec]:
    """The sentences among `words`, each once; the others name token mixers."""
    found: dict[Spec, None] = {}
    for word in words:
        try:
            found[read_sentence(word, "--spec", call)] = None
        except ArgumentError:
            from ..models import token_mixers  # transformers, which takes seconds to import: only where it is needed

            if word not in token_mixers:
                raise
    return list(found)


def _at_least(config: TrainConfig, name: str, least: int, call: str) -> None:
    value = getattr(config, name)
    if value is not None and not value >= least:  # `not >=` so that NaN is caught too
        raise ArgumentError(f"{call}: {_flag(name)} is {value}, expected at least {least}.")
    if value is not None and value > LARGEST:
        raise ArgumentError(f"{call}: {_flag(name)} is {value:.3g}, expected at most {LARGEST}.")


def _above_zero(config: TrainConfig, name: str, call: str) -> None:
    value = getattr(config, name)
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{call}: {_flag(name)} is {value}, expected a number above 0.")


def _share(config: TrainConfig, name: str, call: str, *, ends: bool) -> None:
    value = getattr(config, name)
    if not (0 <= value <= 1 if ends else 0 < value < 1):
        raise ArgumentError(
            f"{call}: {_flag(name)} is {value}, expected a share "
            f"{'from 0 to 1' if ends else 'between 0 and 1, both excluded'}."
        )


def _check_heads(config: TrainConfig, call: str, *, rotary: bool) -> None:
    """Heads share the width in equal parts, which rotary positions need to be even; keys and values share the heads."""
    width, heads, kv_heads = config.width, config.heads, config.kv_heads
    part = 2 if rotary else 1
    if width % part:
        raise ArgumentError(f"{call}: --width is {width}, expected an even number.")
    if width % (part * heads):
        fault = (
            f"which does not divide --width {width}"
            if width % heads
            else f"which gives heads of {width // heads} channels at --width {width}, expected an even number"
        )
        raise ArgumentError(
            f"{call}: --heads is {heads}, {fault}; choose from {_divisors(width // part)}, "
            f"or a --width that is a multiple of {part * heads}."
        )
    if config.share_query_key and kv_heads not in (None, heads):
        raise ArgumentError(
            f"{call}: --share-query-key makes queries of the keys, so that --kv-heads {kv_heads} must be --heads "
            f"{heads}; leave --kv-heads out."
        )
    if kv_heads is not None and heads % kv_heads:
        raise ArgumentError(
            f"{call}: --kv-heads is {kv_heads}, which does not divide --heads {heads}; choose from {_divisors(heads)}."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)


def _check_rules(config: TrainConfig, specs: list[Spec], call: str) -> None:
    """The rules of temperature and ridge exist and fit the sentences."""
    from ..nn import as_ridge, as_temperature

    rule = as_temperature(config.temperature, call, "--temperature")
    for spec in specs:
        rule.require(f"{call}: --temperature", spec)
    ridge = as_ridge(config.ridge, call, "--ridge")
    for spec in [spec for spec in specs if spec.degree] or specs:  # the others have none to learn
        ridge.require(f"{call}: --ridge", spec)


def _check_names(config: TrainConfig, call: str, *, here: bool) -> None:
    from .data.tokenizers import TOKENIZERS
    from .device import resolve_device

    TOKENIZERS.get(config.tokenizer)
    if here:
        resolve_device(config.device, call=call)


def _check_sizes(config: TrainConfig, specs: list[Spec], model: RegardConfig, call: str) -> None:
    """Some implementation computes every sentence at the run's sizes, so that none fails once the folder is
    written."""
    for spec in specs:
        reason = _obstacle(config, spec, model, config.batch)
        if reason is None:
            continue
        batch = config.batch // 2
        while batch and _obstacle(config, spec, model, batch) is not None:
            batch //= 2
        mend = (
            f"a smaller --batch (such as {batch}) with a larger --accumulate, or a smaller --context" if batch else ""
        )
        raise ArgumentError(
            f"{call}: --spec {spec} cannot be computed with --batch {config.batch}, --heads {config.heads} and "
            f"--context {config.context}: {reason}. Give {mend or 'a smaller --context, at any --batch'}."
        )


def _obstacle(config: TrainConfig, spec: Spec, model: RegardConfig, batch: int) -> str | None:
    """Why nothing can train and measure `batch` windows at once, or None."""
    import torch

    from .. import explain
    from .device import resolve_device

    dim = getattr(model, "head_dim", None) or config.width // config.heads
    for diagnostics in (False, True):  # training, and measuring the support
        found = explain(
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
        if all(reason is not None for _, reason, _ in found.rows):
            name, reason, _ = found.rows[-1]  # the plainest, which only size can stop
            return f"{name} {reason}"
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
