"""Calls that a recipe makes in processes of their own, with one thread each, so that what they find does not depend on
what runs beside them and their peak memory is their own."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from regard.checks import ArgumentError
from regard.recipes import Progress

from .running import clean_processes

T = TypeVar("T")


def run_calls(calls: Mapping[str, Callable[[], T]], workers: int, progress: Progress) -> dict[str, T]:
    """`run_each` of calls by their names.

    Returns:
        Name to what the call returned, in the order of `calls`.
    """
    return dict(zip(calls, run_each("run_calls", list(calls.items()), workers, progress), strict=True))


def run_each(call: str, calls: Sequence[tuple[str, Callable[[], T]]], workers: int, progress: Progress) -> list[T]:
    """Make every call in a fresh process, `workers` at a time.

    Args:
        call: how messages name the caller.
        calls: a name, for people, and a function of a module (or a `functools.partial` of one, which can be sent).

    Returns:
        What the calls returned, in their order.

    Raises:
        ArgumentError: the call's.
        RuntimeError: any other exception of a call, or the end of its process, with its name. The processes that still
            run are ended, here and after KeyboardInterrupt.
    """
    if workers < 1:
        raise ArgumentError(f"{call}: workers is {workers}, expected at least 1.")
    made: dict[int, T] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    waiting, begun = list(range(len(calls))), time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                place = waiting.pop(0)
                end, process = _start(calls[place][1])
                running[end] = (place, process)
                progress(_told(calls[place][0], len(made), len(calls), begun))
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                place, process = running.pop(ready)
                made[place] = _finish(calls[place][0], ready, process)
    finally:
        for end, (_, process) in running.items():
            process.terminate()
            process.join()
            end.close()
    return [made[place] for place in range(len(calls))]


def _told(name: str, done: int, count: int, begun: float) -> str:
    """What is under way, and how long it will take if it goes on so."""
    seconds = (time.perf_counter() - begun) / done * (count - done) if done else 0.0
    left = f", about {max(1, round(seconds / 60))} min left" if done else ""
    return f"{name} ({done}/{count} done{left})"


def _start(call: Callable[[], Any]) -> tuple[Connection, Any]:
    """The end of the pipe through which a process answers, and the process."""
    context = clean_processes()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, call), daemon=True)
    process.start()
    there.close()
    return here, process


def _work(answer: Connection, call: Callable[[], Any]) -> None:
    """In the process: ("found", result) or (kind of failure, message) goes into the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    if "transformers" in sys.modules:  # what it has to say of kernels that are not there, every process would repeat
        sys.modules["transformers"].utils.logging.set_verbosity_error()
    try:
        answer.send(("found", call()))
    except ArgumentError as error:
        answer.send(("argument", str(error)))
    except Exception:
        answer.send(("fault", traceback.format_exc()))
    finally:
        answer.close()


def _finish(name: str, end: Connection, process: Any) -> Any:
    """What a process sent."""
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
