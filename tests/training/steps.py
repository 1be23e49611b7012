"""What tests of training share: a callback, and what lies in the folder of a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

TIMES = ("tokens_per_second", "eval_tokens_per_second", "eval_seconds")


class At(TrainerCallback):
    """Calls a function with the model at the beginning of a step."""

    def __init__(self, step: int, action: Callable) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, model=None, **_):
        if state.global_step == self.step:
            self.action(model)


def crash(_: object) -> None:
    """End the process, as far as the trainer can tell."""
    raise SystemError("crash")


def logged(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def metrics(out: Path) -> list[dict]:
    """The metrics without what depends on the clock."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in logged(out)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_model(one: Path, other: Path) -> None:
    """Check that two runs ended with the same bits."""
    first, second = weights(one / "model"), weights(other / "model")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def same_up_to_rounding(one: Path, other: Path, tolerance: float = 2e-5) -> None:
    """The same metrics and weights, but for the support of the first batch of windows, which may be another batch."""
    for first, second in zip(metrics(one), metrics(other), strict=True):
        first.pop("eval_support", None)
        second.pop("eval_support", None)
        assert first == pytest.approx(second, rel=2e-5)
    values = weights(other / "model")
    for name, value in weights(one / "model").items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=tolerance)
