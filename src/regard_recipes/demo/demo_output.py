"""What the demo leaves behind: a table, a page, figures and JSON, in a folder that the next demo may replace.

report.html      the page to look inside; needs no other file
table.md         the table as Markdown
results.json     everything measured, with settings, versions and text digest; it also marks the folder
figures/         loss curves and attention maps as PNG
runs/            one training run per model (see regard.training)
text.txt         the text that was used
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError
from regard.doctor import report as installation
from regard.inspect import figures
from regard.inspect.figures import Curve
from regard.inspect.measures import AttentionMaps
from regard.inspect.report import Page, Sample, Section, render
from regard.inspect.summary import layer_table
from regard.inspect.tables import Table
from regard.training import TrainingStopped
from regard.training.storage.lock import LOCK

MADE_BY = "regard demo"
MARKER, TEXT, RUNS, FIGURES, PAGE, TABLE = (
    *("results.json", "text.txt", "runs"),
    *("figures", "report.html", "table.md"),
)
FREE = 64 * 2**20
"""Bytes that the disk must have free; a demo of four models takes less than half of it."""
NONE = "–"


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The n-gram model on the held-out text. Its seconds and characters per second are of counting."""

    name: str
    bits_per_char: float
    train_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of one model. `train_seconds` is wall time of training steps, `cpu_seconds` processor time
    of the whole training call; `support` is as in `regard.training.evaluate`."""

    bits_per_char: float
    parameters: int
    support: float | None
    train_seconds: float
    cpu_seconds: float
    tokens_per_second: float
    prompt: str
    sample: str
    sampled: str
    maps: AttentionMaps | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One model: its name, its run folder, and either the result or the reason why there is none."""

    name: str
    run: Path
    trained: Trained | None = None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole demo. `settings` and `text` are for people, name to value."""

    settings: dict[str, str]
    text: dict[str, str]
    visible: float
    baseline: Baseline
    outcomes: tuple[Outcome, ...]
    seconds: float


# The folder ------------------------------------------------------------------------------------------------


def check_out(out: Path, call: str) -> None:
    """May a demo be written to `out`? Nothing is changed.

    Raises:
        ArgumentError: it is a file, holds something else, cannot be written, or the disk is nearly full.
    """
    if out.exists() and not out.is_dir():
        raise ArgumentError(f"{call}: --out {out} is a file; give a folder.")
    home = out.absolute()
    while not home.exists():
        home = home.parent
    if not home.is_dir() or not os.access(home, os.W_OK | os.X_OK):
        raise ArgumentError(f"{call}: --out {out} cannot be written; choose another folder.")
    if out.is_dir() and any(path.name != LOCK for path in out.iterdir()) and not is_demo(out):
        raise ArgumentError(
            f"{call}: --out {out} is not empty and holds no earlier demo; choose another folder (nothing was deleted)."
        )
    free = shutil.disk_usage(home).free
    if free < FREE:
        raise ArgumentError(
            f"{call}: the disk of --out {out} has {free / 2**20:.0f} MiB free; {FREE / 2**20:.0f} are needed."
        )


def is_demo(out: Path) -> bool:
    """Whether a demo wrote the folder, be it one that was cut off."""
    try:
        found = json.loads((out / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("made_by") == MADE_BY


def begin(out: Path, text: str, call: str) -> None:
    """Create the folder without the results of an earlier demo, mark it, and put the text into it. What
    else lies in the folder stays.

    Raises:
        ArgumentError: the folder cannot be written.
    """
    try:
        if out.is_dir():
            for name in (TEXT, RUNS, FIGURES, PAGE, TABLE):
                _remove(out / name)
        out.mkdir(parents=True, exist_ok=True)
        _write(out / MARKER, json.dumps({"made_by": MADE_BY, "finished": False}))
        _write(out / TEXT, text)
        (out / FIGURES).mkdir()
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {out}: {error.strerror or error}.") from None


def folder_name(place: int, name: str) -> str:
    """A name for the run of the model at `place` (from 0) that every file system takes."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-")
    return f"{place + 1}-{letters[:60]}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="")  # the text keeps its line ends


# The results -----------------------------------------------------------------------------------------------


def write(out: Path, result: Result) -> None:
    """Figures, table, page, and last the JSON, which says that all is there.

    Raises:
        TrainingStopped: the disk refused; the models in `runs/` are whole.
    """
    curves = [curve(outcome) for outcome in result.outcomes if outcome.trained is not None]
    try:
        pictures = _pictures(result, curves)
        for name, picture in pictures.items():
            (out / FIGURES / name).write_bytes(picture)
        _write(out / TABLE, table(result).markdown())
        _write(out / PAGE, render(page(result, pictures)))
        _write(out / MARKER, json.dumps(as_json(result, curves), indent=1))
    except OSError as error:
        raise TrainingStopped(
            f"cannot write the results to {out}: {error.strerror or error}; the trained models are in {out / RUNS}"
        ) from error


def curve(outcome: Outcome) -> Curve:
    """The run's metrics as a curve that ends with the final result."""
    assert outcome.trained is not None
    lines = (outcome.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    learned = [(r["step"], r["bits_per_char"]) for r in records if "bits_per_char" in r]
    last = json.loads((outcome.run / "summary.json").read_text(encoding="utf-8"))["step"]
    held_out = {r["step"]: r["eval_bits_per_char"] for r in records if "eval_bits_per_char" in r}
    held_out[last] = outcome.trained.bits_per_char
    return Curve(
        name=outcome.name,
        steps=tuple(step for step, _ in learned),
        bits=tuple(bits for _, bits in learned),
        held_out_steps=tuple(held_out),
        held_out_bits=tuple(held_out.values()),
    )


def table(result: Result) -> Table:
    """Each model beside the baseline, in the order in which they were trained."""
    base = result.baseline
    rows = [
        _row(
            base.name,
            f"{base.bits_per_char:.3f}",
            NONE,
            f"{base.train_seconds:.1f} s",
            f"{base.tokens_per_second:,.0f}",
        )
    ]
    for outcome in result.outcomes:
        model = outcome.trained
        if model is None:
            rows.append(_row(outcome.name, "stopped"))
            continue
        rows.append(
            _row(
                outcome.name,
                f"{model.bits_per_char:.3f}",
                f"{model.bits_per_char - base.bits_per_char:+.3f}",
                f"{model.train_seconds:.1f} s",
                f"{model.tokens_per_second:,.0f}",
                f"{model.parameters:,}",
                NONE if model.support is None else f"{model.support:.1f}",
            )
        )
    return Table(
        header=("model", "bits/char", f"vs {base.name}", "training", "tokens/s", "parameters", "support"),
        rows=tuple(rows),
        note=f"Bits per character of held-out text, fewer are better; with one seed ({result.settings['seed']}), small "
        f"differences may be chance. Support: keys with non-zero weight per query, of {result.visible:.1f} visible on "
        f"average.",
    )


def _row(*cells: str) -> tuple[str, ...]:
    """Seven cells, the missing ones dashes."""
    return (*cells, *[NONE] * (7 - len(cells)))


def _pictures(result: Result, curves: list[Curve]) -> dict[str, bytes]:
    """File name to PNG: the curves, and a map for every model that has one."""
    base = result.baseline
    pictures = {}
    if curves:
        pictures["curves.png"] = figures.loss_curves(curves, baseline=base.bits_per_char, baseline_name=base.name)
    for outcome in result.outcomes:
        if outcome.trained is not None and outcome.trained.maps is not None:
            layer, head = outcome.trained.maps.farthest()
            pictures[_map_name(outcome)] = figures.attention_map(outcome.trained.maps, layer, head, title=outcome.name)
    return pictures


def _map_name(outcome: Outcome) -> str:
    return f"attention-{outcome.run.name}.png"


def page(result: Result, pictures: dict[str, bytes]) -> Page:
    """The page of this demo."""
    return Page(
        title="One model, several ways to attend",
        introduction=f"{len(result.outcomes)} small language models that differ in nothing but how "
        f"they weigh the past, trained on the same windows of the same text from the same seed, and measured "
        f"on text that none of them has seen, beside a {result.baseline.name} model of that text. "
        f"The whole took {result.seconds / 60:.1f} minutes.",
        table=table(result),
        curves=pictures.get("curves.png"),
        curves_caption="Bits per character: thin lines on training windows, dots on the whole held-out text.",
        sections=[_section(outcome, pictures.get(_map_name(outcome))) for outcome in result.outcomes],
        settings={
            "Text": result.text,
            "Training, the same for all": result.settings,
            **{f"Installation: {name}": group for name, group in installation().items()},
        },
    )


def _section(outcome: Outcome, picture: bytes | None) -> Section:
    model = outcome.trained
    if model is None:
        return Section(title=outcome.name, failure=f"Training stopped: {outcome.failure}")
    facts = {
        "bits per character": f"{model.bits_per_char:.3f}",
        "training": f"{model.train_seconds:.0f} s at {model.tokens_per_second:,.0f} tokens/s",
    }
    if model.support is not None:
        facts["mean support"] = f"{model.support:.1f} keys"
    return Section(
        title=outcome.name,
        facts=facts,
        sample=Sample(prompt=model.prompt, continuation=model.sample, how=model.sampled),
        picture=picture,
        caption="The head that looks furthest back on average, on the held-out text from which the sample "
        "starts. White: a weight of exactly zero. Right: for every row, how many keys have a weight that is "
        f"not zero, of those that are visible. The {maps_length(model)} characters shown make a mean of "
        f"{(maps_length(model) + 1) / 2:.1f} visible keys; the mean support above is over whole contexts.",
        maps=model.maps,
        layers=None if model.maps is None else layer_table(model.maps),
    )


def maps_length(model: Trained) -> int:
    """Return how many characters the maps show, 0 where there are none."""
    return 0 if model.maps is None else len(model.maps.labels)


def as_json(result: Result, curves: list[Curve]) -> dict[str, Any]:
    """Everything measured, as plain data."""
    by_name = {curve.name: vars(curve) for curve in curves}
    models = []
    for outcome in result.outcomes:
        record: dict[str, Any] = {"spec": outcome.name, "run": f"{RUNS}/{outcome.run.name}"}
        if outcome.trained is None:
            record["failure"] = outcome.failure
        else:
            record |= {key: value for key, value in vars(outcome.trained).items() if key != "maps"}
            record["curve"] = {k: v for k, v in by_name[outcome.name].items() if k != "name"}
        models.append(record)
    return {
        "made_by": MADE_BY,
        "format": 1,
        "finished": True,
        "seconds": result.seconds,
        "visible_keys": result.visible,
        "text": result.text,
        "settings": result.settings,
        "installation": installation(),
        "baseline": vars(result.baseline),
        "models": models,
    }
