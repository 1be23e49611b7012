"""Rules of a layer (temperatures, ridges) and their text form: a name with arguments, `power(exponent=0.5)`.

A rule is a frozen dataclass whose fields are numbers or words, registered under its name.
"""

import re
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

from ...checks import ArgumentError, number, shown, within
from ...registry import Registry

_TERM = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\(([^()]*)\))?\s*")
_ARGUMENT = re.compile(r"\s*([A-Za-z]\w*)\s*=\s*(\S+)\s*")


class Rule:
    """A frozen dataclass whose text form can be parsed again."""

    name: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = ()  # fields that must be numbers above zero

    def __post_init__(self) -> None:
        for name in self.positive:
            object.__setattr__(self, name, number(self.name, name, getattr(self, name), low=0.0, strict=True))

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        text = ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed)
        return f"{self.name}({text})" if text else self.name


R = TypeVar("R", bound=Rule)


def as_rule(kind: type[R], registry: Registry[Any], given: object, call: str, argument: str, example: str) -> R:
    """Return a rule of `kind` as it is, or the one of `registry` that a text describes; `example` is a valid text."""
    return given if isinstance(given, kind) else within(call, argument, _read, registry, given, example)


def _read(registry: Registry[Any], given: object, example: str) -> Any:
    kind = registry.kind
    match = _TERM.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ArgumentError(f"{kind} is {shown(given)}, expected the text of one, such as {example!r}.")
    name, inside = match.groups()
    make = registry.get(name)
    words = {f.name: f.type in (str, "str") for f in fields(make)}
    values: dict[str, float | str] = {}
    for part in inside.split(",") if inside and inside.strip() else []:
        pair = _ARGUMENT.fullmatch(part)
        key, text = pair.groups() if pair else ("", "")
        if pair is None or key in values:
            raise ArgumentError(f"{kind} {given!r}: cannot read {part.strip()!r}, expected name=number, each once.")
        if key not in words:
            known = ", ".join(words) or "none"
            raise ArgumentError(f"{kind} {name}: unknown argument {key!r}; it takes {known}.")
        try:
            values[key] = text if words[key] else float(text)
        except ValueError:
            raise ArgumentError(f"{kind} {name}: {key} is {text!r}, expected a number.") from None
    return make(**values)
