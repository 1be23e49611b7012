"""The commands `regard list` and `regard doctor`: what can be selected, and what runs on this machine."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ..errors import ArgumentError, missing, require, suggestion


def listing(argv: list[str]) -> int:
    """Run `regard list [KIND]`."""
    if argv and argv[0] in ("-h", "--help"):
        which = "presets (the default), another kind, such as kernels, recipes, models or token-mixers, or all kinds"
        print(f"usage: regard list [KIND]\n\nShow what can be selected by name: {which} with `regard list all`.")
        return 0
    require(len(argv) <= 1, "list", f"expected one kind, got {len(argv)}: {' '.join(argv)}.")
    kinds = _kinds()
    wanted = argv[0] if argv else "presets"
    kind = wanted if wanted in kinds else _plural(wanted)
    if wanted == "all":
        for name, entries in kinds.items():
            _show(name, _or_reason(entries) if name not in _SLOW else [("", f"`regard list {name}` shows them")])
    elif kind in kinds:
        _show(kind, kinds[kind]())
    else:
        raise ArgumentError(f"list: unknown kind {wanted!r}.{suggestion(wanted, [*kinds, 'all'])}")
    if not argv:
        print(f"\n`regard list KIND` shows another kind: all, {', '.join(kinds)}.")
    return 0


_SLOW = ("token-mixers", "models")
"""Kinds that need transformers, which takes seconds to import; `all` does not list their entries."""


def _show(title: str, entries: Iterable[tuple[str, str]]) -> None:
    print(f"{title}:")
    print_pairs([(f"  {name}", line) for name, line in entries])


def _or_reason(entries: Callable[[], Iterator[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the entries, or a line with the extra that they take if it is not installed."""
    try:
        return list(entries())
    except ModuleNotFoundError as error:
        if what := missing(error, "recipes"):
            return [("", what)]
        raise


def _kinds() -> dict[str, Callable[[], Iterator[tuple[str, str]]]]:
    """Return by kind a function that yields names, each with a line of description."""
    import regard

    from ..training.data.tokenizers import TOKENIZERS

    def lines(registry: Any) -> Iterator[tuple[str, str]]:
        return ((name, about(thing)) for name, thing in registry.items())

    registries = {**regard.registries(), "tokenizer": TOKENIZERS}
    kinds = {_plural(kind): partial(lines, registry) for kind, registry in registries.items()}
    return {**kinds, "token-mixers": _token_mixers, "models": _models}


def _token_mixers() -> Iterator[tuple[str, str]]:
    """Yield the token mixers that `--spec` takes besides attention specs, with their options."""
    from ..models import token_mixers

    for name, mixer in token_mixers.items():
        yield name, about(mixer)
        yield "", "--option mixer_options: " + ", ".join(f"{key}={_word(v)}" for key, v in mixer.defaults.items())


def _models() -> Iterator[tuple[str, str]]:
    """Yield every model with its own flags and options."""
    from ..training.fields import flag
    from ..training.models import language_models, options

    for name, entry in language_models.items():
        flags, fields = options(name)
        yield name, entry.about
        if flags:
            yield "", "flags: " + ", ".join(map(flag, flags))
        yield "", "--option: " + ", ".join(f"{field}={_word(value)}" for field, value in fields.items())


def _word(value: Any) -> str:
    """Return a default as it is written on the command line."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_word, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def doctor(argv: list[str]) -> int:
    """Run `regard doctor`."""
    require(not argv or argv[0] in ("-h", "--help"), "doctor", f"takes no arguments, got {' '.join(argv)}.")
    if argv:
        print("usage: regard doctor\n\nShow versions, devices, and available implementations.")
        return 0
    from ..doctor import report

    for title, entries in report().items():
        _show(title, entries.items())
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
    """Return one line about a registered object: the spec of a preset, else the first sentence of a docstring."""
    if callable(getattr(thing, "parts", None)):
        return "*".join(thing.parts())
    text = " ".join((getattr(thing, "impl", thing).__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\S\.) (?=[A-Z])", text)[0]  # not at the space in "q . K"
