"""How well a fast-weight memory recalls what it read once, and what it read before it was given other values.

The smallest model that has nothing but a memory: embedding, `nn.FastWeightProductKeyMemory`, output. It reads documents
of random pairs of tokens (`tasks.CrossDocumentRecall`), each several times, the whole document being one chunk. On the
first reading it can know nothing; what it knows on the second it wrote in one step. "Fast-weight Product Key Memory"
calls that step one-step rewriting (section 3.2), but its equation 35 leaves most of the error where several slots are
read; the released program multiplies the step by their number, and the normalised rule divides by the sum of the
squared weights, which makes one write exact. Each rule is trained and measured here.

Then: fewer slots than pairs need; one reading with smaller chunks, so that the writes come before the questions; who
wrote the slots that are read; and whether the entropy of section 3.3 keeps clustered queries from few slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from regard.checks import ArgumentError, suggestion
from regard.recipes import Findings, Progress, recipes
from regard.tasks import CrossDocumentRecall

from ..lib.language_runs import sized

CALL = "reproduce: fast-weight-recall"
REFERENCE, PAPER, NORMALIZED, DETACHED = "reference", "paper", "normalized", "normalized, no meta-gradient"
RULES: dict[str, dict[str, Any]] = {
    REFERENCE: {"step_rule": "reference"},
    PAPER: {"step_rule": "paper"},
    NORMALIZED: {"step_rule": "normalized"},
    DETACHED: {"step_rule": "normalized", "meta_grad": False},
}
"""Name to options of the memory."""


@dataclass(frozen=True, kw_only=True)
class FastWeightRecallConfig:
    """Train a memory and nothing else to recall pairs, under each rule of writing."""

    out: Path = Path("fast-weight-recall-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' eight, 'paper' (the
    paper's memory of 512 x 512 slots, chunks of 512 tokens) an hour or a GPU."""
    quick: bool = False
    """The same as --size quick."""
    rules: tuple[str, ...] = tuple(RULES)
    """Rules of writing to train with."""
    sub_keys: int | None = None
    """Sub-keys of a half; the memory has as many slots as its square."""
    stress_sub_keys: int | None = None
    """The same of the memory that is too small."""
    key_dim: int | None = None
    """Channels of a query, and of a value."""
    top_k: int | None = None
    """Slots that a token reads."""
    width: int | None = None
    """Width of the model."""
    keys: int | None = None
    """Tokens that may be keys; as many may be values."""
    pairs: int | None = None
    """Pairs of a document; a chunk is twice as many tokens."""
    documents: int | None = None
    """Documents, one after the other, of the same keys."""
    reads: int | None = None
    """Readings of each that are measured; in training there are two."""
    steps: int | None = None
    """Optimiser steps."""
    stress_steps: int | None = None
    """The same of the memory that is too small."""
    batch: int | None = None
    """Examples of a step."""
    learning_rate: float | None = None
    """Of AdamW at the start; from there it falls evenly to 0."""
    examples: int | None = None
    """Examples that are measured."""
    address_weight: float | None = None
    """Of the entropy by which keys move. The paper's 10 is meant for its 512 sub-keys."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'. By default the CPU, and 'auto' for the size of the paper."""
    seeds: int | None = None
    """Models of each kind."""
    seed: int = 0
    """The first of the seeds."""
    workers: int = 2
    """Models that are trained at the same time, each in a process with one thread."""


_TOY = {
    "sub_keys": 32, "stress_sub_keys": 12, "key_dim": 64, "top_k": 4, "width": 64, "keys": 128, "pairs": 64,
    "documents": 3, "reads": 4, "batch": 8, "learning_rate": 3e-3, "address_weight": 1.0, "device": "cpu",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {**_TOY, "steps": 150, "stress_steps": 120, "examples": 16, "seeds": 1},
    "desk": {**_TOY, "steps": 300, "stress_steps": 300, "examples": 64, "seeds": 3},
    "paper": {
        "sub_keys": 512, "stress_sub_keys": 64, "key_dim": 512, "top_k": 8, "width": 256, "keys": 2048, "pairs": 256,
        "documents": 3, "reads": 4, "batch": 16, "learning_rate": 1e-3, "address_weight": 10.0, "device": "auto",
        "steps": 1000, "stress_steps": 600, "examples": 64, "seeds": 3,
    },
}  # fmt: skip
"""Size to the numbers that it decides."""


@recipes.register("fast-weight-recall")
class FastWeightRecall:
    """Recall after one reading, after remapping and beyond capacity, under each rule of writing fast weights."""

    Config: ClassVar[type[Any]] = FastWeightRecallConfig

    @staticmethod
    def run(config: FastWeightRecallConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        from ..lib.processes import run_calls
        from .fast_weight_recall_model import measure_collapse, train_and_measure

        config = sized(config, SIZES, CALL)
        check(config)
        calls: dict[str, Any] = {
            f"{kind}, {name}, seed {seed}": partial(train_and_measure, config, name, seed, stress=kind == "too small")
            for kind, name, seed in runs(config)
        }
        calls |= {f"clustered queries, seed {seed}": partial(measure_collapse, seed) for seed in seeds(config)}
        found = list(run_calls(calls, config.workers, progress).values())
        count = len(config.rules) * len(seeds(config))
        rules, small, collapse = found[:count], found[count : -len(seeds(config))], found[-len(seeds(config)) :]
        progress("drawing")
        from . import fast_weight_recall_output as output

        seen = output.Seen(rules, small, collapse, task(config))
        used = {each.name: getattr(config, each.name) for each in fields(config)}
        used |= {"out": str(config.out), "rules": list(config.rules)}
        data = {
            "used": used,
            "runs": [run.record() for run in rules],
            "stress": [run.record() for run in small],
            "collapse": collapse,
        }
        return Findings(data, output.tables(seen), output.figures(seen), output.notes(seen))


def seeds(config: FastWeightRecallConfig) -> range:
    """All of them."""
    return range(config.seed, config.seed + (config.seeds or 1))


def runs(config: FastWeightRecallConfig) -> Iterator[tuple[str, str, int]]:
    """(memory, rule, seed) of every model; without the meta-gradient only where there is room."""
    for kind in ("room enough", "too small"):
        for name in config.rules:
            if kind == "room enough" or name != DETACHED:
                yield from ((kind, name, seed) for seed in seeds(config))


def task(config: FastWeightRecallConfig, reads: int | None = None) -> CrossDocumentRecall:
    """The task with the readings of the measurement, or others."""
    numbers: Any = config
    return CrossDocumentRecall(
        keys=numbers.keys,
        values=numbers.keys,
        pairs=numbers.pairs,
        documents=numbers.documents,
        reads=numbers.reads if reads is None else reads,
    )


def check(config: FastWeightRecallConfig) -> None:
    """Every number is in range; nothing is trained.

    Raises:
        ArgumentError: one is not.
    """
    import torch

    from regard.training.device import resolve_device

    from .fast_weight_recall_model import make_model

    if not config.rules:
        raise ArgumentError(f"{CALL}: --rules names none; give at least one.")
    for name in config.rules:
        if name not in RULES:
            raise ArgumentError(f"{CALL}: --rules: unknown rule {name!r}.{suggestion(name, list(RULES))}")
    least = {"reads": 2, "steps": 1, "stress_steps": 1, "batch": 1, "examples": 1, "width": 1, "top_k": 1}
    for name, low in least.items():
        if getattr(config, name) < low:
            flag = name.replace("_", "-")
            raise ArgumentError(f"{CALL}: --{flag} is {getattr(config, name)}, expected {low} or more.")
    numbers: Any = config
    if not 0 < numbers.learning_rate < float("inf"):
        raise ArgumentError(f"{CALL}: --learning-rate is {numbers.learning_rate}, expected a number above 0.")
    resolve_device(numbers.device, call=CALL)
    try:
        with torch.device("meta"):
            for stress in (False, True):
                make_model(config, config.rules[0], stress=stress)
    except ArgumentError as error:
        raise ArgumentError(f"{CALL}: {error}") from None
