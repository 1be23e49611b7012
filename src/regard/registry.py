"""Small registries: a name, an object, where it came from, and "did you mean".

Everything that can be chosen by name (kernels, bandwidth rules, implementations, tasks, ...) lives in one of
these. Tests, the command line, the docs tables and the Hugging Face names iterate them, so that one new
file with one registration is tested and selectable with no other edit. A third party adds to a registry by an
entry point of the registry's group; it cannot replace what is built in.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, Generic, TypeVar

import torch

from .checks import ArgumentError, shown, suggestion, within

T = TypeVar("T")


def import_all(name: str) -> None:
    """Import a module and, where it is a package, every module in it."""
    for inner in iter_modules(getattr(import_module(name), "__path__", ())):
        import_module(f"{name}.{inner.name}")


class Registry(Generic[T]):
    """Names to objects.

    Args:
        kind: what is registered, in the singular, for messages ("kernel").
        group: entry-point group through which other packages add names ("regard.kernels"). Loading an entry
            point imports its module, whose own `register` call does the work.
        home: package whose modules register what is built in, or one module that imports them; imported on first
            use ("regard.tasks"). A new file in the package is then found with no other edit. Without it the package
            calls `import_all` itself, as those do whose names are needed while regard is imported.
    """

    def __init__(self, kind: str, group: str | None = None, *, home: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self.home = home
        self._objects: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Decorator: file the object under `name`, reachable by `aliases` too."""

        def add(obj: T) -> T:
            keys = (name, *aliases)
            for key in keys:
                if key in self._objects or key in self._aliases or keys.count(key) > 1:
                    raise ArgumentError(f"{self.kind} {key!r} is registered already; choose another name.")
            self._objects[name] = obj
            self._aliases.update(dict.fromkeys(aliases, name))
            return obj

        return add

    def get(self, name: str) -> T:
        """The object of that name.

        Raises:
            ArgumentError: no such name; the message suggests the closest ones.
        """
        self._load()
        if not isinstance(name, str):
            raise ArgumentError(f"a {self.kind} is chosen by name, got {shown(name)} ({type(name).__name__}).")
        key = self._aliases.get(name, name)
        if key not in self._objects:
            raise ArgumentError(f"unknown {self.kind} {shown(name)}.{suggestion(name, self.names(aliases=True))}")
        return self._objects[key]

    def given(self, call: str, argument: str, name: Any) -> T:
        """Return the object of the name given for an argument of a call; errors name both."""
        return within(call, argument, self.get, name)

    def canonical(self, name: str) -> str:
        """The name under which an object is filed, for that name or an alias.

        Raises:
            ArgumentError: no such name.
        """
        self.get(name)
        return self._aliases.get(name, name)

    def names(self, *, aliases: bool = False) -> list[str]:
        """All names, in the order of registration."""
        self._load()
        return [*self._objects, *(self._aliases if aliases else {})]

    def items(self) -> Iterator[tuple[str, T]]:
        """Pairs of name and object, in the order of registration."""
        self._load()
        return iter(list(self._objects.items()))

    def __contains__(self, name: object) -> bool:
        self._load()
        return isinstance(name, str) and (name in self._objects or name in self._aliases)

    def _load(self) -> None:
        if self._loaded or torch.compiler.is_compiling():  # what is being compiled can neither import nor search
            return
        self._loaded = True  # first, since the modules that are imported here may ask this registry
        if self.home is not None:
            import_all(self.home)
        for point in entry_points(group=self.group) if self.group is not None else ():
            try:
                point.load()
            except Exception as error:  # another package's fault must not stop every use of this one
                message = f"regard: the {self.kind} entry point {point.name!r} ({point.value}) failed to load: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
