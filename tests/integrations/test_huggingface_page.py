"""What docs/huggingface.md and its example show is what comes out."""

import re
from pathlib import Path

import pytest
from programs import python

import regard
from regard.integrations.transformers import register

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_blocks_of_the_page_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the page saves a model
    assert len(blocks("python")) >= 6
    space: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "huggingface.md", "exec"), space)
    assert (tmp_path / "saved" / "config.json").exists()


def test_the_example_prints_what_the_page_shows() -> None:
    script = ROOT / "examples" / "huggingface.py"
    assert [python(script)] == blocks("text")


def test_presets_named_on_the_page_exist() -> None:
    named = set(re.findall(r"regard_[a-z0-9-]+[a-z0-9]", PAGE)) - {"regard_sharp", "regard_epanechnikov"}
    assert named
    assert named <= set(register())
    assert {f"regard_{name}" for name in regard.presets()} <= set(register())
