"""Tasks: generators of data, each with its metric and a solver that knows how the data were made.

A task is a function of (seed, index): any example can be made again, alone or in a batch, and a run that is taken up
again sees the same data. One file and one registration each; a task is a frozen dataclass whose fields are its settings.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..registry import Registry

tasks: Registry[Any] = Registry("task", "regard.tasks")


@runtime_checkable
class Task(Protocol):
    """Examples, what counts as an error on them, and what the best informed solver says."""

    def example(self, seed: int, index: int) -> Any:
        """The example `index` of the stream `seed`, which depends on nothing else."""

    def error(self, prediction: Tensor, example: Any) -> Tensor:
        """The metric at every position."""

    def oracle(self, example: Any) -> Tensor:
        """The prediction of a solver that is told what the data hide."""


from .cone_regression import ConeRegression  # noqa: E402  (tasks register themselves, in the registry above)

__all__ = ["ConeRegression", "Task", "tasks"]
