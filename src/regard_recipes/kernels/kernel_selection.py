"""The ten kernels of the kernel-selection paper's Table 1 as the attention of equal language models.

The paper (section 7) trains a small Transformer on characters and reports, without numbers, that every kernel
converges, the plain linear one without normalisation included, that RBF is marginally better than the exponential,
that the clipped geometric series converges with normalised weights, and that query and key may be one vector, which
halves their memory. Here every kernel is trained normalised and not, on the same windows from the same seeds; in the
form that the grammar gives it by default also with q = k; and the steepest with q = k on earlier tokens only, since a
token is most like itself. Two bars say what a loss is worth: a bigram model, and attention that weighs the whole past
equally.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from regard import Spec
from regard.checks import ArgumentError, suggestion
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Job, LanguageRun, initial_range, run_jobs, sized

if TYPE_CHECKING:
    from ..demo.demo_text import Material

CALL = "reproduce: kernel-selection"
PRESETS = {
    "exponential": "softmax",
    "linear": "linear",
    "geometric": "geometric",
    "cosine": "cosine",
    "shift-cosine": "shift-cosine",
    "rbf": "rbf",
    "clipped-geometric": "clipped-geometric",
    "relu": "relu",
    "relu2": "relu2",
    "elu": "elu",
}
"""The kernels of Table 1, in its order, and the presets that are they."""
MEAN = "mean of the past"
"""The bar of equal weights."""
EQUAL = "uniform*fixed(bias=1000000)"
"""Its sentence: every key is inside."""
CACHED = 512
"""Tokens in the cache whose bytes are counted."""


@dataclass(frozen=True, kw_only=True)
class KernelSelectionConfig:
    """Train the ten kernels of the kernel-selection paper, normalised and not, with queries apart and q = k."""

    out: Path = Path("kernel-selection-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' ten, 'paper' (the
    paper's model: 6 layers, 6 heads, width 384, context 256) a GPU."""
    quick: bool = False
    """The same as --size quick."""
    kernels: tuple[str, ...] = tuple(PRESETS)
    """Kernels of Table 1."""
    earlier: tuple[str, ...] = ("exponential", "geometric", "rbf", "clipped-geometric")
    """Of these, the ones that are trained with q = k on earlier tokens only too."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    layers: int | None = None
    """Layers of every model."""
    width: int | None = None
    """Width of every model."""
    heads: int | None = None
    """Heads of every layer."""
    context: int | None = None
    """Characters that a model sees at once."""
    batch: int | None = None
    """Windows of a step."""
    steps: int | None = None
    """Optimiser steps of each model."""
    learning_rate: float | None = None
    """The highest; after 5 % of the steps it falls along a cosine to a tenth."""
    measured: int | None = None
    """Held-out characters that the loss is measured on."""
    looks: int | None = None
    """How often the losses are noted."""
    dtype: str | None = None
    """Of the products: float32 or bfloat16."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'. By default the CPU, and 'auto' for the size of the paper."""
    workers: int = 2
    """Models that are trained at the same time, on one thread each. Changes no number but the times."""


_SMALL = {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 8, "dtype": "float32", "device": "cpu"}
SIZES: dict[str, dict[str, Any]] = {
    "quick": {**_SMALL, "seeds": 1, "steps": 150, "learning_rate": 3e-3, "measured": 4096, "looks": 5},
    "desk": {**_SMALL, "seeds": 3, "steps": 450, "learning_rate": 3e-3, "measured": 8192, "looks": 6},
    "paper": {
        "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "dtype": "bfloat16", "device": "auto",
        "seeds": 3, "steps": 5000, "learning_rate": 1e-3, "measured": 100_000, "looks": 20,
    },
}  # fmt: skip
"""Options by size. The paper gives its model and its text; steps, batch and learning rate are those of nanoGPT's
configuration for characters, which it uses."""


@dataclass(frozen=True)
class Kind:
    """One way to attend.

    Attributes:
        kernel: a name of Table 1, or `MEAN`.
        normalised: whether weights are divided by their sum (equation 8b) or not (8a).
        shared: q = k; earlier: earlier tokens only.
    """

    kernel: str
    normalised: bool
    shared: bool = False
    earlier: bool = False

    @property
    def name(self) -> str:
        """For people, and unique."""
        if self.kernel == MEAN:
            return MEAN
        parts = [self.kernel, "normalised" if self.normalised else "not normalised"]
        parts += ["q = k"] * self.shared + ["earlier tokens only"] * self.earlier
        return ", ".join(parts)

    @property
    def spec(self) -> Spec:
        """The sentence.

        Raises:
            ArgumentError: the grammar refuses it.
        """
        if self.kernel == MEAN:
            return Spec.parse(EQUAL)
        return replace(Spec.parse(PRESETS[self.kernel]), normalise=self.normalised)


def own_form(kernel: str) -> bool:
    """Whether the grammar normalises this kernel unless told otherwise."""
    return bool(Spec.parse(PRESETS[kernel]).normalise)


def kinds(config: KernelSelectionConfig) -> tuple[list[Kind], dict[str, str]]:
    """What is trained, and by name what the grammar refuses, with its reason."""
    wanted = [Kind(kernel, normalised) for normalised in (True, False) for kernel in config.kernels]
    wanted += [Kind(kernel, own_form(kernel), shared=True) for kernel in config.kernels]
    wanted += [Kind(k, own_form(k), shared=True, earlier=True) for k in config.kernels if k in config.earlier]
    made, refused = [Kind(MEAN, True)], {}
    for kind in wanted:
        try:
            kind.spec  # noqa: B018  (building it checks it)
            made.append(kind)
        except ArgumentError as error:
            refused[kind.name] = str(error)
    return made, refused


def check(config: KernelSelectionConfig) -> KernelSelectionConfig:
    """The config with the numbers of its size, after everything in it was found to be in range.

    Raises:
        ArgumentError: something is not, or a kernel is unknown or named twice.
    """
    config = sized(config, SIZES, CALL)
    for flag, names in (("--kernels", config.kernels), ("--earlier", config.earlier)):
        for name in names:
            if name not in PRESETS:
                raise ArgumentError(f"{CALL}: {flag} names no kernel of Table 1: {name!r}.{suggestion(name, PRESETS)}")
            if names.count(name) > 1:
                raise ArgumentError(f"{CALL}: {flag} names {name!r} twice; name every kernel once.")
    if "exponential" not in config.kernels:
        raise ArgumentError(f"{CALL}: --kernels lacks exponential, to which all others are compared; add it.")
    budget(config).check(CALL)
    for kind in kinds(config)[0]:
        model_config(config, kind, 256)
    return config


def budget(config: KernelSelectionConfig) -> Budget:
    """What every model is given."""
    numbers = {f.name: getattr(config, f.name) for f in fields(Budget) if hasattr(config, f.name)}
    return Budget(**numbers)


def model_config(config: KernelSelectionConfig, kind: Kind, vocabulary: int) -> Any:
    """A GPT-2 with rotary positions that attends in this way.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    from regard.models import HybridConfig

    assert config.width is not None
    return HybridConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=4 * config.width,
        feed_forward="gelu",
        norm="layer",
        mixers=kind.spec,
        share_query_key=kind.shared,
        exclude_self=kind.earlier,
        max_position_embeddings=config.context,
        initializer_range=initial_range(config.width),
    )


def memory(model: Any, batch: int, context: int) -> dict[str, Any]:
    """Bytes of queries and keys, of all that is kept for the backward pass, and of the cache; a `measure` of runs."""
    from .shared_query_key import activations, cache_bytes

    device = next(model.parameters()).device
    query_key, kept = activations(model, torch.zeros(batch, context, dtype=torch.long, device=device))
    cached = cache_bytes(model, torch.zeros(1, CACHED, dtype=torch.long, device=device))
    return {"query_key_bytes": query_key, "kept_bytes": kept, "cache_bytes": cached}


@recipes.register("kernel-selection")
class KernelSelection:
    """The ten kernels of the kernel-selection paper in equal language models: losses, time, and what q = k costs."""

    Config: ClassVar[type[Any]] = KernelSelectionConfig

    @staticmethod
    def run(config: KernelSelectionConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = check(config)
        progress("reading the text")
        from ..demo import demo_text

        assert config.context is not None
        material = demo_text.prepare(config.data, context=config.context + 1, excerpt=config.context, call=CALL)
        bigram = bigram_loss(config, material)
        trained, refused = kinds(config)
        own = budget(config)
        found = run_jobs(jobs(config, trained, material), config.workers, progress)
        progress("drawing")
        from . import kernel_selection_output as output

        groups = group(trained, found)
        data = {
            "text": material.described(),
            "numbers": {f.name: getattr(config, f.name) for f in fields(config) if f.name in SIZES["paper"]},
            "bigram": bigram,
            "refused": refused,
            "runs": [run.record() for run in found],
        }
        tables, figures = output.tables(groups), output.figures(groups)
        return Findings(data, tables, figures, output.notes(groups, bigram, refused, own.learning_rate))


def jobs(config: KernelSelectionConfig, trained: list[Kind], material: Material) -> list[Job]:
    """One for every kind and seed."""
    own = budget(config)
    return [
        Job(
            name=kind.name,
            config=model_config(config, kind, len(material.tokenizer)),
            material=material,
            budget=own,
            seed=seed,
            measure=partial(memory, batch=own.batch, context=own.context),
        )
        for kind in trained
        for seed in range(config.seed, config.seed + (config.seeds or 1))
    ]


def group(trained: list[Kind], found: list[LanguageRun]) -> dict[Kind, list[LanguageRun]]:
    """The runs of every kind."""
    return {kind: [run for run in found if run.name == kind.name] for kind in trained}


def bigram_loss(config: KernelSelectionConfig, material: Material) -> float:
    """Nats per character of a smoothed bigram model on the same held-out characters."""
    from ..demo.ngram import NGram

    counted = NGram(material.train_tokens.tolist(), len(material.tokenizer), 2)
    return counted.loss(material.held_out_tokens[: config.measured].tolist())
