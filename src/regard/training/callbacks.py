"""Callbacks of a training run: the metrics file (its fields: docs/language-models.md), the progress bar, Ctrl-C."""

import json
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState

from .errors import TrainingInterrupted
from .storage.checkpoints import last_good, write_atomically, writing
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
    """Append every log to `metrics.jsonl`; first remove damaged lines (counted in `damaged`, but for an incomplete last
    one) and those after `step`."""

    def __init__(self, path: Path, *, step: int) -> None:
        self.path, self.damaged = path, 0
        lines, kept = list[bytes](), list[str]()
        with writing(path, path.parent):
            if path.exists():
                regular_size(path)
                *lines, _half = path.read_bytes().split(b"\n")
            for line in lines:
                record = None
                with suppress(ValueError, RecursionError):  # a power cut may leave NULs
                    record = json.loads(line)
                if not isinstance(record, dict) or type(record.get("step")) is not int:
                    self.damaged += 1
                elif record["step"] <= step:
                    kept.append(line.decode() + "\n")
            write_atomically(path, "".join(kept))

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if state.is_world_process_zero and ("loss" in logs or "eval_loss" in logs):
            values = {key: value for key, value in logs.items() if key not in _NOISE}
            self.append({"step": state.global_step, **values})

    def append(self, record: dict[str, Any]) -> None:
        """Write one line, or raise TrainingStopped if the file cannot be written."""
        with writing(self.path, self.path.parent), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Clock(TrainerCallback):
    """Seconds spent in training steps, in total and since the last lap, without logging, evaluation and saving."""

    def __init__(self) -> None:
        self.seconds, self.steps, self._begin, self._last = 0.0, 0, 0.0, (0, 0.0)

    def on_step_begin(self, *args: Any, **_: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *args: Any, **_: Any) -> None:
        self.seconds += time.perf_counter() - self._begin
        self.steps += 1

    def lap(self) -> tuple[int, float]:
        """Return (steps, seconds) since the last lap, and start a new one."""
        steps, seconds = self.steps - self._last[0], self.seconds - self._last[1]
        self._last = (self.steps, self.seconds)
        return steps, seconds


class Schedule(TrainerCallback):
    """Request an evaluation every `steps` steps (Trainer's own would need a dataset) and a log after the last."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_evaluate = state.global_step % self.steps == 0
        control.should_log |= state.global_step == state.max_steps


class RichProgress(TrainerCallback):
    """Show a progress bar on a terminal, and elsewhere one plain line per log."""

    def __init__(self, console: Console | None = None, label: str = "training") -> None:
        self.console = console or Console(stderr=True)
        # no markup: labels such as local-linear[biweight] have brackets
        label_column = TextColumn("{task.description}", markup=False)
        note_column = TextColumn("{task.fields[note]}", markup=False)
        columns = (label_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task(label, note="", start=False)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero and self.console.is_terminal:
            self.bar.start()
        self.bar.start_task(self.task)
        self.bar.update(self.task, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any], **_: Any) -> None:
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
        """Remove the bar from the terminal."""
        if self.bar.live.is_started:
            self.bar.stop()


class StopGently(TrainerCallback):
    """A context in which the first Ctrl-C (or SIGTERM) ends the run after the current step with a checkpoint, and the
    second one ends it immediately. Outside the main thread it does nothing. Errors name the last good checkpoint."""

    def __init__(self, run: Path) -> None:
        self.run, self.requested = run, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopGently":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.requested:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def check(self, step: int, steps: int) -> None:
        """Raise TrainingInterrupted if the run was ended before its last step."""
        if self.requested and step < steps:
            raise TrainingInterrupted(f"interrupted after step {step} of {steps}; {last_good(self.run)}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise TrainingInterrupted(f"interrupted twice: the current step was not saved; {last_good(self.run)}")
        self.requested = True
        print("\nstopping and saving after this step; press Ctrl-C again to stop immediately", file=sys.stderr)
