"""A needle in a haystack, read up to four times: the paper's figure 4 and findings 4 to 6, at a size for two cores.

Fast-weight Product Key Memory paper, section 4.3. All models learn on the same windows of real text with needles and
the questions for them (without these nothing could be learned here), and are asked for needles in haystacks as long
as those windows and longer, after one to four reads and by three protocols (`needle_reading`): that of the paper, which
answers before it writes, and two that write first.
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
from regard.tasks import NeedleResult, NeedleScore

from ..fwpkm.memory_layouts import KNOWN, LACT, LAYOUTS, MEMORIES, Row, check_names, check_sizes, row_config, rows_of
from ..lib.language_runs import Budget, Corpus, Job, initial_range, run_jobs, sized
from .needle_reading import PROTOCOLS, Protocol, read_and_answer
from .needle_text import FINAL, NeedleWorld, learn_answers, needle_world
from .streaming_perplexity import sizes

CALL = "reproduce: needle"
KEPT_PROTOCOLS: tuple[Protocol, ...] = ("whole", "flushed")
"""Protocols that are measured without a reset between samples, too."""


@dataclass(frozen=True, kw_only=True)
class NeedleConfig:
    """Train the fast-weight paper's layouts on text with needles, and let them read haystacks one to four times."""

    out: Path = Path("needle-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' twelve, 'paper' (12
    layers of width 768, haystacks of 4 K to 128 K tokens) GPUs, days, and --data."""
    quick: bool = False
    """The same as --size quick."""
    layouts: tuple[str, ...] | None = None
    """GDN, GDN+SWA, GDN+FA, FA, FA-pSWA, GDN+FA-pSWA."""
    memories: tuple[str, ...] = ("none", "FwPKM")
    """none, PKM, FwPKM, PKM+FwPKM, FwMLP."""
    also: tuple[str, ...] = ("PKM+FwPKM", "FwMLP")
    """Memories of the first layout, besides."""
    lact: bool = True
    """LaCT too, once."""
    data: Path | None = None
    """UTF-8 text that haystacks are made of, a file or a folder. None: the Python manual inside the interpreter."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    words: int | None = None
    """How many of the commonest words are tokens of their own."""
    needles: int | None = None
    """Needles in a haystack."""
    digits: int | None = None
    """Of a needle's number; two of them are a token."""
    width: int | None = None
    """Width of every model."""
    layers: int | None = None
    """Layers of every model; every fourth is attention where a layout has both kinds."""
    heads: int | None = None
    """Heads of every mixer."""
    context: int | None = None
    """Tokens of a training window, which holds two documents with needles."""
    chunk: int | None = None
    """Tokens between two writes in training; also the window of SWA and pSWA."""
    sub_keys: int | None = None
    """The square root of a memory's slots."""
    memory_dim: int | None = None
    """Channels of a memory's keys and values."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each model."""
    learning_rate: float | None = None
    """The highest, for all models."""
    lengths: tuple[int, ...] | None = None
    """Tokens of a haystack."""
    reads: int | None = None
    """How often a haystack is read at most."""
    samples: int | None = None
    """Haystacks of each length."""
    kept: int | None = None
    """Haystacks that each of several streams reads without a reset in between; 0 for no such test."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each. Changes no number but the times."""


_SMALL: dict[str, Any] = {
    "layers": 4, "parts": 1, "dtype": "float32", "device": "cpu", "seeds": 1, "needles": 5, "digits": 2,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_SMALL, "layouts": ("GDN", "FA", "FA-pSWA"), "words": 50, "width": 32, "heads": 2, "context": 128,
        "chunk": 32, "sub_keys": 16, "memory_dim": 32, "batch": 2, "steps": 10, "learning_rate": 3e-3,
        "lengths": (64, 128), "reads": 2, "samples": 8, "kept": 2, "looks": 2,
    },
    "desk": {
        **_SMALL, "layouts": LAYOUTS, "words": 200, "width": 64, "heads": 2, "context": 256, "chunk": 64,
        "sub_keys": 32, "memory_dim": 64, "batch": 8, "steps": 150, "learning_rate": 3e-3,
        "lengths": (192, 768, 2048), "reads": 4, "samples": 24, "kept": 3, "looks": 4,
    },
    "paper": {
        "layouts": LAYOUTS, "layers": 12, "parts": 4, "dtype": "bfloat16", "device": "auto", "seeds": 1, "needles": 5,
        "digits": 6, "words": 30_000, "width": 768, "heads": 12, "context": 4096, "chunk": 512, "sub_keys": 512,
        "memory_dim": 512, "batch": 128, "steps": 20_000, "learning_rate": 1e-3,
        "lengths": (4096, 8192, 32_768, 131_072), "reads": 4, "samples": 500, "kept": 20, "looks": 20,
    },
}  # fmt: skip
"""Options by size. "paper" has the sizes of the paper's table 3 and section 4.3, with the models that
`streaming_perplexity.SIZES` describes."""
TRAINING_TOKENS = 400_000
AT_ONCE = 65_536
"""Tokens that are read side by side at most."""


def check(config: NeedleConfig) -> NeedleConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a name is unknown or given twice.
    """
    config = sized(config, SIZES, CALL)
    assert config.layouts is not None
    check_names(CALL, "--layouts", config.layouts, KNOWN)
    check_names(CALL, "--memories", config.memories, MEMORIES)
    if config.also:
        check_names(CALL, "--also", config.also, MEMORIES)
    least = {"reads": 1, "samples": 1, "needles": 1, "words": 1, "kept": 0}
    for name, low in least.items():
        if getattr(config, name) < low:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least {low}.")
    assert config.lengths is not None
    assert config.context is not None
    if not config.lengths or min(config.lengths) < 1:
        raise ArgumentError(f"{CALL}: --lengths is {config.lengths}, expected numbers above 0.")
    check_sizes(CALL, config)
    assert config.kept is not None
    assert config.samples is not None
    if config.kept > config.samples:
        raise ArgumentError(f"{CALL}: --kept is {config.kept}, expected at most the {config.samples} --samples.")
    budget(config).check(CALL)
    for row in rows(config):
        row_config(row, sizes(config, 1000))
    return config


def rows(config: NeedleConfig) -> list[Row]:
    """What is trained."""
    assert config.layouts is not None
    also = [Row(config.layouts[0], memory) for memory in config.also] + ([Row(LACT)] if config.lact else [])
    return rows_of(config.layouts, config.memories, also)


def budget(config: NeedleConfig) -> Budget:
    """What every model is given."""
    numbers = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers, measured=2048)


def answered(
    model: Any, row: Row, world: NeedleWorld, lengths: tuple[int, ...], reads: int, samples: int, kept: int, seed: int
) -> dict[str, Any]:
    """Scores of a model, by length, protocol and number of reads; a `measure` of runs.

    Returns:
        "new" and, with a memory, "kept": length to protocol to a list of `counts`, one for each number of reads. A
        model without a memory reads once: it would answer the same after any number of reads.
    """
    found: dict[str, Any] = {"new": {}}
    rereads = row.remembers or row.layout == LACT
    protocols, most = (PROTOCOLS, reads) if rereads else (PROTOCOLS[:1], 1)
    for length in lengths:
        for protocol in protocols:
            scores = asked(model, row, world, length, range(samples), protocol, most, seed)
            found["new"].setdefault(str(length), {})[protocol] = [counts(each) for each in scores]
    if rereads and kept:
        length = lengths[0]
        for protocol in KEPT_PROTOCOLS:
            scores = asked(model, row, world, length, range(samples // kept * kept), protocol, most, seed, kept)
            found.setdefault("kept", {}).setdefault(str(length), {})[protocol] = [counts(each) for each in scores]
    return found


def asked(
    model: Any,
    row: Row,
    world: NeedleWorld,
    length: int,
    indices: range,
    protocol: Protocol,
    reads: int,
    seed: int,
    kept: int = 0,
) -> list[list[NeedleScore]]:
    """Scores of every example after 1 to n reads.

    Args:
        kept: examples of a stream, read without a reset in between; 0: a reset before each.
    """
    task = world.task(length)
    together = len(indices) // kept if kept else max(1, min(len(indices), AT_ONCE // length))
    found: list[list[NeedleScore]] = [[] for _ in range(reads)]
    steps = [indices] if kept else [indices[i : i + together] for i in range(0, len(indices), together)]
    for part in steps:
        examples = task.examples(FINAL + seed, part)
        haystacks = torch.tensor([example.haystack for example in examples])
        questions = torch.tensor([example.question for example in examples])
        if kept:
            haystacks, questions = (x.unflatten(0, (kept, together)) for x in (haystacks, questions))
        answers = read_and_answer(
            model,
            haystacks,
            questions,
            world.digits // 2,
            protocol=protocol,
            reads=reads,
            reset=not kept,
            recurrent=row.layout == LACT,
        ).tokens
        for after, said in zip(found, answers.flatten(1, -2), strict=True):
            pairs = zip(said.tolist(), examples, strict=True)
            after += [task.score(world.decode(tokens), example) for tokens, example in pairs]
    return found


def counts(scores: list[NeedleScore]) -> dict[str, list[float]]:
    """(hits, trials) of every kind of score, as plain data; of digits (sum of the shares, trials)."""
    result = NeedleResult.of(scores)
    many = len(scores)
    return {
        "exact": [result.exact.hits, many],
        "digits": [result.digits * many, many],
        "candidate": [result.candidate.hits, many],
    }


@recipes.register("needle")
class Needle:
    """Needles in a haystack after one to four reads, in the FwPKM layouts, by the paper's protocol and fairer ones."""

    Config: ClassVar[type[Any]] = NeedleConfig

    @staticmethod
    def run(config: NeedleConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        assert config.words is not None
        assert config.needles is not None
        assert config.digits is not None
        world = needle_world(config.data, common=config.words, needles=config.needles, digits=config.digits, call=CALL)
        trained = rows(config)
        found = run_jobs(jobs(config, trained, world), config.workers, progress)
        progress("drawing")
        from . import needle_output as output

        groups = {row: [run for run in found if run.name == row.name] for row in trained}
        data = {
            "vocabulary": len(world.words),
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "runs": [run.record() for run in found],
        }
        assert config.context is not None
        seen = output.Seen(groups, config.context)
        return Findings(data, output.tables(seen), output.figures(seen), output.notes(seen))


def jobs(config: NeedleConfig, trained: list[Row], world: NeedleWorld) -> list[Job]:
    """One for every row and seed."""
    assert config.seeds is not None
    assert config.context is not None
    assert config.width is not None
    document = config.context // 2
    text = Corpus(
        world.training_tokens(max(TRAINING_TOKENS, 4 * config.context), document, config.seed),
        needle_tokens(world, document, config.seed),
    )
    numbers = {name: getattr(config, name) for name in ("lengths", "reads", "samples", "kept", "seed")}
    return [
        Job(
            name=row.name,
            config=row_config(row, sizes(config, len(world.words)), initializer_range=initial_range(config.width)),
            material=text,
            budget=budget(config),
            seed=seed,
            measure=partial(answered, row=row, world=world, **numbers),
            prepare=partial(learn_answers, values=world.values, keys=world.keys),
        )
        for row in trained
        for seed in range(config.seed, config.seed + config.seeds)
    ]


def needle_tokens(world: NeedleWorld, document: int, seed: int) -> Tensor:
    """Documents like those of the training that no model saw, for the curve of the loss over all tokens."""
    return world.training_tokens(4096, document, FINAL + seed)
