"""Run a recipe: cells side by side, each in a fresh process with one thread, whose time and memory are its own."""

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from regard.checks import ArgumentError
from regard.recipes import Progress

from .pages import write
from .recipe import Recipe, Results, check_shared
from .results import Journal, Unit, measure_into, unfinished_units

T = TypeVar("T")


def run(made: Recipe, argv: Sequence[str], progress: Progress) -> Results:
    """Measure all cells, continuing an unfinished run, and write rows, page and figures to `made.out`.

    Raises:
        ArgumentError: an option is out of range, or the folder holds something else.
    """
    check_shared(made)
    journal = Journal.open(made, argv)
    progress("preparing")
    journal.begin(made.prepare())
    measure_units(made, unfinished_units(made, journal), journal.path, progress)
    progress("writing")
    results = journal.finish(made)
    write(made, results, journal.path.parent)
    return results


def measure_units(made: Recipe, units: Sequence[Unit], path: Path, progress: Progress) -> None:
    """Measure cells, `made.workers` at a time, into the journal at `path`; errors are those of `run_calls`."""
    begun = time.perf_counter()
    calls = {", ".join(f"{name} {value}" for name, value in {**cell, "seed": seed}.items()):
             partial(measure_into, path, made, (cell, seed)) for cell, seed in units}  # fmt: skip
    for done, _ in enumerate(run_calls(calls, made.workers), start=1):
        left = (time.perf_counter() - begun) / done * (len(units) - done)
        progress(f"{done}/{len(units)} done, about {max(1, round(left / 60))} min left")


def run_calls(calls: Mapping[str, Callable[[], T]], workers: int) -> Iterator[tuple[str, T]]:
    """Run calls and yield the name and result of each as it is done.

    Args:
        calls: name to a function that can be pickled.
        workers: processes at the same time; 0: the calls run in this process, in turn.

    Raises:
        ArgumentError, ModuleNotFoundError: raised by a call.
        RuntimeError: a call failed, or its process ended; the other processes are ended.
    """
    if workers:
        yield from _side_by_side(calls, workers)
        return
    for name, call in calls.items():
        with one_thread():
            result = call()
        yield name, result


def _side_by_side(calls: Mapping[str, Callable[[], T]], workers: int) -> Iterator[tuple[str, T]]:
    others = set(multiprocessing.active_children())
    running: dict[Future[T], tuple[str, ProcessPoolExecutor]] = {}
    waiting = list(calls)[::-1]
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop()
                pool = ProcessPoolExecutor(1, mp_context=clean_processes(), initializer=_prepare_process)
                running[pool.submit(calls[name])] = name, pool
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name, pool = running.pop(future)
                pool.shutdown(wait=False)
                yield name, _result(future, name)
    finally:
        if running:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            for _, pool in running.values():
                pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[T], name: str) -> T:
    try:
        return future.result()
    except (ArgumentError, ModuleNotFoundError):
        raise
    except BrokenProcessPool:
        raise RuntimeError(f"the process of {name} ended before it was done (memory may have run out).") from None
    except Exception as error:
        raise RuntimeError(f"{name} failed: {error}") from error


def _prepare_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    if "transformers" in sys.modules:  # each process would repeat its warnings about kernels that are not installed
        sys.modules["transformers"].utils.logging.set_verbosity_error()


def clean_processes() -> Any:
    """Return a context of multiprocessing whose processes inherit neither threads nor memory."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard_recipes.lib.language_training", "regard.models", "numba"])
    return context


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread inside the block: on small blocks a second one gains little, and on shared cores it costs much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
