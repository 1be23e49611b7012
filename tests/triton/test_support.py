"""Which Triton will do."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

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
