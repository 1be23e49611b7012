"""The files of a demo, in a folder that the next demo may replace.

report.html      the report; needs no other file
table.md         the tables as Markdown
results.json     all measurements, with settings, versions and text digest; it also marks the folder
figures/         kernels, loss curves, recall and attention maps as PNG
runs/            one training run per model (see regard.training)
text.txt         the text that was used
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError
from regard.doctor import report as installation
from regard.inspect import figures
from regard.inspect.figures import Curve
from regard.inspect.measures import AttentionMaps
from regard.inspect.report import Page, Part, Sample, Section, render
from regard.inspect.summary import layer_table
from regard.inspect.tables import Table
from regard.training import TrainingStopped

from ..lib import results
from ..lib.display import MISSING
from .demo_kernels import KernelWeights
from .demo_recall import Recall, recall_curves, recall_table

MADE_BY = "regard demo"
MARKER, TEXT, RUNS, FIGURES = "results.json", "text.txt", "runs", "figures"
PAGE, TABLE = "report.html", "table.md"
FREE = 64 * 2**20  # bytes that the disk must have free; a demo of four models takes less than half of it


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The n-gram model on the held-out text; seconds and tokens per second are of counting."""

    name: str
    bits_per_char: float
    train_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of one model: `train_seconds` of training steps by the clock, `cpu_seconds` of the whole call."""

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
    kernels: KernelWeights | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One model: its name, its run folder, and either its results or why it stopped."""

    name: str
    run: Path
    trained: Trained | None = None
    failure: str | None = None

    @property
    def brief(self) -> str:
        """Return the result in a few words."""
        if self.trained is None:
            return f"stopped: {self.failure}"
        return f"{self.trained.bits_per_char:.3f} bits/char after {self.trained.train_seconds:.0f} s"


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole demo. `settings` and `text` are shown as they are, name to value."""

    settings: dict[str, str]
    text: dict[str, str]
    visible: float
    baseline: Baseline
    outcomes: tuple[Outcome, ...]
    recalls: tuple[Recall, ...]
    seconds: float

    @property
    def kernels(self) -> KernelWeights | None:
        """Return the weights of several kernels in the first model that has them."""
        trained = (outcome.trained for outcome in self.outcomes)
        return next((one.kernels for one in trained if one is not None and one.kernels is not None), None)


def check_out(out: Path, call: str) -> None:
    """Check that a demo may be written to `out`, without changing anything."""
    free = shutil.disk_usage(results.check_out(out, call, MADE_BY)).free
    if free < FREE:
        raise ArgumentError(
            f"{call}: the disk of --out {out} has {free / 2**20:.0f} MiB free; {FREE / 2**20:.0f} are needed."
        )


def begin(out: Path, text: str, call: str) -> None:
    """Create the folder or remove an earlier demo from it, mark it, and write the text. Other files stay."""
    try:
        for name in (TEXT, RUNS, FIGURES, PAGE, TABLE) if out.is_dir() else ():
            if (out / name).is_dir() and not (out / name).is_symlink():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        _write(out / MARKER, json.dumps({"made_by": MADE_BY, "finished": False}))
        _write(out / TEXT, text)
        (out / FIGURES).mkdir()
    except OSError as error:
        raise ArgumentError(f"{call}: cannot write to --out {out}: {error.strerror or error}.") from None


def folder_name(place: int, name: str) -> str:
    """Return a portable folder name for the run of the model at `place`, counted from 0."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-")
    return f"{place + 1}-{letters[:60]}"


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="")  # the text keeps its line ends


def write(out: Path, result: Result) -> None:
    """Write figures, table and report, and last the JSON, which marks the demo as finished."""
    curves = [curve(outcome) for outcome in result.outcomes if outcome.trained is not None]
    try:
        pictures = _pictures(result, curves)
        for name, picture in pictures.items():
            (out / FIGURES / name).write_bytes(picture)
        _write(out / TABLE, "\n\n".join(each.markdown() for each in tables(result).values()))
        _write(out / PAGE, render(page(result, pictures)))
        _write(out / MARKER, json.dumps(as_json(result, curves), indent=1))
    except OSError as error:
        raise TrainingStopped(
            f"cannot write the results to {out}: {error.strerror or error}; the trained models are in {out / RUNS}"
        ) from error


def curve(outcome: Outcome) -> Curve:
    """Return the run's metrics as a curve that ends with the final result."""
    assert outcome.trained is not None
    records = [json.loads(line) for line in (outcome.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    learned = {r["step"]: r["bits_per_char"] for r in records if "bits_per_char" in r}
    held_out = {r["step"]: r["eval_bits_per_char"] for r in records if "eval_bits_per_char" in r}
    last = json.loads((outcome.run / "summary.json").read_text(encoding="utf-8"))["step"]
    held_out[last] = outcome.trained.bits_per_char
    return Curve(outcome.name, tuple(learned), tuple(learned.values()), tuple(held_out), tuple(held_out.values()))


def tables(result: Result) -> dict[str, Table]:
    """Return the tables by title."""
    found = {"Language models": table(result)}
    if result.recalls:
        found["Recall"] = recall_table(result.recalls, int(result.settings["seed"]))
    return found


def table(result: Result) -> Table:
    """Return a table with the baseline and each language model, in the order of the specs."""
    base = result.baseline
    shown = lambda of, more: (  # noqa: E731
        f"{of.bits_per_char:.3f}", more, f"{of.train_seconds:.1f} s", f"{of.tokens_per_second:,.0f}"
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [(base.name, *shown(base, MISSING), MISSING, MISSING)]
    for outcome in result.outcomes:
        model = outcome.trained
        if model is None:
            rows.append((outcome.name, "stopped", *[MISSING] * 5))
            continue
        support = MISSING if model.support is None else f"{model.support:.1f}"
        above = f"{model.bits_per_char - base.bits_per_char:+.3f}"
        rows.append((outcome.name, *shown(model, above), f"{model.parameters:,}", support))
    header = ("model", "bits/char", f"vs {base.name}", "training", "tokens/s", "parameters", "support")
    note = (
        f"Bits per character of held-out text, fewer are better; with one seed ({result.settings['seed']}), small "
        f"differences may be chance. Support: keys with non-zero weight per query, of {result.visible:.1f} visible on "
        f"average."
    )
    return Table(header, tuple(rows), note)


def _pictures(result: Result, curves: list[Curve]) -> dict[str, bytes]:
    """Return file name to PNG: kernels, curves, and a map for every model that has one."""
    base = result.baseline
    pictures = {}
    if result.kernels is not None:
        pictures["kernels.png"] = result.kernels.picture()
    if result.recalls:
        pictures["recall.png"] = recall_curves(result.recalls)
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
    """Return the report."""
    parts = []
    if result.kernels is not None:
        text = (
            f"Queries and keys of one head, on a held-out text that the {result.kernels.model} model has never seen. "
            f"Each row turns the same scores into weights by another spec. A grey character has a weight of exactly "
            f"zero: the prediction does not depend on it."
        )
        parts.append(Part(title="One text, one trained model, four kernels", text=text, picture=pictures["kernels.png"],
                          caption="Weights of the characters for the query at the last one, in the head where "
                          "biweight gives weight to most of them."))  # fmt: skip
    text = (
        f"{len(result.outcomes)} small language models that differ in their attention only, trained on the same "
        f"windows of the same text from the same seed, beside a {result.baseline.name} model of that text."
    )
    caption = "Bits per character: thin lines on training windows, dots on the whole held-out text."
    parts.append(Part(title="One model, several attention specs", text=text, table=table(result),
                      picture=pictures.get("curves.png"), caption=caption))  # fmt: skip
    if result.recalls:
        text = (
            "Each sequence lists pairs of keys and values, then keys alone; the model must answer with their values. "
            "What a model can keep of earlier tokens decides whether it can."
        )
        caption = "Accuracy on validation examples; curves end where 0.99 is reached."
        parts.append(Part(title="Recall", text=text, table=tables(result)["Recall"], picture=pictures["recall.png"],
                          caption=caption))  # fmt: skip
    return Page(
        title="Attention as regression: what changes when a part of it changes",
        introduction=f"Small models that differ in one part of their attention. The demo took "
        f"{result.seconds / 60:.1f} minutes.",
        parts=parts,
        sections=[_section(outcome, pictures.get(_map_name(outcome))) for outcome in result.outcomes],
        settings={"Text": result.text, "Training, the same for all language models": result.settings,
                  **{f"Installation: {name}": group for name, group in installation().items()}},
    )  # fmt: skip


def _section(outcome: Outcome, picture: bytes | None) -> Section:
    model = outcome.trained
    if model is None:
        return Section(title=outcome.name, failure=f"Training stopped: {outcome.failure}")
    length = 0 if model.maps is None else len(model.maps.labels)
    facts = {
        "bits per character": f"{model.bits_per_char:.3f}",
        "training": f"{model.train_seconds:.0f} s at {model.tokens_per_second:,.0f} tokens/s",
    }
    if model.support is not None:
        facts["mean support"] = f"{model.support:.1f} keys"
    return Section(
        title=outcome.name, facts=facts, picture=picture, maps=model.maps,
        sample=Sample(prompt=model.prompt, continuation=model.sample, how=model.sampled),
        layers=None if model.maps is None else layer_table(model.maps),
        caption=f"The head that looks furthest back on average, on the held-out text from which the sample starts. "
        f"White: a weight of exactly zero. Right: for every query, how many visible keys have a non-zero weight. The "
        f"{length} characters shown have a mean of {(length + 1) / 2:.1f} visible keys; the mean support above is over "
        f"whole contexts.",
    )  # fmt: skip


def as_json(result: Result, curves: list[Curve]) -> dict[str, Any]:
    """Return all measurements as plain data."""
    by_name = {curve.name: vars(curve) for curve in curves}
    models = []
    for outcome in result.outcomes:
        record: dict[str, Any] = {"spec": outcome.name, "run": f"{RUNS}/{outcome.run.name}"}
        if outcome.trained is None:
            record["failure"] = outcome.failure
        else:
            record |= {key: value for key, value in vars(outcome.trained).items() if key not in ("maps", "kernels")}
            record["curve"] = {k: v for k, v in by_name[outcome.name].items() if k != "name"}
        models.append(record)
    return {
        "made_by": MADE_BY, "format": 1, "finished": True, "seconds": result.seconds, "visible_keys": result.visible,
        "text": result.text, "settings": result.settings, "installation": installation(),
        "baseline": vars(result.baseline), "models": models, "recall": [vars(one) for one in result.recalls],
    }  # fmt: skip
