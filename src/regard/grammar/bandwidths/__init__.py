"""Bandwidth rules: how far a row looks. One file a rule; importing this package registers them all."""

from importlib import import_module
from pkgutil import iter_modules

from .base import Bandwidth, bandwidths

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Bandwidth", "bandwidths"]
