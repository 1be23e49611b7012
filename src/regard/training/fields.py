"""Dataclasses from TOML and JSON files: every key is a field; a wrong key or type is an error that teaches.

Only plain data is read (numbers, text, lists); nothing in a file is ever imported or executed.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ArgumentError, suggestion
from .sentences import split_sentences
from .storage.files import read_text

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef, unused-ignore]

C = TypeVar("C")
_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false", Path: "a path as text"}


def read_mapping(path: Path, *, call: str) -> dict[str, Any]:
    """Return the table in a `.toml` or `.json` file.

    Raises:
        ArgumentError: the file is missing, unreadable, no regular file, of another kind, not a table, or names a key
            twice.
    """
    if path.suffix not in (".toml", ".json"):
        raise ArgumentError(f"{call}: {path} is neither a .toml nor a .json file.")
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ArgumentError(f"{call}: config file {path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{call}: cannot read config file {path}: {_one_line(error)}.") from None
    try:
        table = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text, object_pairs_hook=_no_key_twice)
    except (ValueError, RecursionError) as error:  # both decoders derive their errors from ValueError
        raise ArgumentError(f"{call}: {path} is not valid {path.suffix[1:].upper()}: {_one_line(error)}.") from None
    if not isinstance(table, dict):
        raise ArgumentError(f"{call}: {path} holds a {type(table).__name__}, expected a table of settings.")
    return table


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the table of these pairs; a key that stands twice is a ValueError."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def from_mapping(base: C, table: Mapping[str, Any], *, call: str, source: str) -> C:
    """`base` (a dataclass instance) with the table's values in place of its own.

    Args:
        table: field name to value; `-` in a key is read as `_`, so that flags can be copied.
        source: where the table came from, for messages.

    Raises:
        ArgumentError: a key that is no field, or a value of the wrong type.
    """
    cls = type(base)
    hints = get_type_hints(cls, include_extras=False)
    names = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ArgumentError(f"{call}: unknown key {key!r} in {source}.{suggestion(name, names)}")
        if name in values:
            raise ArgumentError(f"{call}: {key!r} stands twice in {source}.")
        values[name] = _coerce(value, hints[name], f"{call}: {key} in {source}")
    return dataclasses.replace(base, **values)  # type: ignore[type-var]


def to_mapping(config: Any) -> dict[str, Any]:
    """The fields of a dataclass as plain JSON data; `from_mapping` reads it back to an equal object."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint` (a plain type, a union with None, a Literal or `tuple[X, ...]`)."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return _coerce(value, inner, where)
    if origin is Literal:
        choices = get_args(hint)
        if value not in choices:
            listed = suggestion(str(value), [str(choice) for choice in choices])
            raise ArgumentError(f"{where} is {value!r}.{listed}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_coerce(item, get_args(hint)[0], where) for item in items)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ArgumentError(f"{where} is a number of {value.bit_length()} bits; give a smaller one.")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ArgumentError(f"{where} is {value!r} ({type(value).__name__}), expected {_WORDS.get(hint, hint.__name__)}.")


def from_text(text: str, hint: Any, where: str) -> Any:
    """A value of the type `hint` from the text of a command line: numbers, true or false, none where the type allows
    it, lists with commas between their parts. Of several types the first that fits; where any is allowed, text, or a
    list of texts if there are commas outside brackets.

    Raises:
        ArgumentError: the text is no such value; the message begins with `where`.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if len(kinds) < len(get_args(hint)) and text.lower() == "none":
            return None
        for kind in kinds[:-1]:
            with suppress(ArgumentError):
                return from_text(text, kind, where)
        return from_text(text, kinds[-1], where)
    if origin is Literal:
        return _coerce(text, hint, where)
    if hint is Any or origin in (list, tuple, Sequence):
        parts = split_sentences(text)
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
