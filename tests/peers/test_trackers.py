"""`regard train --report-to` with wandb (offline) and trackio (local): both keep the losses of metrics.jsonl."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import python

pytestmark = pytest.mark.peers
SIZES = "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --steps 4 --eval-every 2 --log-every 1 --device cpu"


@pytest.fixture
def trained(tmp_path: Path) -> Callable[[str], list[dict]]:
    """`trained(tracker)`: train in a process of its own with a tracker, and return the lines of metrics.jsonl."""
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"line {i} says {i * i % 97} and no more\n" for i in range(120)))
    words = ["-m", "regard", "train", "--data", text, "--out", out, *SIZES.split(), "--report-to"]
    places = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path)}

    def train(tracker: str) -> list[dict]:
        pytest.importorskip(tracker, reason=f"the extra `peers` brings {tracker}")
        python(*words, tracker, **places)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    return train


def test_trackio(trained: Callable, tmp_path: Path) -> None:
    lines = trained("trackio")
    with sqlite3.connect(tmp_path / "regard.db") as database:
        rows = database.execute("select run_name, metrics from metrics order by id").fetchall()
    assert {name for name, _ in rows} == {"run"}
    told = [json.loads(row) for _, row in rows]
    for kind, name in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
        assert [row[kind] for row in told if kind in row] == [line[name] for line in lines if name in line]


def test_wandb(trained: Callable, tmp_path: Path) -> None:
    lines = trained("wandb")
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")  # records one after the other, values as JSON
    content = record.read_bytes()
    assert b"train/loss" in content
    assert b"eval/loss" in content
    assert all(repr(line.get("loss", line.get("eval_loss"))).encode() in content for line in lines)
