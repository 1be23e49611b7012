"""Print the section of CHANGELOG.md of one version: `python .github/release_notes.py 0.2.0`."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def notes(version: str) -> str:
    """Return the text below the heading of a version."""
    text = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None or not found[1].strip():
        raise SystemExit(f"release_notes: CHANGELOG.md has no section '## [{version}]'; write it before the release.")
    return found[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
