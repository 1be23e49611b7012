"""What mkdocs does beyond its plugins to build the site (`hooks` in mkdocs.yml).

- A fence `math` holds LaTeX and becomes MathML, which browsers draw without a script.
- Files outside docs/ that pages link to are part of the site: CONTRIBUTING.md and CHANGELOG.md as pages, others as they
  are, under `repository/`.
- Notebooks become pages.
- Pages of mechanisms get tables of the papers' claims (`site_claims.py`).
- The search runs from disk: browsers start no worker from a file there, so its code is kept in a script of the site.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2mathml.converter
import nbformat
from mkdocs.structure.files import File, Files
from site_claims import filled

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/regard_recipes/lib/README.md": "writing-recipes.md",
}
"""Pages that lie outside docs/, and their places in the site."""
LINK = re.compile(r"(\]\()([^)#\s]+)")
WORKER = "javascripts/search-worker.js"


def math(source: str, language: str, css_class: str, options: dict, md: Any, **_: Any) -> str:
    """Return the MathML of a fence, one formula per line."""
    lines = (line for line in source.splitlines() if line.strip())
    return "\n".join(latex2mathml.converter.convert(line, display="block") for line in lines)


def slug(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_config(config: Any) -> Any:
    """Add what cannot be written in mkdocs.yml: functions, and the script that starts the search."""
    fence = {"name": "math", "class": "math", "format": math}
    config["mdx_configs"].setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    config["mdx_configs"]["toc"]["slugify"] = slug
    config["extra"]["polyfills"] = [p for p in config["extra"]["polyfills"] if "iframe-worker" not in p] + [WORKER]
    return config


def outside(page: Path) -> Iterator[str]:
    """Yield the paths, relative to the repository, of files outside docs/ that a page links to."""
    for _, target in LINK.findall(page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs"):
            yield path.relative_to(ROOT).as_posix()


def on_files(files: Files, config: Any) -> Files:
    """Add linked files of the repository, and a page for each notebook."""
    docs = ROOT / "docs"
    pages = [*docs.rglob("*.md"), *(ROOT / name for name in PAGES)]
    linked = {name for page in pages for name in outside(page)} - set(PAGES)
    for name in sorted(linked):
        files.append(File.generated(config, f"repository/{name}", abs_src_path=str(ROOT / name)))
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted(docs.glob("notebooks/*.ipynb")):
        place = path.relative_to(docs).with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in tables of claims, and point links that leave docs/ to the files that `on_files` added."""
    markdown = filled(markdown)
    here = page.file.src_uri
    source = next((name for name, place in PAGES.items() if place == here), f"docs/{here}")

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        inside = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"repository/{path}")
        if not here.startswith("notebooks/"):  # its page in place of the file
            inside = re.sub(r"\.ipynb$", ".md", inside)
        return match[1] + posixpath.relpath(inside, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def notebook(path: Path) -> str:
    """Return a notebook with its outputs as Markdown."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                parts.append(f'<img alt="figure" src="data:image/png;base64,{output.data["image/png"].strip()}">')
            elif printed := output.get("text") or output.get("data", {}).get("text/plain"):
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + f"\n\n[This notebook]({path.name}) as a file.\n"


def on_post_build(config: Any) -> None:
    """Write the script that starts the search worker from disk."""
    site = Path(config["site_dir"])
    (worker,) = site.glob("assets/javascripts/workers/search.*.min.js")
    code = json.dumps(worker.read_text(encoding="utf-8")).replace("</", "<\\/")
    (site / WORKER).parent.mkdir(exist_ok=True)
    (site / WORKER).write_text(
        'if (location.protocol === "file:") {\n'
        "  const Plain = window.Worker;\n"
        f'  const code = new Blob([{code}], {{ type: "text/javascript" }});\n'
        "  window.Worker = function (url) {\n"
        "    return new Plain(/search/.test(url) ? URL.createObjectURL(code) : url);\n"
        "  };\n"
        "}\n",
        encoding="utf-8",
    )
