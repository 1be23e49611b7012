"""Which Triton will do."""

import ast
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import Mock

import pytest

from regard.triton.runtime import support


@pytest.mark.parametrize(
    ("installed", "version", "reason"),
    [
        (True, "3.5.1", r"3\.6.* 3\.5\.1"),
        (True, "3.6.0", "None"),
        (True, "3.10.0+git1", "None"),
        (True, PackageNotFoundError("triton"), "None"),  # one that pip does not know
        (False, PackageNotFoundError("triton"), "pip install"),
    ],
)
def test_the_version(monkeypatch: pytest.MonkeyPatch, installed: bool, version: object, reason: str) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(support, "version", Mock(side_effect=[version]))
    assert re.search(reason, str(support._missing()))


def test_kernels_hold_no_syntax_that_the_oldest_version_cannot_read() -> None:
    """Triton 3.6 fails where tuples stand within the tuple that is assigned to: `(a, b), c = f(x)`."""
    found = []
    for path in Path(support.__file__).parents[1].rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        jitted = [f for f in functions if any("triton.jit" in ast.unparse(x) for x in f.decorator_list)]
        targets = [t for f in jitted for node in ast.walk(f) if isinstance(node, ast.Assign) for t in node.targets]
        nested = [t for t in targets if isinstance(t, ast.Tuple) and any(isinstance(x, ast.Tuple) for x in t.elts)]
        found += [f"{path.name}:{t.lineno}: {ast.unparse(t)}" for t in nested]
    assert found == []
