"""One model of the demo: settings, a trial step, training, sample and attention maps."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regard import Spec
from regard.checks import ArgumentError
from regard.inspect.capture import capture
from regard.inspect.measures import attention_maps
from regard.models import HybridForCausalLM
from regard.training import (
    TrainConfig,
    TrainingInterrupted,
    TrainingStopped,
    Units,
    generate_text,
    language_model,
    load_model,
    train,
)  # fmt: skip
from regard.training.callbacks import Clock
from regard.training.config import SEEDS
from regard.training.validation import validate

from .demo_kernels import kernel_weights
from .demo_output import RUNS, TEXT, Baseline, Outcome, Trained, folder_name
from .demo_text import Material
from .ngram import NGram

CONTEXT = 128  # characters that a model sees at once
EXCERPT = 64  # characters in the attention maps: as many as can be read in a figure
INITIAL = 0.05  # standard deviation of the first weights
SAMPLE, TEMPERATURE = 400, 0.8  # characters of generated text
_OWN = ("data", "spec", "out", "resume", "overwrite", "steps", "seed")


def plan(material: Material, spec: Spec, place: int, *, steps: int, seed: int, out: Path) -> TrainConfig:
    """Return the training of the model at `place`. Models differ in `spec` and run folder only. Three evaluations come
    before the last one, which always covers the whole held-out text."""
    return TrainConfig(
        data=out / TEXT, validation=material.share, spec=(str(spec),), layers=3, width=96, heads=4, context=CONTEXT,
        batch=8, steps=steps, learning_rate=1e-2, final_learning_rate=0.02, optimizer="muon", seed=seed, device="cpu",
        out=out / RUNS / folder_name(place, str(spec)), log_every=max(1, steps // 50), eval_every=steps // 4 + 1,
        eval_tokens=len(material.held_out_tokens), save_every=steps, keep=1,
    )  # fmt: skip


def build_model(settings: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the usual model with larger first weights: the usual 0.02 suits widths of a thousand; at a tenth of that
    it costs a few hundredths of a bit in a short run."""
    config = language_model(settings, tokenizer).config
    config.initializer_range = INITIAL
    return HybridForCausalLM(config)


def shared_settings(settings: TrainConfig) -> dict[str, str]:
    """Return the settings that all models share, name to value."""
    named = ((field.name, getattr(settings, field.name)) for field in fields(settings))
    first = {"steps": str(settings.steps), "seed": str(settings.seed), "initializer_range": str(INITIAL)}
    return first | {name: str(value) for name, value in named if name not in _OWN}


def rehearse(plans: Sequence[TrainConfig], material: Material, call: str) -> None:
    """Run every model forward and backward on one window, so that a spec that cannot be trained is found first."""
    window = material.train_tokens[:CONTEXT].long()[None]
    for settings in plans:
        validate(settings, call)
        try:
            with torch.random.fork_rng(devices=[]):
                model = build_model(settings, material.tokenizer)
            model(input_ids=window, labels=window).loss.backward()
            with capture(model), torch.no_grad():
                model(input_ids=window)
        except ArgumentError as error:
            raise ArgumentError(f"{call}: --specs: {settings.spec[0]} cannot be trained: {error}") from None


def count(material: Material, order: int) -> Baseline:
    """Return the n-gram model of the training text, measured on the held-out text."""
    start = time.perf_counter()
    model = NGram(material.train_tokens.tolist(), len(material.tokenizer), order)
    seconds = time.perf_counter() - start
    held_out = material.held_out_tokens.tolist()
    bits = Units.of(material.held_out, len(held_out)).bits_per_char(model.loss(held_out))
    return Baseline(name=f"{order}-gram", bits_per_char=bits, train_seconds=seconds,
                    tokens_per_second=len(material.train_tokens) / seconds)  # fmt: skip


def train_one(settings: TrainConfig, material: Material, call: str) -> Outcome:
    """Train a model, generate a sample, and compute attention maps; a run that stops gives the reason."""
    name, clock, cpu = settings.spec[0], Clock(), time.process_time()
    try:
        summary = train(settings, build_model=build_model, callbacks=[clock], console=Console(quiet=True))
    except TrainingInterrupted:
        raise
    except TrainingStopped as error:
        return Outcome(name=name, run=settings.out, failure=str(error))
    cpu = time.process_time() - cpu
    model, tokenizer = load_model(settings.out, call=call)
    sample = write_on(model, tokenizer, material.prompt, settings.seed)
    maps = kernels = None
    with suppress(ArgumentError):  # the model has no weights to show
        maps = attention_maps(model, material.excerpt_tokens, list(material.excerpt))
        kernels = kernel_weights(model, name, material.excerpt_tokens, material.excerpt)
    half = CONTEXT // 2
    sampled = (
        f"Temperature {TEMPERATURE}, seed {settings.seed}; the coloured part is the prompt, from the held-out text. "
        f"Every {half} characters continue from the {half} before."
    )
    trained = Trained(
        bits_per_char=summary.bits_per_char, parameters=summary.parameters, support=summary.support,
        train_seconds=clock.seconds, cpu_seconds=cpu, prompt=material.prompt, sample=sample, sampled=sampled, maps=maps,
        kernels=kernels,
        tokens_per_second=clock.steps * settings.per_step * CONTEXT / clock.seconds,
    )  # fmt: skip
    return Outcome(name=name, run=settings.out, trained=trained)


def write_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, length: int = SAMPLE
) -> str:
    """Generate `length` characters after the prompt, in pieces of half a context that continue from the half before,
    since no model was trained on more than one context."""
    half = CONTEXT // 2
    text = prompt
    for piece in range(-(-length // half)):
        tail = text[-half:]
        how: dict[str, Any] = {"temperature": TEMPERATURE, "seed": (seed + piece) % SEEDS}
        text += generate_text(model, tokenizer, tail, max_new_tokens=half, **how)[len(tail) :]
    return text[len(prompt) : len(prompt) + length]
