"""The process in which `gpu.py` runs its rows. Its parent stops it when a row takes too long, which a signal inside the
process could not do: a blocked synchronisation with the device cannot be interrupted."""

import gc
import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

START = 180.0
"""Seconds that a process may take to import everything, or to measure the ceilings of the device."""


class Worker:
    """A process that is started when something is asked of it, and again after it has ended.

    Args:
        options: of `serve`.
    """

    def __init__(self, **options: Any) -> None:
        self.options, self.process = options, None

    def ask(self, what: str, limit: float = START) -> Any:
        """Return the answer: to "provenance", to "ceilings", or to the name of a row what it found.

        Raises:
            TimeoutError: after `limit` seconds; the process has been killed.
            ChildProcessError: the process has ended by itself, as with an illegal access in a driver.
        """
        if self.process is None:
            self._start()
        self.pipe.send(what)
        return self._answer(limit)

    def stop(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), kwargs=self.options, daemon=True)
        self.process.start()
        other.close()
        self._answer(START)

    def _answer(self, limit: float) -> Any:
        if not self.pipe.poll(limit):
            self.stop()
            raise TimeoutError(f"took more than {limit:.3g} s")
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            code, self.process = self.process.exitcode, None
            raise ChildProcessError(f"the process ended with exit code {code}") from None


def serve(pipe: Connection, *, dry: bool, tune_peers: bool, parts: tuple[str, ...], match: str) -> None:
    """Answer what is asked through the pipe until it is closed."""
    from gpu import rows_of
    from gpu_measure import Bench, ceilings, provenance

    bench = Bench(dry, tune_peers)
    rows = {row.name: row for row in rows_of(bench, parts, match)}
    pipe.send("ready")
    while True:
        try:
            what = pipe.recv()
        except EOFError:
            return
        about = {"provenance": provenance, "ceilings": ceilings}
        pipe.send(about[what](bench) if what in about else found(rows[what], bench))


def found(row: Any, bench: Any) -> dict[str, Any]:
    """Return what a row finds, or what it fails with, and whether the device is lost."""
    from gpu_peers import Missing

    start, entry = time.perf_counter(), {"part": row.part}
    try:
        entry |= {"status": "measured", **row.run()}
    except Missing as reason:
        entry |= {"status": "not available", "reason": str(reason)}
    except Exception as error:  # whatever it is: the other rows still count
        entry |= {"status": "failed", "error": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        entry["trace"] = traceback.format_exc().splitlines()[-6:]
    if entry["status"] == "failed" and lost(bench):
        entry["lost"] = True
    entry["seconds"] = round(time.perf_counter() - start, 1)
    return entry


def lost(bench: Any) -> bool:
    """Return whether nothing runs on the device any more, as after an illegal access."""
    import torch

    gc.collect()
    if bench.dry:
        return False
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False
