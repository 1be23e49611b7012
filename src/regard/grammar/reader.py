"""Read the terms of a spec from text: name(key=value, ...)*name*..."""

import re
from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Any, ClassVar, TypeVar

from ..checks import ArgumentError

T = TypeVar("T")
_TOKEN = re.compile(r"\s*(?:(?P<word>[A-Za-z][\w.+-]*)|(?P<number>[-+]?[\d.][\w.+-]*)|(?P<sign>[*(),=\[\]]))")


class Reader:
    """Reader of terms `name(key=value, ...)`; a value is a number, a word or a term. Its errors name no call."""

    def __init__(self, text: str) -> None:
        self.text, self.rest, at = text, list[str](), 0
        while at < len(text.rstrip()):
            match = _TOKEN.match(text, at)
            if match is None:
                raise ArgumentError(f"cannot read {text[at:].strip()!r} in {text!r}.")
            self.rest.append(match.group().strip())
            at = match.end()

    def take(self, wanted: str | None = None) -> str:
        if not self.rest or (wanted is not None and self.rest[0] != wanted):
            given = repr(self.rest[0]) if self.rest else "the end"
            what = f"'{wanted}'" if wanted else "a name"
            raise ArgumentError(f"expected {what} but found {given} in {self.text!r}.")
        return self.rest.pop(0)

    def term(self) -> tuple[str, dict[str, Any]]:
        name = self.take()
        if name in "*(),=[]":
            raise ArgumentError(f"expected a name but found {name!r} in {self.text!r}.")
        arguments: dict[str, Any] = {}
        if self.rest[:1] == ["("]:
            self.take("(")
            while self.rest[:1] != [")"]:
                key = self.take()
                self.take("=")
                if key in arguments:
                    raise ArgumentError(f"{key!r} is given twice in {self.text!r}.")
                arguments[key] = self.value()
                if self.rest[:1] != [")"]:
                    self.take(",")
            self.take(")")
        return name, arguments

    def terms(self) -> list[tuple[str, dict[str, Any]]]:
        terms = [self.term()]
        while self.rest:
            self.take("*")
            terms.append(self.term())
        return terms

    def value(self) -> Any:
        token = self.rest[0] if self.rest else self.take()
        if token in ("True", "False"):
            return self.take() == "True"
        try:
            number = float(token)
        except ValueError:
            name, arguments = self.term()
            return (name, arguments) if arguments else name
        self.take()
        return int(token) if re.fullmatch(r"[-+]?\d+", token) else number


def kept(make: Callable[..., T], key: Callable[..., tuple[Any, ...]] | None = None) -> Callable[..., T]:
    """Return `make`, which keeps its 1024 latest results by its arguments or their `key`, as constants of a graph.

    While dynamo traces, it copies a dictionary when it first reads it, and misses what a second text of the same graph
    adds. It looks up an attribute of a class each time.
    """

    class Results:
        names: ClassVar[dict[Any, str]] = {}

    numbers, alone = count(), Lock()

    def name_of(*arguments: Any) -> str:
        """Return the name of the attribute that holds the result. No name is used again."""
        identity, names = key(*arguments) if key else arguments, Results.names
        try:
            name = names.get(identity)
        except TypeError:  # no hash: `make` will refuse it
            name = None
        if name is None:
            name, result = f"made_{next(numbers)}", make(*arguments)
            with alone:  # another thread may have made it, too
                if identity not in names:
                    if len(names) >= 1024:  # bounds the memory when a number in the text changes at every call
                        delattr(Results, names.pop(next(iter(names))))
                    setattr(Results, name, result)
                    names[identity] = name
                name = names[identity]
        return name

    # Dynamo calls this function instead of tracing it. torch.compiler.assume_constant_result would import the compiler.
    name_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def call(*arguments: Any) -> T:
        result: T | None = getattr(Results, name_of(*arguments), None)
        return make(*arguments) if result is None else result  # None: another thread made 1024 others in between

    call.results = Results  # type: ignore[attr-defined]
    return call
