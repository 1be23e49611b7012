"""One model of the demo: its settings, a rehearsal, the training, and a look at what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regard import Spec
from regard.checks import ArgumentError
from regard.inspect.capture import capture
from regard.inspect.measures import AttentionMaps, attention_maps
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
)
from regard.training.callbacks import Clock
from regard.training.config import SEEDS
from regard.training.validation import validate

from .demo_output import RUNS, TEXT, Baseline, Outcome, Trained, folder_name
from .demo_text import Material
from .ngram import NGram

CONTEXT = 128
"""Characters that a model sees at once."""
EXCERPT = 64
"""Characters in the attention maps: as many as can be read in a figure."""
INITIAL = 0.05
"""Standard deviation of the first weights."""
SAMPLE = 400
"""Characters of generated text."""
TEMPERATURE = 0.8
_OWN = ("data", "spec", "out", "resume", "overwrite", "steps", "seed")


def plan(material: Material, spec: Spec, place: int, *, steps: int, seed: int, out: Path) -> TrainConfig:
    """The training of the model at `place`. All models differ in `spec` and their run folder only."""
    return TrainConfig(
        data=out / TEXT,
        validation=material.share,
        spec=(str(spec),),
        layers=3,
        width=96,
        heads=3,
        context=CONTEXT,
        batch=8,
        steps=steps,
        learning_rate=3e-3,
        final_learning_rate=0.02,
        seed=seed,
        device="cpu",  # the demo compares on the machine that everyone has
        out=out / RUNS / folder_name(place, str(spec)),
        log_every=max(1, steps // 50),
        # three looks on the way; after the last step the whole held-out text is measured in any case
        eval_every=steps // 4 + 1,
        eval_tokens=len(material.held_out_tokens),
        save_every=steps,
        keep=1,
    )


def build_model(settings: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The usual model with larger first weights: the customary 0.02 suits widths of a thousand; at a tenth of
    that it costs a few hundredths of a bit in a run as short as this one."""
    config = language_model(settings, tokenizer).config
    config.initializer_range = INITIAL
    return HybridForCausalLM(config)


def shared_settings(settings: TrainConfig) -> dict[str, str]:
    """What all models have in common, name to value."""
    named = ((field.name, getattr(settings, field.name)) for field in fields(settings))
    first = {"steps": str(settings.steps), "seed": str(settings.seed), "initializer_range": str(INITIAL)}
    return first | {name: str(value) for name, value in named if name not in _OWN}


def rehearse(plans: Sequence[TrainConfig], material: Material, call: str) -> None:
    """Take every model one window forward and back, with and without observers, so that a sentence that
    cannot be trained is found before others have been trained for minutes.

    Raises:
        ArgumentError: one cannot; the message says which and why.
    """
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
    """The n-gram model of the text to learn, measured on the held-out text."""
    start = time.perf_counter()
    model = NGram(material.train_tokens.tolist(), len(material.tokenizer), order)
    seconds = time.perf_counter() - start
    held_out = material.held_out_tokens.tolist()
    return Baseline(
        name=f"{order}-gram",
        bits_per_char=Units.of(material.held_out, len(held_out)).bits_per_char(model.loss(held_out)),
        train_seconds=seconds,
        tokens_per_second=len(material.train_tokens) / seconds,
    )


def train_one(settings: TrainConfig, material: Material, console: Console, label: str, call: str) -> Outcome:
    """Train a model, let it write, and look inside. A run that stops by itself gives an outcome with the
    reason, so that the minutes spent on the other models are not lost.

    Raises:
        TrainingInterrupted: Ctrl-C or SIGTERM.
    """
    name, clock, cpu = settings.spec[0], Clock(), time.process_time()
    try:
        summary = train(settings, build_model=build_model, callbacks=[clock], console=console, label=label)
    except TrainingInterrupted:
        raise
    except TrainingStopped as error:
        return Outcome(name=name, run=settings.out, failure=str(error))
    cpu = time.process_time() - cpu
    with console.status(f"{label}: writing a sample, looking inside"):
        model, tokenizer = load_model(settings.out, call=call)
        sample = write_on(model, tokenizer, material.prompt, settings.seed)
        maps = look_inside(model, material)
    trained = Trained(
        bits_per_char=summary.bits_per_char,
        parameters=summary.parameters,
        support=summary.support,
        train_seconds=clock.seconds,
        cpu_seconds=cpu,
        tokens_per_second=clock.steps * settings.per_step * CONTEXT / clock.seconds,
        prompt=material.prompt,
        sample=sample,
        sampled=f"Temperature {TEMPERATURE}, seed {settings.seed}; the coloured part is the prompt, "
        f"from the held-out text. Every {CONTEXT // 2} characters continue from the {CONTEXT // 2} before.",
        maps=maps,
    )
    return Outcome(name=name, run=settings.out, trained=trained)


def write_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, length: int = SAMPLE
) -> str:
    """`length` characters after the prompt, in pieces of half a context that continue from the half before,
    since in training a model never looked back further than one context."""
    half = CONTEXT // 2
    text = prompt
    for piece in range(-(-length // half)):
        tail = text[-half:]
        longer = generate_text(
            model, tokenizer, tail, max_new_tokens=half, temperature=TEMPERATURE, seed=(seed + piece) % SEEDS
        )
        text += longer[len(tail) :]
    return text[len(prompt) : len(prompt) + length]


def look_inside(model: PreTrainedModel, material: Material) -> AttentionMaps | None:
    """The weights of all heads on the excerpt; None for a mechanism that has no weights to show."""
    try:
        return attention_maps(model, material.excerpt_tokens, list(material.excerpt))
    except ArgumentError:
        return None
