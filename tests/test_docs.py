"""What the README and the docs show is what comes out."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import regard

ROOT = Path(__file__).resolve().parents[1]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_readme_shows_the_example_and_its_output() -> None:
    script = ROOT / "examples" / "first.py"
    assert blocks("python") == [script.read_text(encoding="utf-8")]
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert [done.stdout] == blocks("text")


def test_the_words_of_the_grammar_are_listed_as_registered() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_grammar.py"))
    listed = (ROOT / "docs" / "grammar.md").read_text(encoding="utf-8")
    assert listed == maker["page"](), "run `python docs/make_grammar.py`"
    for name in regard.presets():
        assert f"`{name}`" in listed


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_examples_of_the_layers_page_run() -> None:
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(found) >= 2
    # In a process of its own, since the page registers a name.
    done = subprocess.run([sys.executable, "-c", "\n".join(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_language_models_page_shows_what_comes_out() -> None:
    page = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    code, shown = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("python", "text"))
    assert len(code) == len(shown) == 3
    done = subprocess.run([sys.executable, "-c", "\nprint('-' * 9)\n".join(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("-" * 9 + "\n") == shown


@pytest.mark.parametrize("name", ["hybrid-models", "product-key-memory"])
def test_the_pages_of_memories_show_what_comes_out(name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    code, shown = (re.findall(rf"```{kind}\n(.*?)```", page, flags=re.DOTALL) for kind in ("python", "text"))
    assert len(code) == len(shown) == 1
    done = subprocess.run([sys.executable, "-c", code[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown[0]


def test_the_pages_of_memories_name_what_is_registered() -> None:
    from regard.models import token_mixers

    names = ("hybrid-models", "product-key-memory")
    pages = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names}
    registries = regard.registries()
    for name in [*registries["memory"].names(), *registries["step-rule"].names()]:
        assert f"`{name}`" in pages["product-key-memory"]
    for name in token_mixers.names():
        assert f"`{name}`" in pages["hybrid-models"]


def test_the_language_models_page_names_every_model() -> None:
    from regard.models import language_models

    page = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    for name in language_models.names():
        assert f"| `{name}` |" in page
