"""Write docs/grammar.md from the registries: `python docs/make_grammar.py`. A test checks that it was run."""

import inspect
import re
from pathlib import Path
from typing import Any

import regard
from regard.recurrent.linear import finite_features

PAGE = Path(__file__).with_name("grammar.md")
HEAD = ("preset", "spec", "sparse?", "linear time?", "sums to one?", "takes `scale`?", "parameters that can be learned")


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
        numbers = ", ".join(f"{n} = {float(i.default):.4g}" for n, i in spec.params.items()) or "-"
        cuts = spec.kernel.compact or spec.bandwidth.name in ("anchored", "nearest")
        marks = (cuts, finite_features(spec), spec.normalise, spec.takes_scale)
        rows.append((f"`{name}`", f"`{'*'.join(spec.parts())}`", *("yes" if mark else "no" for mark in marks), numbers))
    return rows


def page() -> str:
    """The whole page."""
    parts = [
        "# Spec reference",
        "This page lists all parts of attention specs. A spec joins a kernel and at most one part of each other kind "
        "by `*`, such as `triweight*anchored(margin=0.5)*cosine`. [Concepts and syntax](spec-syntax.md) explain the "
        "parts; [choose a spec](choose-a-spec.md) says when to use which. `python docs/make_grammar.py` writes the "
        "page from the registries.",
        "## Presets",
        "A preset is a spec with a name; `regard.Spec.parse(name)` returns the spec. *Sparse*: some weights are "
        "exactly zero. *Linear time*: a state of fixed size replaces the keys and values of earlier tokens. `params=` "
        "of a call takes the parameters as numbers or tensors, per head or per query, with gradients.",
        table(HEAD, preset_rows()),
    ]
    titles = {
        "kernel": "Kernels",
        "bandwidth": "Thresholding rules (bandwidths)",
        "similarity": "Similarities",
        "solver": "Solvers",
        "temperature": "Temperatures (of layers, see [layers.md](layers.md))",
        "ridge": "Ridges (of layers, see [layers.md](layers.md))",
    }
    for axis, title in titles.items():
        if axis not in regard.registries():
            continue
        registry = regard.registries()[axis]
        rows = [(f"`{name}`", first_sentence(obj)) for name, obj in registry.items()]
        parts += [f"## {title}", table(("rule" if axis == "bandwidth" else axis, "what it is"), rows)]
    impls = sorted(regard.registries()["impl"].items())  # their order of registration depends on who imports first
    rows = [(f"`{n}`", first_sentence(e.impl)) for n, e in impls]
    parts += ["## Implementations", table(("`impl=`", "what it does"), rows)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
