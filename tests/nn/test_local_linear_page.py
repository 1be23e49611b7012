"""What docs/local-linear-attention.md and docs/global-linear.md show runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "local-linear-attention.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "blocks"), [("local-linear-attention", 8), ("global-linear", 7)])
def test_the_examples_run(page: str, blocks: int) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) >= blocks
    done = subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_statuses_and_solvers_are_all_there() -> None:
    import regard
    from regard.grammar import SolveStatus

    for status in SolveStatus:
        assert f"| `{status.name}` |" in PAGE
    for name in regard.registries()["solver"].names():
        assert f"| `{name}" in PAGE
