"""Fetch the releases named in releases.txt from the package index: `python tests/peers/fetch.py FOLDER`.

pip compares each file with its hash and fails if they differ.
"""

import subprocess
import sys
from pathlib import Path

RELEASES = Path(__file__).with_name("releases.txt")


def fetch(folder: Path, releases: Path = RELEASES) -> list[Path]:
    """Return the files in `folder`, one per release of a list."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--require-hashes", "--requirement", str(releases), "--dest", str(folder)], check=True)
    return sorted(folder.iterdir())


if __name__ == "__main__":
    print(*fetch(Path(sys.argv[1])), sep="\n")
