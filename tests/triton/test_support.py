"""Which Triton will do."""

import ast
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from regard.triton.runtime import support


@pytest.mark.parametrize(("found", "reason"), [("3.5.1", "3.5.1"), ("3.6.0", None), ("3.10.0+git1", None)])
def test_the_version(monkeypatch: pytest.MonkeyPatch, found: str, reason: str | None) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: name)
    monkeypatch.setattr(support, "version", lambda name: found)
    told = support._missing()
    assert told is None if reason is None else (told is not None and reason in told and "3.6" in told)


def test_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "find_spec", lambda name: None)
    assert "pip install" in (support._missing() or "")


def test_one_that_pip_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(support, "find_spec", lambda name: name)
    monkeypatch.setattr(support, "version", version)
    assert support._missing() is None


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
