"""Recipes: experiments that `regard reproduce NAME` runs, one file and one registration each.

A recipe measures and draws; the folder with table, figures and JSON is written here, the same way for all. Recipe
files import torch and regard only at their top, so that listing them is cheap; what draws is imported when it draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from .registry import Registry

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Findings:
    """What a recipe found.

    Attributes:
        data: plain data for the JSON file: every number behind tables and figures.
        tables: name to table (`regard.inspect.tables.Table`); the first one is also printed.
        figures: file name to PNG.
        notes: sentences for the terminal and the Markdown file.
    """

    data: Mapping[str, Any]
    tables: Mapping[str, Any]
    figures: Mapping[str, bytes]
    notes: tuple[str, ...] = ()


class Recipe(Protocol):
    """One experiment. Its docstring's first sentence is what `regard list recipes` shows.

    `Config` is a dataclass with a default and a docstring for every field: its fields are the flags of the command.
    """

    Config: ClassVar[type[Any]]

    @staticmethod
    def run(config: Any, progress: Progress) -> Findings:
        """Measure; `progress` is told in a few words what is under way.

        Raises:
            ArgumentError: a number in the config is out of range; found before anything is computed.
        """


recipes: Registry[Any] = Registry("recipe", "regard.recipes")
