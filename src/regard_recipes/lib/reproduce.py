"""`regard reproduce NAME`: run a recipe and leave its results in a folder."""

from __future__ import annotations

import time
from typing import Any

from regard.cli.options import parse
from regard.errors import ArgumentError
from regard.recipes import recipes

CALL = "reproduce"


def reproduce(argv: list[str]) -> int:
    """`regard reproduce NAME [options]`."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        if argv:
            return 0
        raise ArgumentError(f"{CALL}: name a recipe: {', '.join(sorted(recipes.names()))}.")
    if argv[0].startswith("-"):
        raise ArgumentError(f"{CALL}: the name of a recipe comes first: {', '.join(sorted(recipes.names()))}.")
    name, rest = argv[0], argv[1:]
    recipe = recipes.get(name)
    config: Any = parse(recipe.Config, rest, command=f"{CALL} {name}")
    from . import recipe_output

    recipe_output.check_out(config.out, CALL)
    from rich.console import Console

    progress, screen = Console(stderr=True), Console()
    for console in (progress, screen):
        if not console.is_terminal:  # a file or a pipe has no edge at which to fold
            console.width = max(console.width, 160)
    start = time.perf_counter()
    with progress.status(name) as status:
        findings = recipe.run(config, lambda text: status.update(f"{name}: {text}"))
    seconds = time.perf_counter() - start
    recipe_output.write(config.out, name, config, findings, rest, seconds)
    for title, table in list(findings.tables.items())[:1]:
        screen.print(table.rich(title))
    for note in findings.notes:
        screen.print(note, highlight=False, markup=False)
    screen.print(f"{seconds:.0f} s in all. Look inside: {config.out}", highlight=False)
    return 0


def usage() -> str:
    """The text of `regard reproduce --help`."""
    from regard.cli.show import about

    width = max(map(len, recipes.names())) + 2
    lines = [f"  {name:<{width}}{about(recipe)}" for name, recipe in sorted(recipes.items())]
    return "\n".join(
        [
            "usage: regard reproduce RECIPE [options]",
            "",
            "Run an experiment; leaves a table, figures and JSON with provenance in a folder.",
            "",
            *lines,
            "",
            "`regard reproduce RECIPE --help` lists the options of a recipe.",
        ]
    )
