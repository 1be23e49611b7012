"""CONTRIBUTING.md shows how each kind of part is added: every example is one file, and the code after it runs."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import python

for package in ("transformers", "pandas", "scipy", "matplotlib"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PARTS = [part.split("\n### ")[-1] for part in re.split(r"\n(?=### )", PAGE)[1:]]
KINDS = [part.strip("# ").split("\n")[0] for part in PARTS]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages with the file of every example."""
    source = tmp_path_factory.mktemp("copy") / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    for part in PARTS:
        code = blocks(part)[0]
        path = source.parent / code.split("\n")[0].removeprefix("# ")
        assert path.parent.is_dir()
        assert not path.exists()
        path.write_text(code, encoding="utf-8")
    return source


def blocks(part: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)


def test_every_kind_of_part_has_an_example() -> None:
    expected = ["kernel", "thresholding rule", "similarity", "token mixer", "memory", "model", "task", "recipe"]
    assert [kind.removeprefix("A ") for kind in KINDS] == expected
    assert all(len(blocks(part)) == 2 for part in PARTS)


@pytest.mark.parametrize("part", PARTS, ids=KINDS)
def test_an_added_file_is_all_that_it_takes(copy: Path, part: str) -> None:
    path = os.pathsep.join([str(copy), os.environ.get("PYTHONPATH", "")])
    interpreted = {"TRITON_INTERPRET": "1"} if find_spec("triton") else {}  # the kernel's device function runs, too
    begin = "import sys, torch\nsys.stderr = sys.stdout\ntorch.manual_seed(0)\n"
    assert "deprecated" not in python("-c", begin + blocks(part)[1], PYTHONPATH=path, **interpreted)
