"""The protocol of tasks, and their registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor
from typing_extensions import Self

from ..checks import require, shown, suggestion, whole
from ..registry import Registry

Settings = Mapping[str, Mapping[str, Any]]
"""Name to values of the fields that differ from the defaults."""


def check_place(call: str, seed: Any, index: Any) -> None:
    """Check that `seed` and `index` are integers and the index is at least 0."""
    whole(call, "seed", seed, -(2**63), 2**64)
    whole(call, "index", index, 0, 2**63)


tasks: Registry[Any] = Registry("task", "regard.tasks", home="regard.tasks")


@runtime_checkable
class Task(Protocol):
    """Examples, the error of a prediction, and the best possible prediction."""

    def example(self, seed: int, index: int) -> Any:
        """Return example `index` of the stream `seed`; it depends on nothing else."""

    def error(self, prediction: Tensor, example: Any) -> Tensor:
        """Return the error at every position."""

    def oracle(self, example: Any) -> Tensor:
        """Return the prediction of a solver that knows how the data were made."""


class Named:
    """A task with named settings, such as those of a paper.

    Attributes:
        settings: name to values of the fields that differ from the defaults.
    """

    settings: ClassVar[Settings] = {}

    @classmethod
    def named(cls, setting: str, **changes: Any) -> Self:
        """Return the task with a named setting, some of its fields changed.

        Raises:
            ArgumentError: an unknown setting.
        """
        unknown = f"unknown setting {shown(setting)}.{suggestion(shown(setting), [*cls.settings])}"
        require(setting in cls.settings, f"{cls.__name__}.named", unknown)
        return cls(**{**cls.settings[setting], **changes})
