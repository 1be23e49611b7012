"""The folder of a recipe's results, written from its rows: record, Markdown and figures; and a page for each paper.

`regard reproduce --papers FOLDER` writes FOLDER/paper-NAME.md from stored results: the paper's tables and figures with
the verdicts on their claims, or with the command that runs them: not run, or not testable where it needs a GPU.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.checks import require
from regard.recipes import recipes

from .claims import NOT_TESTABLE, Claim, claims_table
from .recipe import Recipe, Results
from .results import load, plain, showing, writing

FIRST, LONGEST = 30, 16  # rows of the first and of other tables that are shown on pages of the docs


def write(made: Recipe, results: Results, out: Path) -> None:
    """Write figures, HTML pages, NAME.md and last NAME.json to `out`."""
    figures = {f"{made.name}-{part}.png": picture for part, picture in made.figures(results).items()}
    body = markdown(made, results, list(figures))
    claims = [plain(claim.record()) for claim in made.claims(results)]
    rows = plain(results.frame.astype(object).to_numpy().tolist())
    stored = {"facts": results.facts, "claims": claims, "columns": list(results.frame.columns), "rows": rows}
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for file, picture in figures.items():
            (out / file).write_bytes(picture)
        for part, page in made.pages(results).items():
            (out / f"{made.name}-{part}.html").write_text(page, encoding="utf-8")
        (out / f"{made.name}.md").write_text(f"# {made.name}\n\n{body}", encoding="utf-8")
        (out / f"{made.name}.json").write_text(json.dumps({**results.record, **stored}) + "\n", encoding="utf-8")


def markdown(made: Recipe, results: Results, figures: list[str], folder: str = "", level: int = 2) -> str:
    """Return claims, notes, tables and figures as Markdown.

    Args:
        figures: file names.
        folder: what stands before them in links from another page, such as "results/", which has no long tables.
        level: of the headings.
    """
    record, head = results.record, "#" * level
    parts = [f"Made by `{record['command']}`, {record['date'][:10]}, {time_of(record)} in all cells."]
    claims = made.claims(results)
    if claims:
        parts += [f"{head} Claims", claims_table(claims).markdown().strip()]
    tables = {title: table for title, table in made.tables(results).items() if table.rows}
    for number, (title, table) in enumerate(tables.items()):
        if not folder or len(table.rows) <= (LONGEST if number else FIRST):
            parts += [f"{head} {title}", table.markdown().strip()]
    if folder:
        every = f"All {len(tables)} tables are" if len(tables) > 1 else "The table is"
        parts += [f"{every} in [{made.name}.md]({folder}{made.name}.md)."]
    parts += [f"![{file}]({folder}{file})" for file in figures]
    parts += ["\n".join(f"- {note}" for note in made.notes(results))]
    return "\n\n".join(part for part in parts if part) + "\n"


def time_of(record: Mapping[str, Any]) -> str:
    """Return the time of all cells of a run as text."""
    seconds = record["seconds"]
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def write_block(page: Path, made: Recipe, results: Results, folder: str) -> None:
    """Replace what stands on a page between `<!-- regard reproduce NAME: begin -->` and `... end -->`."""
    text = page.read_text(encoding="utf-8")
    begin, end = marks(made.name)
    missing = f"{page} needs one line {begin!r} and one {end!r}."
    require(text.count(begin) == text.count(end) == 1, made.call(), missing)
    files = [f"{made.name}-{part}.png" for part in made.figures(results)]
    body = markdown(made, results, files, folder, level=3)
    new = re.sub(f"(?s){re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{body}\n{end}", text)
    page.write_text(new, encoding="utf-8")


def marks(name: str) -> tuple[str, str]:
    """Return the lines that enclose a recipe's block on a page."""
    return f"<!-- regard reproduce {name}: begin -->", f"<!-- regard reproduce {name}: end -->"


NOTE = (
    "Verdicts are computed from 95 % intervals. Rows that are not run have no stored result. Time is that of all cells "
    "of a run. What the full sizes need: "
    "[run a recipe at full size on a GPU](../cookbook/full-size-on-a-gpu.md#what-the-full-sizes-need)."
)


@dataclass(frozen=True)
class Item:
    """A table, a figure or a section with results.

    Attributes:
        recipe, gpu: the recipe that measures it, or if there is none the command that does where there is a GPU.
        where: the part of `Claim.where` that tells it from other items of the recipe.
    """

    place: str
    what: str
    recipe: str = ""
    where: str = ""
    gpu: str = ""

    def unmeasured(self) -> tuple[str, str]:
        """Return the verdict and the command where no claim is stored."""
        if self.gpu:
            return NOT_TESTABLE, f"on a GPU: `{self.gpu}`"
        return ("not run", f"`regard reproduce {self.recipe}`") if self.recipe else ("nothing to measure", "")


PAPERS: dict[str, tuple[Item, ...]] = {
    "Sparse attention": (
        Item("section 2.1", "softmax disperses over long contexts", "dispersion"),
        Item("table 1", "RegBench: accuracy and total variation", "in-context-language"),
        Item("figures 2 and 3", "loss of Memory Mosaics by kernel and depth", "mosaic-kernels"),
        Item("figures 2 and 3 at 8 and 12 blocks", "loss of Memory Mosaics by kernel",
             gpu="regard reproduce mosaic-kernels --size paper --device cuda --workers 1"),
        Item("tables 2 and 7", "exact answers at up to 64 times the training length", "length-generalization"),
        Item("table 4, stories", "stories by kernel", "stories"),
        Item("figure 5, Wikipedia", "loss along another text than the one trained on", "out-of-distribution"),
        Item("figures 1 and 4, tables 3 to 6", "kernels, examples of tasks, settings, size of the data"),
    ),
    "Local Linear Attention": (
        Item("propositions 2.1, 2.2", "rates of the integrated error", "boundary-bias"),
        Item("figures 2, 3 and 6", "test-time regression on piecewise linear data", "test-time-regression"),
        Item("figure 4a", "in-context regression", "in-context-regression"),
        Item("figures 4b and 9", "associative recall", "associative-recall"),
        Item("figure 5", "state tracking", "state-tracking"),
        Item("table 1, appendix E", "windows and diagonal blocks", "lla-variants"),
        Item("table 2", "precision of the solver in bfloat16", "lla-numerics"),
        Item("figures 1 and 7", "memory and latency of prefill", gpu="python benchmarks/gpu.py --write"),
        Item("figure 8, appendix F.3", "language-model pretraining", "lla-pretraining"),
    ),
    "Fast-weight Product Key Memory": (
        Item("sections 3 and 5.1", "one-step rewriting, addressing, what slots hold", "fast-weight-recall"),
        Item("section 4.2, findings 1 to 3, figures 2 and 3", "streaming perplexity and gates", "streaming-perplexity"),
        Item("sections 4.2 and 5.2, on names", "a written memory against a frozen one", "recurring-names"),
        Item("section 4.3, findings 3 to 6, figure 4", "needles in repeated readings", "needle"),
        Item("section 5, figures 5, 6 and 10", "two case studies: slots, gates", "fwpkm-case-studies"),
        Item("table 2", "parameters, FLOPs and speed", "fwpkm-cost"),
        Item("appendix B, figures 7 to 9", "ablations", "fwpkm-ablation"),
        Item("section 3.3.1", "use of slots: 64.4 to 97.9 % with batch norm of the queries", "slot-use"),
        Item("figure 1, tables 1 and 3", "architecture, kinds of memories, settings"),
    ),
    "ICLM": (
        Item("tables 1 and 2", "perplexity beside a Transformer of equal size", "iclm-parity"),
        Item("figure 2, section 7", "attention maps: sinks, copying, induction", "iclm-mechanisms"),
        Item("table 3", "TinyMath with and without feed-forward layers", "tinymath", "table 3"),
        Item("figure 3", "attention of f to the token that it predicts", "tinymath", "figure 3"),
        Item("table 1, stories", "stories graded by a judge", "stories"),
        Item("table 2, zero-shot tasks", "accuracy of the models of 353 million parameters",
             gpu="regard eval FOLDER --lm-eval hellaswag winogrande piqa arc_challenge arc_easy --limit 500"),
        Item("figure 1", "architecture"),
    ),
    "Kernel selection": (
        Item("section 7, kernels", "losses of ten kernels on Shakespeare (here the Python manual)", "kernel-selection"),
        Item("section 7, q = k", "memory and loss with shared queries and keys", "shared-query-key"),
    ),
}  # fmt: skip
"""Papers by the name that claims give them, with the errata in docs/errata.md."""


Stored = tuple[str, str, str, Claim]
"""The name of a recipe, the command and the time of its stored run, and one of its claims."""


def stored(folder: Path) -> Iterator[Stored]:
    """Yield the claims of each record in a folder."""
    for name, kind in sorted(recipes.items()):
        if isinstance(kind, type) and issubclass(kind, Recipe) and (folder / f"{name}.json").exists():
            made, results = load(kind, folder)
            with showing(name, folder):
                command, time = str(results.record["command"]), time_of(results.record)
                claims = made.claims(results)
            yield from ((name, command, time, claim) for claim in claims)


def page(paper: str, claims: Sequence[Stored]) -> str:
    """Return the page of a paper as Markdown: its items in `PAPERS` with the claims of their recipes."""
    from regard.inspect.tables import Table

    rows = []
    for item in PAPERS[paper]:
        measured = [
            (item.place, f"“{claim.wording}”", claim.verdict, claim.measured(), f"`{command}`", time)
            for name, command, time, claim in claims
            if name == item.recipe and item.where in claim.where and claim.paper in (paper, "regard's targets")
        ]
        verdict, command = item.unmeasured()
        rows += measured or [(item.place, item.what, verdict, "", command, "")]
    counts = Counter(each[2] for each in rows)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    table = Table(("place", "claim", "verdict", "measured", "command", "time"), tuple(rows), NOTE)
    intro = "What we measured of the paper's tables and figures. Written by `regard reproduce --papers docs/results`."
    return f"# {paper}\n\n{intro}\n\n{len(rows)} rows: {summary}.\n\n{table.markdown()}"


def write_pages(folder: Path) -> list[Path]:
    """Write the page of each paper to a folder with stored results, and return their paths."""
    claims = list(stored(folder))
    require(bool(claims), "reproduce: --papers", f"{folder} holds no results of recipes with claims (NAME.json).")
    paths = {paper: folder / f"paper-{paper.lower().replace(' ', '-')}.md" for paper in PAPERS}
    for paper, path in paths.items():
        path.write_text(page(paper, claims), encoding="utf-8")
    return list(paths.values())
