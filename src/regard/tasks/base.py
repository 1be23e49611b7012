"""The protocol of tasks, and their registry."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from ..checks import in_range, refuse, require, shown, suggestion, whole
from ..registry import Registry

E = TypeVar("E")
Settings = Mapping[str, Mapping[str, Any]]
"""Name to values of the fields that differ from the defaults."""


def hashed(text: str, size: int = 8) -> int:
    """Return a number of `size` bytes that depends on the text alone, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


MOST = 2**40
"""Sizes beyond this are mistakes."""


def check_sizes(task: Any, **least: int) -> None:
    """Check that fields of a task are whole numbers, at least as large as given."""
    for name, low in least.items():
        whole(type(task).__name__, name, getattr(task, name), low, MOST)


def check_span(task: Any, name: str, low: int, high: int = MOST) -> None:
    """Check that a field of a task is (least, most), whole numbers from `low` to `high`."""
    span = getattr(task, name)
    two = isinstance(span, (tuple, list)) and len(span) == 2 and all(type(n) is int for n in span)
    if not (two and low <= span[0] <= span[1] <= high):
        bounds = f"{low} <= least <= most" + ("" if high == MOST else f" <= {high}")
        raise refuse(type(task).__name__, name, span, f"(least, most), whole numbers with {bounds}")


def check_share(task: Any) -> None:
    """Check that the field `share` of a task is a number above 0, at most 1."""
    in_range(type(task).__name__, "share", task.share, low=0.0, strict=True)
    in_range(type(task).__name__, "share", task.share, high=1.0, strict=False)


def check_place(call: str, seed: Any, index: Any) -> None:
    """Check that `seed` and `index` are integers and the index is at least 0."""
    whole(call, "seed", seed, -(2**63), 2**64)
    whole(call, "index", index, 0, 2**63)


def generator(call: str, name: str, seed: Any, index: Any) -> torch.Generator:
    """Return the source of random numbers of one example, the same on every machine; errors name `call`."""
    check_place(call, seed, index)
    return torch.Generator().manual_seed(hashed(f"{name}:{seed}:{index}") >> 1)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make tensors on the CPU, whatever torch's default device is, inside a block or a decorated function."""
    with torch.device("cpu"):
        yield


class Stackable(ABC, Generic[E]):
    """A task whose examples are dataclasses of tensors, all of the same sizes."""

    @abstractmethod
    def example(self, seed: int, index: int) -> E:
        """Return example `index` of the stream `seed`, without a batch axis."""

    def examples(self, seed: int, indices: Iterable[int]) -> E:
        """Return the examples of `indices`, in order, with a batch axis."""
        made = [self.example(seed, index) for index in indices]
        names = [field.name for field in fields(made[0])]  # type: ignore[arg-type]
        return type(made[0])(*(torch.stack([getattr(one, name) for one in made]) for name in names))


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
    """A task with named settings, such as those of a paper."""

    settings: ClassVar[Settings] = {}

    @classmethod
    def named(cls, setting: str, **changes: Any) -> Self:
        """Return the task with a named setting, some of its fields changed; refuse an unknown one."""
        unknown = f"unknown setting {shown(setting)}.{suggestion(shown(setting), [*cls.settings])}"
        require(setting in cls.settings, f"{cls.__name__}.named", unknown)
        return cls(**{**cls.settings[setting], **changes})
