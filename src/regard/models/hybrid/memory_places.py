"""The layers of a model that have memories, as a text such as "FwPKM@2,6,10" or "PKM@6+FwPKM@2,10" (from layer 0)."""

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from ...checks import ArgumentError, refuse, require, shown, suggestion, within
from ...nn.memories import memory_layers
from ...registry import Registry

_PART = re.compile(r"\s*([A-Za-z][\w-]*)\s*@\s*(\d+(?:\s*,\s*\d+)*)\s*")
Places = dict[int, list[str]]
"""Layer -> names of its memories: one beside the feed-forward layer, one instead of it, or both."""


def read_places(call: str, given: str | Mapping[Any, Any] | None, depth: int) -> Places:
    """Return the memories of each of `depth` layers that has any, from the text or a mapping of layers to names; raise
    `ArgumentError` for an unreadable text, an unknown memory or layer, or two memories in the same place."""
    places: Places = {}
    for name, at in _pairs(call, given):
        name = within(call, "memories", memory_layers.canonical, name.lower())
        there = f"there are layers 0 to {depth - 1} (num_hidden_layers={depth})"
        require(0 <= at < depth, call, f"memories puts {name} at layer {at}, but {there}.")
        kind = memory_layers.get(name).replaces_feed_forward
        clash = [n for n in places.get(at, []) if memory_layers.get(n).replaces_feed_forward == kind]
        if clash:
            where = "in place of the feed-forward layer" if kind else "beside the feed-forward layer"
            raise ArgumentError(f"{call}: memories puts {clash[0]} and {name} {where} of layer {at}; choose one.")
        places.setdefault(at, []).append(name)
    return dict(sorted(places.items()))


def places_text(places: Places) -> str:
    """Return the places as a text that `read_places` reads; "" for none."""
    names = sorted({name for found in places.values() for name in found})
    return "+".join(f"{n}@{','.join(str(at) for at, found in places.items() if n in found)}" for n in names)


def read_options(
    call: str, field: str, given: str | Mapping[str, Any] | None, registry: Registry[Any]
) -> dict[str, dict[str, Any]]:
    """Return options by name, from a mapping or its JSON text; raise `ArgumentError` for anything else, or an unknown
    name or option. An entry of the registry with `defaults` has those options, another the keywords of its class."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{call}: {field} is {shown(given)}, which is no JSON: {error}.") from None
    given = {} if given is None else given
    example = next(iter(registry.names()), "name")
    items = given.items() if isinstance(given, Mapping) else [(None, given)]
    if not all(isinstance(name, str) and isinstance(each, Mapping) for name, each in items):
        raise refuse(call, field, given, f"a mapping such as {{{example!r}: {{...}}}}")
    found: dict[str, dict[str, Any]] = {}
    for name, options in given.items():
        name = within(call, field, registry.canonical, name.lower())
        entry = registry.get(name)
        known = [*entry.defaults] if hasattr(entry, "defaults") else [*inspect.signature(entry).parameters][1:]
        for option in options:
            if option not in known:
                raise ArgumentError(f"{call}: {field}: {name} has no option {option!r}.{suggestion(option, known)}")
        found[name] = dict(options)
    return found


def _pairs(call: str, given: str | Mapping[Any, Any] | None) -> list[tuple[str, int]]:
    expected = "expected a text such as 'FwPKM@2,6,10' or 'PKM@6+FwPKM@2,10'"
    if given is None:
        return []
    if isinstance(given, Mapping):
        try:
            named = [(int(at), [names] if isinstance(names, str) else [*names]) for at, names in given.items()]
        except (TypeError, ValueError):
            raise ArgumentError(f"{call}: memories is {shown(given)}, {expected}, or depths mapped to names.") from None
        return [(name, at) for at, names in named for name in names]
    if not isinstance(given, str):
        raise ArgumentError(f"{call}: memories is {shown(given)}, {expected}.")
    found: list[tuple[str, int]] = []
    for part in given.split("+") if given.strip() else []:
        match = _PART.fullmatch(part)
        if match is None:
            raise ArgumentError(f"{call}: memories is {shown(given)}, {expected}; cannot read {part.strip()!r}.")
        found += [(match[1], int(at)) for at in match[2].split(",")]
    return found
