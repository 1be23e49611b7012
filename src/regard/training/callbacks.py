"""What listens to a run: the metrics file, the progress bar, Ctrl-C.

`metrics.jsonl` has one JSON object per line. Training lines: step, loss (nats per token, mean since the last
line), bits_per_char, bits_per_byte, grad_norm, learning_rate, tokens (seen so far), tokens_per_second
(since the last line; evaluation and saving do not count), and of the first held-out window what `row_means` says:
support, density, of layers with a fixed bandwidth empty_rows, and of local linear layers negative_mass,
solver_iterations, solver_residual, unconverged, and of memories memory_coverage, memory_collisions, memory_kl_uniform,
memory_marginal_entropy, memory_gate, memory_not_finite (absent where no layer reports them). Lines about held-out text
have the same names behind `eval_`.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..models.base.base import tell_step
from .errors import TrainingInterrupted
from .storage.checkpoints import write_atomically, writing
from .storage.files import regular_size

_NOISE = ("epoch", "total_flos")
_BRIEF = (
    ("loss", "loss {:.3f}"),
    ("bits_per_char", "{:.3f} bits/char"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("support", "support {:.1f}"),
    ("empty_rows", "empty rows {:.1%}"),
    ("negative_mass", "negative {:.2f}"),
    ("solver_iterations", "{:.1f} solver steps"),
)


class MetricsFile(TrainerCallback):
    """Appends every log to `metrics.jsonl`, flushed line by line.

    Args:
        path: the file. Lines of steps after `step` are dropped first, since a resumed run writes them again, and
            damaged ones.
        step: the step from which the run (re)starts.

    Attributes:
        damaged: how many damaged lines were dropped.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        self.damaged = 0
        kept = [line for line in self._sound_lines() if json.loads(line)["step"] <= step]
        with writing(path, path.parent):
            write_atomically(path, "".join(kept))

    def _sound_lines(self) -> Iterator[str]:
        """Yield the whole lines. A process that was killed leaves half a line at the end, and a power cut may leave
        NULs: such lines are left out, and those before the end are counted in `damaged`."""
        if not self.path.exists():
            return
        with writing(self.path, self.path.parent):
            regular_size(self.path)
            *lines, _half = self.path.read_bytes().split(b"\n")
        for line in lines:
            if _is_record(line):
                yield line.decode() + "\n"
            else:
                self.damaged += 1

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        if state.is_world_process_zero and ("loss" in logs or "eval_loss" in logs):
            values = {key: value for key, value in logs.items() if key not in _NOISE}
            self.append({"step": state.global_step, **values})

    def append(self, record: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            TrainingStopped: the file cannot be written.
        """
        with writing(self.path, self.path.parent), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _is_record(line: bytes) -> bool:
    """Return whether a line is one that `MetricsFile` wrote."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and type(record.get("step")) is int


class Clock(TrainerCallback):
    """Seconds spent in training steps, in all and since the last lap; logging, evaluating and saving are not
    counted."""

    def __init__(self) -> None:
        self.seconds, self.steps, self._begin, self._last = 0.0, 0, 0.0, (0, 0.0)

    def on_step_begin(self, *args: Any, **_: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *args: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    def lap(self) -> tuple[int, float]:
        """(steps, seconds) since the last lap; starts a new one."""
        steps, seconds = self.steps - self._last[0], self.seconds - self._last[1]
        self._last = (self.steps, self.seconds)
        return steps, seconds


class StepNumber(TrainerCallback):
    """Tells the model which step begins (`tell_step`)."""

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **_: Any,
    ) -> None:
        assert model is not None  # transformers always gives it
        tell_step(model, state.global_step)


class Rhythm(TrainerCallback):
    """Asks for an evaluation every so many steps and for a log after the last. (Trainer's own `eval_strategy`
    wants a dataset; the held-out text is read by strided windows instead.)"""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_evaluate = state.global_step % self.steps == 0
        control.should_log |= state.global_step == state.max_steps


class RichProgress(TrainerCallback):
    """A bar on a terminal; elsewhere one plain line per log, so that a log file shows progress too."""

    def __init__(self, console: Console | None = None, label: str = "training") -> None:
        self.console = console or Console(stderr=True)
        # no markup: a label such as local-linear[biweight] has brackets of its own
        label_column = TextColumn("{task.description}", markup=False)
        note_column = TextColumn("{task.fields[note]}", markup=False)
        columns = (label_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task(label, note="", start=False)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.console.is_terminal:
            self.bar.start()
        self.bar.start_task(self.task)
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        held_out = "eval_loss" in logs
        if not state.is_world_process_zero or not (held_out or "loss" in logs):
            return
        prefix = "eval_" if held_out else ""
        note = "  ".join(text.format(logs[prefix + key]) for key, text in _BRIEF if prefix + key in logs)
        if held_out or not self.console.is_terminal:
            where = "held out" if held_out else self.bar.tasks[0].description
            line = f"step {state.global_step}/{state.max_steps}  {where}: {note}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        if not held_out:
            self.bar.update(self.task, note=note)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self.bar.live.is_started:
            self.bar.stop()


class StopGently(TrainerCallback):
    """A context in which the first Ctrl-C (or SIGTERM) ends the run after the current step, with a
    checkpoint, and the second one ends it at once. Outside the main thread signals are left alone."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopGently:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.requested:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise TrainingInterrupted("interrupted twice: the current step was not saved")
        self.requested = True
        print("\nstopping after this step, then saving; once more to stop at once", file=sys.stderr)
