"""Many language models: one process for each, and what recipes that compare them have in common.

A job is one model and one seed in a process of its own with one thread, so that its numbers do not depend on what runs
beside it and its peak memory is its own.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..checks import ArgumentError
from ..training.config import SEEDS
from .language_training import Budget, Corpus, LanguageRun, Tokens, train_language_model
from .recipes import Progress

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
    if workers < 1:
        raise ArgumentError(f"run_jobs: workers is {workers}, expected at least 1.")
    made: list[LanguageRun | None] = [None] * len(jobs)
    running: dict[Connection, tuple[int, Any]] = {}
    waiting, begun = list(enumerate(jobs)), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        paths = _write_texts(jobs, Path(folder))
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    place, job = waiting.pop(0)
                    running.update([_start(place, job, paths[id(job.material)])])
                    progress(_told(job, len(jobs) - len(waiting) - len(running), len(jobs), begun))
                for end in wait(list(running)):
                    assert isinstance(end, Connection)
                    place, process = running.pop(end)
                    made[place] = _finish(jobs[place], end, process)
        finally:
            for end, (_, process) in running.items():
                process.terminate()
                process.join()
                end.close()
    return [run for run in made if run is not None]


def _told(job: Job, done: int, count: int, begun: float) -> str:
    """What is under way, and how long it will take if it goes on so."""
    seconds = (time.perf_counter() - begun) / done * (count - done) if done else 0.0
    left = f", about {max(1, round(seconds / 60))} min left" if done else ""
    return f"{job.name}, seed {job.seed} ({done}/{count} done{left})"


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


def clean_processes() -> Any:
    """A context of multiprocessing whose processes inherit nothing of this one, neither threads nor memory: forks of a
    server that has only imported what a job needs, which takes seconds; where there is no such server, spawned ones."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "regard.models", "regard.training.evaluation", "numba"])
    return context


def _start(place: int, job: Job, text: Path) -> tuple[Connection, tuple[int, Any]]:
    """A process for the job, and the end of the pipe through which it answers."""
    context = clean_processes()
    here, there = context.Pipe(duplex=False)
    given = {each.name: getattr(job, each.name) for each in fields(job) if each.name != "material"}
    process = context.Process(target=_work, args=(there, given, text), daemon=True)
    process.start()
    there.close()
    return here, (place, process)


def _work(answer: Connection, given: dict[str, Any], text: Path) -> None:
    """What the process does with a job's fields and its text: ("run", LanguageRun) or (kind of failure, message) goes
    into the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    from safetensors.torch import load_file

    try:
        answer.send(("run", train_language_model(material=Corpus(**load_file(text)), **given)))
    except ArgumentError as error:
        answer.send(("argument", str(error)))
    except Exception:
        answer.send(("fault", traceback.format_exc()))
    finally:
        answer.close()


def _finish(job: Job, end: Connection, process: Any) -> LanguageRun:
    """The run that a process sent."""
    name = f"{job.name}, seed {job.seed}"
    try:
        kind, found = end.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        why = f"signal {-code} (memory may have run out)" if code and code < 0 else f"exit code {code}"
        raise RuntimeError(f"the process of {name} ended by {why} before it was done.") from None
    finally:
        end.close()
    process.join()
    if kind == "argument":
        raise ArgumentError(found)
    if kind == "fault":
        print(found, file=sys.stderr)
        raise RuntimeError(f"{name} failed: {found.strip().splitlines()[-1]}")
    return found


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
