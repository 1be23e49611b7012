"""What each part of a fast-weight product-key memory is worth: appendix B of its paper at a size for two cores.

Each row of the comparison is the same model, gated delta nets with FwPKM layers, with one part of the memory left out
or another number of slots read; beside them stand the three rules of writing, dot-product scores, which the paper
leaves out since they "often result in memory collapsing and loss divergence", and the model without a memory.

Each is trained twice: on text, for its perplexity on held-out text, read in order with the memory carried on as in the
paper, its gates and its use of the slots there; and on needles in text with the questions for them (`needle_text`),
for the answers after one to four readings. The paper's models do both at once; at this size a model whose loss counts
all of the text learns nothing of needles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Corpus, Job, initial_range, run_jobs, sized
from ..long_text.needle_reading import read_and_answer
from ..long_text.needle_text import FINAL, NeedleWorld, learn_answers, needle_world
from ..long_text.streaming import Carry, streamed
from .memory_layouts import Row, Sizes, check_names, row_config

CALL = "reproduce: fwpkm-ablation"
LAYOUT = "GDN"
NONE, WHOLE = "no memory", "FwPKM"
RULES: dict[str, dict[str, Any]] = {
    "rule: paper": {"step_rule": "paper"},
    "rule: reference": {"step_rule": "reference"},
}
PARTS: dict[str, dict[str, Any]] = {
    "without value norm": {"value_norm": False},
    "without address loss": {"key_update": "mse"},
    "without gating": {"gating": False},
    "without loss weight": {"gate_loss": False},
    "without look-ahead": {"look_ahead": False},
}
WIDER, HEADS, DOT = "1 head, 4 k slots", "4 heads, k slots each", "dot-product scores"
ON_TEXT, ON_NEEDLES = " on text", " on needles"
"""After a variant's name, what a run of it was trained on."""
UNSEEN = 500_000
"""Added to the seed for needle documents that no model learns from."""
VARIANTS = (NONE, WHOLE, *RULES, WIDER, HEADS, *PARTS, DOT)
"""WHOLE is the memory with all its parts and the normalised rule; the others differ from it in what their name says."""


@dataclass(frozen=True, kw_only=True)
class FwPKMAblationConfig:
    """Leave out one part of a fast-weight product-key memory at a time."""

    out: Path = Path("fwpkm-ablation-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' twelve, 'paper' (12
    layers of width 768, 512 x 512 slots at layers 2, 6 and 10) GPUs, days and --data."""
    quick: bool = False
    """The same as --size quick."""
    variants: tuple[str, ...] = VARIANTS
    """Which memories are trained."""
    data: Path | None = None
    """UTF-8 text, a file or a folder. None: the Python manual inside the interpreter."""
    words: int | None = None
    """How many words are tokens of their own."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    width: int | None = None
    """Width of every model."""
    layers: int | None = None
    """Layers of every model."""
    heads: int | None = None
    """Heads of every mixer."""
    context: int | None = None
    """Tokens of a training window, and of a segment."""
    chunk: int | None = None
    """Tokens between two writes."""
    sub_keys: int | None = None
    """The square root of a memory's slots."""
    memory_dim: int | None = None
    """Channels of a memory's keys and values."""
    top_k: int | None = None
    """k, slots that a token reads."""
    address_weight: float | None = None
    """Of the entropy by which keys move. The paper's 10 is meant for its 512 sub-keys, and throws fewer away."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each training."""
    learning_rate: float | None = None
    """The highest, for all models."""
    examples: int | None = None
    """Needle documents that are made, half a window long; a model sees windows of them."""
    segments: int | None = None
    """Windows of held-out text that are read in order."""
    haystack: int | None = None
    """Tokens of a haystack."""
    needles: int | None = None
    """Needles in it."""
    digits: int | None = None
    """Digits of a needle's number, an even count."""
    questions: int | None = None
    """Haystacks with a question that each model is asked."""
    reads: int | None = None
    """Readings of each, at most."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each. Changes no number but the times."""


_SMALL: dict[str, Any] = {
    "layers": 2, "parts": 1, "dtype": "float32", "device": "cpu", "seeds": 1, "needles": 5, "digits": 2, "reads": 4,
    "address_weight": 1.0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_SMALL, "words": 200, "width": 32, "heads": 2, "context": 128, "chunk": 32, "sub_keys": 16, "memory_dim": 32,
        "top_k": 4, "batch": 2, "steps": 12, "learning_rate": 3e-3, "examples": 200, "segments": 4, "haystack": 64,
        "questions": 8, "looks": 2,
    },
    "desk": {
        **_SMALL, "words": 1000, "width": 64, "heads": 2, "context": 256, "chunk": 64, "sub_keys": 32, "memory_dim": 64,
        "top_k": 8, "batch": 8, "steps": 160, "learning_rate": 4e-3, "examples": 4000, "segments": 32, "haystack": 512,
        "questions": 96, "looks": 4,
    },
    "paper": {
        "words": 30_000, "layers": 12, "parts": 4, "dtype": "bfloat16", "device": "auto", "seeds": 1, "width": 768,
        "heads": 12, "context": 4096, "chunk": 512, "sub_keys": 512, "memory_dim": 512, "top_k": 8, "batch": 128,
        "steps": 20_000, "learning_rate": 1e-3, "examples": 100_000, "segments": 256, "haystack": 4000, "needles": 5,
        "digits": 6, "questions": 500, "reads": 4, "looks": 20, "address_weight": 10.0,
    },
}  # fmt: skip
"""Options by size; the paper's from its tables 1 and 3 and section 4."""


@recipes.register("fwpkm-ablation")
class FwPKMAblation:
    """A fast-weight product-key memory with one part left out at a time: perplexity, gates, slots in use, needles."""

    Config: ClassVar[type[Any]] = FwPKMAblationConfig

    @staticmethod
    def run(config: FwPKMAblationConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        numbers: Any = config
        world = needle_world(
            config.data, common=numbers.words, needles=numbers.needles, digits=numbers.digits, call=CALL
        )
        runs = run_jobs(jobs(config, world), config.workers, progress)
        progress("drawing")
        from . import fwpkm_ablation_output as output

        groups = {
            kind: {name: [run for run in runs if run.name == f"{name}{kind}"] for name in config.variants}
            for kind in (ON_TEXT, ON_NEEDLES)
        }
        data = {
            "text": {"words": len(world.words), "learned": len(world.learn), "held out": len(world.held_out)},
            "variants": {name: memory_options(config, name) for name in config.variants},
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "runs": [run.record() for run in runs],
        }
        seen = output.Seen(groups[ON_TEXT], groups[ON_NEEDLES], digits=numbers.digits, reads=numbers.reads)
        return Findings(data, output.tables(seen), output.figures(seen), output.notes(seen))


def check(config: FwPKMAblationConfig) -> FwPKMAblationConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a variant is unknown or named twice.
    """
    config = sized(config, SIZES, CALL)
    check_names(CALL, "--variants", config.variants, VARIANTS)
    for name in ("words", "examples", "segments", "haystack", "needles", "digits", "questions", "reads"):
        if getattr(config, name) < 1:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least 1.")
    numbers: Any = config
    if numbers.context < 2 * numbers.chunk:
        raise ArgumentError(
            f"{CALL}: --context {numbers.context} has less than two chunks of {numbers.chunk}: in training nothing "
            f"that is written would be read; take a smaller --chunk."
        )
    budget(config).check(CALL)
    for name in config.variants:
        model_config(config, name, 258)
    return config


def budget(config: FwPKMAblationConfig) -> Budget:
    """What every model is given."""
    numbers: Any = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers, measured=16 * (config.context or 1))


def memory_options(config: FwPKMAblationConfig, variant: str) -> dict[str, Any]:
    """What a variant's memory has that the whole memory has not."""
    numbers: Any = config
    other = {WIDER: {"top_k": 4 * numbers.top_k}, HEADS: {"heads": 4}, DOT: {"score": "dot"}, WHOLE: {}, NONE: {}}
    return {**other, **RULES, **PARTS}[variant]


def model_config(config: FwPKMAblationConfig, variant: str, vocabulary: int) -> Any:
    """The model of a variant.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    numbers: Any = config
    depths = (2, 6, 10) if numbers.layers >= 12 else (numbers.layers - 1,)
    sizes = Sizes(
        vocabulary=vocabulary,
        **{name: getattr(numbers, name) for name in ("width", "layers", "heads", "context", "sub_keys", "memory_dim")},
        chunk=numbers.chunk,
        slow_depths=depths,
        fast_depths=depths,
        mixed_slow=depths,
        mixed_fast=depths,
        fast_top_k=numbers.top_k,
    )
    row = Row(LAYOUT, "none" if variant == NONE else "FwPKM")
    made = row_config(row, sizes, initializer_range=initial_range(numbers.width))
    if variant == NONE:
        return made
    own = {
        **made.memory_options["fwpkm"],
        "address_weight": numbers.address_weight,
        **memory_options(config, variant),
    }
    return row_config(row, sizes, initializer_range=initial_range(numbers.width), memory_options={"fwpkm": own})


def jobs(config: FwPKMAblationConfig, world: NeedleWorld) -> list[Job]:
    """One for every variant and seed.

    Raises:
        ArgumentError: too little held-out text, or needles that do not fit.
    """
    numbers: Any = config
    length = numbers.context * numbers.segments + 1
    held_out = torch.tensor(world.held_out[:length], dtype=torch.int32)
    if len(held_out) < length:
        raise ArgumentError(
            f"{CALL}: {len(held_out):,} words of the text are held out, expected {numbers.segments} --segments of "
            f"{numbers.context}; give fewer, or more --data."
        )
    document = numbers.context // 2
    needle_text = Corpus(
        world.training_tokens(numbers.examples * document, document, config.seed),
        world.training_tokens(budget(config).measured, document, UNSEEN + config.seed),
    )
    asked = needles(world, numbers.haystack, numbers.questions, config.seed)
    kinds: dict[str, dict[str, Any]] = {
        ON_TEXT: {
            "material": Corpus(torch.tensor(world.learn, dtype=torch.int32), held_out),
            "measure": partial(read_text, text=held_out, segment=numbers.context),
        },
        ON_NEEDLES: {
            "material": needle_text,
            "measure": partial(answer, asked=asked, reads=numbers.reads),
            "prepare": partial(learn_answers, values=world.values, keys=world.keys),
        },
    }
    return [
        Job(
            name=f"{name}{kind}",
            config=model_config(config, name, len(world.words)),
            budget=budget(config),
            seed=seed,
            **given,
        )
        for name in config.variants
        for kind, given in kinds.items()
        for seed in range(config.seed, config.seed + numbers.seeds)
    ]


def needles(world: NeedleWorld, length: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Haystacks [E, L], questions [E, Q] and answers [E, A] of held-out text, int64."""
    task = world.task(length)
    examples = task.examples(FINAL + seed, range(count))
    answers = [world.encode(example.answer) for example in examples]
    haystacks, questions = ([getattr(example, name) for example in examples] for name in ("haystack", "question"))
    return torch.tensor(haystacks), torch.tensor(questions), torch.tensor(answers)


def read_text(model: Any, text: Tensor, segment: int) -> dict[str, Any]:
    """What a model makes of a text [T] as a stream of segments, the memory carried on: `text` as streamed, and the loss
    with the memory `frozen`."""
    carry = Carry.paper()
    read = streamed(model, [text], segment, carry, statistics=True)
    frozen = streamed(model, [text], segment, carry, frozen=True)
    return {"text": read.record(), "frozen": frozen.loss}


def answer(model: Any, asked: tuple[Tensor, Tensor, Tensor], reads: int) -> dict[str, Any]:
    """How many answers are exact, by the number of readings."""
    haystacks, questions, answers = asked
    found = read_and_answer(model, haystacks, questions, answers.shape[1], reads=reads).tokens
    return {"exact": (found == answers).all(-1).sum(1).tolist(), "asked": len(answers)}
