"""Registries: names of objects, with suggestions for misspelt ones.

Everything that can be chosen by name (kernels, thresholding rules, implementations, tasks, ...) is in a registry.
Tests, the command line and the docs iterate the registries, so a new file with one registration is selectable and
tested. Other packages add names by an entry point of the registry's group; they cannot replace built-in ones.
"""

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
    """Import a module and, if it is a package, every module in it."""
    for inner in iter_modules(getattr(import_module(name), "__path__", ())):
        import_module(f"{name}.{inner.name}")


class Registry(Generic[T]):
    """Names to objects.

    Args:
        kind: what is registered, in the singular, for messages ("kernel").
        group: entry-point group of other packages' names ("regard.kernels"). Loading an entry point imports its module,
            which calls `register`.
        home: package whose modules register the built-in names, imported on first use ("regard.tasks"), or one module
            that imports them. Packages whose names are needed during `import regard` call `import_all` instead.
    """

    def __init__(self, kind: str, group: str | None = None, *, home: str | None = None) -> None:
        self.kind = kind
        self.group = group
        self.home = home
        self._objects: dict[str, T] = {}
        self._aliases: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under `name` and `aliases`, and gives a class without a `name` of
        its own this one."""

        def add(obj: T) -> T:
            keys = (name, *aliases)
            for key in keys:
                if key in self._objects or key in self._aliases or keys.count(key) > 1:
                    raise ArgumentError(f"{self.kind} {key!r} is registered already; choose another name.")
            if isinstance(obj, type) and "name" not in vars(obj):
                obj.name = name  # type: ignore[attr-defined]
            self._objects[name] = obj
            self._aliases.update(dict.fromkeys(aliases, name))
            return obj

        return add

    def get(self, name: str) -> T:
        """Return the object of that name; raise ArgumentError, which suggests the closest ones, if it is unknown."""
        self.load()
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
        """Return the name for a name or an alias; raise ArgumentError if it is unknown."""
        self.get(name)
        return self._aliases.get(name, name)

    def names(self, *, aliases: bool = False) -> list[str]:
        """Return all names, in the order of registration."""
        self.load()
        return [*self._objects, *(self._aliases if aliases else {})]

    def items(self) -> Iterator[tuple[str, T]]:
        """Return the pairs of name and object, in the order of registration."""
        self.load()
        return iter(list(self._objects.items()))

    def __contains__(self, name: object) -> bool:
        self.load()
        return isinstance(name, str) and (name in self._objects or name in self._aliases)

    def load(self) -> None:
        """Import what registers names, if that has not happened yet.

        Warns of entry points of other packages that fail to load.

        Raises:
            ModuleNotFoundError: an extra that regard's own entry point takes is not installed; the message names the
                command that installs it.
        """
        if self._loaded or torch.compiler.is_compiling():  # no imports while a graph is compiled
            return
        self._loaded = True  # first: the imported modules may use this registry
        if self.home is not None:
            import_all(self.home)
        for point in entry_points(group=self.group) if self.group is not None else ():
            try:
                point.load()
            except Exception as error:
                if point.dist is not None and point.dist.name == "regard":  # an extra of our own is not installed
                    self._loaded = False
                    raise
                # a faulty package must not disable the registry
                message = f"regard: the {self.kind} entry point {point.name!r} ({point.value}) failed to load: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
