"""`regard demo`: train small language models with different attention specs on the same text, and compare them.

All models have the same sizes and seed, and see the same windows in the same order. A 5-gram model of the text is the
baseline. `run_demo` imports slow modules after the checks that do not need them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.options import parse
from regard.errors import ArgumentError
from regard.training.config import check_seed
from regard.training.specs import read_spec, split_specs
from regard.training.storage.lock import only_run

if TYPE_CHECKING:
    from rich.console import Console

    from regard import Spec
    from regard.training.config import TrainConfig

    from .demo_output import Result
    from .demo_text import Material

CALL = "demo"
ORDER = 5  # of the n-gram baseline


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train small language models that differ in their attention only, and compare them.

    Ends with a table on the terminal, and with report.html, figures, table.md and results.json in a folder.
    """

    steps: int = 800
    """Optimiser steps per model. The default takes about a minute per model on two cores."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    specs: str = "softmax,biweight,relumax,shift-cosine"
    """The models: attention specs with commas between them, such as 'softmax,triweight*anchored(margin=1)'.
    `regard list presets` shows the named ones."""
    out: Path = Path("demo-out")
    """Folder to write. The results of an earlier demo in it are replaced; any other folder must be empty."""
    seed: int = 0
    """Seed of the first weights, the windows of each step, and the generated text."""


def command(argv: list[str]) -> int:
    """Run `regard demo`."""
    return run_demo(parse(DemoConfig, argv, command="demo"))


def run_demo(config: DemoConfig) -> int:
    """Train the models, write the folder, print the table.

    Returns:
        0, or 1 if a model could not be trained to the end; the results of the others are written.

    Raises:
        ArgumentError: a mistake in the config, the text or the folder; found before any training starts.
        TrainingStopped: the results cannot be written.
        TrainingInterrupted: Ctrl-C or SIGTERM.
    """
    start = time.perf_counter()
    specs = parse_specs(config.specs)
    if config.steps < 1:
        raise ArgumentError(f"{CALL}: --steps is {config.steps}, expected at least 1.")
    check_seed(config.seed, CALL)
    from ..lib.reproduce import consoles

    progress, screen = consoles(120)
    with progress.status("loading"):
        from . import demo_output, demo_text, demo_train
    demo_output.check_out(config.out, CALL)
    with progress.status("reading the text, trying every spec once"):
        material = demo_text.prepare(config.data, context=demo_train.CONTEXT, excerpt=demo_train.EXCERPT, call=CALL)
        plans = [
            demo_train.plan(material, spec, place, steps=config.steps, seed=config.seed, out=config.out)
            for place, spec in enumerate(specs)
        ]
        demo_train.rehearse(plans, material, CALL)
    with only_run(config.out, call=CALL):
        demo_output.begin(config.out, material.content, CALL)
        result = _train_all(plans, material, progress, start)
        with progress.status("drawing"):
            demo_output.write(config.out, result)
    screen.print(demo_output.table(result).rich())
    screen.print(f"{result.seconds:.0f} s in all. Look inside: {config.out / demo_output.PAGE}", highlight=False)
    return 1 if any(outcome.failure for outcome in result.outcomes) else 0


def _train_all(plans: list[TrainConfig], material: Material, progress: Console, start: float) -> Result:
    """Count the n-grams and train every model in turn; `seconds` of the result count from `start`."""
    from . import demo_output, demo_train

    described = material.described()
    progress.print(f"text: {described['source']}, {described['characters']} characters", highlight=False)
    with progress.status(f"counting {ORDER}-grams"):
        baseline = demo_train.count(material, ORDER)
    outcomes = [
        demo_train.train_one(settings, material, progress, f"{place}/{len(plans)} {settings.spec[0]}", CALL)
        for place, settings in enumerate(plans, start=1)
    ]
    return demo_output.Result(
        settings=demo_train.shared_settings(plans[0]), text=described, visible=(demo_train.CONTEXT + 1) / 2,
        baseline=baseline, outcomes=tuple(outcomes), seconds=time.perf_counter() - start,
    )  # fmt: skip


def parse_specs(text: str, call: str = CALL) -> list[Spec]:
    """Return the specs of a list with commas between them.

    Raises:
        ArgumentError: an empty or unknown spec, or one that is named twice.
    """
    specs: list[Spec] = []
    for part in split_specs(text):
        spec = read_spec(part, "--specs", call)
        if spec in specs:
            raise ArgumentError(f"{call}: --specs names {str(spec)!r} twice; name every spec once.")
        specs.append(spec)
    return specs
