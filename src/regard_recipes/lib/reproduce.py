"""`regard reproduce NAME`: run a recipe and leave its results in a folder."""

import os
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from regard.cli.options import parse
from regard.errors import ArgumentError, require
from regard.recipes import recipes

from .recipe import Recipe, check_shared

CALL = "reproduce"


def reproduce(argv: list[str]) -> int:
    """Run `regard reproduce NAME [options]`."""
    known = ", ".join(sorted(recipes.names()))
    if not argv or {"-h", "--help"} & set(argv if argv[0] == "--all" else argv[:1]):
        print(usage())
        require(bool(argv), CALL, f"name a recipe: {known}.")
        return 0
    name, *rest = argv
    if name == "--all":
        return _run_all(rest)
    if name == "--papers":
        from .pages import write_pages

        require(len(rest) == 1, CALL, "expected --papers FOLDER, with the results of recipes.")
        print(*write_pages(Path(rest[0])), sep="\n")
        return 0
    require(not name.startswith("-"), CALL, f"the name of a recipe comes first: {known}.")
    recipe = recipes.get(name)
    if "--estimate" in rest:
        from .trained import estimate

        made = options(recipe, [word for word in rest if word != "--estimate"])
        consoles()[1].print(estimate(made).rich(f"{CALL} {name}"))
        return 0
    return _rebuild(recipe, rest[1:]) if rest[:1] == ["--rebuild"] else _run(recipe, rest)


def _run(kind: type[Recipe], argv: list[str]) -> int:
    """Measure a recipe and write its results."""
    from .running import run

    made = options(kind, argv)
    progress, screen = consoles()
    start = time.perf_counter()
    with progress.status(kind.name) as status:
        results = run(made, argv, lambda text: status.update(f"{kind.name}: {text}"))
    _show(screen, made, results)
    out = made.out or Path(f"{kind.name}-out")
    screen.print(f"{time.perf_counter() - start:.0f} s in all. Look inside: {out}", highlight=False)
    return 0


def _run_all(argv: list[str]) -> int:
    """Run every recipe with the same options, each in its folder NAME-out; return 1 if one failed."""
    folders = "--all writes NAME-out for each recipe; omit --out and run it in another folder."
    require("--out" not in argv, CALL, folders)
    known = dict(sorted(recipes.items()))
    for kind in known.values():  # mistakes are found before anything runs
        check_shared(options(kind, argv))
    failed = []
    for name, kind in known.items():
        try:
            _run(kind, argv)
        except (ArgumentError, ModuleNotFoundError, RuntimeError) as error:
            failed.append(name)
            consoles()[0].print(f"{name}: {error}", highlight=False, markup=False)
    if failed:
        consoles()[0].print(f"failed: {', '.join(failed)}", highlight=False, markup=False)
    return int(bool(failed))


def options(kind: type[Recipe], argv: list[str]) -> Any:
    """Return the recipe from flags, over the values of the chosen size."""
    command, about = f"{CALL} {kind.name}", sizes_text(kind)
    given: Any = parse(kind, argv, command=command, about=kind.__doc__, epilogue=about)
    both = given.quick and given.size == "paper"
    require(not both, kind.call(), "--quick and --size paper were both given; give one of them.")
    size = "quick" if given.quick else given.size
    if size != "small":
        given = parse(kind, argv, command=command, base=kind.configure(size))
    return kind.configure(size, **{f.name: getattr(given, f.name) for f in fields(given) if f.name != "size"})


def sizes_text(kind: type[Recipe]) -> str:
    """Return what the sizes change, for `--help`."""
    parts = [
        f"--size {size} sets {', '.join(f'{name} {value}' for name, value in values.items())}."
        for size, values in kind.by_size.items()
    ]
    return " ".join([
        *parts, *([f"There is no size paper: {kind.no_paper_size}"] if kind.no_paper_size else ()),
        "--rebuild FOLDER, alone, writes the page of stored results again without measuring.",
        "--estimate prints parameters, operations and memory of a run instead of running.",
    ])  # fmt: skip


def _rebuild(kind: type[Recipe], argv: list[str]) -> int:
    """Write a folder's page and figures, and the block on a page, from stored rows."""
    from .pages import write, write_block
    from .results import load, showing

    usage = "expected --rebuild FOLDER, or --rebuild FOLDER --page PAGE.md."
    require(len(argv) == 1 or (len(argv) == 3 and argv[1] == "--page"), kind.call(), usage)
    folder = Path(argv[0])
    made, results = load(kind, folder)
    with showing(kind.name, folder):
        write(made, results, folder)
    if len(argv) == 3:
        page = Path(argv[2])
        write_block(page, made, results, Path(os.path.relpath(folder, page.parent)).as_posix() + "/")
    _show(consoles()[1], made, results)
    return 0


def _show(screen: Any, made: Recipe, results: Any) -> None:
    for title, table in list(made.tables(results).items())[:1]:
        screen.print(table.rich(title))
    for claim in made.claims(results):
        screen.print(f"“{claim.wording}” ({claim.paper}, {claim.where}): {claim.verdict}. {claim.measured()}",
                     highlight=False, markup=False)  # fmt: skip
    for note in made.notes(results):
        screen.print(note, highlight=False, markup=False)


def consoles(width: int = 160) -> tuple[Any, Any]:
    """Return one for progress and one for results, of this width or more where lines need not be folded."""
    from rich.console import Console

    progress, screen = Console(stderr=True), Console()
    for console in (progress, screen):
        if not console.is_terminal:  # a file or a pipe
            console.width = max(console.width, width)
    return progress, screen


def usage() -> str:
    """Return the text of `regard reproduce --help`."""
    from regard.cli.show import about

    width = max(map(len, recipes.names())) + 2
    names = "\n".join(f"  {name:<{width}}{about(recipe)}" for name, recipe in sorted(recipes.items()))
    return f"""usage: regard reproduce RECIPE [options]

Run an experiment, and write its tables, figures and results (JSON) to a folder.

{names}

`regard reproduce RECIPE --help` lists the options of a recipe. `regard reproduce --all --quick` runs all of them.
`regard reproduce --papers FOLDER` writes a page for each paper from the results in a folder."""
