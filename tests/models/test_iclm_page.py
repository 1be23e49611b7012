"""What the page about ICLM shows is what comes out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from regard.models import parity_report

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "iclm.md").read_text(encoding="utf-8")


def test_its_examples_print_what_it_says():
    found = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == 3
    done = subprocess.run([sys.executable, "-c", "\n".join(found)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert [printed[0], printed[5], printed[7]] == ["True", "True", "tensor(True)"]
    shown = re.findall(r"^print\(.*\.shape\)  # (\[[\d, ]+\])", "\n".join(found), flags=re.MULTILINE)
    assert [f"torch.Size({shape})" for shape in shown] == [*printed[1:5], printed[6]]


def test_its_table_of_sizes_is_counted():
    assert str(parity_report()) in PAGE
