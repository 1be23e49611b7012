"""The weightings of the sparse-attention paper in the contextual memories of Memory Mosaics: its figures 2 and 3.

The paper trains Memory Mosaics of 1, 8 and 12 blocks with eight weightings and shows curves: at one block the compact
kernels (sparsemax, biweight, triweight) lie below the Gaussian and the nearest-key baselines, at eight still, at
twelve all are level but uniform nearest keys and normalised ReLU, which are worse. Its released programs do not compute
all of these as the paper defines them: `released_weightings` says what they do compute, and here both are trained on
the same budget. Uniform nearest keys are trained with a straight-through gradient, and with k = 32 also as released,
where keys have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from regard.checks import ArgumentError, suggestion
from regard.recipes import Findings, Progress, recipes
from regard.training.config import SEEDS

from ..lib.language_runs import Budget, Job, run_jobs, sized
from .released_weightings import FORMS, RULES, Released, ReleasedMemory, use_released

if TYPE_CHECKING:
    from ..lib.language_text import LanguageText

CALL = "reproduce: mosaic-kernels"
WEIGHTINGS = {
    "softmax": "softmax",
    "topk-softmax": "gaussian*nearest(k={k})",
    "topk-uniform": "uniform*nearest(k={k})",
    "normrelu": "epanechnikov*fixed(h=1.4)*euclidean",
    "relumax": "relumax",
    "sparsemax": "sparsemax",
    "biweight": "biweight",
    "triweight": "triweight",
}
"""Name to sentence. The bandwidth h of normalised ReLU (equation 11: distances between unit keys) and the margin of
ReLUmax are learned per head, h from where it leaves out 7.5 % of random pairs."""
DEFINED, HARD = "defined", "no gradient"
SHOWN_K = 32
"""The k of the paper's language models: alone at every depth but the first."""
LOOKED_AT = 8
"""Windows that empty rows are counted on."""


@dataclass(frozen=True, kw_only=True)
class MosaicKernelsConfig:
    """Train Memory Mosaics with every weighting of the sparse-attention paper, as defined and as released."""

    out: Path = Path("mosaic-kernels-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' fifteen, 'paper' (1, 8
    and 12 blocks of width 768 on GPT-2 tokens) GPUs, days, and --data."""
    quick: bool = False
    """The same as --size quick."""
    weightings: tuple[str, ...] = tuple(WEIGHTINGS)
    """Which of the eight."""
    released: tuple[str, ...] = FORMS
    """Forms of normalised ReLU and ReLUmax in released programs that are trained too, at the first depth: 'fast' (of
    the paper's language models), 'mended' (fast with the right mask) and 'regular'."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    tokenizer: str | None = None
    """char, byte or gpt2."""
    depths: tuple[int, ...] | None = None
    """Numbers of blocks. At the first, everything is trained; at the others the eight weightings as they are defined,
    nearest keys with k = 32 alone."""
    ks: tuple[int, ...] | None = None
    """How many nearest keys; of uniform ones, k = 32 also without a gradient to keys, as released."""
    seeds: int | None = None
    """Models of each kind at the first depth; they differ in first weights and windows."""
    k_seeds: int | None = None
    """The same of nearest keys with another k than 32."""
    deep_seeds: int | None = None
    """The same at the other depths."""
    seed: int = 0
    """The first of the seeds."""
    width: int | None = None
    """Width of every model."""
    heads: int | None = None
    """Heads of every memory."""
    context: int | None = None
    """Tokens that a model sees at once."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each model at the first depth."""
    deep_steps: int | None = None
    """The same at the other depths."""
    learning_rates: tuple[float, ...] | None = None
    """The highest: one for all depths, or one for each."""
    final_shares: tuple[float, ...] | None = None
    """To which share of it the learning rate falls along a cosine: one for all depths, or one for each."""
    warmup: float | None = None
    """Share of the steps over which the learning rate rises from zero."""
    measured: int | None = None
    """Held-out tokens that the loss is measured on."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    compile: bool | None = None
    """Train through torch.compile."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'. By default the CPU, and 'auto' for the size of the paper."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each. Changes no number but the times."""


_SMALL: dict[str, Any] = {
    "tokenizer": "char", "depths": (1, 4), "ks": (16, 32, 64), "parts": 1, "learning_rates": (2e-2,),
    "final_shares": (0.1,), "k_seeds": 1, "deep_seeds": 1, "warmup": 0.05, "dtype": "float32",
    "compile": False, "device": "cpu",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_SMALL, "seeds": 1, "width": 32, "heads": 2, "context": 96, "batch": 4, "steps": 80, "deep_steps": 80,
        "measured": 2048, "looks": 4,
    },
    "desk": {
        **_SMALL, "seeds": 3, "width": 64, "heads": 4, "context": 128, "batch": 8, "steps": 700, "deep_steps": 400,
        "measured": 8192, "looks": 6,
    },
    "paper": {
        "tokenizer": "gpt2", "depths": (1, 8, 12), "ks": (16, 32, 64), "parts": 16, "warmup": 0.025,
        "learning_rates": (5e-3, 5e-3, 1e-3), "final_shares": (0.02, 0.02, 0.05), "seeds": 3, "k_seeds": 3,
        "deep_seeds": 1, "width": 768, "heads": 12, "context": 512, "batch": 512, "steps": 80_000, "deep_steps": 80_000,
        "measured": 2_621_440, "looks": 40, "dtype": "bfloat16", "compile": False, "device": "auto",
    },
}  # fmt: skip
"""Options by size; the paper's from its tables 3 and 5. It drops 5 % of contextual weights, which no loop here does."""


@dataclass(frozen=True)
class Kind:
    """One way to weigh, in a model of one depth.

    Attributes:
        weighting: a name of `WEIGHTINGS`.
        depth: blocks.
        k: nearest keys, where the weighting has them.
        form: `DEFINED`, `HARD` (0/1 weights whose keys have no gradient), or one of `FORMS`.
    """

    weighting: str
    depth: int
    k: int | None = None
    form: str = DEFINED

    @property
    def label(self) -> str:
        """For people, unique among those of a depth."""
        form = f"released: {self.form}" if self.form in FORMS else self.form
        parts = [self.weighting] + ([] if self.k is None else [f"k = {self.k}"])
        return ", ".join(parts + ([] if self.form == DEFINED else [form]))

    @property
    def name(self) -> str:
        """For people, unique."""
        return f"{self.label}, depth {self.depth}"

    @property
    def sentence(self) -> str:
        """In the grammar. Released forms replace the weights of softmax, whose learned sharpness they need."""
        return "softmax" if self.form in FORMS else WEIGHTINGS[self.weighting].format(k=self.k)


def shown_k(ks: Sequence[int]) -> int:
    """The k of comparisons: the paper's if it is among those trained."""
    return SHOWN_K if SHOWN_K in ks else ks[0]


def kinds(config: MosaicKernelsConfig) -> list[Kind]:
    """What is trained."""
    assert config.depths is not None
    assert config.ks is not None
    made = []
    for place, depth in enumerate(config.depths):
        ks = config.ks if place == 0 or SHOWN_K not in config.ks else (SHOWN_K,)
        for weighting in config.weightings:
            near: Sequence[int | None] = ks if "{k}" in WEIGHTINGS[weighting] else (None,)
            made += [Kind(weighting, depth, k) for k in near]
            if weighting == "topk-uniform" and place == 0:
                made.append(Kind(weighting, depth, shown_k(ks), HARD))
            if weighting in RULES and place == 0:
                made += [Kind(weighting, depth, form=form) for form in config.released]
    return made


def check(config: MosaicKernelsConfig) -> MosaicKernelsConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a name is unknown or given twice.
    """
    config = sized(config, SIZES, CALL)
    known: Sequence[str]
    for flag, names, known in (
        ("--weightings", config.weightings, tuple(WEIGHTINGS)),
        ("--released", config.released, FORMS),
    ):
        for name in names:
            if name not in known:
                raise ArgumentError(f"{CALL}: {flag} names {name!r}, which is unknown.{suggestion(name, known)}")
            if names.count(name) > 1:
                raise ArgumentError(f"{CALL}: {flag} names {name!r} twice; name it once.")
    if "softmax" not in config.weightings:
        raise ArgumentError(f"{CALL}: --weightings lacks softmax, to which all others are compared; add it.")
    assert config.depths is not None
    assert config.ks is not None
    for flag, numbers in (("--depths", config.depths), ("--ks", config.ks)):
        if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
            raise ArgumentError(f"{CALL}: {flag} is {numbers}, expected at least one whole number above 0, each once.")
    for name in ("learning_rates", "final_shares"):
        given = getattr(config, name)
        if len(given) not in (1, len(config.depths)):
            flag = "--" + name.replace("_", "-")
            raise ArgumentError(
                f"{CALL}: {flag} has {len(given)} numbers for {len(config.depths)} depths; give one, or one for each."
            )
    for flag, count in (("--k-seeds", config.k_seeds), ("--deep-seeds", config.deep_seeds)):
        assert count is not None
        if not 1 <= count <= SEEDS - config.seed:
            raise ArgumentError(f"{CALL}: {flag} is {count}, expected 1 to {SEEDS - config.seed}.")
    assert config.deep_steps is not None
    if config.deep_steps < 1:
        raise ArgumentError(f"{CALL}: --deep-steps is {config.deep_steps}, expected at least 1.")
    for depth in config.depths:
        budget(config, depth).check(CALL)
    for kind in kinds(config):
        model_config(config, kind, 256)
    return config


def budget(config: MosaicKernelsConfig, depth: int) -> Budget:
    """What every model of this depth is given."""
    assert config.depths is not None
    numbers = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    for name in ("learning_rates", "final_shares"):
        given = getattr(config, name)
        numbers[name[:-1]] = given[config.depths.index(depth) if len(given) > 1 else 0]
    if depth != config.depths[0]:
        numbers["steps"] = config.deep_steps
    return Budget(**numbers)


def model_config(config: MosaicKernelsConfig, kind: Kind, vocabulary: int) -> Any:
    """The Memory Mosaic of a kind.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    from regard.models import MemoryMosaicConfig

    return MemoryMosaicConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        num_hidden_layers=kind.depth,
        num_attention_heads=config.heads,
        mixers=kind.sentence,
        uniform_gradient="hard" if kind.form == HARD else "straight-through",
        max_position_embeddings=config.context,
    )


def inside(model: Any, windows: list[list[int]]) -> dict[str, Any]:
    """What the contextual memories do on windows [B, T] of tokens; a `measure` of runs.

    Returns:
        "empty": share of rows, from the second token on, in which no pair has weight by itself; "support": mean number
        of pairs with weight, None for released forms; "sharpness" (beta^2), "h", "margin", ...: what is learned, by
        block and head.
    """
    from regard.inspect import capture
    from regard.nn import ContextualMemory

    memories = [module for module in model.modules() if isinstance(module, ContextualMemory)]
    tokens = torch.tensor(windows, device=next(model.parameters()).device)
    training = model.training
    with torch.no_grad(), capture(model.eval()) as seen:
        model(input_ids=tokens, use_cache=False)
    model.train(training)
    empty, support = [], []
    for place, memory in enumerate(memories):
        if isinstance(memory, ReleasedMemory):
            empty.append(_later_rows(memory.fallen))
        else:
            found = seen.layers[place]
            empty.append(_later_rows(found.empty | found.fallback))
            support.append(_later_rows(found.support))
    learned: dict[str, list[list[float]]] = {}
    for memory in memories:
        numbers = {} if isinstance(memory, ReleasedMemory) else memory.numbers()
        if memory.sharpness is not None:
            numbers = {"sharpness": memory.sharpness(), **numbers}
        for name, number in numbers.items():
            learned.setdefault(name, []).append([round(x, 4) for x in number.detach().flatten().tolist()])
    mean = lambda parts: sum(parts) / len(parts) if parts else None  # noqa: E731
    return {"empty": mean(empty), "support": mean(support), **learned}


def _later_rows(rows: Tensor) -> float:
    """The mean of [B, H, T] without the first token's, which sees no pair."""
    return rows[..., 1:].double().mean().item()


@recipes.register("mosaic-kernels")
class MosaicKernels:
    """Memory Mosaics with every weighting of the sparse-attention paper, as defined and as its programs computed it."""

    Config: ClassVar[type[Any]] = MosaicKernelsConfig

    @staticmethod
    def run(config: MosaicKernelsConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        from ..lib.language_text import read_text

        assert config.context is not None
        assert config.tokenizer is not None
        assert config.measured is not None
        text = read_text(config.data, config.tokenizer, context=config.context, measured=config.measured, call=CALL)
        trained = kinds(config)
        windows = text.windows(LOOKED_AT, config.context)
        begun = starts(config, trained, text, windows)
        found = run_jobs(jobs(config, trained, text, windows), config.workers, progress)
        progress("drawing")
        from . import mosaic_kernels_output as output

        groups = {kind: [run for run in found if run.name == kind.name] for kind in trained}
        data = {
            "text": text.described,
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "empty_at_the_start": begun,
            "runs": [run.record() for run in found],
        }
        return Findings(data, output.tables(groups), output.figures(groups), output.notes(groups, begun, rates(config)))


def rates(config: MosaicKernelsConfig) -> dict[int, float]:
    """The highest learning rate of every depth."""
    assert config.depths is not None
    return {depth: budget(config, depth).learning_rate for depth in config.depths}


def starts(
    config: MosaicKernelsConfig, trained: Sequence[Kind], text: LanguageText, windows: list[list[int]]
) -> dict[str, float]:
    """Share of empty rows before any training, of normalised ReLU as it is defined: name to share."""
    from regard.models import MemoryMosaicForCausalLM

    found = {}
    for kind in trained:
        if kind.weighting == "normrelu" and kind.form == DEFINED:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                model = MemoryMosaicForCausalLM(model_config(config, kind, text.vocabulary))
            found[kind.name] = inside(model, windows)["empty"]
    return found


def jobs(
    config: MosaicKernelsConfig, trained: Sequence[Kind], text: LanguageText, windows: list[list[int]]
) -> list[Job]:
    """One for every kind and seed."""
    return [
        Job(
            name=kind.name,
            config=model_config(config, kind, text.vocabulary),
            material=text,
            budget=budget(config, kind.depth),
            seed=seed,
            measure=partial(inside, windows=windows),
            prepare=released(kind),
        )
        for kind in trained
        for seed in seeds(config, kind)
    ]


def seeds(config: MosaicKernelsConfig, kind: Kind) -> range:
    """The seeds of a kind."""
    assert config.depths is not None
    assert config.ks is not None
    count = config.seeds if kind.k in (None, shown_k(config.ks)) else config.k_seeds
    count = count if kind.depth == config.depths[0] else config.deep_seeds
    return range(config.seed, config.seed + (count or 1))


def released(kind: Kind) -> Any:
    """What makes a model weigh as a released program did; None for what the grammar computes."""
    return partial(use_released, released=Released(kind.weighting, kind.form)) if kind.form in FORMS else None
