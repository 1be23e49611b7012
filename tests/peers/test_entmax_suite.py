"""The test suite of the package entmax passes with `entmax` replaced by `regard.compat.entmax`."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fetch import fetch

pytestmark = [pytest.mark.peers, pytest.mark.slow]
PREPARE = """
import sys
import torch

sys.modules["entmax"] = None  # importing the package itself fails
torch.manual_seed(0)  # the suite draws without a seed
"""
ROUNDED = "torch.allclose(y, torch.zeros_like(y), atol=1e-7)"
"""The suite asks that a row padded with -inf differs by at most 1e-8, less than a float32 rounds weights to (6e-8).
Some CPUs add the weights of a longer row in another order."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the suite, with the name of the package replaced in its imports."""
    folder = tmp_path_factory.mktemp("entmax")
    archive = next(path for path in fetch(folder / "releases") if path.name.startswith("entmax-"))
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if Path(name).name.startswith("test_"):
                text = files.read(name).decode()
                text = text.replace("torch.allclose(y, torch.zeros_like(y))", ROUNDED)
                (folder / Path(name).name).write_text(
                    re.sub(r"^from entmax\b", "from regard.compat.entmax", text, flags=re.M)
                )
    (folder / "conftest.py").write_text(PREPARE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def test_its_own_suite(suite: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(suite), str(suite)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=suite, env={**os.environ, "PYTHONPATH": PATH})
    assert done.returncode == 0, done.stdout
    assert re.search(r"^127 passed in ", done.stdout, flags=re.M), done.stdout


PATH = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
"""Where this checkout's regard lies: the suite runs in another folder."""
