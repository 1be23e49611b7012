"""The layout of the source: no import circles, no import upward, small folders."""

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
LAYERS = (
    *("_version", "errors", "checks", "registry", "precision", "one_node"),
    *("grammar", "pairwise", "recurrent", "memory", "triton", "implementations"),
    *("nn", "tasks", "recipes", "public", "", "compat", "models"),
    *("inspect", "integrations", "doctor", "training", "cli", "__main__"),
)  # fmt: skip
"""Parts of `regard`: each imports only what stands before it. "" is the package itself; `public` holds its names."""
MOST_FILES = 16


MODULES = {".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): p for p in SRC.rglob("*.py")}


def _imports(name: str, path: Path) -> set[str]:
    """Modules of this repository that a module imports anywhere: at its top, in a function, or for types alone."""
    found = set()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{a.name}") in MODULES else base for a in node.names}
    return {module for module in found if module in MODULES and module != name}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: _imports(name, path) for name, path in MODULES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports in `regard` of a part above the importing module's."""
    rank = {part: i for i, part in enumerate(LAYERS)}

    def part(module: str) -> str:
        return (*module.split("."), "")[1]

    return sorted(
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name.split(".")[0] == "regard" and (other.split(".")[0] != "regard" or rank[part(other)] > rank[part(name)])
    )


def test_no_import_circles(graph: dict[str, set[str]]) -> None:
    assert circle(graph) == []


def test_no_import_upward(graph: dict[str, set[str]]) -> None:
    assert upward(graph) == []


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda p: p.name)
def test_folders_are_small(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def test_a_file_name_that_repeats_has_its_reason_in_the_design() -> None:
    design = (SRC.parent / "docs" / "design.md").read_text()
    reasons = design.partition("**Names that repeat.**")[2].partition("\n## ")[0]
    names = Counter(path.name for name, path in MODULES.items() if name.split(".")[0] == "regard")
    assert [x for x in names if names[x] > 1 and x != "__init__.py" and f"`{x}`" not in reasons] == []
    everywhere = Counter(path.name for path in MODULES.values())
    assert [x for x in re.findall(r"`(\w+\.py)`", reasons) if everywhere[x] < 2] == []


def test_no_source_file_looks_like_a_test() -> None:
    assert [str(path) for path in MODULES.values() if path.name.startswith("test_")] == []


def test_faults_are_seen() -> None:
    graph = {"regard.checks": {"regard.nn"}, "regard.nn": {"regard.checks", "regard_recipes"}, "regard_recipes": set()}
    assert circle(graph) == ["regard.checks", "regard.nn"]
    assert upward(graph) == ["regard.checks imports regard.nn", "regard.nn imports regard_recipes"]
