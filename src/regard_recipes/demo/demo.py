"""`regard demo`: small models with different mechanisms, trained side by side, on one page.

Language models of the same sizes and seed, which differ in their attention spec alone, learn the same windows of a
text, beside a 5-gram model. The queries and keys of one of them show what four kernels make of the same scores. Other
models learn to recall values by keys. Slow modules are imported after the checks that do not need them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.options import parse
from regard.training.config import check_seed
from regard.training.fields import flag, read_spec, split_specs
from regard.training.storage.files import only_run

if TYPE_CHECKING:
    from rich.console import Console

    from regard.training.config import TrainConfig

    from ..lib.language_text import LanguageText
    from .demo_output import Result

CALL = "demo"
ORDER = 5  # of the n-gram baseline


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train small models with different mechanisms, and compare them: on a text, and in recall.

    Ends with tables on the terminal, and with report.html, figures, table.md and results.json in a folder.
    """

    steps: int = 1000  # Optimiser steps of each language model.
    recall_steps: int = 300  # Most optimiser steps of each model that learns to recall; 0 leaves this part out.
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    specs: str = "softmax,biweight"
    """The language models: attention specs with commas between them, such as 'softmax,triweight*anchored(margin=1)'.
    `regard list presets` shows the named ones."""
    out: Path = Path("demo-out")
    """Folder to write. The results of an earlier demo in it are replaced; any other folder must be empty."""
    seed: int = 0  # Seed of the first weights, the windows and examples of each step, and the generated text.
    workers: int = 2
    """Models that are trained at the same time, each in a process of its own with one thread; 0: in this process."""


def command(argv: list[str]) -> int:
    """Run `regard demo`."""
    return run_demo(parse(DemoConfig, argv, command="demo"))


def run_demo(config: DemoConfig) -> int:
    """Train the models, write the folder, print the tables. Return 0, or 1 if a model could not be trained to the end;
    the results of the others are written. Mistakes are found before any training starts."""
    start = time.perf_counter()
    from ..lib.recipe import check_number, check_once
    from ..lib.reproduce import consoles

    specs = [read_spec(part, "--specs", CALL) for part in split_specs(config.specs)]
    check_once(CALL, "--specs", list(map(str, specs)))
    for name, least in (("steps", 1), ("recall_steps", 0), ("workers", 0)):
        check_number(CALL, flag(name), getattr(config, name), least, math.inf)
    check_seed(config.seed, CALL)
    progress, screen = consoles(120)
    with progress.status("loading"):
        from ..lib.language_text import read_text
        from . import demo_output, demo_train
    demo_output.check_out(config.out, CALL)
    with progress.status("reading the text, trying every spec once"):
        text = read_text(config.data, "char", context=demo_train.CONTEXT, call=CALL, longest=demo_train.LONGEST)
        plans = [
            demo_train.plan(text, spec, number, steps=config.steps, seed=config.seed, out=config.out)
            for number, spec in enumerate(specs)
        ]
        demo_train.rehearse(plans, text, CALL)
    with only_run(config.out, call=CALL):
        demo_output.begin(config.out, text.content, CALL)
        result = _train_all(config, plans, text, progress, start)
        with progress.status("drawing"):
            demo_output.write(config.out, result)
    for table in demo_output.tables(result).values():
        screen.print(table.rich())
    screen.print(f"{result['seconds']:.0f} s in all. Look inside: {config.out / demo_output.PAGE}", highlight=False)
    return 1 if any("failure" in model for model in result["models"]) else 0


def _train_all(
    config: DemoConfig, plans: list[TrainConfig], text: LanguageText, progress: Console, start: float
) -> Result:
    """Count the n-grams and train every model; `seconds` of the result count from `start`."""
    from regard.doctor import report as installation

    from ..lib.running import run_calls
    from . import demo_output, demo_recall, demo_train

    progress.print(f"text: {text.described['source']}, {text.described['characters']} characters", highlight=False)
    with progress.status(f"counting {ORDER}-grams"):
        baseline = demo_train.count(text, ORDER)
    calls: dict[str, Callable[[], Any]] = {
        settings.spec[0]: partial(demo_train.train_one, settings, text, CALL) for settings in plans
    }
    recalls = {f"recall with {name}": name for name in demo_recall.MODELS if config.recall_steps}
    for call, name in reversed(recalls.items()):  # the slow ones first
        calls[call] = partial(demo_recall.recall, name, steps=config.recall_steps, seed=config.seed)
    records: dict[str, Any] = {}
    with progress.status(f"training {len(calls)} models, {max(1, config.workers)} at a time") as status:
        for name, record in run_calls(calls, config.workers):
            records[name] = record
            progress.print(f"{len(records)}/{len(calls)} {name}: {brief(record)}", highlight=False)
            status.update(f"training the other {len(calls) - len(records)} models")
    return {
        "made_by": demo_output.MADE_BY, "format": 1, "finished": True, "seconds": time.perf_counter() - start,
        "visible_keys": (demo_train.CONTEXT + 1) / 2, "text": text.described,
        "settings": demo_train.shared_settings(plans[0]), "installation": installation(), "baseline": baseline,
        "models": [records[settings.spec[0]] for settings in plans], "recall": [records[call] for call in recalls],
    }  # fmt: skip


def brief(record: Mapping[str, Any]) -> str:
    """Return the result of a model in a few words."""
    if "failure" in record:
        return f"stopped: {record['failure']}"
    if "final" in record:
        return f"accuracy {record['final']:.3f} after {record['steps'][-1]} steps, {record['seconds']:.0f} s"
    return f"{record['bits_per_char']:.3f} bits/char after {record['train_seconds']:.0f} s"
