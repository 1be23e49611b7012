"""The registry of recipes: experiments that `regard reproduce NAME` runs. `regard_recipes` has their base class."""

from collections.abc import Callable
from typing import Any

from .registry import Registry

Progress = Callable[[str], None]
"""Called with a few words about what is being done."""

recipes: Registry[Any] = Registry("recipe", "regard.recipes")
