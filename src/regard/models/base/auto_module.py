"""The file in a saved model's folder by which transformers finds the model's classes in the installed regard.

`config.json` names classes of this file in `auto_map`, so that `AutoModelForCausalLM.from_pretrained(folder,
trust_remote_code=True)` works in a program that does not import regard. The file holds one import. regard itself never
runs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

MODULE = "regard_auto"
_TEXT = '"""Classes of regard, for transformers: pip install "regard[lm]"."""\n\n'


def write_auto_module(classes: Mapping[str, type], folder: str | os.PathLike[str]) -> dict[str, str]:
    """Write the file for classes by the name of their Auto class, and return the `auto_map`; no file for no classes."""
    if not classes:
        return {}
    public = sys.modules["regard.models"]  # inner modules may move from one release to the next
    lines = []
    for each in classes.values():
        home = "regard.models" if getattr(public, each.__name__, None) is each else each.__module__
        lines.append(f"from {home} import {each.__name__}\n")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{MODULE}.py").write_text(_TEXT + "".join(lines), encoding="utf-8")
    return {auto: f"{MODULE}.{each.__name__}" for auto, each in classes.items()}
