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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.checks import ArgumentError, require
from regard.inspect import figures
from regard.inspect.figures import Curve
from regard.inspect.report import Page, Part, Sample, Section, layer_table, render
from regard.inspect.tables import Table
from regard.training import TrainingStopped

from ..lib import results
from ..lib.display import means, pivot
from ..lib.recipe import frame_of
from .demo_recall import recall_curves, recall_table

MADE_BY = "regard demo"
MARKER, TEXT, RUNS, FIGURES = "results.json", "text.txt", "runs", "figures"
PAGE, TABLE = "report.html", "table.md"
FREE = 64 * 2**20  # bytes that the disk must have free; a demo of four models takes less than half of it
Result = Mapping[str, Any]
"""The content of results.json, and each model's `maps` and `kernels` (`demo_train.train_one`), which are only drawn."""


def check_out(out: Path, call: str) -> None:
    """Check that a demo may be written to `out`, without changing anything."""
    free = shutil.disk_usage(results.check_out(out, call, MADE_BY)).free
    few = f"the disk of --out {out} has {free / 2**20:.0f} MiB free; {FREE / 2**20:.0f} are needed."
    require(free >= FREE, call, few)


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


def folder_name(number: int, name: str) -> str:
    """Return a portable folder name for the run of the model at `number`, counted from 0."""
    letters = "".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-")
    return f"{number + 1}-{letters[:60]}"


def _write(path: Path, content: str) -> None:
    path.write_text(content, encoding="utf-8", newline="")  # the text keeps its line ends


def write(out: Path, result: Result) -> None:
    """Write figures, table and report, and last the JSON, which marks the demo as finished."""
    drawn = ("maps", "kernels")
    models = [{name: value for name, value in model.items() if name not in drawn} for model in result["models"]]
    try:
        pictures = _pictures(result)
        for name, picture in pictures.items():
            (out / FIGURES / name).write_bytes(picture)
        _write(out / TABLE, "\n\n".join(each.markdown() for each in tables(result).values()))
        _write(out / PAGE, render(page(result, pictures)))
        _write(out / MARKER, json.dumps({**result, "models": models}, indent=1))
    except OSError as error:
        raise TrainingStopped(
            f"cannot write the results to {out}: {error.strerror or error}; the trained models are in {out / RUNS}"
        ) from error


def tables(result: Result) -> dict[str, Table]:
    """Return the tables by title."""
    by_title = {"Language models": table(result)}
    if result["recall"]:
        by_title["Recall"] = recall_table(result["recall"], result["settings"]["seed"])
    return by_title


def table(result: Result) -> Table:
    """Return a table with the baseline and each language model, in the order of the specs."""
    base = result["baseline"]
    shown = ["spec", "bits_per_char", "train_seconds", "tokens_per_second", "parameters", "support"]
    rows = frame_of([{"spec": base["name"], **base}, *result["models"]]).reindex(columns=shown)
    rows["above"] = rows["bits_per_char"][1:].astype(float) - base["bits_per_char"]
    bits = means("{bits_per_char:.3f}")
    return pivot(rows, {"spec": "model"}, {
        "bits/char": lambda rows: bits(rows) if rows["bits_per_char"].notna().all() else "stopped",
        f"vs {base['name']}": "{above:+.3f}", "training": "{train_seconds:.1f} s",
        "tokens/s": "{tokens_per_second:,.0f}", "parameters": "{parameters:,.0f}", "support": "{support:.1f}",
    }, note=(
        f"Bits per character of held-out text, lower is better; with one seed ({result['settings']['seed']}), small "
        f"differences may be chance. Support: keys with non-zero weight per query, of {result['visible_keys']:.1f} "
        f"visible on average."))  # fmt: skip


def _kernels(result: Result) -> dict[str, Any] | None:
    """Return the weights of several kernels in the first model that has them."""
    return next((model["kernels"] for model in result["models"] if model.get("kernels") is not None), None)


def _pictures(result: Result) -> dict[str, bytes]:
    """Return file name to PNG: kernels, curves, and a map for every model that has one."""
    pictures = {}
    if (kernels := _kernels(result)) is not None:
        head = f"layer {kernels['layer'] + 1} head {kernels['head'] + 1} of {kernels['model']}"
        title = f"Weights of the last character's query, {head}"
        pictures["kernels.png"] = figures.weights_on_text(kernels["weights"], kernels["labels"], title=title)
    if result["recall"]:
        pictures["recall.png"] = recall_curves(result["recall"])
    if curves := [Curve(model["spec"], **model["curve"]) for model in result["models"] if "curve" in model]:
        base = result["baseline"]
        pictures["curves.png"] = figures.loss_curves(curves, baseline=base["bits_per_char"], baseline_name=base["name"])
    for model in result["models"]:
        if (maps := model.get("maps")) is not None:
            pictures[_map_name(model)] = figures.attention_map(maps, *maps.farthest(), title=model["spec"])
    return pictures


def _map_name(model: Mapping[str, Any]) -> str:
    return f"attention-{model['run'].removeprefix(f'{RUNS}/')}.png"


def page(result: Result, pictures: dict[str, bytes]) -> Page:
    """Return the report."""
    parts, by_title = [], tables(result)
    if (kernels := _kernels(result)) is not None:
        text = (
            f"Queries and keys of one head, on a held-out text that the {kernels['model']} model has never seen. "
            f"Each row turns the same scores into weights by another spec. A grey character has a weight of exactly "
            f"zero: the prediction does not depend on it."
        )
        parts.append(Part(title="One text, one trained model, four kernels", text=text, picture=pictures["kernels.png"],
                          caption="Weights of the characters for the query at the last one, in the head where "
                          "biweight gives weight to most of them."))  # fmt: skip
    text = (
        f"{len(result['models'])} small language models that differ in their attention only, trained on the same "
        f"windows of the same text from the same seed, beside a {result['baseline']['name']} model of that text."
    )
    caption = "Bits per character: thin lines on training windows, dots on the whole held-out text."
    parts.append(Part(title="One model, several attention specs", text=text, table=by_title["Language models"],
                      picture=pictures.get("curves.png"), caption=caption))  # fmt: skip
    if "Recall" in by_title:
        text = (
            "Each sequence lists pairs of keys and values, then keys alone; the model must answer with their values. "
            "What a model can keep of earlier tokens decides whether it can."
        )
        caption = "Accuracy on validation examples; curves end where 0.99 is reached."
        parts.append(Part(title="Recall", text=text, table=by_title["Recall"], picture=pictures["recall.png"],
                          caption=caption))  # fmt: skip
    return Page(
        title="Attention as regression: what changes when a part of it changes",
        introduction=f"Small models that differ in one part of their attention. The demo took "
        f"{result['seconds'] / 60:.1f} minutes.",
        parts=parts,
        sections=[_section(model, pictures.get(_map_name(model))) for model in result["models"]],
        settings={"Text": result["text"], "Training, the same for all language models": result["settings"],
                  **{f"Installation: {name}": group for name, group in result["installation"].items()}},
    )  # fmt: skip


def _section(model: Mapping[str, Any], picture: bytes | None) -> Section:
    if "failure" in model:
        return Section(title=model["spec"], failure=f"Training stopped: {model['failure']}")
    maps = model["maps"]
    length = 0 if maps is None else len(maps.labels)
    facts = {
        "bits per character": f"{model['bits_per_char']:.3f}",
        "training": f"{model['train_seconds']:.0f} s at {model['tokens_per_second']:,.0f} tokens/s",
    }
    if model["support"] is not None:
        facts["mean support"] = f"{model['support']:.1f} keys"
    return Section(
        title=model["spec"], facts=facts, picture=picture, maps=maps,
        sample=Sample(prompt=model["prompt"], continuation=model["sample"], how=model["sampled"]),
        layers=None if maps is None else layer_table(maps),
        caption=f"The head that looks furthest back on average, on the held-out text from which the sample starts. "
        f"White: a weight of exactly zero. Right: for every query, how many visible keys have a non-zero weight. The "
        f"{length} characters shown have a mean of {(length + 1) / 2:.1f} visible keys; the mean support above is over "
        f"whole contexts.",
    )  # fmt: skip
