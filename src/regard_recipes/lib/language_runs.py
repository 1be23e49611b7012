"""Many language models: one process for each, and what recipes that compare them have in common.

A job is one model and one seed in a process of its own with one thread, so that its numbers do not depend on what runs
beside it and its peak memory is its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from regard.checks import ArgumentError
from regard.recipes import Progress
from regard.training.config import SEEDS

from .language_training import Budget, Corpus, LanguageRun, Tokens, train_language_model
from .processes import run_each

__all__ = [
    "Budget",
    "Corpus",
    "Job",
    "LanguageRun",
    "Tokens",
    "by_name",
    "initial_range",
    "run_jobs",
    "sized",
    "train_language_model",
]

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: the arguments of `train_language_model`, which a process of its own is given.

    `measure` and `prepare` must be functions of a module (or `functools.partial` of them), so that they can be sent.
    """

    name: str
    config: Any
    material: Tokens
    budget: Budget
    seed: int
    measure: Callable[[Any], dict[str, Any]] | None = None
    prepare: Callable[[Any], None] | None = None


def run_jobs(jobs: Sequence[Job], workers: int, progress: Progress) -> list[LanguageRun]:
    """Run every job in a fresh process with one thread, `workers` at a time.

    Returns:
        Their runs in the order of the jobs; what a job finds does not depend on `workers`.

    Raises:
        ArgumentError: the job's, with its name.
        RuntimeError: any other exception of a job, or the end of its process, with its name. The jobs that still run
            are ended, here and after KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = _write_texts(jobs, Path(folder))
        calls = [(f"{job.name}, seed {job.seed}", partial(_run, _given(job), paths[id(job.material)])) for job in jobs]
        return run_each("run_jobs", calls, workers, progress)


def _given(job: Job) -> dict[str, Any]:
    """What a job's process is told beside the text."""
    return {each.name: getattr(job, each.name) for each in fields(job) if each.name != "material"}


def _run(given: dict[str, Any], text: Path) -> LanguageRun:
    """What the process does with a job's fields and its text."""
    from safetensors.torch import load_file

    return train_language_model(material=Corpus(**load_file(text)), **given)


def _write_texts(jobs: Sequence[Job], folder: Path) -> dict[int, Path]:
    """Every text once, for all jobs that read it: id of the material to its file."""
    from safetensors.torch import save_file

    paths: dict[int, Path] = {}
    for text in (job.material for job in jobs):
        if id(text) not in paths:
            paths[id(text)] = folder / f"{len(paths)}.safetensors"
            parts = {"train_tokens": text.train_tokens, "held_out_tokens": text.held_out_tokens}
            save_file({name: part.contiguous().clone() for name, part in parts.items()}, paths[id(text)])
    return paths


def sized(config: C, sizes: Mapping[str, Mapping[str, Any]], call: str) -> C:
    """A recipe's config with the numbers of its size where it says None.

    Args:
        config: a dataclass with `size` and `quick`, which means the size "quick".
        sizes: name to values of fields.

    Raises:
        ArgumentError: an unknown size, or fewer than one worker, one seed, or a seed out of range.
    """
    given: Any = config
    size = "quick" if given.quick else given.size
    if size not in sizes:
        raise ArgumentError(f"{call}: --size is {size!r}, expected one of {', '.join(sizes)}.")
    own = {name: value for name, value in sizes[size].items() if getattr(given, name) is None}
    given = replace(given, size=size, **own)
    for name in ("workers", "seeds"):
        if getattr(given, name) < 1:
            raise ArgumentError(f"{call}: --{name} is {getattr(given, name)}, expected at least 1.")
    if not 0 <= given.seed <= SEEDS - given.seeds:
        raise ArgumentError(f"{call}: --seed is {given.seed}, expected 0 to {SEEDS - given.seeds}.")
    return given


def initial_range(width: int) -> float:
    """Standard deviation of a model's first weights: 0.05 up to a width of 256, of wider ones the customary 0.02."""
    return 0.05 if width <= 256 else 0.02


def by_name(runs: Sequence[LanguageRun]) -> Iterator[tuple[str, list[LanguageRun]]]:
    """The runs of every model, in the order in which the models first come."""
    for name in dict.fromkeys(run.name for run in runs):
        yield name, [run for run in runs if run.name == name]
