"""Writes docs/grammar.md from the registries: `python docs/make_grammar.py`. A test checks that it was run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import regard

PAGE = Path(__file__).with_name("grammar.md")


def first_sentence(obj: Any) -> str:
    """The first sentence of an object's docstring, on one line."""
    text = " ".join((inspect.getdoc(obj) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows])


def preset_rows() -> list[tuple[str, ...]]:
    rows = []
    for name, spec in regard.presets().items():
        sentence = "*".join(spec.parts())
        numbers = ", ".join(f"{n} = {float(i.default):.4g}" for n, i in spec.params.items()) or "-"
        scale = "yes" if spec.takes_scale else "no"
        weights = "sum to one" if spec.normalise else "as they are"
        rows.append((f"`{name}`", f"`{sentence}`", weights, scale, numbers))
    return rows


def page() -> str:
    """The whole page."""
    parts = [
        "# The grammar's words",
        "Made by `python docs/make_grammar.py` from what is registered. How the words join: "
        "[design.md](design.md), section 3.",
        "## Presets",
        "`Spec.parse(name)` gives the sentence; `params=` takes the numbers, per head or per row, with gradient.",
        table(("preset", "sentence", "weights", "takes `scale`", "numbers that can be learned"), preset_rows()),
    ]
    titles = {
        "kernel": "Kernels",
        "bandwidth": "Bandwidth rules",
        "similarity": "Similarities",
        "solver": "Solvers",
        "temperature": "Temperatures (of layers, see [layers.md](layers.md))",
        "ridge": "Ridges (of layers, see [layers.md](layers.md))",
    }
    for axis, title in titles.items():
        registry = regard.registries()[axis]
        rows = [(f"`{name}`", first_sentence(obj)) for name, obj in registry.items()]
        parts += [f"## {title}", table((axis, "what it is"), rows)]
    impls = sorted(regard.registries()["impl"].items())  # their order of registration depends on who imports first
    rows = [(f"`{n}`", first_sentence(e.impl)) for n, e in impls]
    parts += ["## Implementations", table(("impl", "what it is"), rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
