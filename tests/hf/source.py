"""transformers' own test classes, as the importable package `tests`.

They come from the source archive named in releases.txt. It lacks the folders of tests/, generation and export among
them, whose mixins are empty then. TRANSFORMERS_SOURCE=PATH names a checkout of transformers' repository, from which
these folders are taken.
"""

import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "transformers"
RELEASES = Path(__file__).with_name("releases.txt")
ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin: ...\n",
    "generation/test_utils.py": "class GenerationTesterMixin: ...\n",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
"""What the archive lacks, and what stands for it."""


def prepare() -> bool:
    """Make `tests` importable; return whether it holds the tests of `generate`."""
    package, tree = FOLDER / "tests", os.environ.get("TRANSFORMERS_SOURCE")
    shutil.rmtree(package, ignore_errors=True)
    _unpack(package)
    for name, text in ABSENT.items():
        path = package / name
        if tree is not None:
            shutil.copytree((Path(tree) / "tests" / name).parent, path.parent)
        else:
            path.parent.mkdir()
            path.write_text(text)
    for folder in (package, *(path for path in package.iterdir() if path.is_dir())):
        (folder / "__init__.py").touch()
    sys.path[:0] = [str(FOLDER), *([] if tree is None else [str(Path(tree) / "utils")])]
    return tree is not None


def _unpack(package: Path) -> None:
    """Fetch the archive, unless it lies here, and unpack the files of its folder tests/."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
    from fetch import fetch

    (archive,) = fetch(FOLDER / "archive", RELEASES)
    package.mkdir(parents=True)
    with tarfile.open(archive) as files:
        for member in files.getmembers():
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and member.isfile():
                source = files.extractfile(member)
                assert source is not None
                (package / parts[2]).write_bytes(source.read())


pytest.importorskip("parameterized", reason="the extra `peers` brings it: run `make test-hf`")
