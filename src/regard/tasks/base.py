"""What a task is, and where tasks are registered."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..checks import whole
from ..registry import Registry


def check_place(call: str, seed: Any, index: Any) -> None:
    """Check that `seed` and `index` are whole numbers, the index >= 0."""
    whole(call, "seed", seed, -(2**63), 2**64)
    whole(call, "index", index, 0, 2**63)


tasks: Registry[Any] = Registry("task", "regard.tasks", home="regard.tasks")


@runtime_checkable
class Task(Protocol):
    """Examples, what counts as an error on them, and what the best informed solver says."""

    def example(self, seed: int, index: int) -> Any:
        """The example `index` of the stream `seed`, which depends on nothing else."""

    def error(self, prediction: Tensor, example: Any) -> Tensor:
        """The metric at every position."""

    def oracle(self, example: Any) -> Tensor:
        """The prediction of a solver that is told what the data hide."""
