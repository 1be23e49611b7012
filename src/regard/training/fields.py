"""Reading dataclasses from TOML and JSON files and from text, with checked keys and types; lists of specs."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ArgumentError, require, suggestion
from .errors import expect, one_error
from .storage.files import read_text

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef, unused-ignore]

if TYPE_CHECKING:
    from .. import Spec

C = TypeVar("C")
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path as text"}


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def read_mapping(path: Path, *, call: str) -> dict[str, Any]:
    """Return the table in a `.toml` or `.json` file; raise `ArgumentError` if it cannot be read or has a key twice."""
    require(path.suffix in (".toml", ".json"), call, f"{path} is neither a .toml nor a .json file.")
    with one_error(f"{call}: cannot read config file {path}"):
        exists = path.exists()
        text = read_text(path) if exists else ""
    require(exists, call, f"config file {path} does not exist.")
    with one_error(f"{call}: {path} is not valid {path.suffix[1:].upper()}"):
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_no_key_twice)
    require(isinstance(table, dict), call, f"{path} holds a {type(table).__name__}, expected a table of settings.")
    return table


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        expect(name not in table, f"duplicate key {name!r}")
        table[name] = value
    return table


def from_mapping(base: C, table: Mapping[str, Any], *, call: str, source: str) -> C:
    """Return a copy of the dataclass `base` with the values of a table; a `-` in a key is read as `_`, as in flags. The
    `ArgumentError` for an unknown or duplicate key, or a value of the wrong type, names `source`."""
    hints = get_type_hints(type(base), include_extras=False)
    names = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ArgumentError(f"{call}: unknown key {key!r} in {source}.{suggestion(name, names)}")
        require(name not in values, call, f"duplicate key {key!r} in {source}.")
        where = f"{call}: {key} in {source}"
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) >= 2**63:
                raise ArgumentError(f"{where} is a number of {number.bit_length()} bits; give a smaller one.")
        values[name] = coerce(value, hints[name], where)
    return dataclasses.replace(base, **values)  # type: ignore[type-var]


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON data, from which `from_mapping` makes an equal object."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return json.loads(json.dumps(values, default=_plain))  # tuples become lists


def _plain(value: Any) -> Any:
    """Return numbers of numpy or torch as plain ones, and what else JSON does not have, such as a path, as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def coerce(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as a plain type, an optional, a Literal or a `tuple[X, ...]`; errors begin with `where`."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return coerce(value, inner, where)
    if origin is Literal:
        choices = get_args(hint)
        if value not in choices:
            raise ArgumentError(f"{where} is {value!r}.{suggestion(str(value), map(str, choices))}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(coerce(item, get_args(hint)[0], where) for item in items)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ArgumentError(f"{where} is {value!r} ({type(value).__name__}), expected {_WORDS.get(hint, hint.__name__)}.")


def split_specs(text: str) -> list[str]:
    """Split a list of specs at the commas that stand outside brackets, and strip the parts."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth <= 0:
            parts.append(text[start:i])
            start = i + 1
    return [part.strip() for part in (*parts, text[start:])]


def read_spec(text: str, flag: str, call: str) -> Spec:
    """Return the spec of one part of a list given with `flag`, which the message of an `ArgumentError` names."""
    from ..grammar import as_spec

    require(bool(text), call, f"{flag} has an empty part; put one comma between two specs.")
    return as_spec(text, call, flag)


def from_text(text: str, hint: Any, where: str) -> Any:
    """Return the value of type `hint` that a text stands for; raise `ArgumentError`, which begins with `where`.

    Texts are numbers, true or false, none for optional types, and lists separated by commas. Of a union, the first type
    that fits is taken. For `Any`, the result is text, or a list of texts if there are commas outside brackets.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        *first, last = (kind for kind in get_args(hint) if kind is not type(None))
        if type(None) in get_args(hint) and text.lower() == "none":
            return None
        for kind in first:
            with suppress(ArgumentError):
                return from_text(text, kind, where)
        return from_text(text, last, where)
    if origin is Literal:
        return coerce(text, hint, where)
    if hint is Any or origin in (list, tuple, Sequence):
        parts = split_specs(text)
        if hint is Any:
            return parts[0] if len(parts) == 1 else parts
        inner = (*get_args(hint), Any)[0]
        return (tuple if origin is tuple else list)(from_text(part, inner, where) for part in parts)
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint in (int, float):
        with suppress(ValueError):
            return hint(text)
    elif hint in (str, Path):
        return hint(text)
    raise ArgumentError(f"{where} is {text!r}, expected {_WORDS.get(hint, str(hint))}.")
