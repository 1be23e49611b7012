"""Memory of a run does not grow with its text."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from peak import on_linux
from programs import python

from regard.training.fields import to_mapping

PROGRAM = """
import sys, threading, time
from regard.cli import main

most = 0


def watch():  # pages of mapped files are left out: the system takes them back when memory is short
    global most
    while True:
        with open("/proc/self/status") as lines:
            most = max(most, next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024)
        time.sleep(0.01)


threading.Thread(target=watch, daemon=True).start()
assert main(["train", "--config", sys.argv[1]]) == 0
print("peak", most)
"""
LINE = "the quick brown fox jumps over a lazy dog while seven wizards box"


def peak_of_a_run(tiny, data: Path | str, folder: Path, **changes) -> float:
    """Return the peak in MiB."""
    config = folder / "config.json"
    folder.mkdir()
    out = {"out": folder / "run", "steps": 2, "eval_every": 9, "validation": 1e-4, "tokenizer": "byte"}
    config.write_text(json.dumps(to_mapping(tiny(data=Path(data), **out, **changes))))
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072", "HF_HOME": str(folder / "hub")}
    return float(python("-W", "ignore", "-c", PROGRAM, config, **environment).split("peak ")[1])


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "data set", "stream"])
def test_the_peak_does_not_grow_with_the_text(tiny, tmp_path: Path, kind: str) -> None:
    """Of 48 MB, against 24 MB. (Arrow holds two blocks of 10 MB.) 24 million tokens more would take 92 MiB."""
    if kind != "text" and find_spec("datasets") is None:
        pytest.skip("needs the extra data")
    peaks = []
    for size in (24_000_000, 48_000_000):
        path = tmp_path / f"{size}.txt"
        path.write_text("".join(f"{i} {LINE}\n" for i in range(size // 75)))
        data = path if kind == "text" else f"datasets:{path}"
        peaks.append(peak_of_a_run(tiny, data, tmp_path / f"run-{size}", stream=kind == "stream"))
    assert peaks[1] < peaks[0] + 20
