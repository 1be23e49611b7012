"""Programs in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path


def python(*words: object, cwd: Path | None = None, timeout: float = 600, code: int = 0, **environment: str) -> str:
    """Run Python with these words to this exit code; return what it prints, with its errors if it is not 0."""
    command, environ = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=cwd, timeout=timeout, env=environ
    )
    assert done.returncode == code, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr if code else done.stdout
