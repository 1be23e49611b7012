"""What a recipe declares. `lib/README.md` explains it from start to end."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Literal

from regard.checks import ArgumentError, require, suggestion
from regard.recipes import recipes
from regard.training.config import SEEDS
from regard.training.device import resolve_device
from regard.training.fields import flag

from .claims import Claim, Frame

Cell = Mapping[str, Any]
"""One point of the grid: column to a text, a number or a truth value."""
Row = Mapping[str, Any]
"""One measurement: column to a text, a number, a truth value or None."""
Limits = Mapping[str, tuple[float | str, float | str]]
"""Option to its least and largest number, or the option that has it."""


@dataclass(frozen=True)
class Results:
    """All rows of a run.

    Attributes:
        frame: one line for each row; columns of the cells, `seed`, then what was measured (missing: NaN or None).
        facts: what `Recipe.prepare` returned.
        record: command, date, seconds, config and installation, as JSON.
    """

    frame: Frame
    facts: Mapping[str, Any]
    record: Mapping[str, Any]

    def select(self, **where: Any) -> Frame:
        """Return the rows whose columns have these values."""
        return select(self.frame, **where)


def select(frame: Frame, **where: Any) -> Frame:
    """Return the rows whose columns have these values; a list stands for any of its values."""
    for column, value in where.items():
        frame = frame[frame[column].isin(value) if isinstance(value, (list, tuple, set)) else frame[column] == value]
    return frame


def frame_of(rows: Iterable[Row]) -> Frame:
    """Return rows as a frame; its columns are in the order in which they first come."""
    import pandas as pd

    return pd.DataFrame.from_records(list(rows))


def stacked(frames: Iterable[Frame]) -> Frame:
    """Return the rows of several frames one below the other."""
    import pandas as pd

    return pd.concat(frames)


def significant(x: Any) -> float:
    """Return a number rounded to four significant digits, to be stored."""
    return float(f"{float(x):.4g}")


@dataclass(kw_only=True, eq=False)
class Recipe(ABC):
    """An experiment with its options. The first sentence of the docstring is what `regard list recipes` shows.

    A subclass with a name, such as `class Sums(Recipe, name="sums")`, is registered; one without is a base of others.
    Every subclass is a dataclass, whose fields are options with their values at the size 'small', and a text each; a
    value without a type changes the default of an inherited option. Its attributes must be picklable.

    Attributes:
        limits: field to its least and largest number; whole numbers that it does not name are at least 1. For an option
            with several numbers, every number must lie in the range and occur once. Here as in `choices`, those of the
            base classes hold too.
        choices: field to the known names. Of an option with several names, at least one is named, and each only once.
        by_size: 'quick' and 'paper' to the fields in which they differ from the defaults.
        no_paper_size: why there is no size 'paper', a sentence; empty where `by_size` has one.
    """

    out: Path | None = None
    """Folder to write; by default NAME-out. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "small", "paper"] = "small"
    """Sets the options that are not given: 'quick' takes at most two minutes on two cores, 'small' up to an hour,
    'paper' needs the paper's hardware."""
    quick: bool = False  # The same as --size quick.
    seed: int = 0  # The first seed.
    seeds: int = 1  # Number of seeds.
    workers: int = 2
    """Cells measured at the same time, each in a process of its own with one thread; 0: in this process, in turn."""
    device: str = "cpu"  # 'cpu', 'cuda', 'mps' or 'auto'.
    limits: ClassVar[Limits] = {"workers": (0, math.inf)}
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    by_size: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    no_paper_size: ClassVar[str] = ""
    name: ClassVar[str] = ""

    def __init_subclass__(cls, name: str = "") -> None:
        bases = filter(is_dataclass, reversed(cls.__mro__[1:]))
        types = {option.name: option.type for base in bases for option in fields(base)}
        for field in types.keys() & vars(cls).keys() - get_annotations(cls).keys():  # a dataclass would ignore it
            value = vars(cls)[field]
            text = f"{field} is an option of the recipe, but a {type(value).__name__} here; give it another name."
            require(not callable(value) and not isinstance(value, property), cls.__name__, text)
            cls.__annotations__[field] = types[field]
        dataclass(kw_only=True, eq=False)(cls)
        if name:
            cls.name = name
            recipes.register(name)(cls)

    @classmethod
    def declared(cls, what: str) -> dict[str, Any]:
        """Return "limits" or "choices" with those of the base classes."""
        return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).get(what, {}).items()}

    @classmethod
    def ranges(cls) -> dict[str, tuple[float | str, float | str]]:
        """Return `limits` with those of the whole numbers that no class names, but for the first seed."""
        whole = [option.name for option in fields(cls) if option.type in (int, tuple[int, ...])]
        return {**dict.fromkeys(filter("seed".__ne__, whole), (1, math.inf)), **cls.declared("limits")}

    @classmethod
    def configure(cls, size: str = "small", **changes: Any) -> Any:
        """Return the recipe of a size with some options changed; an ArgumentError says that there is no such size."""
        known = ["small", *cls.by_size]
        reason = f" {cls.no_paper_size}" if size == "paper" and cls.no_paper_size else ""
        require(size in known, cls.call(), f"--size is {size!r}, expected {' or '.join(known)}.{reason}")
        return replace(cls(), **{"size": size, **cls.by_size.get(size, {}), **changes})

    @classmethod
    def call(cls) -> str:
        """Return the start of error messages."""
        return f"reproduce: {cls.name}"

    @property
    def torch_device(self) -> str:
        """Return the device by torch's name: of "auto" the fastest."""
        return resolve_device(self.device, call=self.call())

    def check(self) -> None:  # noqa: B027
        """Raise an ArgumentError, which need not name the recipe, for a wrong option, before anything is computed."""

    def prepare(self) -> Mapping[str, Any]:
        """Load what all cells share into attributes. Called once, in the main process.

        Returns:
            Plain data to store beside the rows; `Results.facts` has it.
        """
        return {}

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Return the grid. It must not depend on `prepare`."""

    def seeds_of(self, cell: Cell) -> int:
        """Return the number of seeds of a cell."""
        return self.seeds

    @abstractmethod
    def measure(self, cell: Cell, seed: int) -> Iterable[Row]:
        """Measure one cell with one seed. The columns of the cell and `seed` are added to each row."""

    def claims(self, results: Results) -> Sequence[Claim]:
        """Return the paper's claims beside what was measured."""
        return ()

    def tables(self, results: Results) -> Mapping[str, Any]:
        """Return title to table (`regard.inspect.tables.Table`); the first one is also printed."""
        return {}

    def figures(self, results: Results) -> Mapping[str, bytes]:
        """Return the last part of a file name ("curves" for NAME-curves.png) to PNG."""
        return {}

    def pages(self, results: Results) -> Mapping[str, str]:
        """Return the last part of a file name ("look" for NAME-look.html) to HTML."""
        return {}

    def notes(self, results: Results) -> Sequence[str]:
        """Return sentences that a reader needs to understand the tables."""
        return ()


def check_shared(made: Recipe) -> None:
    """Raise an ArgumentError where a shared option, or then one of the recipe's own, is out of range."""
    call = made.call()
    resolve_device(made.device, call=call)
    for name, limits in made.ranges().items():
        low, high = (getattr(made, limit) if isinstance(limit, str) else limit for limit in limits)
        options = "".join(f" ({flag(limit)})" for limit in limits if isinstance(limit, str))
        check_number(call, flag(name), getattr(made, name), low, high, options)
    for name, known in made.declared("choices").items():
        given = getattr(made, name)
        check_names(call, flag(name), [given] if isinstance(given, str) else given, list(known))
    try:
        made.check()
    except ArgumentError as error:  # what a recipe makes, such as a task, does not know who makes it
        raise ArgumentError(str(error) if str(error).startswith(call) else f"{call}: {error}") from None
    last = SEEDS - max([made.seeds, *map(made.seeds_of, made.cells())])
    require(0 <= made.seed <= last, call, f"--seed is {made.seed}, expected 0 to {last}.")


def check_names(call: str, option: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise an ArgumentError where a name is not known or comes twice, or there is none."""
    require(len(names) > 0, call, f"{option} names nothing; choose from {', '.join(known)}.")
    for name in names:
        require(name in known, call, f"{option} names {name!r}, which is unknown here.{suggestion(name, known)}")
    check_once(call, option, names)


def check_once(call: str, option: str, names: Sequence[str]) -> None:
    """Raise an ArgumentError where a name comes twice."""
    for name in names:
        require(names.count(name) == 1, call, f"{option} names {name!r} twice; name it once.")


def check_number(call: str, option: str, value: Any, low: float, high: float, others: str = "") -> None:
    """Raise an ArgumentError where a number or one of several is out of range, or one of several comes twice or there
    is none. `others` says which options the range is of."""
    numbers = value if isinstance(value, tuple) else (value,)
    limits = f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
    require(len(numbers) > 0, call, f"{option} names no number; give at least one.")
    for number in numbers:
        require(low <= number <= high, call, f"{option} is {number}, expected {limits}{others}.")
        require(numbers.count(number) == 1, call, f"{option} names {number} twice; name it once.")
