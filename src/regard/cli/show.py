"""`regard list` and `regard doctor`: what can be chosen, and what can run here. Neither needs a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..errors import ArgumentError, suggestion


def listing(argv: list[str]) -> int:
    """`regard list [WHAT]`."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: regard list [WHAT]\n\nShow what can be chosen by name: {_WHAT}.")
        return 0
    if len(argv) > 1:
        raise ArgumentError(f"list: expected one thing to list, got {len(argv)}: {' '.join(argv)}.")
    shelves = _shelves()
    if not argv:
        for shelf, items in shelves.items():
            _show(shelf, items() if shelf not in _SLOW else [("", f"`regard list {shelf}` shows them")])
        return 0
    shelf = argv[0] if argv[0] in shelves else _plural(argv[0])
    if shelf not in shelves:
        raise ArgumentError(f"list: there are no {argv[0]!r}.{suggestion(argv[0], shelves)}")
    _show(shelf, shelves[shelf]())
    return 0


_WHAT = "everything, or one kind, such as kernels, presets, recipes, models or token-mixers"
_SLOW = ("token-mixers", "models")
"""What only transformers can tell, which takes seconds to import: listed when it is asked for."""


def _show(shelf: str, items: Iterable[tuple[str, str]]) -> None:
    print(f"{shelf}:")
    print_pairs([(f"  {name}", line) for name, line in items])


def _shelves() -> dict[str, Callable[[], Iterator[tuple[str, str]]]]:
    """What can be listed, by name: a function that gives names and lines about them."""
    import regard

    from ..training.data.tokenizers import TOKENIZERS

    def lines(registry: Any) -> Iterator[tuple[str, str]]:
        return ((name, about(thing)) for name, thing in registry.items())

    registries = {**regard.registries(), "tokenizer": TOKENIZERS}
    return {_plural(kind): partial(lines, registry) for kind, registry in registries.items()} | {
        "token-mixers": _token_mixers,
        "models": _models,
    }


def _token_mixers() -> Iterator[tuple[str, str]]:
    """What `--spec` may name beside a sentence of the grammar, with its options."""
    from ..models import token_mixers

    for name, mixer in token_mixers.items():
        yield name, about(mixer)
        yield "", "--option mixer_options: " + ", ".join(f"{key}={_word(v)}" for key, v in mixer.defaults.items())


def _models() -> Iterator[tuple[str, str]]:
    """Every model with the flags and options that are its own."""
    from ..training.models import language_models, options

    for name, entry in language_models.items():
        flags, fields = options(name)
        yield name, entry.about
        if flags:
            yield "", "flags: " + ", ".join("--" + flag.replace("_", "-") for flag in flags)
        yield "", "--option: " + ", ".join(f"{field}={_word(value)}" for field, value in fields.items())


def _word(value: Any) -> str:
    """A default as one writes it on the command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_word, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def doctor(argv: list[str]) -> int:
    """`regard doctor`."""
    if argv and argv[0] not in ("-h", "--help"):
        raise ArgumentError(f"doctor: takes no arguments, got {' '.join(argv)}.")
    if argv:
        print("usage: regard doctor\n\nShow versions, devices, and which implementations can run.")
        return 0
    from ..doctor import report

    for title, pairs in report().items():
        print(f"{title}:")
        print_pairs([(f"  {name}", text) for name, text in pairs.items()])
    return 0


def print_pairs(pairs: list[tuple[str, str]]) -> None:
    """Print two aligned columns."""
    width = max((len(name) for name, _ in pairs), default=0) + 2
    for name, text in pairs:
        print(f"{name:<{width}}{text}".rstrip())


def _plural(kind: str) -> str:
    kind = kind.lower()
    if kind.endswith("s"):
        return kind
    return re.sub("(?<=[^aeiou])y$", "ie", kind) + "s"


def about(thing: Any) -> str:
    """Return one line about something registered: a preset spelt out, else the first sentence of a docstring."""
    if hasattr(thing, "parts"):
        return "*".join(thing.parts())
    text = " ".join((getattr(thing, "impl", thing).__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\S\.) (?=[A-Z])", text)[0]  # "q . K" has a blank before the full stop
