"""The exception for wrong arguments, suggestions for misspelt names, and the commands that install missing packages,
without torch for the command line.

Elsewhere `ArgumentError`, `require` and `suggestion` come from `regard.checks`.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

EXTRAS = {
    "lm": ("tyro", "rich", "transformers", "accelerate", "tokenizers", "safetensors", "matplotlib", "jinja2", "tomli"),
    "recipes": ("numpy", "pandas", "scipy"),
}
"""Packages of the extras that modules import when they are loaded."""


class ArgumentError(ValueError):
    """A wrong argument. The command line prints the message as one line and exits with status 2."""


def require(condition: bool, call: str, message: str) -> None:
    """Raise `ArgumentError("call: message")` unless `condition` holds."""
    if not condition:
        raise ArgumentError(f"{call}: {message}")


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return at most two of `choices` that are similar to `name`; fewer with a higher cutoff."""
    return difflib.get_close_matches(name, sorted(set(choices)), n=2, cutoff=cutoff)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean ...?' with the closest of `choices`, or else a list of all."""
    known = sorted(set(choices))
    close = closest(name, known)
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" Choose from: {', '.join(known)}."


def missing(error: ModuleNotFoundError, wanted: str | None = None) -> str | None:
    """Return what is not installed and how to install its extra (or the extra `wanted`); None if no extra brings it."""
    package = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"{error.name} is not installed; pip install 'regard[{wanted or extra}]'"
    return None


@contextmanager
def extra_imports() -> Iterator[None]:
    """Name the command that installs an extra, if an import inside the block does not find a package of it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if what := missing(error):
            raise ModuleNotFoundError(what, name=error.name) from None
        raise
