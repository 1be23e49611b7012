"""Measure cells side by side, each in a fresh process with one thread, so that numbers and peak memory of a cell do
not depend on the others."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch

from regard.checks import ArgumentError
from regard.recipes import Progress

from .recipe import Recipe, Row
from .results import Unit

Measured = tuple[Unit, list[Row], float]
"""A cell and seed, its rows, and the seconds they took."""


def measure_units(made: Recipe, units: Sequence[Unit], progress: Progress) -> Iterator[Measured]:
    """Measure cells and yield each as it is done, `config.workers` at a time.

    Raises:
        ArgumentError: raised by `measure`.
        RuntimeError: another exception of `measure`, or the end of its process; processes that still run are ended.
    """
    begun = time.perf_counter()
    steps = _in_turn if made.config.workers == 0 else _side_by_side
    for done, found in enumerate(steps(made, list(units)), start=1):
        left = (time.perf_counter() - begun) / done * (len(units) - done)
        progress(f"{done}/{len(units)} done, about {max(1, round(left / 60))} min left")
        yield found


def _in_turn(made: Recipe, units: list[Unit]) -> Iterator[Measured]:
    for unit in units:
        with one_thread():
            yield (unit, *_measure(made, unit))


def _side_by_side(made: Recipe, units: list[Unit]) -> Iterator[Measured]:
    others = set(multiprocessing.active_children())
    running: dict[Future[tuple[list[Row], float]], tuple[Unit, ProcessPoolExecutor]] = {}
    waiting = units[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < made.config.workers:
                unit = waiting.pop()
                pool = ProcessPoolExecutor(1, mp_context=clean_processes(), initializer=_prepare_process)
                running[pool.submit(_measure, made, unit)] = unit, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit, pool = running.pop(future)
                pool.shutdown(wait=False)
                yield (unit, *_result(future, unit))
    finally:
        if running:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            for _, pool in running.values():
                pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[tuple[list[Row], float]], unit: Unit) -> tuple[list[Row], float]:
    named = ", ".join(f"{name} {value}" for name, value in (*unit[0].items(), ("seed", unit[1])))
    try:
        return future.result()
    except ArgumentError:
        raise
    except BrokenProcessPool:
        raise RuntimeError(f"the process of {named} ended before it was done (memory may have run out).") from None
    except Exception as error:
        raise RuntimeError(f"{named} failed: {error}") from error


def _measure(made: Recipe, unit: Unit) -> tuple[list[Row], float]:
    begun = time.perf_counter()
    rows = list(made.measure(*unit))
    return rows, time.perf_counter() - begun


def _prepare_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    if "transformers" in sys.modules:  # each process would repeat its warnings about kernels that are not installed
        sys.modules["transformers"].utils.logging.set_verbosity_error()


def clean_processes() -> Any:
    """Return a context of multiprocessing whose processes inherit neither threads nor memory: forks of a server that
    has imported what cells need, or spawned processes where there is no such server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    needed = ["regard_recipes.lib.language_runs", "regard.models", "regard.training.evaluation", "numba"]
    context.set_forkserver_preload(needed)
    return context


@contextmanager
def one_thread() -> Iterator[None]:
    """A second thread brings little on small blocks, and where the cores are shared it costs many times that."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
