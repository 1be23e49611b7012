"""Two looks into a fast-weight memory: the slots that answer a question about a needle, and the gates over a text.

Section 5 of "Fast-weight Product Key Memory". A haystack is read several times, the memory written once after each;
then a question is asked, and every slot that is retrieved for the answer's tokens is shown with what its last write
stored, marked where that is the true next token. And a text is read with smaller chunks than in training, and the gate
of every memory layer is shown token by token. What the paper says of both is counted here, over many questions and a
longer text: how many slots hit, what the others hold, and how gates go with the rarity of a token. The first look is
into a model that learned from needles and questions, the second into one that learned from text (`fwpkm_ablation` says
why).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Corpus, Job, initial_range, run_jobs, sized
from ..long_text.needle_text import UNKNOWN, NeedleWorld, learn_answers, needle_world
from .fwpkm_ablation import ON_NEEDLES, ON_TEXT, UNSEEN, needles
from .memory_layouts import Row, Sizes, row_config

CALL = "reproduce: fwpkm-case-studies"
ROW = Row("GDN", "PKM+FwPKM")
"""The paper's model: gated delta nets, a slow memory between two fast ones."""


@dataclass(frozen=True, kw_only=True)
class FwPKMCaseStudiesConfig:
    """Train a model with two fast-weight memories, and look at its slots and its gates."""

    out: Path = Path("fwpkm-case-studies-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs a minute on two cores, 'desk' five, 'paper' (12 layers
    of width 768, PKM at layer 6 and FwPKM at 2 and 10) GPUs, days and --data."""
    quick: bool = False
    """The same as --size quick."""
    data: Path | None = None
    """UTF-8 text, a file or a folder. None: the Python manual inside the interpreter."""
    words: int | None = None
    """How many words are tokens of their own."""
    seeds: int | None = None
    """Models that are trained; the first one's case is drawn."""
    seed: int = 0
    """The first of the seeds."""
    width: int | None = None
    """Width of the model."""
    layers: int | None = None
    """Layers of the model."""
    heads: int | None = None
    """Heads of every mixer."""
    context: int | None = None
    """Tokens of a training window."""
    chunk: int | None = None
    """Tokens between two writes in training."""
    gate_chunk: int | None = None
    """The same where gates are looked at; the paper takes a sixteenth."""
    sub_keys: int | None = None
    """The square root of a memory's slots."""
    memory_dim: int | None = None
    """Channels of a memory's keys and values."""
    top_k: int | None = None
    """Slots that a token reads."""
    address_weight: float | None = None
    """Of the entropy by which keys move. The paper's 10 is meant for its 512 sub-keys, and throws fewer away."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps."""
    learning_rate: float | None = None
    """The highest."""
    examples: int | None = None
    """Needle documents that are made, half a window long; the model sees windows of them."""
    haystack: int | None = None
    """Tokens of a haystack."""
    needles: int | None = None
    """Needles in it."""
    digits: int | None = None
    """Digits of a needle's number, an even count."""
    questions: int | None = None
    """Haystacks with a question; the first that is answered rightly is drawn."""
    reads: int | None = None
    """Readings before the question."""
    gate_tokens: int | None = None
    """Tokens of held-out text whose gates are counted."""
    drawn: int | None = None
    """Of these, how many are drawn."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each."""


_SMALL: dict[str, Any] = {
    "layers": 4, "parts": 1, "dtype": "float32", "device": "cpu", "needles": 5, "digits": 4, "reads": 4,
    "address_weight": 1.0,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_SMALL, "words": 200, "width": 32, "heads": 2, "context": 128, "chunk": 32, "gate_chunk": 8, "sub_keys": 16,
        "memory_dim": 32, "top_k": 4, "batch": 4, "steps": 30, "learning_rate": 3e-3, "examples": 200, "haystack": 64,
        "questions": 8, "gate_tokens": 400, "drawn": 200, "looks": 2, "seeds": 1,
    },
    "desk": {
        **_SMALL, "words": 4000, "width": 64, "heads": 2, "context": 256, "chunk": 64, "gate_chunk": 16, "sub_keys": 32,
        "memory_dim": 64, "top_k": 8, "batch": 8, "steps": 250, "learning_rate": 4e-3, "examples": 4000,
        "haystack": 192, "questions": 64, "gate_tokens": 8000, "drawn": 240, "looks": 4, "seeds": 2,
    },
    "paper": {
        "words": 30_000, "layers": 12, "parts": 4, "dtype": "bfloat16", "device": "auto", "seeds": 1, "width": 768,
        "heads": 12, "context": 4096, "chunk": 512, "gate_chunk": 32, "sub_keys": 512, "memory_dim": 512, "top_k": 8,
        "batch": 128, "steps": 20_000, "learning_rate": 1e-3, "examples": 100_000, "haystack": 4000, "needles": 5,
        "digits": 6, "questions": 100, "reads": 4, "gate_tokens": 100_000, "drawn": 600, "looks": 20,
        "address_weight": 10.0,
    },
}  # fmt: skip
"""Options by size. "paper" has the sizes of the paper's table 3 and section 5, with the models that
`streaming_perplexity.SIZES` describes."""


@recipes.register("fwpkm-case-studies")
class FwPKMCaseStudies:
    """Slots that answer a needle's question with their hits, and gates over a text: the two case studies of FwPKM."""

    Config: ClassVar[type[Any]] = FwPKMCaseStudiesConfig

    @staticmethod
    def run(config: FwPKMCaseStudiesConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        numbers: Any = config
        world = needle_world(
            config.data, common=numbers.words, needles=numbers.needles, digits=numbers.digits, call=CALL
        )
        runs = run_jobs(jobs(config, world), config.workers, progress)
        progress("drawing")
        from . import fwpkm_case_studies_output as output

        needled, texts = ([run for run in runs if run.name == f"{ROW.name}{kind}"] for kind in (ON_NEEDLES, ON_TEXT))
        seen = output.Seen(needled, texts, world.words, numbers.reads, numbers.gate_chunk, numbers.drawn)
        data = {
            "text": {"words": len(world.words), "learned": len(world.learn), "held out": len(world.held_out)},
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "runs": [run.record() for run in runs],
        }
        return Findings(data, output.tables(seen), output.figures(seen), output.notes(seen))


def check(config: FwPKMCaseStudiesConfig) -> FwPKMCaseStudiesConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not.
    """
    config = sized(config, SIZES, CALL)
    least = {"gate_chunk": 2, "gate_tokens": 2, "drawn": 1}
    same = ("words", "examples", "haystack", "needles", "digits", "questions", "reads")
    for name, low in {**dict.fromkeys(same, 1), **least}.items():
        if getattr(config, name) < low:
            flag = name.replace("_", "-")
            raise ArgumentError(f"{CALL}: --{flag} is {getattr(config, name)}, expected at least {low}.")
    budget(config).check(CALL)
    model_config(config, 258)
    return config


def budget(config: FwPKMCaseStudiesConfig) -> Budget:
    """How the model is trained."""
    numbers: Any = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers, measured=4 * (config.context or 1))


def model_config(config: FwPKMCaseStudiesConfig, vocabulary: int) -> Any:
    """The model: fast memories low and high, a slow one between them.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    numbers: Any = config
    paper = numbers.layers >= 12
    fast = (2, 10) if paper else (min(1, numbers.layers - 1), numbers.layers - 1)
    slow = (6,) if paper else (numbers.layers // 2,)
    sizes = Sizes(
        vocabulary=vocabulary,
        **{name: getattr(numbers, name) for name in ("width", "layers", "heads", "context", "sub_keys", "memory_dim")},
        chunk=numbers.chunk,
        slow_depths=slow,
        fast_depths=fast,
        mixed_slow=slow,
        mixed_fast=fast,
        pkm_top_k=min(32, numbers.sub_keys),
        fast_top_k=numbers.top_k,
    )
    made = row_config(ROW, sizes, initializer_range=initial_range(numbers.width))
    made.memory_options["fwpkm"]["address_weight"] = numbers.address_weight
    return made


def jobs(config: FwPKMCaseStudiesConfig, world: NeedleWorld) -> list[Job]:
    """One for every seed.

    Raises:
        ArgumentError: too little held-out text, or needles that do not fit.
    """
    from .fwpkm_case_studies_measure import look_at_gates, look_at_slots

    numbers: Any = config
    held_out = torch.tensor(world.held_out[: numbers.gate_tokens], dtype=torch.int32)
    if len(held_out) < numbers.gate_tokens:
        raise ArgumentError(
            f"{CALL}: {len(held_out):,} words of the text are held out, expected --gate-tokens "
            f"{numbers.gate_tokens:,}; give fewer, or more --data."
        )
    document = numbers.context // 2
    learned = torch.tensor(world.learn, dtype=torch.int32)
    haystacks, questions, answers = needles(world, numbers.haystack, numbers.questions, config.seed)
    asked = {"haystacks": haystacks, "questions": questions, "answers": answers, "reads": numbers.reads}
    read = {"text": held_out, "learned": learned, "chunk": numbers.gate_chunk, "unknown": world.words.index(UNKNOWN)}
    kinds: dict[str, dict[str, Any]] = {
        ON_NEEDLES: {
            "material": Corpus(
                world.training_tokens(numbers.examples * document, document, config.seed),
                world.training_tokens(budget(config).measured, document, UNSEEN + config.seed),
            ),
            "measure": partial(look_at_slots, **asked),
            "prepare": partial(learn_answers, values=world.values, keys=world.keys),
        },
        ON_TEXT: {"material": Corpus(learned, held_out), "measure": partial(look_at_gates, **read)},
    }
    return [
        Job(
            name=f"{ROW.name}{kind}",
            config=model_config(config, len(world.words)),
            budget=budget(config),
            seed=seed,
            **given,
        )
        for kind, given in kinds.items()
        for seed in range(config.seed, config.seed + numbers.seeds)
    ]
