"""The notebooks run, and the first gives the text that is stored in it."""

import json
from pathlib import Path

import pytest
from programs import python

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
EXACT = {"attention-is-regression"}
"""Notebooks whose numbers do not depend on the machine: nothing is trained in float32."""


def cells(path: Path) -> list[dict]:
    """The cells with code."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    return "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebooks_are_stored_with_their_outputs(path: Path) -> None:
    for cell in cells(path):
        source = "".join(cell["source"])
        assert ("print(" in source) == bool(printed(cell)) or "def " in source
        shown = any("image/png" in out.get("data", {}) for out in cell["outputs"])
        assert shown or "plt.show()" not in source.split("def show")[0]
        assert not any(out["output_type"] == "error" for out in cell["outputs"])


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    code = "import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join("".join(cell["source"]) for cell in cells(path))
    found = python("-c", code, cwd=tmp_path)
    if path.stem in EXACT:
        assert found == "".join(printed(cell) for cell in cells(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyter(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the extra `docs` brings it")
    nbformat = pytest.importorskip("nbformat", reason="the extra `docs` brings it")
    pytest.importorskip("ipykernel", reason="the extra `docs` brings it")
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources=where).execute()
    shown = [cell for cell in book.cells if cell.cell_type == "code" and cell.outputs]
    assert len(shown) == sum(bool(cell["outputs"]) for cell in cells(path))
