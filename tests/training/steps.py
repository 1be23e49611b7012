"""Callbacks of training that act at the beginning of a step."""

from __future__ import annotations

from collections.abc import Callable

from transformers import TrainerCallback


class At(TrainerCallback):
    """Calls a function with the model at the beginning of a step."""

    def __init__(self, step: int, action: Callable) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            self.action(model)
