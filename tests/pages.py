"""Run the Python blocks of Markdown pages and compare what they print: `python tests/pages.py PAGE...`.

The blocks of a page are one program. A `text` block that follows a `python` block is what that block prints.
Prints one line of JSON: for every page None, or what went wrong.
"""

import contextlib
import io
import json
import re
import shlex
import sys
import traceback
import warnings
from pathlib import Path

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def program(page: Path) -> list[tuple[str, str | None]]:
    """Return the blocks of a page: (code, what it prints, None where the page does not say)."""
    fences = FENCE.findall(page.read_text(encoding="utf-8"))
    following = [*fences, ("", "")][1:]
    return [
        (code, shown if kind == "text" else None)
        for (language, code), (kind, shown) in zip(fences, following, strict=True)
        if language == "python"
    ]


def commands(page: Path) -> list[list[str]]:
    """Return the words after `regard` of the commands in the code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    lines = re.findall(r"^ *regard ([a-z]+[^\n]*)$", text, flags=re.M)
    return [shlex.split(line, comments=True) for line in lines]


def run(page: Path) -> str | None:
    """Run a page's program; return what differs from the page, or None."""
    space: dict[str, object] = {"__name__": "__main__"}  # where dataclasses look for their module
    for code, shown in program(page):
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, str(page), "exec", dont_inherit=True), space)
        except Exception:
            return traceback.format_exc()
        if shown is not None and printed.getvalue() != shown:
            return f"printed\n{printed.getvalue()}but the page shows\n{shown}"
    return None


if __name__ == "__main__":
    warnings.simplefilter("error", RuntimeWarning)
    print(json.dumps({name: run(Path(name)) for name in sys.argv[1:]}))
