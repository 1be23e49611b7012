"""Show errors in the five papers and in the programs that were published with them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..lib.recipe import Cell, Recipe, Results, Row
from . import _fast_weights, _iclm_and_kernels, _local_linear, _sparse_attention
from ._listing import Erratum

ERRATA = {name.replace("_", "-"): member
          for module in (_fast_weights, _iclm_and_kernels, _local_linear, _sparse_attention)
          for name, member in vars(module).items() if isinstance(member, Erratum)}  # fmt: skip
"""Errata by the names of their functions, with hyphens for underscores."""


class Errata(Recipe, name="errata"):
    """Errors in the papers and their programs, each with a function of a few lines that shows it."""

    only: tuple[str, ...] = tuple(ERRATA)  # Names of the errata to show; all by default.
    choices: ClassVar = {"only": tuple(ERRATA)}
    by_size: ClassVar = {"quick": {}, "paper": {}}

    def cells(self) -> Sequence[Cell]:
        return [{"erratum": name} for name in self.only]

    def measure(self, cell: Cell, seed: int) -> Iterable[Row]:
        numbers: Mapping[Any, Any] = ERRATA[cell["erratum"]].numbers() or {None: None}
        yield from ({"quantity": name, "number": number} for name, number in numbers.items())

    def tables(self, results: Results) -> Mapping[str, Any]:
        from regard.inspect.tables import Table

        tables: dict[str, list[tuple[str, ...]]] = {}
        for name, rows in results.frame.groupby("erratum", sort=False):
            known, measured = ERRATA[str(name)], rows.dropna(subset=["quantity"])
            numbers = "; ".join(f"{row.quantity}: {row.number:.3g}" for row in measured.itertuples())
            script = f"`{name}` in {Path(known.numbers.__code__.co_filename).name}"
            cells = (known.place, *known.texts(), numbers or "read in the source", script)
            tables.setdefault(known.paper, []).append(cells)
        header = ("place", "printed or released", "correct", "measured", "script")
        return {paper: Table(header, tuple(rows)) for paper, rows in tables.items()}

    def notes(self, results: Results) -> Sequence[str]:
        return [
            "A script is a function in `src/regard_recipes/errata/`; `regard reproduce errata --only NAME` runs one.",
            "Arrays are from N(0, 1), in float64. Errors are relative, in the Frobenius norm.",
        ]
