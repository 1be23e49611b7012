"""What an argument may be: for every kind of argument the values that are valid, and values that are not.

`Kind.values(given)` lists replacements of a valid value; `Kind.accepts(value)` says which of them are documented as
valid. The fuzzer puts each of them into an otherwise valid call.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Strange:
    """An object that nothing accepts."""

    def __repr__(self) -> str:
        raise RuntimeError("an error message must not need this")


HUGE = 10**5000  # its repr is an error of its own
FLOATS = (0.5, 1.5, -0.5, 1e300, -1e300, math.nan, math.inf, -math.inf)
NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 7, *FLOATS, 10**30, HUGE, True, False)
OBJECTS: tuple[Any, ...] = ("nonsense", "", b"bytes", None, (), [], {}, [1], {"a": 1}, object, Strange(), len, 2j)
TENSORS: tuple[Tensor, ...] = (
    *map(torch.tensor, (1.0, True, 3)), *map(torch.ones, ((2, 3), (0,), (1, 1, 1, 1, 1, 1))),
    torch.full((1,), math.nan), torch.ones(1, device="meta"),
)  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """What an argument may be."""

    none: bool = False  # whether None is valid
    also: tuple[Any, ...] = ()  # further values that are not valid
    fine: tuple[Any, ...] = ()  # further values that are valid, compared by identity or equality
    most: float = math.inf  # valid numbers above this are left out: they take too much time or memory
    skip: Callable[[Any, Any], bool] = lambda value, given: False  # which are left out, and what they would replace
    test: Callable[[Any], bool] = lambda value: False  # whether a value of no other kind is valid

    def accepts(self, value: Any) -> bool:
        if value is None:
            return self.none
        known = any(value is each or (type(value) is type(each) and value == each) for each in self.fine)
        return known or self.own(value)

    def own(self, value: Any) -> bool:
        return self.test(value)

    def values(self, given: Any) -> list[Any]:
        every = [*NUMBERS, *OBJECTS, *TENSORS, *self.also, *self.fine]
        return [v for v in every if not (isinstance(v, (int, float)) and v > self.most and self.accepts(v))]


@dataclass(frozen=True)
class Anything(Kind):
    """An argument that is not fuzzed."""

    def values(self, given: Any) -> list[Any]:
        return []


@dataclass(frozen=True)
class Flag(Kind):
    """True or False."""

    def own(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Whole(Kind):
    """A whole number from `low` to `high`."""

    low: int | None = None
    high: int | None = None
    even: bool = False

    def own(self, value: Any) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        low = self.low is None or value >= self.low
        return low and (self.high is None or value <= self.high) and not (self.even and value % 2)


@dataclass(frozen=True)
class Real(Kind):
    """A finite number from `low` to `high`; with `rows`, also a tensor that broadcasts to one of these shapes."""

    low: float | None = None
    high: float | None = None
    strict: bool = False
    rows: tuple[tuple[int, ...], ...] = ()

    def values(self, given: Any) -> list[Any]:
        """Numbers of rows are of the tensors' dtype, whose largest number is not the same for all."""
        wild = lambda v: self.rows and isinstance(v, (int, float)) and 1e20 < abs(v) < math.inf and self.low is not None  # noqa: E731
        return [v for v in super().values(given) if not wild(v)]

    def own(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            known = value.is_floating_point() and value.device.type == "cpu"
            return known and any(broadcasts(value.shape, rows) for rows in self.rows)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e300:
            return False
        value = float(value)  # as the checks compare it
        above = self.low is None or (value > self.low if self.strict else value >= self.low)
        return above and (self.high is None or (value < self.high if self.strict else value <= self.high))


@dataclass(frozen=True)
class Word(Kind):
    """One of a few words."""

    words: tuple[str, ...] = ()

    def own(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def values(self, given: Any) -> list[Any]:
        near = [change for word in self.words for change in (word[:-1], word.upper(), f" {word}*")]
        return [*super().values(given), *near]


BROKEN = (
    "softmx", "softmax*", "*", "gaussian*adaptive", "biweight(", "nearest(k=0)", "gaussian*nearest(k=-1)",
    "gaussian*nearest(k=1e400)", "polynomial(r=nan)", "softmax*softmax", "linear(ridge=-1)", "local-linear[x]",
    "interpolated[x]", "gaussian*fixed(h=1)", "a" * 10_000, "\x00", "gaussian*fixed(bias=(((((",
)  # fmt: skip


def SpecValue(also: tuple[Any, ...] = (), **more: Any) -> Kind:
    """A Spec or its text. What a call refuses besides is in `also`."""
    return Kind(also=(*BROKEN, *also), **more)


@dataclass(frozen=True)
class Floats(Kind):
    """A floating-point tensor, whose rank is always given."""

    fixed: tuple[int, ...] | None = None  # axes whose size other arguments decide; None: all
    dtype: bool = True  # whether the dtype must be that of the others
    broadcast: bool = False  # whether an axis of 1 (or fewer axes) will do
    short: bool = False  # whether a first axis of 1 may be left out
    alone: bool = False  # whether no other tensor says where it must be
    kind: str = "float"  # or "bool" or "integer"

    def values(self, given: Any) -> list[Any]:
        if not isinstance(given, Tensor):
            return [v for v in [*NUMBERS, *OBJECTS] if v is not None]
        bad: list[Any] = [*NUMBERS, *OBJECTS, *self.also]
        bad += [given.to(torch.complex64), given.tolist(), *([] if self.alone else [given.to("meta")])]
        if self.kind == "float":
            bad += [given.long(), given > 0, given.to(torch.float8_e4m3fn)]
            bad += [given.half() if given.dtype != torch.float16 else given.float()] if self.dtype else []
        elif self.kind == "bool":
            bad += [given.float(), given.long(), given.to(torch.uint8)]
        else:
            bad += [given.float(), given > 0]
        bad += [given.expand(2, 1, 1, *given.shape), given[None, None, None, None, None]]
        if not self.broadcast:
            bad += [given[None]]
            bad += [given[0]] if given.dim() and len(given) and not (self.short and len(given) == 1) else []
        for axis in range(given.dim()) if self.fixed is None else self.fixed:
            bad += [torch.cat([given] * 3, axis)]
            if given.shape[axis] > 2 or not self.broadcast:
                bad += [given.narrow(axis, 0, given.shape[axis] - 1)] if given.shape[axis] > 1 else []
        return bad


def Mask(**more: Any) -> Floats:
    """A boolean tensor."""
    return Floats(kind="bool", **more)


def Integers(**more: Any) -> Floats:
    """An integer tensor."""
    return Floats(kind="integer", **more)


ONLY_NONE = Kind(none=True)
"""An argument that has no meaning in this call."""
NEVER = Kind(test=lambda value: value is False)
"""A flag that can only be False."""
STEPS = Kind(test=lambda value: value is False or (isinstance(value, int) and value >= 1))
"""`meta_grad`: True, False or a number of chunks."""
RAISES: Callable[[Any, Any], bool] = lambda value, given: value is object  # noqa: E731
"""To leave out what raises an error of its own where a function is called."""
SIZE = Whole(low=1, most=10**6)
POSITIVE = Real(low=0.0, strict=True)
RATE = Real(low=0.0)


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether `shape` broadcasts to `target` without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def label(value: Any) -> str:
    """A value as short text, for reports."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)}@{value.device}"
    if isinstance(value, Strange):
        return "Strange()"
    try:
        return repr(value)[:60]
    except Exception:
        return type(value).__name__


def finite(results: Any) -> Iterable[str]:
    """The floating-point tensors in a result that hold something that is not finite."""
    parts = results if isinstance(results, (tuple, list)) else [results]
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and not bool(part.isfinite().all()):
            yield label(part)
